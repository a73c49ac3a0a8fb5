// Plans to begin with: LPT, snake order, and LPT on either side of a split.
#pragma once

#include <optional>

#include "speed_bound.hpp"

namespace evenrank {

// Partitions in a binary heap, the lightest on top, ties by fewest rows, then by index. Only the top is replaced or
// removed.
class LightestFirst {
 public:
  struct Entry {
    Weight load;
    Index count;
    Index part;

    bool before(const Entry& other) const {
      if (load != other.load) return load < other.load;
      if (count != other.count) return count < other.count;
      return part < other.part;
    }
  };

  explicit LightestFirst(const Weights& loads) {
    entries_.reserve(loads.size());
    for (std::size_t part = 0; part < loads.size(); ++part) {
      entries_.push_back({loads[part], 0, static_cast<Index>(part)});
    }
    for (std::size_t at = entries_.size() / 2; at-- > 0;) sift_down(at, entries_[at]);
  }

  const Entry& top() const { return entries_.front(); }
  void replace_top(const Entry& entry) { sift_down(0, entry); }

  void pop() {
    const Entry last = entries_.back();
    entries_.pop_back();
    if (!entries_.empty()) sift_down(0, last);
  }

 private:
  void sift_down(std::size_t at, Entry entry) {
    const std::size_t size = entries_.size();
    for (std::size_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && entries_[child + 1].before(entries_[child])) ++child;
      if (!entries_[child].before(entry)) break;
      entries_[at] = entries_[child];
      at = child;
    }
    entries_[at] = entry;
  }

  std::vector<Entry> entries_;
};

// LPT, longest processing time first: the next heaviest row goes to the lightest partition that may take it, ties by
// fewest rows, then by index.
//
// Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969); with a limit on the number of
// rows per partition as in the k-partitioning literature. There are n - k * min_count rows beyond min_count in a
// partition; each one taken leaves one less, and when none is left a partition with min_count rows is full.
inline Indices lpt(const Problem& problem) {
  const Limits& limits = problem.limits;
  const Weight num_rows = static_cast<Weight>(problem.weights.size());
  Indices parts(num_rows);
  Weight spare = num_rows - limits.min_count * problem.num_parts;
  LightestFirst lightest(problem.first_loads());
  for (Weight row = 0; row < num_rows; ++row) {
    while (lightest.top().count >= limits.min_count) {
      if (spare > 0) {
        --spare;
        break;
      }
      lightest.pop();
    }
    const LightestFirst::Entry entry = lightest.top();
    parts[row] = entry.part;
    if (entry.count + 1 == limits.max_count) {
      lightest.pop();
    } else {
      lightest.replace_top({entry.load + problem.weights[row], entry.count + 1, entry.part});
    }
  }
  return parts;
}

// Snake order: rows go to partitions 0, 1, ..., k-1, k-1, ..., 1, 0, 0, ... in turn. The cheapest plan, and a weak one;
// sizes differ by one at most.
inline Indices snake(Index num_rows, Index num_parts) {
  Indices parts(num_rows);
  for (Index row = 0; row < num_rows; ++row) {
    const Index place = row % num_parts;
    parts[row] = row / num_parts % 2 == 0 ? place : num_parts - 1 - place;
  }
  return parts;
}

// LPT within the partitions that the counting bound is about, and within the others, each with the rows that the bound
// gives them. LPT over all partitions cannot see that some of them must hold one large row more, and so only the
// lightest others. None where these rows do not exist or do not keep the limits.
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
