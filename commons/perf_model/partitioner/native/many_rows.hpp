// What plans for many partitions keep in order: which partition is the heaviest or the lightest, and the rows of each.
#pragma once

#include "plan.hpp"

namespace evenrank {

// The partition with the largest (or smallest) load of a range, ties by index: a tournament over those that take part.
template <bool largest>
class Tournament {
 public:
  explicit Tournament(const Weights& loads) : loads_(loads), first_(1) {
    while (first_ < loads.size()) first_ *= 2;
    winners_.assign(2 * first_, kNone);
    for (std::size_t part = 0; part < loads.size(); ++part) winners_[first_ + part] = static_cast<Index>(part);
    for (std::size_t at = first_; --at > 0;) winners_[at] = better(winners_[2 * at], winners_[2 * at + 1]);
  }
  Index winner() const { return winners_[1]; }
  Index winner(std::size_t begin, std::size_t end) const {
    Index left = kNone;
    Index right = kNone;
    for (begin += first_, end += first_; begin < end; begin /= 2, end /= 2) {
      if (begin % 2 == 1) left = better(left, winners_[begin++]);
      if (end % 2 == 1) right = better(winners_[--end], right);
    }
    return better(left, right);
  }
  bool takes_part(Index part) const { return winners_[first_ + part] != kNone; }
  void enter(Index part) { set(part, part); }
  void leave(Index part) { set(part, kNone); }
  // Replays the matches of `part`, up to one that another partition had won and wins again.
  void changed(Index part) {
    for (std::size_t at = (first_ + part) / 2; at > 0; at /= 2) {
      const Index winner = better(winners_[2 * at], winners_[2 * at + 1]);
      if (winner == winners_[at] && winner != part) break;
      winners_[at] = winner;
    }
  }

 private:
  void set(Index part, Index value) {
    winners_[first_ + part] = value;
    changed(part);
  }
  // The winner of two; `a` has the smaller index.
  Index better(Index a, Index b) const {
    if (a == kNone || b == kNone) return a == kNone ? b : a;
    return (largest ? loads_[b] > loads_[a] : loads_[b] < loads_[a]) ? b : a;
  }

  const Weights& loads_;
  std::size_t first_;
  Indices winners_;
};

// The rows of every partition, heaviest first, ties by sample. Few partitions are ever read, so each is sorted then.
class SortedRows {
 public:
  struct Row {
    Weight weight;
    Weight size;
    Index sample;
    Index home;
    bool before(const Row& other) const {
      return weight != other.weight ? weight > other.weight : sample < other.sample;
    }
  };

  SortedRows(const Request& request, const Indices& parts, Index num_parts, const Weights& sizes)
      : request_(request), sizes_(sizes), samples_(parts.size()), counts_(count_per_part(parts, num_parts)),
        starts_(counts_), rows_(num_parts) {
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    for (std::size_t sample = parts.size(); sample-- > 0;) {
      samples_[--starts_[parts[sample]]] = static_cast<Index>(sample);
    }
  }

  const std::vector<Row>& of(Index part) {
    std::vector<Row>& rows = rows_[part];
    if (counts_[part] > 0) sort(part);
    return rows;
  }
  // Moves a row; returns its new position.
  Index move(Index from, Index at, Index to) {
    const Row row = of(from)[at];
    of(to);
    rows_[from].erase(rows_[from].begin() + at);
    return insert(rows_[to], row);
  }

 private:
  void sort(Index part) {
    std::vector<Row>& rows = rows_[part];
    const Index count = std::exchange(counts_[part], 0);
    rows.reserve(count + 1);  // a swap adds a row before it removes one
    for (Index at = starts_[part]; at < starts_[part] + count; ++at) {
      const Index sample = samples_[at];
      insert(rows, {request_.workloads[sample], sizes_[sample], sample, request_.home[sample]});
    }
  }

  static Index insert(std::vector<Row>& rows, const Row& row) {
    rows.push_back(row);
    std::size_t at = rows.size() - 1;
    for (; at > 0 && row.before(rows[at - 1]); --at) rows[at] = rows[at - 1];
    rows[at] = row;
    return static_cast<Index>(at);
  }

  const Request& request_;
  const Weights& sizes_;
  Indices samples_;  // by partition
  Indices counts_;   // of each partition; 0 once its rows are in order
  Indices starts_;
  std::vector<std::vector<Row>> rows_;
};

}  // namespace evenrank
