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
    Weight cost;  // at its present place
    Index sample;
    Index home;

    // The additional cost of the row at another place.
    Weight cost_to(const Place& place) const { return size * place.cost(home) - cost; }
    void move_to(const Place& place) { cost += cost_to(place); }
    bool before(const Row& other) const {
      return weight != other.weight ? weight > other.weight : sample < other.sample;
    }
  };

  // `order` is the samples, heaviest first.
  SortedRows(const Request& request, const Indices& order, const Indices& parts, const std::vector<Place>& places,
             const Weights& sizes)
      : request_(request), places_(places), sizes_(sizes), samples_(parts.size()),
        counts_(count_per_part(parts, static_cast<Index>(places.size()))), ends_(places.size(), 0),
        rows_(places.size()) {
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
    source[row].move_to(places_[to]);
    if (back == kNone) {
      target.push_back(source[row]);
      sink(target, target.size() - 1);
      source.erase(source.begin() + row);
    } else {
      target[back].move_to(places_[from]);
      std::swap(source[row], target[back]);
      sink(source, row);
      sink(target, back);
    }
  }

 private:
  void read(Index part) {
    std::vector<Row>& rows = rows_[part];
    const Index count = std::exchange(counts_[part], 0);
    rows.resize(count);
    for (Index at = 0; at < count; ++at) {
      const Index sample = samples_[ends_[part] - count + at];
      rows[at] = {request_.workloads[sample], sizes_[sample], 0, sample, request_.home[sample]};
      rows[at].move_to(places_[part]);
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
  const std::vector<Place>& places_;  // of the partitions
  const Weights& sizes_;
  Indices samples_;  // partition by partition
  Indices counts_;   // samples of each partition; 0 after it was read
  Indices ends_;     // where each partition ends in samples_
  std::vector<std::vector<Row>> rows_;
};

}  // namespace evenrank
