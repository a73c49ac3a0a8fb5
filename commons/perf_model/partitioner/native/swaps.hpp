// Swaps of rows between partitions, for refinement and repair.
//
// A round pairs each of the heaviest partitions with others, and carries out its best swap. Every partition is in at most
// one swap of a round, so that swaps are independent. A swap exchanges one row for one row, or moves one row.
#pragma once

#include "problem.hpp"

namespace evenrank {

// A heavy partition that has found a swap stops once the light ones that it has tried, times its rows, exceed this.
constexpr Weight kMostPairs = 1 << 18;

// A row and its weight.
struct Item {
  Weight weight;
  Index row;
};

// The rows of a problem, numbered by weight.
struct RowsByWeight {
  using Row = Item;
  const Weights& weights;

  Index heaviest(Index place) const { return place; }
  Item read(Index row) const { return {weights[row], row}; }
};

// Orders partitions by load, heaviest first, ties by index.
struct ByLoad {
  const Weights& loads;
  bool operator()(Index a, Index b) const { return loads[a] != loads[b] ? loads[a] > loads[b] : a < b; }
};

inline void rank_by_load(const Weights& loads, Indices& parts) { std::sort(parts.begin(), parts.end(), ByLoad{loads}); }

// A swap of a heavy partition with a light one; a larger value is better.
struct Swap {
  Weight value = -1;
  Index light = kNone;  // kNone for no swap
  Index row = kNone;    // number among the rows of the heavy partition
  Index back = kNone;   // number among the rows of the light partition; kNone for a move

  bool exists() const { return light != kNone; }
};

// A plan that is changed in place by swaps. The rows of a partition are in descending order of weight, ties by number. They
// are read at their first use, because many partitions are never used.
template <typename Rows>
class WorkingPartition {
 public:
  using Row = typename Rows::Row;

  // `rows.heaviest(n)` is row number n in this order.
  WorkingPartition(const Rows& rows, const Problem& problem, Indices parts, const Cap& cap)
      : source_(rows),
        limits_(problem.limits),
        cap_(cap),
        parts_(std::move(parts)),
        loads_(sum_by_rank(parts_, rows.weights, problem.num_parts, problem.base)),
        ordered_(parts_.size()),
        ends_(count_per_part(parts_, problem.num_parts)),
        rows_(problem.num_parts),
        changed_(problem.num_parts, true) {
    if (cap.exists()) held_ = sum_by_rank(parts_, cap.weights, problem.num_parts, cap.base);
    Index before = 0;
    for (Index& end : ends_) before += std::exchange(end, before);
    const Index num_rows = static_cast<Index>(parts_.size());
    for (Index place = 0; place < num_rows; ++place) {
      const Index row = rows.heaviest(place);
      ordered_[ends_[parts_[row]]++] = row;
    }
  }

  const Indices& parts() const { return parts_; }
  const Weights& loads() const { return loads_; }
  const std::vector<Row>& rows(Index part) {
    if (rows_[part].capacity() == 0) read(part);
    return rows_[part];
  }
  Indices release() { return std::move(parts_); }

  // Sorts partitions by load, heaviest first. Partitions whose loads have not changed since the last call must be in
  // order, so only the others are sorted and merged.
  void rank(Indices& parts) {
    const auto first = std::stable_partition(parts.begin(), parts.end(), [&](Index part) { return !changed_[part]; });
    std::sort(first, parts.end(), ByLoad{loads_});
    for (auto part = first; part != parts.end(); ++part) changed_[*part] = false;
    std::inplace_merge(parts.begin(), first, parts.end(), ByLoad{loads_});
  }
  // Call it before rank() with other partitions than in the last call.
  void forget_order() { changed_.assign(changed_.size(), true); }

  // Whether the limits of sizes allow a move; the rows of both partitions have been read.
  bool may_move(Index heavy, Index light) const {
    return static_cast<Weight>(rows_[heavy].size()) > limits_.min_count &&
           static_cast<Weight>(rows_[light].size()) < limits_.max_count;
  }

  // Whether the cap allows a swap of `heavy`.
  bool keeps_cap(Index heavy, const Swap& swap) const {
    if (held_.empty()) return true;
    const auto weight = [&](Index part, Index number) { return cap_.weights[rows_[part][number].row]; };
    const Weight taken = weight(heavy, swap.row) - (swap.back == kNone ? 0 : weight(swap.light, swap.back));
    return held_[heavy] - taken <= cap_.limit && held_[swap.light] + taken <= cap_.limit;
  }

  // Carries out a swap of `heavy`, if it is one; returns whether it is.
  bool apply(Index heavy, const Swap& swap) {
    if (!swap.exists()) return false;
    std::vector<Row>& source = rows_[heavy];
    std::vector<Row>& target = rows_[swap.light];
    give(heavy, swap.light, source[swap.row]);
    if (swap.back == kNone) {
      target.push_back(source[swap.row]);
      sink(target, target.size() - 1);
      source.erase(source.begin() + swap.row);
    } else {
      give(swap.light, heavy, target[swap.back]);
      std::swap(source[swap.row], target[swap.back]);
      sink(source, swap.row);
      sink(target, swap.back);
    }
    return true;
  }

 private:
  [[gnu::noinline]] void read(Index part) {  // rare; rows() stays small in the loops that call it
    const Index first = part == 0 ? 0 : ends_[part - 1];
    rows_[part].reserve(ends_[part] - first + 1);
    for (Index at = first; at < ends_[part]; ++at) rows_[part].push_back(source_.read(ordered_[at]));
  }

  void give(Index from, Index to, const Row& row) {
    parts_[row.row] = to;
    loads_[from] -= row.weight;
    loads_[to] += row.weight;
    changed_[from] = changed_[to] = true;
    if (held_.empty()) return;
    held_[from] -= cap_.weights[row.row];
    held_[to] += cap_.weights[row.row];
  }

  // Moves row number `at` to its position; the other rows are in order.
  static void sink(std::vector<Row>& rows, std::size_t at) {
    const Row row = rows[at];
    const auto begin = rows.begin(), place = begin + at;
    const auto before = [](const Row& one, const Row& other) {
      return one.weight != other.weight ? one.weight > other.weight : one.row < other.row;
    };
    if (at > 0 && before(row, rows[at - 1])) {
      const auto first = std::upper_bound(begin, place, row, before);
      std::move_backward(first, place, place + 1);
      *first = row;
    } else {
      const auto last = std::lower_bound(place + 1, rows.end(), row, before);
      std::move(place + 1, last, place);
      *(last - 1) = row;
    }
  }

  const Rows source_;
  Limits limits_;
  const Cap& cap_;
  Indices parts_;  // of each row
  Weights loads_;
  Weights held_;                        // the second weight per partition; empty without a cap
  Indices ordered_;                     // the rows at the start, partition by partition
  Indices ends_;                        // where each partition ends in ordered_
  std::vector<std::vector<Row>> rows_;  // without capacity before they are read
  std::vector<char> changed_;           // whether the load has changed since rank()
};

inline WorkingPartition<RowsByWeight> working_partition(const Problem& problem, Indices parts, const Cap& cap) {
  return {RowsByWeight{problem.weights}, problem, std::move(parts), cap};
}

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
