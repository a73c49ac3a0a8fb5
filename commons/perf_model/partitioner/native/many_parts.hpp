// Plans near home for many partitions, in a time that grows with the rows that have to move.
// The lower bound says how low the loads may go. As long as one is above that, the heaviest partition swaps a row with
// the lightest one. repair() makes plans as good, but each of its dozens of rounds looks at all partitions: it gets
// only what these swaps leave above the limit. A few left of thousands are dealt anew instead, with the lightest of
// all. Plans are by sample here: the samples of a rank are neighbours in memory, its rows are not.
#pragma once

#include "home_deal.hpp"
#include "many_rows.hpp"

namespace evenrank {

constexpr Index kMany = 512;           // from this many partitions on, plans are made here first
constexpr int kAsked = 64;             // partitions that may fail to swap with a heavy one before it is left as it is
constexpr std::size_t kMostSwaps = 2;  // swaps per row, far more than plans need
constexpr Index kFewLeft = 4096;       // one partition of so many left above the limit is dealt anew,
constexpr Weight kFewMoved = 32;       // which may cost as much as moving one of so many tokens
constexpr Index kFewCells = 64;        // one cell of a grid of so many left above the limit is dealt anew

// Lets the heaviest partition swap a row with the lightest one until no load is above the limit, if it can.
//
// The swap is the one that takes off most load per token moved and leaves the lightest within the limit. The lightest
// of the rank and of the node are tried first, then up to kAsked of the lightest of all. Where none of them can swap, as with two rows
// that each fill a partition, the lightest of all may once rise above the limit and pass the rest on. Before all that,
// while there is room, partitions with a row that almost fills them swap the rest of theirs for the lightest of all.
class HeaviestLowered {
 public:
  HeaviestLowered(const Problem& problem, const Request& request, Indices parts, const Weights& sizes, Weight limit,
                  Index may_fail)
      : request_(request),
        order_(problem.order),
        num_light_(static_cast<Index>(problem.order.size())),
        limits_(problem.limits),
        limit_(limit),
        may_fail_(may_fail),
        parts_(std::move(parts)),
        base_(problem.base.empty() ? Weights(problem.num_parts, 0) : problem.base),
        ranks_(problem.num_parts),
        nodes_(problem.num_parts),
        rows_(request, parts_, problem.num_parts, sizes),
        loads_(sum_by_rank(parts_, request.workloads, problem.num_parts, problem.base)),
        heaviest_(loads_),
        lightest_(loads_),
        left_rank_(problem.num_parts, request.num_steps == 1),
        left_node_(problem.num_parts, request.num_parts <= request.ranks_per_node),
        left_lightest_(problem.num_parts, false),
        forced_(problem.num_parts, false),
        has_large_(problem.num_parts, false),
        gain_shift_(std::max(0, bit_length(problem.weights.front()) - kBits)),
        cost_shift_(std::max(0, bit_length(2 * kNodeCost * largest_of(sizes)) - kBits)) {
    if (request.max_tokens) held_ = sum_by_rank(parts_, request.tokens, problem.num_parts);
    for (Index part = 0; part < problem.num_parts; ++part) {
      ranks_[part] = part / request.num_steps;
      nodes_[part] = ranks_[part] / request.ranks_per_node;
    }
  }

  Indices run() {
    const Weight large = limit_ - largest_of(base_);  // no lighter row is large in any step
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
        if (swap.efficiency < 0) break;
        carry_out(heavy, swap);
      }
      leave_lightest(heavy);
    }
    for (std::size_t swaps = kMostSwaps * parts_.size(); swaps > 0;) {
      const Index heavy = heaviest_.winner();
      if (heavy == kNone || loads_[heavy] <= limit_) break;
      const Swap found = find_swap(heavy);
      if (found.efficiency < 0) {
        if (leave_lightest(heavy)) continue;
        heaviest_.leave(heavy);
        if (--may_fail_ < 0) break;
      } else {
        carry_out(heavy, found);
        --swaps;
      }
    }
    return std::move(parts_);
  }

 private:
  struct Swap {
    Weight efficiency = -1;
    Index light = kNone;
    Index row = kNone;   // position among the rows of the heavy one
    Index back = kNone;  // position among the rows of the light one; kNone for a move
  };
  // Gives a partition with one large row the lightest rows of all for others; returns whether its load fell.
  bool leave_lightest(Index heavy) {
    const std::vector<SortedRows::Row>& own = rows_.of(heavy);
    if (own.empty() || !is_large(own[0].weight, heavy)) return false;
    if (own.size() > 1 && is_large(own[1].weight, heavy)) return false;
    has_large_[heavy] = true;
    const Weight load = loads_[heavy];
    int failed = 0;
    for (Index at = num_light_; at > 0 && failed < kAsked && loads_[heavy] > limit_; --at) {
      const Index light = parts_[order_[at - 1]];
      if (light == heavy || has_large_[light] || loads_[light] >= limit_) {
        if (at == num_light_) --num_light_;
        continue;
      }
      const Swap swap = best_within(heavy, light);
      if (swap.efficiency >= 0) {
        carry_out(heavy, swap);
      } else {
        ++failed;
      }
    }
    return loads_[heavy] < load;
  }
  // Whether no second row of this weight fits beside it.
  bool is_large(Weight weight, Index part) const { return weight > limit_ - base_[part] - weight; }

  void carry_out(Index heavy, const Swap& swap) {
    Index back = swap.back;
    const Index stands = give(heavy, swap.light, swap.row);
    if (back != kNone) give(swap.light, heavy, back + (stands <= back));
    for (const Index part : {heavy, swap.light}) {
      heaviest_.changed(part);
      lightest_.changed(part);
    }
  }
  // A swap with the lightest of the rank, else of the node; none where those have failed before.
  Swap nearby(Index heavy) {
    const Index steps = request_.num_steps;
    const Swap swap = within(heavy, ranks_[heavy] * steps, steps, left_rank_);
    if (swap.efficiency >= 0) return swap;
    const Index node = std::min(request_.ranks_per_node, request_.num_parts) * steps;
    return within(heavy, nodes_[heavy] * node, node, left_node_);
  }
  // A swap with the lightest of `size` partitions from `first` on; if there is none, `heavy` has left them.
  Swap within(Index heavy, Index first, Index size, std::vector<bool>& left) {
    if (left[heavy]) return {};
    const Index end = std::min(first + size, static_cast<Index>(loads_.size()));
    const Swap swap = best_within(heavy, lightest_.winner(first, end));
    if (swap.efficiency < 0) left[heavy] = true;
    return swap;
  }
  // A swap with the lightest of the rank, the node or of all; efficiency is -1 if there is none.
  Swap find_swap(Index heavy) {
    Swap swap = nearby(heavy);
    if (swap.efficiency >= 0) return swap;
    Indices asked;
    while (swap.efficiency < 0 && !left_lightest_[heavy] && asked.size() < kAsked) {
      const Index light = lightest_.winner();
      if (light == kNone || loads_[light] >= limit_) break;
      swap = best_within(heavy, light);
      if (swap.efficiency < 0) {
        asked.push_back(light);
        lightest_.leave(light);
      }
    }
    for (const Index light : asked) lightest_.enter(light);
    if (swap.efficiency < 0) left_lightest_[heavy] = true;
    if (swap.efficiency < 0 && !forced_[heavy]) {
      forced_[heavy] = true;
      const Index light = lightest_.winner();
      swap = best(heavy, light, loads_[heavy] - loads_[light] - 1);
      if (swap.efficiency >= 0) heaviest_.enter(light);
    }
    return swap;
  }
  // The best swap that leaves `light` within the limit.
  Swap best_within(Index heavy, Index light) { return best(heavy, light, limit_ - loads_[light]); }
  // The most efficient swap that takes at most `room` off `heavy`: each row for the lightest that suffices, or none.
  Swap best(Index heavy, Index light, Weight room) {
    Swap best;
    if (room <= 0) return best;
    best.light = light;
    const std::vector<SortedRows::Row>& rows = rows_.of(heavy);
    const std::vector<SortedRows::Row>& others = rows_.of(light);
    const Index num_others = static_cast<Index>(others.size());
    const Weight excess = loads_[heavy] - limit_;
    const Weight lightest = others.empty() ? kMax : others.back().weight;
    const bool may_move = static_cast<Weight>(rows.size()) > limits_.min_count && num_others < limits_.max_count;
    Index enough = 0;  // so many of the others bring enough back
    for (Index at = 0; at < static_cast<Index>(rows.size()); ++at) {
      const SortedRows::Row& row = rows[at];
      if (row.weight <= lightest && !may_move) break;  // no swap for lighter rows either
      while (enough < num_others && others[enough].weight >= row.weight - room) ++enough;
      const Weight taken = enough > 0 ? row.weight - others[enough - 1].weight : 0;
      const bool moves = may_move && 0 < row.weight && row.weight <= room;
      if (taken <= 0 && !moves) continue;
      const Weight cost_out = cost_at(row, light) - cost_at(row, heavy);
      const auto consider = [&](Weight taken, Index back, Weight cost) {
        const Weight gain = std::min(taken, excess) >> gain_shift_;
        const Weight efficiency = efficiency_above(best.efficiency, gain, cost);
        if (efficiency > best.efficiency &&
            keeps_cap(heavy, light, row.sample, back == kNone ? kNone : others[back].sample)) {
          best.efficiency = efficiency;
          best.row = at;
          best.back = back;
        }
      };
      if (taken > 0) {
        const SortedRows::Row& back = others[enough - 1];
        consider(taken, enough - 1, cost_out + cost_at(back, heavy) - cost_at(back, light));
      }
      if (moves) consider(row.weight, kNone, cost_out);
    }
    return best;
  }
  // The efficiency of a swap if it is above `least`, else -1. Most are not: a product shows that without a division.
  Weight efficiency_above(Weight least, Weight gain, Weight cost) const {
    if (cost <= 0) return kFree + gain;
    const Weight divisor = std::max<Weight>(cost >> cost_shift_, 1);
    if (static_cast<__int128>(least + 1) * divisor > (gain << kBits)) return -1;
    return (gain << kBits) / divisor;
  }

  Weight cost_at(const SortedRows::Row& row, Index part) const {
    if (row.home == ranks_[part]) return 0;
    return row.size * (nodes_[row.home * request_.num_steps] == nodes_[part] ? 1 : kNodeCost);
  }

  bool keeps_cap(Index heavy, Index light, Index row, Index back) const {
    if (held_.empty()) return true;
    const Weight taken = request_.tokens[row] - (back == kNone ? 0 : request_.tokens[back]);
    return held_[heavy] - taken <= *request_.max_tokens && held_[light] + taken <= *request_.max_tokens;
  }
  // Moves a row and its load; returns its new position.
  Index give(Index from, Index to, Index at) {
    const SortedRows::Row row = rows_.of(from)[at];
    parts_[row.sample] = to;
    loads_[from] -= row.weight;
    loads_[to] += row.weight;
    if (!held_.empty()) {
      held_[from] -= request_.tokens[row.sample];
      held_[to] += request_.tokens[row.sample];
    }
    return rows_.move(from, at, to);
  }

  const Request& request_;
  const Indices& order_;
  Index num_light_;  // rows of order_ from this one on are in partitions without room
  Limits limits_;
  Weight limit_;
  Index may_fail_;  // partitions that may be left above the limit before the others are left too
  Indices parts_;
  Weights base_;
  Indices ranks_;  // of each partition
  Indices nodes_;
  SortedRows rows_;
  Weights loads_;
  Weights held_;  // tokens per partition; empty without a cap
  Tournament<true> heaviest_;
  Tournament<false> lightest_;
  std::vector<bool> left_rank_;      // partitions that found no swap with the lightest of their rank,
  std::vector<bool> left_node_;      // those that found none with the lightest of their node,
  std::vector<bool> left_lightest_;  // and those that found none with the lightest of all
  std::vector<bool> forced_;         // those that have tried to bring another above the limit
  std::vector<bool> has_large_;      // those with a row that no second one of its size fits beside
  int gain_shift_;
  int cost_shift_;
};

inline Index num_above(const Weights& loads, Weight limit) {
  return static_cast<Index>(std::count_if(loads.begin(), loads.end(), [&](Weight load) { return load > limit; }));
}

// A plan of the cells of a grid, none of which is above `limit`, that leaves many rows on their rank; by sample. The
// rows of each rank begin in its own steps. `sizes` are those of the samples. None where swaps find no such plan.
inline std::optional<Indices> near_ranks_of_many(const Request& request, const Problem& problem, const Weights& sizes,
                                                 Weight limit) {
  const Home home{take(request.home, problem.order), take(sizes, problem.order), request.ranks_per_node,
                  request.num_steps};
  Indices parts = problem.by_sample(deal_at_home(problem, home, limit));
  const auto above_cap = [&] {
    return request.max_tokens && largest_load(request.tokens, parts, problem.num_parts) > *request.max_tokens;
  };
  if (above_cap()) return std::nullopt;
  const Index may_fail = problem.num_parts / kFewCells;
  parts = HeaviestLowered(problem, request, std::move(parts), sizes, limit, may_fail).run();
  const Weights loads = sum_by_rank(parts, request.workloads, problem.num_parts, problem.base);
  const Index above = num_above(loads, limit);
  if (above == 0) return parts;
  if (above > may_fail) return std::nullopt;
  Cap cap;
  if (request.max_tokens) cap = {take(request.tokens, problem.order), *request.max_tokens};
  const std::optional<Indices> dealt =
      redeal_heaviest(problem, take(parts, problem.order), home, limit, request.max_tokens ? &cap : nullptr);
  if (!dealt) return std::nullopt;
  return problem.by_sample(*dealt);
}

// A plan within 1 + slack of the bound that leaves many rows at home; by sample. None where no such plan is found, or
// is better sought otherwise: a slack below what plans are refined to, or a home above the cap.
inline std::optional<Indices> near_home_of_many(const Request& request, const Problem& problem, Weight bound) {
  const Index num_parts = request.num_parts;
  Weight limit = with_slack(bound, request.slack);
  if (request.home.empty() || limit < near(bound)) return std::nullopt;
  const auto above_cap = [&](const Indices& parts) {
    return request.max_tokens && largest_load(request.tokens, parts, num_parts) > *request.max_tokens;
  };
  if (above_cap(request.home)) return std::nullopt;
  const Weight home_load = largest_load(request.workloads, request.home, num_parts);
  const bool even = problem.limits.keep(count_per_part(request.home, num_parts));
  if (home_load <= bound || (even && home_load <= limit)) return request.home;
  limit = std::min(limit, home_load - 1);
  const Weights sizes = movable(request.tokens.empty() ? request.workloads : request.tokens);
  const auto by_row = [&] {
    return Home{take(request.home, problem.order), take(sizes, problem.order), request.ranks_per_node};
  };
  Indices parts = request.home;
  if (!even) {
    parts = problem.by_sample(even_counts(problem.weights, num_parts, problem.limits, limit, by_row()));
    if (above_cap(parts)) return std::nullopt;
  }
  parts = HeaviestLowered(problem, request, std::move(parts), sizes, limit, num_parts).run();
  if (largest_load(request.workloads, parts, num_parts) > limit) {
    Cap cap;
    if (request.max_tokens) cap = {take(request.tokens, problem.order), *request.max_tokens};
    const Home home = by_row();
    const Cap* const kept = request.max_tokens ? &cap : nullptr;
    const Indices swapped = take(parts, problem.order);
    const Weight total = std::accumulate(sizes.begin(), sizes.end(), Weight{0});
    std::optional<Indices> repaired;
    if (num_above(sum_by_rank(parts, request.workloads, num_parts), limit) <= num_parts / kFewLeft) {
      repaired = redeal_heaviest(problem, swapped, home, limit, kept);
      if (repaired && home.cost(*repaired) - home.cost(swapped) > total / kFewMoved) repaired.reset();
    }
    if (!repaired) repaired = repair_start(problem, swapped, home, limit, kept);
    if (!repaired || home.cost(*repaired) > total / 2) return std::nullopt;
    parts = problem.by_sample(*repaired);
  }
  return parts;
}

}  // namespace evenrank
