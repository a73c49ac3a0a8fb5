// Ordered structures for plans with many partitions: the lightest partitions, and the rows of each partition.
#pragma once

#include "plan.hpp"

namespace evenrank {

// The partitions, lightest first. Those taken from the tournament are kept in order, because the next heavy partition
// tries the same ones.
class LightestParts {
 public:
  explicit LightestParts(const Weights& loads) : loads_(loads), others_(loads) {}

  // The partition at a position of the order; kNone behind its end.
  Index at(std::size_t position) {
    if (position == 0 && first_.empty()) return others_.winner();
    while (first_.size() <= position) {
      const Index next = others_.winner();
      if (next == kNone) return kNone;
      others_.leave(next);
      first_.push_back(next);
    }
    return first_[position];
  }
  // Updates the load of a partition; returns it, and the kept partitions that now follow it, to the tournament.
  void changed(Index part) {
    if (!others_.takes_part(part)) first_.erase(std::find(first_.begin(), first_.end(), part));
    while (!first_.empty() && std::pair(loads_[part], part) < std::pair(loads_[first_.back()], first_.back())) {
      others_.enter(first_.back(), loads_[first_.back()]);
      first_.pop_back();
    }
    others_.enter(part, loads_[part]);
  }

 private:
  const Weights& loads_;
  Indices first_;
  Tournament<false> others_;
};

// The rows of every partition, heaviest first, ties by sample. Reads a partition at its first use: most are never used.
class SortedRows {
 public:
  struct Row {
    Weight weight;
    Weight size;
    Index sample;
    Index home;

    // The additional cost of the row at place `to`, when it is at place `from`.
    Weight cost_of_move(const Place& from, const Place& to) const { return size * (to.cost(home) - from.cost(home)); }
    bool before(const Row& other) const {
      return weight != other.weight ? weight > other.weight : sample < other.sample;
    }
  };

  // `order` is the samples, heaviest first.
  SortedRows(const Request& request, const Indices& order, const Indices& parts, const Weights& sizes, Index num_parts)
      : request_(request), sizes_(sizes), samples_(parts.size()), counts_(count_per_part(parts, num_parts)),
        ends_(num_parts, 0), rows_(num_parts) {
    std::partial_sum(counts_.begin(), counts_.end() - 1, ends_.begin() + 1);
    for (const Index sample : order) samples_[ends_[parts[sample]]++] = sample;
  }

  const std::vector<Row>& of(Index part) {
    std::vector<Row>& rows = rows_[part];
    if (counts_[part] > 0) read(part);
    return rows;
  }
  // Moves row number `row` of `from` to `to`, and row number `back` of `to`, unless it is kNone, to `from`.
  void swap(Index from, Index row, Index to, Index back) {
    std::vector<Row>& source = rows_[from];
    std::vector<Row>& target = rows_[to];
    if (back == kNone) {
      target.push_back(source[row]);
      sink(target, target.size() - 1);
      source.erase(source.begin() + row);
    } else {
      std::swap(source[row], target[back]);
      sink(source, row);
      sink(target, back);
    }
  }

 private:
  void read(Index part) {
    std::vector<Row>& rows = rows_[part];
    const Index count = std::exchange(counts_[part], 0);
    rows.reserve(count + 1);
    for (Index at = ends_[part] - count; at < ends_[part]; ++at) {
      const Index sample = samples_[at];
      rows.push_back({request_.workloads[sample], sizes_[sample], sample, request_.home[sample]});
    }
  }

  // Moves row number `at` to its position; the other rows are in order.
  static void sink(std::vector<Row>& rows, std::size_t at) {
    const Row row = rows[at];
    const auto begin = rows.begin(), place = begin + at;
    const auto before = [](const Row& one, const Row& other) { return one.before(other); };
    if (at > 0 && row.before(rows[at - 1])) {
      const auto first = std::upper_bound(begin, place, row, before);
      std::move_backward(first, place, place + 1);
      *first = row;
    } else {
      const auto last = std::lower_bound(place + 1, rows.end(), row, before);
      std::move(place + 1, last, place);
      *(last - 1) = row;
    }
  }

  const Request& request_;
  const Weights& sizes_;
  Indices samples_;  // partition by partition
  Indices counts_;   // samples of each partition; 0 after it was read
  Indices ends_;     // where each partition ends in samples_
  std::vector<std::vector<Row>> rows_;
};

}  // namespace evenrank
