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
// Comput. 6, 1977). Limits as in lpt().
inline Indices lpt_at_speeds(const Problem& problem) {
  const Weights& speed = problem.speeds.by_part();
  FillingParts filling(problem, Weights(problem.num_parts, 0));
  Indices parts;
  for (const Weight weight : problem.weights) {
    Index first = kNone;
    __int128 load_of_first = 0;
    for (Index part = 0; part < problem.num_parts; ++part) {
      const __int128 load = static_cast<__int128>(filling.load(part)) + weight;
      if (!filling.is_open(part) || (first != kNone && load * speed[first] >= load_of_first * speed[part])) continue;
      first = part;
      load_of_first = load;
    }
    filling.add(first, weight);
    parts.push_back(first);
  }
  return parts;
}

// Lowers the time of a plan, by row, towards the bound; it never rises. Bisection: every target is half way between the
// time reached and the last target that was missed, at first the bound.
inline Indices lower_time(Problem problem, Indices parts, Weight bound, int targets, const Cap& cap = {}) {
  Weight time = problem.time(parts);
  for (Weight failed = bound; targets > 0 && time > near_time(failed); --targets) {
    const Weight target = failed + (time - failed) / 2;
    Indices tried = refine(problem.aim(target), parts, target, cap);
    const Weight reached = problem.time(tried);
    if (reached > target) failed = target;
    if (reached >= time) continue;
    time = reached;
    parts = std::move(tried);
  }
  return parts;
}

// The default algorithm: LPT with the bases of a target near the bound, then swaps and lower_time(); with few rows also
// from the plan of lpt_at_speeds(), if the time is still above the target.
inline Indices refined_at_speeds(Problem problem, Weight bound) {
  const Weight target = near_time(bound);
  problem.aim(target);
  Indices best = lpt(problem);
  if (problem.time(best) <= target) return best;
  best = refine(problem, std::move(best), target);
  if (problem.time(best) <= target) return best;
  if (!problem.is_few()) return lower_time(problem, std::move(best), bound, kTargets);
  best = lower_time(problem, std::move(best), bound, kTargetsOfFew);
  Indices other = lower_time(problem, lpt_at_speeds(problem), bound, kTargetsOfFew);
  return problem.time(other) < problem.time(best) ? other : best;
}

}  // namespace evenrank
