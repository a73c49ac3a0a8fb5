// Plans for partitions of different speeds: the algorithms for equal ones towards a target time (speeds.hpp), and a search
// for the least target that they reach.
#pragma once

#include "refinement.hpp"
#include "starts.hpp"

namespace evenrank {

// The time at which a plan is good enough, given a lower bound of it. Measured speeds are known to a few percent: what
// near() would still gain costs more than it brings.
constexpr Weight kTimeTolerance = 2'000;
inline Weight near_time(Weight bound) { return bound + bound / kTimeTolerance; }

// Targets tried below a time that is above the bound; with few rows more are worth their time.
constexpr int kTargets = 2, kTargetsOfFew = 12;

// LPT for uniform processors: the next heaviest row goes to the partition, of those that may take it, that is done with
// it first, ties by index (Gonzalez, Ibarra and Sahni, "Bounds for LPT schedules on uniform processors", SIAM J. Comput. 6,
// 1977). Limits as in lpt().
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

// Lowers the time of a plan, by row, towards the bound; it never rises. Every target is half way between what swaps have
// reached and what they could not, or the bound.
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

inline bool is_few(const Problem& problem) {
  return static_cast<Weight>(problem.weights.size()) * problem.num_parts <= kFew;
}

// The default algorithm: LPT by the room that is left under the bound, then swaps; with few rows also from the plan of
// lpt_at_speeds(), if that is not enough.
inline Indices refined_at_speeds(Problem problem, Weight bound) {
  const Weight target = near_time(bound);
  problem.aim(target);
  Indices best = lpt(problem);
  if (problem.time(best) <= target) return best;
  best = refine(problem, std::move(best), target);
  if (problem.time(best) <= target) return best;
  if (!is_few(problem)) return lower_time(problem, std::move(best), bound, kTargets);
  best = lower_time(problem, std::move(best), bound, kTargetsOfFew);
  Indices other = lower_time(problem, lpt_at_speeds(problem), bound, kTargetsOfFew);
  return problem.time(other) < problem.time(best) ? other : best;
}

}  // namespace evenrank
