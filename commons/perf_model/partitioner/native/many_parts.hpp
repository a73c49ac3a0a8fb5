// Plans near home for many partitions, in a time that grows with the number of rows that have to move.
//
// While a load is above the limit, which follows from the lower bound, the heaviest partition swaps a row with one of the
// lightest. repair() makes equally good plans, but each of its dozens of rounds visits all partitions, so it is used only
// for partitions that these swaps leave above the limit. If these are few, they are replanned together with the lightest
// partitions instead. Plans are by sample here: the samples of a rank are neighbours in memory, its rows are not.
#pragma once

#include "many_rows.hpp"

namespace evenrank {

constexpr Index kMany = 512;            // from this many partitions on, plans are made here first
constexpr std::size_t kMostTried = 64;  // partitions to try for a swap with a heavy one before giving it up
constexpr std::size_t kFewTried = 16;   // the same for cells of a grid, of which there are more
constexpr std::size_t kMostSwaps = 2;   // swaps per row, far more than plans need
constexpr Weight kMedium = 64;          // like kLarge, for rows of medium weight
constexpr Index kFewLeft = 4096;        // replan up to 1 / kFewLeft of the partitions, if they remain above the limit,
constexpr Weight kFewMoved = 32;        // at a cost of at most 1 / kFewMoved of moving all tokens
constexpr Index kFewCells = 64;         // deal a grid again if more than 1 / kFewCells of its cells remain above the limit

// The partition of each sample, and the loads of the partitions.
struct LoadedParts {
  Indices parts;
  Weights loads;
};

// Lowers loads by swaps of the heaviest partition with a light one, until no load is above the limit or no swap is found.
//
// The swap removes the most load per moved token and leaves the light partition within the limit. Candidates are the
// lightest partition of the rank, then of the node, then up to kMostTried of the lightest of all. If none of them can
// swap, for example because two rows each fill a partition, the lightest of all may rise above the limit, once per heavy
// partition, and swaps the excess on. First of all, while there is room, a partition with a row that almost fills it swaps
// its other rows for the lightest rows of all. Last of all, partitions that are left above the limit swap a row for one that
// is lighter by little more than their excess, in whichever partition that is.
class HeaviestLowered {
 public:
  HeaviestLowered(const Problem& problem, const Request& request, const Indices& parts, const Weights& sizes,
                  Weight limit)
      : request_(request),
        order_(problem.order),
        weights_(problem.weights),
        num_light_(static_cast<Index>(problem.order.size())),
        limit_(limit),
        most_tried_(request.num_steps == 1 ? kMostTried : kFewTried),
        base_(problem.first_loads()),
        cap_(request.cap()),
        plan_(RowsBySample{request.workloads, sizes, request.home, problem.order}, problem, parts, cap_),
        places_(Place::of_all(problem.num_parts, request.num_steps, request.ranks_per_node)),
        heaviest_(loads_),
        lightest_(loads_),
        left_rank_(problem.num_parts, request.num_steps == 1),
        left_node_(problem.num_parts, request.num_parts <= request.ranks_per_node),
        left_lightest_(problem.num_parts, false),
        forced_(problem.num_parts, false),
        has_large_(problem.num_parts, false),
        efficiency_(Efficiency::of(problem.weights.front(), sizes)) {}

  LoadedParts run() {
    const Weight large = limit_ - largest_of(base_);  // a row is large in no step unless it exceeds half of this
    Index num_large = 0;
    for (const Index sample : order_) {
      if (request_.workloads[sample] <= large - request_.workloads[sample]) break;
      ++num_large;
      if (is_large(request_.workloads[sample], parts_[sample])) has_large_[parts_[sample]] = true;
    }
    for (Index row = 0; row < num_large; ++row) {
      const Index heavy = parts_[order_[row]];
      if (!is_large(request_.workloads[order_[row]], heavy)) continue;
      while (loads_[heavy] > limit_) {
        const Swap swap = nearby(heavy);
        if (!swap.exists()) break;
        carry_out(heavy, swap);
      }
      leave_lightest(heavy);
    }
    Index may_fail = static_cast<Index>(loads_.size());
    std::size_t swaps = kMostSwaps * parts_.size();
    while (swaps > 0) {
      const Index heavy = heaviest_.winner();
      if (heavy == kNone || loads_[heavy] <= limit_) break;
      const Swap found = find_swap(heavy);
      if (!found.exists()) {
        if (leave_lightest(heavy)) continue;
        heaviest_.leave(heavy);
        if (--may_fail < 0) break;
      } else {
        carry_out(heavy, found);
        --swaps;
      }
    }
    if (request_.num_steps == 1) swap_for_lighter_rows(swaps);  // in a grid it would move more rows than a repair
    return {plan_.release(), loads_};
  }

 private:
  // Swaps the other rows of a partition with one large row for the lightest rows of all; returns whether its load fell.
  bool leave_lightest(Index heavy) {
    const std::vector<RowsBySample::Row>& own = plan_.rows(heavy);
    if (own.empty() || !is_large(own[0].weight, heavy)) return false;
    if (own.size() > 1 && is_large(own[1].weight, heavy)) return false;
    has_large_[heavy] = true;
    const Weight load = loads_[heavy];
    std::size_t failed = 0;
    const Index looked = request_.num_steps == 1 ? num_light_ : static_cast<Index>(loads_.size());
    const Index last = std::max(num_light_ - looked, 0);
    for (Index at = num_light_; at > last && failed < most_tried_ && loads_[heavy] > limit_; --at) {
      const Index light = parts_[order_[at - 1]];
      if ((light == heavy) | has_large_[light] | (loads_[light] >= limit_)) {  // one branch: true for most rows
        if (at == num_light_) --num_light_;
        continue;
      }
      const Swap swap = best_within(heavy, light);
      if (swap.exists()) {
        carry_out(heavy, swap);
      } else {
        ++failed;
      }
    }
    return loads_[heavy] < load;
  }
  // Whether two rows of this weight do not fit into a partition.
  bool is_large(Weight weight, Index part) const { return weight > limit_ - base_[part] - weight; }

  void carry_out(Index heavy, const Swap& swap) {
    plan_.apply(heavy, swap);
    // Partitions above the limit are used only in heaviest_, others only in lightest_, so only that one is updated. The
    // outdated load in the other one is on the same side of the limit.
    for (const Index part : {heavy, swap.light}) {
      const bool is_above = loads_[part] > limit_;
      if ((is_above || part == heavy) && heaviest_.takes_part(part)) heaviest_.enter(part, loads_[part]);
      if (!is_above || part == swap.light) lightest_.changed(part);
    }
  }
  // A swap with the lightest partition of the rank, else of the node, unless these have failed for `heavy` before.
  Swap nearby(Index heavy) {
    const Index steps = request_.num_steps;
    const Swap swap = within(heavy, places_[heavy].rank * steps, steps, left_rank_);
    if (swap.exists()) return swap;
    return within(heavy, places_[heavy].first * steps, request_.ranks_per_node * steps, left_node_);
  }
  // A swap with the lightest of `size` partitions from `first` on; if there is none, sets left[heavy].
  Swap within(Index heavy, Index first, Index size, std::vector<bool>& left) {
    if (left[heavy]) return {};
    const Index end = std::min(first + size, static_cast<Index>(loads_.size()));
    Index light = first;
    for (Index part = first + 1; part < end; ++part) light = loads_[part] < loads_[light] ? part : light;
    const Swap swap = best_within(heavy, light);
    if (!swap.exists()) left[heavy] = true;
    return swap;
  }
  // A swap with a light partition of the rank, the node or of all.
  Swap find_swap(Index heavy) {
    Swap swap = nearby(heavy);
    if (swap.exists()) return swap;
    for (std::size_t tried = 0; !swap.exists() && !left_lightest_[heavy] && tried < most_tried_; ++tried) {
      const Index light = lightest_.at(tried);
      if (light == kNone || loads_[light] >= limit_) break;
      swap = best_within(heavy, light);
    }
    if (!swap.exists()) left_lightest_[heavy] = true;
    if (!swap.exists() && !forced_[heavy]) {
      forced_[heavy] = true;
      const Index light = lightest_.at(0);
      swap = best(heavy, light, loads_[heavy] - loads_[light] - 1);
      if (swap.exists()) heaviest_.enter(light, loads_[light]);
    }
    return swap;
  }
  // Lowers the partitions that are left above the limit, by at most `swaps` swaps.
  void swap_for_lighter_rows(std::size_t swaps) {
    for (Index heavy = 0; heavy < static_cast<Index>(loads_.size()); ++heavy) {
      for (; swaps > 0 && loads_[heavy] > limit_; --swaps) {
        const Swap swap = find_lighter_row(heavy);
        if (!swap.exists()) break;
        carry_out(heavy, swap);
      }
    }
  }
  // A swap with a partition that has a row just light enough to take the excess from a row of `heavy`. The lightest of its
  // rows are tried first, because they move the fewest tokens.
  Swap find_lighter_row(Index heavy) {
    const Weight excess = loads_[heavy] - limit_;
    const std::vector<RowsBySample::Row>& rows = plan_.rows(heavy);
    Weight last = kMax;
    for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
      if (std::exchange(last, row->weight) == row->weight) continue;
      auto other = std::lower_bound(weights_.begin(), weights_.end(), row->weight - excess, std::greater<>());
      for (std::size_t tried = 0; tried < kMostTried && other != weights_.end(); ++tried, ++other) {
        const Index light = parts_[order_[other - weights_.begin()]];
        if (loads_[light] + row->weight - *other > limit_) continue;
        const Swap swap = best_within(heavy, light);
        if (swap.exists()) return swap;
      }
    }
    return {};
  }
  // The best swap that leaves `light` within the limit.
  Swap best_within(Index heavy, Index light) { return best(heavy, light, limit_ - loads_[light]); }
  // The most efficient swap that moves at most `room` from `heavy`: of each row for the lightest row that is heavy enough,
  // or for none.
  Swap best(Index heavy, Index light, Weight room) {
    Swap best;
    if (room <= 0) return best;
    const std::vector<RowsBySample::Row>& rows = plan_.rows(heavy);
    const std::vector<RowsBySample::Row>& others = plan_.rows(light);
    const Index num_others = static_cast<Index>(others.size());
    const Place at_heavy = places_[heavy], at_light = places_[light];
    const Weight excess = loads_[heavy] - limit_;
    const bool may_move = plan_.may_move(heavy, light);
    const Weight most_moved = may_move ? room : 0;
    const Weight too_light = may_move ? -1 : others.empty() ? kMax : others.back().weight;  // rows up to it cannot swap
    const auto consider = [&](Index row, Weight taken, Weight cost, Index back) {
      const Weight value = efficiency_.above(best.value, std::min(taken, excess), cost);
      if (value >= 0 && plan_.keeps_cap(heavy, {value, light, row, back})) best = {value, light, row, back};
    };
    Index enough = 0;  // number of the other rows that are heavy enough to come back
    for (Index at = 0; at < static_cast<Index>(rows.size()); ++at) {
      const RowsBySample::Row& row = rows[at];
      if (row.weight <= too_light) break;
      while (enough < num_others && others[enough].weight >= row.weight - room) ++enough;
      if (enough > 0 && others[enough - 1].weight < row.weight) {
        const RowsBySample::Row& back = others[enough - 1];
        const Weight cost = row.cost_of_move(at_heavy, at_light) + back.cost_of_move(at_light, at_heavy);
        consider(at, row.weight - back.weight, cost, enough - 1);
      }
      if (row.weight <= most_moved && row.weight > 0) consider(at, row.weight, row.cost_of_move(at_heavy, at_light), kNone);
    }
    return best;
  }

  const Request& request_;
  const Indices& order_;
  const Weights& weights_;  // in this order
  Index num_light_;  // the rows of order_ from this one on are known to be in partitions without room
  Weight limit_;
  std::size_t most_tried_;
  Weights base_;
  const Cap cap_;
  WorkingPartition<RowsBySample> plan_;
  const Indices& parts_ = plan_.parts();
  const Weights& loads_ = plan_.loads();
  std::vector<Place> places_;  // of each partition
  Tournament<true> heaviest_;
  LightestParts lightest_;
  std::vector<bool> left_rank_;      // partitions without a swap with the lightest of their rank,
  std::vector<bool> left_node_;      // of their node,
  std::vector<bool> left_lightest_;  // and of all
  std::vector<bool> forced_;         // partitions that have tried to bring another one above the limit
  std::vector<char> has_large_;      // partitions with a large row, see is_large()
  Efficiency efficiency_;
};

inline Index num_above(const Weights& loads, Weight limit) {
  return static_cast<Index>(std::count_if(loads.begin(), loads.end(), [&](Weight load) { return load > limit; }));
}

// Whether nearly every cell above the limit has a row of medium weight that weighs more than the cell's excess: such rows
// do not fit beside the large rows of their cells, and should have been dealt to other cells.
inline bool has_misplaced(const Problem& problem, const LoadedParts& plan, Weight limit) {
  const Weight room = limit - largest_of(problem.base);
  std::vector<bool> counted(problem.num_parts, false);
  Index misplaced = 0;
  for (std::size_t row = 0; row < problem.weights.size() && problem.weights[row] >= room / kMedium; ++row) {
    const Weight weight = problem.weights[row];
    const Index cell = plan.parts[problem.order[row]];
    const Weight excess = plan.loads[cell] - limit;
    if (weight >= room / kLarge || excess <= 0 || weight < excess || counted[cell]) continue;
    counted[cell] = true;
    ++misplaced;
  }
  const Index above = num_above(plan.loads, limit);
  return above > problem.num_parts / kFewCells && misplaced > above - above / 4;
}

// A plan of a grid with no cell above `limit`, in which many rows stay on their rank; by sample. Starts with the rows of
// each rank in its own steps. Nothing if swaps find no such plan.
inline std::optional<Indices> cells_near_ranks(const Request& request, const Problem& problem, Weight limit) {
  const Weights sizes = sizes_of(request);
  const Home home = home_by_row(request, problem.order, sizes);
  const auto lowered_from = [&](Weight fraction) {
    const Indices dealt = problem.by_sample(deal_at_home(problem, home, limit, fraction));
    return HeaviestLowered(problem, request, dealt, sizes, limit).run();
  };
  LoadedParts lowered = lowered_from(kLarge);
  if (has_misplaced(problem, lowered, limit)) {
    LoadedParts other = lowered_from(kMedium);
    if (excess_of(other.loads, limit) < excess_of(lowered.loads, limit) / 4) lowered = std::move(other);
  }
  const Cap cap = request.cap().in_order(problem.order);
  const Indices swapped = take(lowered.parts, problem.order);
  if (num_above(lowered.loads, limit) == 0 && cap.keeps(swapped, problem.num_parts)) return std::move(lowered.parts);
  const std::optional<Indices> repaired = repair_start(problem, swapped, home, limit, cap);
  if (!repaired) return std::nullopt;
  return problem.by_sample(*repaired);
}

// A plan within 1 + slack of the bound in which many rows stay at home; by sample. Nothing if no such plan is found, or
// another algorithm suits better: if the slack is below the tolerance of refined plans, or home breaks the cap.
inline std::optional<Indices> near_home_of_many(const Request& request, Problem& problem, Weight bound) {
  const Index num_parts = request.num_parts;
  Weight limit = with_slack(bound, request.slack);
  if (request.home.empty() || limit < near(bound)) return std::nullopt;
  const Cap cap = request.cap();
  if (!cap.keeps(request.home, num_parts)) return std::nullopt;
  const Weights loads = sum_by_rank(request.home, request.workloads, num_parts);
  const Indices counts = count_per_part(request.home, num_parts);
  const AtHome at_home{problem.speeds.largest_time(loads.data(), loads.size()), problem.limits.keep(counts),
                       request.home_splits};
  if (at_home.stays(bound, limit)) return request.home;
  problem.aim(limit);
  const Weights sizes = sizes_of(request);
  const auto by_row = [&] { return home_by_row(request, problem.order, sizes); };
  const bool few_rows = request.equal_size || *std::max_element(counts.begin(), counts.end()) <= kMaxRounds;
  Indices start = request.home;
  if (!at_home.even || !few_rows) {
    start = problem.by_sample(start_at_home(problem, limit, by_row()));
    if (!cap.keeps(start, num_parts)) return std::nullopt;
  }
  LoadedParts lowered = HeaviestLowered(problem, request, start, sizes, limit).run();
  const Index above = num_above(lowered.loads, limit);
  if (above == 0) return std::move(lowered.parts);
  const Cap cap_by_row = cap.in_order(problem.order);
  const Home home = by_row();
  const Indices swapped = take(lowered.parts, problem.order);
  const Weight total = sum_of(sizes);
  std::optional<Indices> repaired;
  if (above <= num_parts / kFewLeft) {
    repaired = redeal_heaviest(problem, swapped, home, limit, cap_by_row);
    if (repaired && home.cost(*repaired) - home.cost(swapped) > total / kFewMoved) repaired.reset();
  }
  if (!repaired) {
    // Where swaps have moved many rows, a repair from the start moves fewer.
    const bool many_moved = home.cost(swapped) > total / 2;
    repaired = repair_start(problem, many_moved ? take(start, problem.order) : swapped, home, limit, cap_by_row);
  }
  // Else a plan made without regard to home, with its partitions renamed, may move fewer tokens.
  const Weight of_all = request.ranks_per_node < num_parts ? kNodeCost * total : total;
  if (!repaired || home.cost(*repaired) > of_all / 2) return std::nullopt;
  return problem.by_sample(*repaired);
}

}  // namespace evenrank
