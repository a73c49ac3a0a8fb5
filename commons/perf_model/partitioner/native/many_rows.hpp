// Structures for plans with many partitions: the lightest partitions, and rows by sample.
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

// The rows by sample, with what it costs to move them.
struct RowsBySample {
  struct Row {
    Weight weight;
    Weight size;
    Index row;  // number of the sample
    Index home;

    // The additional cost of the row at place `to`, when it is at place `from`.
    Weight cost_of_move(const Place& from, const Place& to) const { return size * (to.cost(home) - from.cost(home)); }
  };
  const Weights& weights;
  const Weights& sizes;
  const Indices& home;
  const Indices& order;  // the samples, heaviest first

  Index heaviest(Index place) const { return order[place]; }
  Row read(Index sample) const { return {weights[sample], sizes[sample], sample, home[sample]}; }
};

}  // namespace evenrank
