// A partition that swaps change in place. The twin of swaps.py, one swap at a time.
#pragma once

#include "problem.hpp"

namespace evenrank {

struct Item {
  Weight weight;
  Index row;
};

// Partitions sorted by load, heaviest first, ties by index.
inline void rank_by_load(const Weights& loads, Indices& parts) {
  std::sort(parts.begin(), parts.end(),
            [&](Index a, Index b) { return loads[a] != loads[b] ? loads[a] > loads[b] : a < b; });
}

class WorkingPartition {
 public:
  WorkingPartition(const Weights& weights, Indices parts, Index num_parts, const Limits& limits, const Cap* cap,
                   const Weights& base)
      : parts_(std::move(parts)),
        loads_(base.empty() ? Weights(num_parts, 0) : base),
        items_(num_parts),
        limits_(limits),
        cap_(cap) {
    const Indices counts = count_per_part(parts_, num_parts);
    for (Index part = 0; part < num_parts; ++part) items_[part].reserve(counts[part] + 1);
    for (std::size_t row = 0; row < weights.size(); ++row) {
      items_[parts_[row]].push_back({weights[row], static_cast<Index>(row)});
      loads_[parts_[row]] += weights[row];
    }
    if (cap_ != nullptr) held_ = sum_by_rank(parts_, cap_->weights, num_parts, cap_->base);
  }

  const Weights& loads() const { return loads_; }
  const std::vector<Item>& items(Index part) const { return items_[part]; }
  Indices release() { return std::move(parts_); }

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
    loads_[from] -= item.weight;
    loads_[to] += item.weight;
    if (cap_ != nullptr) {
      held_[from] -= cap_->weights[item.row];
      held_[to] += cap_->weights[item.row];
    }
  }

  Indices parts_;
  Weights loads_;
  Weights held_;
  std::vector<std::vector<Item>> items_;  // heaviest first
  Limits limits_;
  const Cap* cap_;
};

// The light partitions that fall to one of the heavy ones: in turn, lightest first.
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

inline Index heavy_at_level(Index num_over, std::size_t num_parts, int level) {
  return std::max(1, std::min(num_over, static_cast<Index>(num_parts / 2)) >> level);
}

}  // namespace evenrank
