// Refinement: swap rows between a heavy and a light partition until the largest load is near its lower bound.
#pragma once

#include "swaps.hpp"

namespace evenrank {

// Swaps stop at 1 + 1 / kTolerance of the lower bound, a difference too small to measure in step times.
constexpr Weight kTolerance = 10'000;
// Swaps stop when this many rounds have reduced the excess above the target by less than a quarter.
constexpr int kPatience = 16;
// Candidates on each side of the best difference; more with a cap, which excludes many of them.
constexpr Weight kReach = 1;
constexpr Weight kReachWithCap = 16;

// The largest load at which a plan is good enough, given a lower bound of it.
inline Weight near(Weight bound) { return bound + bound / kTolerance; }

// Carries out the best swap of `heavy` with a partition of its share; returns whether there was one.
//
// A swap moves d = (weight of the row) - (weight of the row that comes back) from the heavy load H to the light load L.
// The larger of the two loads falls by min(d, H - L - d), which is largest for d = (H - L) / 2. So the candidates for
// each row of the heavy partition are the rows of the light one whose weights are next to (its weight) - (H - L) / 2.
// Both sides are sorted by weight, so one pass finds all candidates.
inline bool lower(WorkingPartition<RowsByWeight>& plan, Index heavy, const Share& share, Weight reach) {
  const Weights& loads = plan.loads();
  const std::vector<Item>& rows = plan.rows(heavy);
  Swap best{0};
  for (Index at_light = 0; at_light < share.size(); ++at_light) {
    const Index light = share[at_light];
    const Weight gap = loads[heavy] - loads[light];
    // The larger load cannot fall by more than half the gap, and gaps only get smaller.
    if (gap / 2 <= best.value || (best.exists() && at_light * static_cast<Weight>(rows.size()) > kMostPairs)) break;
    const std::vector<Item>& others = plan.rows(light);
    const Weight num_others = static_cast<Weight>(others.size());
    const bool may_move = plan.may_move(heavy, light);
    const auto consider = [&](Index row, Weight taken, Index back) {
      const Swap swap{std::min(taken, gap - taken), light, row, back};
      if (swap.value > best.value && plan.keeps_cap(heavy, swap)) best = swap;
    };
    const Weight lightest = may_move || others.empty() ? 0 : others.back().weight;
    Weight below = 0;
    for (Index row = 0; row < static_cast<Index>(rows.size()); ++row) {
      const Weight weight = rows[row].weight;
      if (weight - lightest <= best.value) break;  // neither this row nor a lighter one makes a better swap
      const Weight threshold = weight - gap / 2;
      while (below < num_others && others[below].weight >= threshold) ++below;
      const Weight end = std::min(below + reach, num_others);
      for (Weight at = std::max<Weight>(below - reach, 0); at < end; ++at) {
        consider(row, weight - others[at].weight, static_cast<Index>(at));
      }
      if (may_move) consider(row, weight, kNone);
    }
  }
  return plan.apply(heavy, best);
}

// Lowers the largest load to `target`, or until no swap lowers it; it never rises. `parts` keeps the limits and the cap,
// before and after.
//
// In each round the other partitions are shared out among those above the target (Share), and each of these carries out
// its best swap. If the heaviest finds none, the next round has half as many heavy partitions with larger shares,
// finally only the heaviest; after a round in which it finds a swap, the number doubles again (Level).
inline Indices refine(const Problem& problem, Indices parts, Weight target, const Cap& cap = {}) {
  const Index num_parts = problem.num_parts;
  if (num_parts == 1) return parts;
  auto plan = working_partition(problem, std::move(parts), cap);
  const Weight reach = cap.exists() ? kReachWithCap : kReach;
  Indices ranked = range(num_parts);
  Weight checkpoint = kMax;
  Level level;
  for (int rounds = 0;; ++rounds) {
    const Weights& loads = plan.loads();
    plan.rank(ranked);
    const Weight heaviest = loads[ranked[0]];
    if (heaviest <= target) break;
    if (rounds % kPatience == 0) {
      if (rounds > 0 && checkpoint - heaviest < (checkpoint - target) / 4) break;
      checkpoint = heaviest;
    }
    const auto is_over = [&](Index part) { return loads[part] > target; };
    const Index num_over = static_cast<Index>(std::partition_point(ranked.begin(), ranked.end(), is_over) - ranked.begin());
    const Index num_heavy = level.num_heavy(num_over, num_parts);
    bool lowered = false;
    for (Index heavy = 0; heavy < num_heavy; ++heavy) {
      const bool found = lower(plan, ranked[heavy], Share(ranked, num_heavy, heavy), reach);
      if (heavy == 0) lowered = found;
    }
    if (!level.next(lowered, num_heavy)) break;
  }
  return plan.release();
}

}  // namespace evenrank
