// Swaps of rows between partitions, for refinement and repair.
//
// A round pairs each of the heaviest partitions with others, and carries out its best swap. Every partition is in at most
// one swap of a round, so that swaps are independent. A swap exchanges one row for one row, or moves one row.
#pragma once

#include "problem.hpp"

namespace evenrank {

// A row and its weight; {0, kNone} is the row that comes back in a move.
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

// The loads of partitions, updated while rows move between them; rows are in any order, but in that of `cap.weights`.
struct HeldRows {
  Indices parts;
  Weights loads;
  const Cap& cap;
  Weights held;  // the second weight per partition; empty without a cap

  HeldRows(Indices parts_of_rows, Weights loads_of_parts, const Cap& kept)
      : parts(std::move(parts_of_rows)), loads(std::move(loads_of_parts)), cap(kept) {
    if (cap.exists()) held = sum_by_rank(parts, cap.weights, static_cast<Index>(loads.size()), cap.base);
  }

  // Whether the cap allows giving `row` from `heavy` to `light`, and `back` (or kNone) the other way.
  bool keeps_cap(Index heavy, Index light, Index row, Index back) const {
    if (held.empty()) return true;
    const Weight taken = cap.weights[row] - (back == kNone ? 0 : cap.weights[back]);
    return held[heavy] - taken <= cap.limit && held[light] + taken <= cap.limit;
  }

  void give(Index from, Index to, Index row, Weight weight) {
    parts[row] = to;
    loads[from] -= weight;
    loads[to] += weight;
    if (held.empty()) return;
    held[from] -= cap.weights[row];
    held[to] += cap.weights[row];
  }
};

// A swap of a heavy partition with a light one; a larger value is better.
struct Swap {
  Weight value;
  Index light = kNone;
  Item row{};
  Item back{};
};

// A plan that is changed in place by swaps.
class WorkingPartition {
 public:
  WorkingPartition(const Problem& problem, Indices parts, const Cap& cap)
      : rows_(std::move(parts), problem.first_loads(), cap),
        items_(problem.num_parts),
        changed_(problem.num_parts, true),
        limits_(problem.limits) {
    const Weights& weights = problem.weights;
    const Indices counts = count_per_part(rows_.parts, problem.num_parts);
    for (Index part = 0; part < problem.num_parts; ++part) items_[part].reserve(counts[part] + 1);
    for (std::size_t row = 0; row < weights.size(); ++row) {
      items_[rows_.parts[row]].push_back({weights[row], static_cast<Index>(row)});
      rows_.loads[rows_.parts[row]] += weights[row];
    }
  }

  const Weights& loads() const { return rows_.loads; }
  const std::vector<Item>& items(Index part) const { return items_[part]; }
  Indices release() { return std::move(rows_.parts); }

  // Sorts partitions by load, heaviest first. Partitions whose loads have not changed since the last call must be in
  // order, so only the others are sorted and merged.
  void rank(Indices& parts) {
    const auto first = std::stable_partition(parts.begin(), parts.end(), [&](Index part) { return !changed_[part]; });
    std::sort(first, parts.end(), ByLoad{loads()});
    for (auto part = first; part != parts.end(); ++part) changed_[*part] = false;
    std::inplace_merge(parts.begin(), first, parts.end(), ByLoad{loads()});
  }
  // Call it before rank() with other partitions than in the last call.
  void forget_order() { changed_.assign(changed_.size(), true); }

  // Whether the limits of sizes allow a move.
  bool may_move(Index heavy, Index light) const {
    return static_cast<Weight>(items_[heavy].size()) > limits_.min_count &&
           static_cast<Weight>(items_[light].size()) < limits_.max_count;
  }

  bool keeps_cap(Index heavy, Index light, const Item& row, const Item& back) const {
    return rows_.keeps_cap(heavy, light, row.row, back.row);
  }

  // Carries out a swap of `heavy`, if it is one; returns whether it is.
  bool apply(Index heavy, const Swap& swap) {
    if (swap.light == kNone) return false;
    give(heavy, swap.light, swap.row);
    if (swap.back.row != kNone) give(swap.light, heavy, swap.back);
    return true;
  }

 private:
  void give(Index from, Index to, const Item& item) {
    const auto by_row = [](const Item& a, const Item& b) { return a.row < b.row; };
    auto& source = items_[from];
    auto& target = items_[to];
    source.erase(std::lower_bound(source.begin(), source.end(), item, by_row));
    target.insert(std::lower_bound(target.begin(), target.end(), item, by_row), item);
    changed_[from] = changed_[to] = true;
    rows_.give(from, to, item.row, item.weight);
  }

  HeldRows rows_;
  std::vector<std::vector<Item>> items_;  // rows per partition, heaviest first
  std::vector<char> changed_;             // whether the load has changed since rank()
  Limits limits_;
};

// The partitions with which one of the heavy partitions may swap. All but the `num_heavy` heaviest of `ranked` are dealt
// to these in turn, lightest first; a remainder is left out.
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

// How many of the partitions above the limit look for a swap in a round: at most half of all partitions, and half as
// many at each higher level.
class Level {
 public:
  Index num_heavy(Index num_over, std::size_t num_parts) const {
    return std::max(1, std::min(num_over, static_cast<Index>(num_parts / 2)) >> level_);
  }

  // Doubles the number after a round in which the heaviest found a swap, halves it otherwise; false if it cannot be
  // halved.
  bool next(bool found, Index num_heavy) {
    level_ = found ? std::max(level_ - 1, 0) : level_ + 1;
    return found || num_heavy > 1;
  }

 private:
  int level_ = 0;
};

}  // namespace evenrank
