// Locality: plans with loads as good as refined ones in which most rows stay where they are.
//
// A repair starts from home, where every partition has its present rows. Partitions above the limit swap rows with others;
// the best swap removes the most load per moved token. A token that leaves its node counts kNodeCost times.
#pragma once

#include "swaps.hpp"

namespace evenrank {

// The cost of moving a token to another node, relative to one within a node.
constexpr Weight kNodeCost = 4;
// Candidates of the light partition for each row. The lightest row that is heavy enough costs least, unless one of the
// next heavier rows is away from home.
constexpr Weight kHomeReach = 4;
// More rounds than plans need; every round lowers the sum of excess loads, so that the loop ends anyway.
constexpr int kMaxRounds = 64;
// With several steps, continue with larger groups when this many rounds have lowered excess loads by less than a quarter.
constexpr int kRepairPatience = 4;
// The efficiency of a swap is (removed load) * 2^31 / cost, both reduced to 31 bits: an integer, the same on every CPU.
constexpr int kBits = 31;
// Added to the efficiency of a swap that costs nothing or brings rows home, which is above all others (below 2^62).
constexpr Weight kFree = Weight{1} << 62;

// The rank and node of a partition, computed once for many rows, because divisions would take most of the time.
struct Place {
  Index rank;
  Index first;  // rank of its node
  Index ranks_per_node;

  static Place of(Index part, Index steps, Index ranks_per_node) {
    const Index rank = part / steps;
    return {rank, rank - rank % ranks_per_node, ranks_per_node};
  }
  static std::vector<Place> of_all(Index num_parts, Index steps, Index ranks_per_node) {
    std::vector<Place> places(num_parts);
    for (Index part = 0; part < num_parts; ++part) places[part] = of(part, steps, ranks_per_node);
    return places;
  }
  bool has(Index other_rank) const {
    return static_cast<std::uint32_t>(other_rank - first) < static_cast<std::uint32_t>(ranks_per_node);
  }

  // The cost of a token here: 0 at home, 1 within its node, else kNodeCost. Without branches, which would be mispredicted.
  Weight cost(Index home) const { return (home != rank) + (kNodeCost - 1) * !has(home); }
};

// Where rows are now, and the cost of moving them.
struct Home {
  Indices parts;  // the rank of each row; rank r has the partitions [r * steps, r * steps + steps)
  Weights sizes;  // tokens of each row; their sum is below 2^60, so that costs fit into an int64
  Index ranks_per_node;
  Index steps = 1;  // partitions per rank, between which rows move at no cost
  bool alike = true;  // whether all ranks are equally fast, so that two of them can exchange all their rows

  Place place_of(Index part) const { return Place::of(part, steps, ranks_per_node); }
  Weight cost_at(Index row, const Place& place) const { return place.cost(parts[row]) * sizes[row]; }

  // The cost of a whole plan.
  Weight cost(const Indices& plan) const {
    Weight sum = 0;
    for (std::size_t row = 0; row < plan.size(); ++row) sum += cost_at(static_cast<Index>(row), place_of(plan[row]));
    return sum;
  }
};

// Computes the efficiency of swaps; shifts reduce load and cost to 31 bits.
struct Efficiency {
  int gain_shift;
  int cost_shift;

  static Efficiency of(Weight heaviest, const Weights& sizes) {
    return {std::max(0, bit_length(heaviest) - kBits), std::max(0, bit_length(2 * kNodeCost * largest_of(sizes)) - kBits)};
  }
  // The efficiency of a swap if it is above `least`, else -1. A product excludes most swaps without a division.
  Weight above(Weight least, Weight gain, Weight cost) const {
    gain >>= gain_shift;
    if (cost <= 0) return kFree + gain > least ? kFree + gain : -1;
    const Weight divisor = std::max<Weight>(cost >> cost_shift, 1);
    Weight needed;
    if (__builtin_mul_overflow(least + 1, divisor, &needed) || needed > (gain << kBits)) return -1;
    return (gain << kBits) / divisor;
  }
};

// The settings of a repair.
struct Repair {
  const Home& home;
  Weight limit;
  Efficiency efficiency;
};

// Carries out the most efficient swap of `heavy` with a partition of its share; returns whether there was one.
//
// The light partition must stay within the limit, so a swap removes at most `room` from the heavy one, and the row that
// comes back weighs at least (weight of the row) - room. Load removed beyond the excess is no gain.
inline bool relieve(WorkingPartition<RowsByWeight>& plan, Index heavy, const Share& share, const Repair& repair) {
  const Weights& loads = plan.loads();
  const std::vector<Item>& rows = plan.rows(heavy);
  const Weight excess = loads[heavy] - repair.limit;
  const Place at_heavy = repair.home.place_of(heavy);
  Swap best;
  for (Index at_light = 0; at_light < share.size(); ++at_light) {
    const Index light = share[at_light];
    const Weight room = repair.limit - loads[light];
    // The remaining partitions of the share are heavier: none has more room.
    if (room <= 0 || best.value >= kFree + (std::min(room, excess) >> repair.efficiency.gain_shift)) break;
    if (best.exists() && at_light * static_cast<Weight>(rows.size()) > kMostPairs) break;
    const std::vector<Item>& others = plan.rows(light);
    const Weight num_others = static_cast<Weight>(others.size());
    const bool may_move = plan.may_move(heavy, light);
    const Place at_lighter = repair.home.place_of(light);
    const Weight lightest = num_others > 0 ? others.back().weight : kMax;
    Weight below = 0;
    for (Index number = 0; number < static_cast<Index>(rows.size()); ++number) {
      const Item& row = rows[number];
      if (row.weight <= lightest && !may_move) break;  // no swap for lighter rows either
      while (below < num_others && others[below].weight >= row.weight - room) ++below;
      if (below == 0 && !may_move) continue;
      const Weight cost_out = repair.home.cost_at(row.row, at_lighter) - repair.home.cost_at(row.row, at_heavy);
      const auto consider = [&](Weight taken, Weight cost, Index back) {
        if (taken <= 0 || taken > room) return;
        const Weight value = repair.efficiency.above(best.value, std::min(taken, excess), cost);
        if (value >= 0 && plan.keeps_cap(heavy, {value, light, number, back})) best = {value, light, number, back};
      };
      for (Weight at = below - 1; at >= std::max<Weight>(below - kHomeReach, 0); --at) {
        const Index back = others[at].row;
        const Weight cost_back = repair.home.cost_at(back, at_heavy) - repair.home.cost_at(back, at_lighter);
        consider(row.weight - others[at].weight, cost_out + cost_back, static_cast<Index>(at));
      }
      if (may_move) consider(row.weight, cost_out, kNone);
    }
  }
  return plan.apply(heavy, best);
}

// The result of one round within each group of partitions.
struct Round {
  bool any_over = false;
  bool any_found = false;
  Index most_heavy = 0;
};

inline Round relieve_groups(WorkingPartition<RowsByWeight>& plan, std::vector<Indices>& groups, const Repair& repair,
                            const Level& level) {
  Round round;
  for (Indices& group : groups) {
    const Index num_over = static_cast<Index>(
        std::count_if(group.begin(), group.end(), [&](Index part) { return plan.loads()[part] > repair.limit; }));
    if (num_over == 0 || group.size() == 1) continue;
    round.any_over = true;
    plan.rank(group);
    const Index num_heavy = level.num_heavy(num_over, group.size());
    round.most_heavy = std::max(round.most_heavy, num_heavy);
    for (Index heavy = 0; heavy < num_heavy; ++heavy) {
      round.any_found |= relieve(plan, group[heavy], Share(group, num_heavy, heavy), repair);
    }
  }
  return round;
}

// Group sizes of a repair: the partitions of a rank, of a node, and all. A size of one, or equal to the next, is left out.
inline Weights group_sizes(const Home& home, Index num_parts) {
  const Weight rank = home.steps;
  const Weight node = rank * home.ranks_per_node;
  Weights sizes;
  if (1 < rank && rank < node) sizes.push_back(rank);
  if (node < num_parts) sizes.push_back(node);
  sizes.push_back(num_parts);
  return sizes;
}

inline Weight excess_of(const Weights& loads, Weight limit) {
  Weight sum = 0;
  for (const Weight load : loads) sum += std::max<Weight>(load - limit, 0);
  return sum;
}

// Lowers every load to `limit` by swaps that move few tokens: first within ranks, then within nodes, then between all
// partitions. A swap brings no partition above the limit or the cap. Some partitions may remain above the limit, if no
// swap is left. `parts`, by row, keeps the limits of sizes.
inline Indices repair(const Problem& problem, Indices parts, Weight limit, const Home& home, const Cap& cap = {}) {
  const Index num_parts = problem.num_parts;
  auto plan = working_partition(problem, std::move(parts), cap);
  const Repair repair{home, limit, Efficiency::of(problem.weights.front(), home.sizes)};
  int rounds = 0;
  for (const Weight size : group_sizes(home, num_parts)) {
    std::vector<Indices> groups;
    plan.forget_order();
    for (Index part = 0; part < num_parts; ++part) {
      if (part % size == 0) groups.emplace_back();
      groups.back().push_back(part);
    }
    Level level;
    const int first = rounds;
    Weight checkpoint = 0;
    for (; rounds < kMaxRounds; ++rounds) {
      if (home.steps > 1 && (rounds - first) % kRepairPatience == 0) {
        const Weight excess = excess_of(plan.loads(), limit);
        if (rounds > first && checkpoint - excess < checkpoint / 4) break;
        checkpoint = excess;
      }
      const Round round = relieve_groups(plan, groups, repair, level);
      if (!round.any_over) break;
      if (level.next(round.any_found, round.most_heavy)) continue;
      ++rounds;
      break;
    }
  }
  return plan.release();
}

// Renames the partitions of a finished plan so that many tokens are at home, greedily by the largest saving. `parts` is
// the partition of each of `rows` in the plan, from 0 to names.size() - 1; returns one of `names` for each row. With
// several partitions per rank, only partitions of one step exchange names, where partition p is of the step of names[p].
// With ranks of different speeds, names stay as they are.
inline Indices relabel(const Indices& parts, const Indices& rows, const Indices& names, const Home& home) {
  if (!home.alike) return take(names, parts);
  const Index num_names = static_cast<Index>(names.size());
  const Index steps = home.steps;
  Index last = *std::max_element(names.begin(), names.end()) / steps;
  last = std::max(last, *std::max_element(home.parts.begin(), home.parts.end()));
  Indices slot((last + 1) * steps, kNone);
  for (std::size_t at = 0; at < names.size(); ++at) slot[names[at]] = static_cast<Index>(at);

  struct Saving {
    Weight value;
    Index part;
    Index slot;
  };
  std::vector<Saving> savings;
  savings.reserve(rows.size());
  const std::vector<Indices> rows_of = rows_by_part(parts, num_names);
  const Index num_nodes = last / home.ranks_per_node + 1;
  // A row that stays in its node saves the higher cost of leaving it.
  const Weight saved_in_node = num_nodes > 1 ? kNodeCost - 1 : 0;
  Weights at_slot(num_names, 0), at_node(num_nodes, 0);  // the sizes of a part, by the home of its rows
  for (Index part = 0; part < num_names; ++part) {
    Indices slots;
    for (const Index at : rows_of[part]) {
      const Index rank = home.parts[rows[at]], home_slot = slot[rank * steps + names[part] % steps];
      at_node[rank / home.ranks_per_node] += home.sizes[rows[at]];
      if (home_slot == kNone) continue;
      at_slot[home_slot] += home.sizes[rows[at]];
      slots.push_back(home_slot);
    }
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    for (const Index at : slots) {
      const Weight in_node = at_node[names[at] / steps / home.ranks_per_node];
      savings.push_back({std::exchange(at_slot[at], 0) + saved_in_node * in_node, part, at});
    }
    for (const Index at : rows_of[part]) at_node[home.parts[rows[at]] / home.ranks_per_node] = 0;
  }
  std::stable_sort(savings.begin(), savings.end(), [](const Saving& a, const Saving& b) { return a.value > b.value; });
  Indices named(names.size(), kNone);
  std::vector<bool> taken(names.size(), false);
  for (const Saving& saving : savings) {
    if (named[saving.part] != kNone || taken[saving.slot]) continue;
    named[saving.part] = names[saving.slot];
    taken[saving.slot] = true;
  }
  // The other partitions get the remaining names of their steps, of which there are equally many.
  std::vector<std::size_t> next(steps, 0);
  for (std::size_t part = 0; part < named.size(); ++part) {
    if (named[part] != kNone) continue;
    std::size_t& at = next[names[part] % steps];
    while (taken[at] || names[at] % steps != names[part] % steps) ++at;
    named[part] = names[at++];
  }
  return take(named, parts);
}

}  // namespace evenrank
