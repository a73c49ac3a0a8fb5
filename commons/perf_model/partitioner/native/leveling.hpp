// Exchanges that raise the smallest load. The twin of leveling.py in commons/micro_batching.
#pragma once

#include "plan.hpp"

namespace evenrank {

constexpr Weight kRoundsPerGroup = 4;

// The exchange that brings two loads nearest, of all pairs that `consider` has been shown.
class BestExchange {
 public:
  explicit BestExchange(const WorkingPlan& plan) : plan_(plan) {}

  // Whether a pair with this difference of loads can still have the best exchange.
  bool may_gain(Weight gap) const { return gap / 2 > gain_; }

  void consider(Index heavy, Index light) {
    const Weight gap = plan_.loads()[heavy] - plan_.loads()[light];
    const std::vector<Item>& others = plan_.items(light);
    const Weight num_others = static_cast<Weight>(others.size());
    const bool may_move = plan_.may_move(heavy, light);
    const auto take = [&](const Item& row, const Item& back) {
      const Weight taken = row.weight - back.weight;
      const Weight gain = std::min(taken, gap - taken);
      if (gain > gain_) {
        gain_ = gain;
        heavy_ = heavy;
        light_ = light;
        row_ = row;
        back_ = back;
      }
    };
    Weight below = 0;
    for (const Item& row : plan_.items(heavy)) {
      const Weight threshold = row.weight - gap / 2;
      while (below < num_others && others[below].weight >= threshold) ++below;
      const Weight end = std::min(below + 1, num_others);
      for (Weight at = std::max<Weight>(below - 1, 0); at < end; ++at) take(row, others[at]);
      if (may_move) take(row, {0, kNone});
    }
  }

  bool apply(WorkingPlan& plan) const {
    if (gain_ > 0) plan.apply(heavy_, light_, row_, back_);
    return gain_ > 0;
  }

 private:
  const WorkingPlan& plan_;
  Weight gain_ = 0;  // how far the larger load falls, and the smaller rises
  Index heavy_ = kNone;
  Index light_ = kNone;
  Item row_{};
  Item back_{};
};

// rank_by_load where only two loads have changed: an insertion sort.
inline void rank_again(const Weights& loads, Indices& ranked) {
  for (std::size_t at = 1; at < ranked.size(); ++at) {
    const Index moved = ranked[at];
    std::size_t to = at;
    for (; to > 0; --to) {
      const Index before = ranked[to - 1];
      if (loads[before] > loads[moved] || (loads[before] == loads[moved] && before < moved)) break;
      ranked[to] = before;
    }
    ranked[to] = moved;
  }
}

inline Indices level(const Weights& weights, Indices groups, Index num_groups, const Limits& limits) {
  if (num_groups == 1) return groups;
  const Weight mean = std::accumulate(weights.begin(), weights.end(), Weight{0}) / num_groups;
  const Weight enough = std::max<Weight>(1, mean / kTolerance);
  WorkingPlan plan(weights, std::move(groups), num_groups, limits, nullptr);
  const Weights& loads = plan.loads();
  Indices ranked = range(num_groups);
  rank_by_load(loads, ranked);
  for (Weight round = 0; round < kRoundsPerGroup * num_groups; ++round) {
    if (round > 0) rank_again(loads, ranked);
    const Index heaviest = ranked.front();
    const Index lightest = ranked.back();
    if (loads[heaviest] - loads[lightest] <= enough) break;
    BestExchange raise(plan);
    for (auto heavy = ranked.begin(); heavy != ranked.end() - 1; ++heavy) {
      if (!raise.may_gain(loads[*heavy] - loads[lightest])) break;  // gaps only get smaller
      raise.consider(*heavy, lightest);
    }
    if (raise.apply(plan)) continue;
    BestExchange lower(plan);
    for (auto light = ranked.rbegin(); light != ranked.rend() - 1; ++light) {
      if (!lower.may_gain(loads[heaviest] - loads[*light])) break;
      lower.consider(heaviest, *light);
    }
    if (!lower.apply(plan)) break;
  }
  return plan.release();
}

}  // namespace evenrank
