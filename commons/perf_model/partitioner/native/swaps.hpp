// Swaps of rows between partitions, for refinement and repair.
//
// A round pairs the heaviest partitions with others and carries out the best swap of each of them. Every partition
// takes part in one swap of a round at most, so that the swaps do not disturb one another. A swap gives one row for
// one, or for none: then it is a move.
#pragma once

#include "problem.hpp"

namespace evenrank {

// A row and its weight; {0, kNone} is what comes back for a move.
struct Item {
  Weight weight;
  Index row;
};

// Orders partitions by load, heaviest first, ties by index.
struct ByLoad {
  const Weights& loads;
  bool operator()(Index a, Index b) const { return loads[a] != loads[b] ? loads[a] > loads[b] : a < b; }
};

inline void rank_by_load(const Weights& loads, Indices& parts) { std::sort(parts.begin(), parts.end(), ByLoad{loads}); }

// A plan that swaps change in place.
class WorkingPartition {
 public:
  WorkingPartition(const Problem& problem, Indices parts, const Cap* cap)
      : parts_(std::move(parts)),
        loads_(problem.first_loads()),
        items_(problem.num_parts),
        changed_(problem.num_parts, true),
        limits_(problem.limits),
        cap_(cap) {
    const Weights& weights = problem.weights;
    const Indices counts = count_per_part(parts_, problem.num_parts);
    for (Index part = 0; part < problem.num_parts; ++part) items_[part].reserve(counts[part] + 1);
    for (std::size_t row = 0; row < weights.size(); ++row) {
      items_[parts_[row]].push_back({weights[row], static_cast<Index>(row)});
      loads_[parts_[row]] += weights[row];
    }
    if (cap_ != nullptr) held_ = sum_by_rank(parts_, cap_->weights, problem.num_parts, cap_->base);
  }

  const Weights& loads() const { return loads_; }
  const std::vector<Item>& items(Index part) const { return items_[part]; }
  Indices release() { return std::move(parts_); }

  // Sorts some partitions by load, heaviest first; those whose load has not changed since the last call are in order.
  void rank(Indices& parts) {
    const auto first = std::stable_partition(parts.begin(), parts.end(), [&](Index part) { return !changed_[part]; });
    std::sort(first, parts.end(), ByLoad{loads_});
    for (auto part = first; part != parts.end(); ++part) changed_[*part] = false;
    std::inplace_merge(parts.begin(), first, parts.end(), ByLoad{loads_});
  }
  // For rank() of others than in the call before.
  void forget_order() { changed_.assign(changed_.size(), true); }

  // Whether the counts allow a move.
  bool may_move(Index heavy, Index light) const {
    return static_cast<Weight>(items_[heavy].size()) > limits_.min_count &&
           static_cast<Weight>(items_[light].size()) < limits_.max_count;
  }

  // Whether the second weight allows giving `row` from `heavy` to `light`, and `back` (or kNone) the other way.
  bool keeps_cap(Index heavy, Index light, Index row, Index back) const {
    if (cap_ == nullptr) return true;
    const Weight taken = cap_->weights[row] - (back == kNone ? 0 : cap_->weights[back]);
    return held_[heavy] - taken <= cap_->limit && held_[light] + taken <= cap_->limit;
  }

  // Gives `item` from `heavy` to `light`, and `back`, if it is a row, the other way.
  void apply(Index heavy, Index light, const Item& item, const Item& back) {
    give(heavy, light, item);
    if (back.row != kNone) give(light, heavy, back);
  }

 private:
  void give(Index from, Index to, const Item& item) {
    const auto by_row = [](const Item& a, const Item& b) { return a.row < b.row; };
    auto& source = items_[from];
    auto& target = items_[to];
    source.erase(std::lower_bound(source.begin(), source.end(), item, by_row));
    target.insert(std::lower_bound(target.begin(), target.end(), item, by_row), item);
    parts_[item.row] = to;
    changed_[from] = changed_[to] = true;
    loads_[from] -= item.weight;
    loads_[to] += item.weight;
    if (cap_ != nullptr) {
      held_[from] -= cap_->weights[item.row];
      held_[to] += cap_->weights[item.row];
    }
  }

  Indices parts_;
  Weights loads_;
  Weights held_;                          // the second weight per partition; empty without a cap
  std::vector<std::vector<Item>> items_;  // rows per partition, heaviest first
  std::vector<char> changed_;             // whether the load has changed since rank()
  Limits limits_;
  const Cap* cap_;
};

// The partitions that one of the heavy ones may swap with. The others are dealt to the `num_heavy` heaviest of `ranked`
// in turn, lightest first; those left over take no part.
class Share {
 public:
  Share(const Indices& ranked, Index num_heavy, Index heavy)
      : ranked_(ranked), num_heavy_(num_heavy), heavy_(heavy) {}

  Index size() const { return (static_cast<Index>(ranked_.size()) - num_heavy_) / num_heavy_; }
  Index operator[](Index at) const { return ranked_[ranked_.size() - 1 - (heavy_ + at * num_heavy_)]; }

 private:
  const Indices& ranked_;
  Index num_heavy_;
  Index heavy_;
};

// How many of the `num_over` partitions above the limit look for a swap: at most half of all, and half as many at each
// further level.
inline Index heavy_at_level(Index num_over, std::size_t num_parts, int level) {
  return std::max(1, std::min(num_over, static_cast<Index>(num_parts / 2)) >> level);
}

}  // namespace evenrank
