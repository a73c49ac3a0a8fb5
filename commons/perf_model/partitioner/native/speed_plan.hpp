// Plans for partitions of different speeds: runs the algorithms for equal speeds with a target time (speeds.hpp), and
// searches for the least target that they reach.
#pragma once

#include "refinement.hpp"
#include "starts.hpp"

namespace evenrank {

// The time at which a plan is good enough, given a lower bound. Coarser than near(): measured speeds are accurate to a few
// percent.
constexpr Weight kTimeTolerance = 2'000;
inline Weight near_time(Weight bound) { return bound + bound / kTimeTolerance; }

// How many targets to try below a time that is above the bound; more with few rows, which take little time.
constexpr int kTargets = 2, kTargetsOfFew = 12;

// LPT for uniform processors: the next heaviest row goes to the partition that would finish it first, among those that
// may take it, ties by index (Gonzalez, Ibarra and Sahni, "Bounds for LPT schedules on uniform processors", SIAM J.
// Comput. 6, 1977). Limits as in lpt(). With a cap, by row, a partition takes no row that breaks it; a row that breaks it
// everywhere goes to the partition that would finish it first.
inline Indices lpt_at_speeds(const Problem& problem, const Cap& cap = {}) {
  const Weights speed = problem.speeds.empty() ? Weights(problem.num_parts, 1) : problem.speeds.by_part();
  FillingParts filling(problem, Weights(problem.num_parts, 0));
  Weights held(problem.num_parts, 0);
  Indices parts;
  for (std::size_t row = 0; row < problem.weights.size(); ++row) {
    const Weight weight = problem.weights[row], size = cap.exists() ? cap.weights[row] : 0;
    Index first = kNone;
    bool first_fits = false;
    __int128 load_of_first = 0;
    for (Index part = 0; part < problem.num_parts; ++part) {
      const bool fits = held[part] + size <= cap.limit;
      if (!filling.is_open(part) || (first_fits && !fits)) continue;
      const __int128 load = static_cast<__int128>(filling.load(part)) + weight;
      if (first != kNone && fits == first_fits && load * speed[first] >= load_of_first * speed[part]) continue;
      first = part;
      first_fits = fits;
      load_of_first = load;
    }
    filling.add(first, weight);
    held[first] += size;
    parts.push_back(first);
  }
  return parts;
}

// Renames the partitions of a plan, by row, so that larger loads are on faster ones, ties by index; the time never rises.
inline Indices larger_loads_on_faster(const Problem& problem, Indices parts) {
  const auto ranked = [&](const Weights& values) {
    Indices order = range(problem.num_parts);
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return values[a] > values[b]; });
    return order;
  };
  const Indices heaviest = ranked(sum_by_rank(parts, problem.weights, problem.num_parts));
  const Indices fastest = ranked(problem.speeds.by_part());
  Indices names(problem.num_parts);
  for (Index at = 0; at < problem.num_parts; ++at) names[heaviest[at]] = fastest[at];
  for (Index& part : parts) part = names[part];
  return parts;
}

// Lowers the time of a plan, by row, towards the bound; it never rises. Bisection: every target is half way between the
// time reached and the last target that was missed, at first the bound.
inline Indices lower_time(Problem problem, Indices parts, Weight bound, int targets, const Cap& cap = {}) {
  Weight time = problem.time(parts);
  for (Weight failed = bound; targets > 0 && time > near_time(failed); --targets) {
    const Weight target = failed + (time - failed) / 2;
    Indices tried = larger_loads_on_faster(problem, refine(problem.aim(target), parts, target, cap));
    const Weight reached = problem.time(tried);
    if (reached > target) failed = target;
    if (reached >= time) continue;
    time = reached;
    parts = std::move(tried);
  }
  return parts;
}

}  // namespace evenrank
