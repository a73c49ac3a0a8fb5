// What plans for many partitions keep in order: which partition is the heaviest or the lightest, and the rows of each.
#pragma once

#include "plan.hpp"

namespace evenrank {

// The partitions, lightest first. The first ones are kept in order until loads change: those that a heavy partition cannot
// swap with are tried by the next one too.
class LightestParts {
 public:
  explicit LightestParts(const Weights& loads) : loads_(loads), others_(loads) {}

  // The one that `position` others are before; kNone if there are not so many.
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
  // The load of a partition has changed; it, and those that it is before now, are no longer among the first ones.
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

// The rows of every partition, heaviest first, ties by sample. Few partitions are ever looked at, so each is read then.
class SortedRows {
 public:
  struct Row {
    Weight weight;
    Weight size;
    Weight cost;  // of being where it is
    Index sample;
    Index home;

    // What it costs more to have it at another place.
    Weight cost_to(const Place& place) const { return size * place.cost(home) - cost; }
    void move_to(const Place& place) { cost += cost_to(place); }
    bool before(const Row& other) const {
      return weight != other.weight ? weight > other.weight : sample < other.sample;
    }
  };

  // `order` has the samples, heaviest first.
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
  // Moves the row at `row` of `from` to `to`, and the one at `back` there, if it is one, the other way.
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

  // Brings the row at `at` to its place among the others, which are in order.
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
  Indices samples_;  // by partition
  Indices counts_;   // of each partition; 0 once its rows have been read
  Indices ends_;     // of each partition among them
  std::vector<std::vector<Row>> rows_;
};

}  // namespace evenrank
