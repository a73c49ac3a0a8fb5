// Starting plans: LPT, snake order, and LPT on each side of a split.
#pragma once

#include <optional>

#include "speed_bound.hpp"

namespace evenrank {

// A tournament tree that gives the partition with the largest (or smallest) load, ties by fewest rows, then by index.
// Keys are stored in the tree, so that a path can be prefetched, and comparisons need no branches.
template <bool largest>
class Tournament {
 public:
  explicit Tournament(const Weights& loads) : first_(1) {
    while (first_ < loads.size()) first_ *= 2;
    winners_.assign(2 * first_, kNobody);
    for (std::size_t part = 0; part < loads.size(); ++part) {
      winners_[first_ + part] = key(static_cast<Index>(part), loads[part], 0);
    }
    for (std::size_t at = first_; --at > 0;) winners_[at] = std::max(winners_[2 * at], winners_[2 * at + 1]);
  }
  Index winner() const { return index_of(winners_[1]); }
  // The winner among the partitions [first, last).
  Index winner(Index first, Index last) const {
    Key winner = kNobody;
    for (std::size_t from = first_ + first, to = first_ + last; from < to; from /= 2, to /= 2) {
      if (from % 2) winner = std::max(winner, winners_[from++]);
      if (to % 2) winner = std::max(winner, winners_[--to]);
    }
    return index_of(winner);
  }
  bool takes_part(Index part) const { return winners_[first_ + part] != kNobody; }
  // Adds or updates a partition with its load and number of rows; returns whether that changes it.
  bool enter(Index part, Weight load, Index count = 0) { return set(part, key(part, load, count)); }
  void leave(Index part) { set(part, kNobody); }

 private:
  // The load, the complement of the count and the complement of the index: the winner has the largest key.
  using Key = unsigned __int128;
  static constexpr Key kNobody = 0;

  static Key key(Index part, Weight load, Index count) {
    const auto low = static_cast<std::uint64_t>(~static_cast<std::uint32_t>(count)) << 32 | ~static_cast<std::uint32_t>(part);
    return static_cast<Key>(largest ? load : kMax - load) << 64 | low;
  }
  static Index index_of(Key winner) { return winner == kNobody ? kNone : ~static_cast<std::uint32_t>(winner); }
  // Updates the path of `part` up to the first node that does not change.
  bool set(Index part, Key winner) {
    std::size_t at = first_ + part;
    if (winners_[at] == winner) return false;
    for (winners_[at] = winner; at > 1; at /= 2) {
      winner = std::max(winner, winners_[at ^ 1]);
      if (winners_[at / 2] == winner) break;
      winners_[at / 2] = winner;
    }
    return true;
  }

  std::size_t first_;
  std::vector<Key> winners_;
};

// Loads and counts of partitions while they are filled. A partition may take one more row if it has fewer than min_count,
// or fewer than max_count while spare rows are left; of n rows in k partitions, n - k * min_count are spare.
class FillingParts {
 public:
  explicit FillingParts(const Problem& problem) : FillingParts(problem, problem.first_loads()) {}
  FillingParts(const Problem& problem, Weights loads)
      : limits_(problem.limits),
        loads_(std::move(loads)),
        counts_(problem.num_parts, 0),
        spare_(static_cast<Weight>(problem.weights.size()) - limits_.min_count * problem.num_parts),
        lightest_(loads_) {}

  Weight load(Index part) const { return loads_[part]; }
  Weight largest() const { return largest_of(loads_); }
  bool is_open(Index part) const {
    return counts_[part] < (spare_ > 0 ? limits_.max_count : limits_.min_count);
  }

  // The lightest partition (of [first, last)) that may take a row, ties by fewest rows, then by index; kNone if none may.
  Index lightest_of_all() {
    return open([&] { return lightest_.winner(); });
  }
  Index lightest(Index first, Index last) {
    return open([&] { return lightest_.winner(first, last); });
  }

  void add(Index part, Weight weight) {
    spare_ -= counts_[part] >= limits_.min_count;
    ++counts_[part];
    loads_[part] += weight;
  }

 private:
  // The winner that may take a row, after updating the tournament.
  template <typename Winner>
  Index open(const Winner& winner) {
    while (true) {
      const Index part = winner();
      if (part != kNone && !is_open(part)) {
        lightest_.leave(part);
      } else if (part == kNone || !lightest_.enter(part, loads_[part], counts_[part])) {
        return part;
      }
    }
  }

  Limits limits_;
  Weights loads_;
  Indices counts_;
  Weight spare_;
  Tournament<false> lightest_;  // with loads that may be outdated, but never too large: loads only grow
};

// LPT, longest processing time first: the next heaviest row goes to the lightest partition that may take it, ties by
// fewest rows, then by index.
//
// Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969); with a limit on the number of
// rows per partition as in the k-partitioning literature.
inline Indices lpt(const Problem& problem) {
  FillingParts filling(problem);
  Indices parts;
  parts.reserve(problem.weights.size());
  for (const Weight weight : problem.weights) {
    parts.push_back(filling.lightest_of_all());
    filling.add(parts.back(), weight);
  }
  return parts;
}

// Snake order: rows go to partitions 0, 1, ..., k-1, k-1, ..., 1, 0, 0, ... in turn. Cheap but weak; sizes differ by at
// most one.
inline Indices snake(Index num_rows, Index num_parts) {
  Indices parts(num_rows);
  for (Index row = 0; row < num_rows; ++row) {
    const Index place = row % num_parts;
    parts[row] = row / num_parts % 2 == 0 ? place : num_parts - 1 - place;
  }
  return parts;
}

// LPT within the partitions of a split (see Split) and within the others, with the rows that attain the bound. LPT over
// all partitions does not consider that some of them must have one large row more, and therefore only the lightest other
// rows. Nothing if these rows do not exist or break the limits.
inline std::optional<Indices> split_start(const Problem& problem, const Split& split) {
  const Weight num_rows = static_cast<Weight>(problem.weights.size());
  const Weight rest = problem.num_parts - split.num_parts;
  // The other partitions cannot hold more than max_count rows each.
  const Weight num_fill =
      std::max(split.num_fill, num_rows - rest * problem.limits.max_count - split.num_top);
  if (split.end_top > num_rows - num_fill) return std::nullopt;
  Indices parts(num_rows);
  for (const bool inside : {true, false}) {
    Indices rows;
    for (Weight row = 0; row < num_rows; ++row) {
      const bool top = split.end_top - split.num_top <= row && row < split.end_top;
      if ((top || row >= num_rows - num_fill) == inside) rows.push_back(static_cast<Index>(row));
    }
    const Weight num_parts = inside ? split.num_parts : rest;
    const Weight count = static_cast<Weight>(rows.size());
    if (count < problem.limits.min_count * num_parts || count > problem.limits.max_count * num_parts) {
      return std::nullopt;
    }
    const Indices dealt =
        lpt({take(problem.weights, rows), {}, static_cast<Index>(num_parts), problem.equal_size, problem.limits});
    const Index first_part = inside ? 0 : static_cast<Index>(split.num_parts);
    for (std::size_t i = 0; i < rows.size(); ++i) parts[rows[i]] = first_part + dealt[i];
  }
  return parts;
}

}  // namespace evenrank
