// A lower bound of the largest time of partitions with different speeds.
#pragma once

#include "bounds.hpp"

namespace evenrank {

// For time see speeds.hpp. The largest time of some partitions is at least the time of their total load when they share
// it in proportion to their speeds.
class SpeedBound {
 public:
  // `weights` descend.
  SpeedBound(const Weights& weights, const Speeds& speeds, const Limits& limits)
      : speeds_(speeds), limits_(limits), fastest_(descending_values(speeds.by_part())), sums_(weights),
        power_(fastest_), num_rows_(static_cast<Weight>(weights.size())),
        num_parts_(static_cast<Weight>(fastest_.size())) {}

  // The largest of four bounds; each follows from a statement about every plan that keeps the limits.
  //
  // - All partitions together have all rows.
  // - The j slowest partitions have at least j * min_count rows, so at least the load of the lightest ones.
  // - Within the time of the plan, the partitions have places for the T heaviest rows, for every T.
  // - Either some partition, at best the fastest, has two of the T heaviest rows. Or T partitions have one each. Then the
  //   i slowest of these, which are at most as fast as the i slowest of the T fastest, have i of the T heaviest rows, and
  //   the lightest rows as fillers.
  Weight best() const {
    Weight bound = speeds_.mean_time(sums_.total());
    for (Weight slow = 1; slow < num_parts_; ++slow) {
      bound = std::max(bound, speeds_.time(sums_.last(slow * limits_.min_count), power_.last(slow)));
    }
    // places() does not fall as T grows: if it is above T, the values of T up to it satisfy the statement too.
    for (Weight rows = 1; rows <= num_rows_ - limits_.min_count;) {
      Weight held = places(rows, bound);
      if (held < rows) {
        Weight low = bound, high = bound;
        while (held < rows) held = places(rows, high += high - low + high / kFirstStep + 1);
        while (low + 1 < high) {
          const Weight middle = low + (high - low) / 2;
          (places(rows, middle) < rows ? low : high) = middle;
        }
        bound = high;
        held = places(rows, bound);
      }
      rows = held + 1;
    }
    for (Weight rows = 2; rows <= std::min(num_parts_, num_rows_ - limits_.min_count); ++rows) {
      bound = std::max(bound, of_one_each(rows, bound));
    }
    return bound;
  }

 private:
  static constexpr Weight kFirstStep = 1 << 10, kNear = 64;

  static Weights descending_values(Weights values) {
    std::sort(values.begin(), values.end(), std::greater<>());
    return values;
  }

  // The last bound for T = `tops`; 0 if it cannot be above `bound`.
  Weight of_one_each(Weight tops, Weight bound) const {
    const auto time_of_slow = [&](Weight slow) {
      return speeds_.time(sums_.between(tops - slow, tops) + sums_.last(slow * (limits_.min_count - 1)),
                          power_.between(tops - slow, tops));
    };
    if (limits_.min_count < 2 || time_of_slow(1) < bound - bound / kNear) return 0;
    Weight most = 0;
    for (Weight slow = 2; slow <= tops; slow *= 2) most = std::max(most, time_of_slow(slow));
    const Weight of_two = sums_.between(tops - 2, tops) + sums_.last(limits_.min_count - 2);
    return std::min(most, speeds_.time(of_two, fastest_[0]));
  }

  // How many of the `tops` heaviest rows the partitions can have within a time; stops counting at num_rows. A partition
  // with q of them has at least the load of the q lightest of them and of the lightest fillers.
  Weight places(Weight tops, Weight time) const {
    Weight held = 0;
    for (Weight q = 1; q <= std::min(limits_.max_count, tops) && held < num_rows_; ++q) {
      const Weight load = sums_.between(tops - q, tops) + sums_.last(limits_.min_count - q);
      const Weight least = speeds_.least_speed(load, time);
      const auto can = std::partition_point(fastest_.begin(), fastest_.end(), [&](Weight speed) { return speed >= least; });
      if (can == fastest_.begin()) break;  // no partition can have q or more
      held += can - fastest_.begin();
    }
    return held;
  }

  const Speeds& speeds_;
  Limits limits_;
  Weights fastest_;   // speeds, descending
  PrefixSums sums_;   // of the weights
  PrefixSums power_;  // of fastest_
  Weight num_rows_;
  Weight num_parts_;
};

// The bound of the largest time; of the largest load, if all partitions are equally fast.
inline Bound bound_of(const Weights& weights, Index num_parts, const Limits& limits, const Speeds& speeds) {
  if (speeds.empty()) return counting_bound(weights, num_parts, limits);
  return {SpeedBound(weights, speeds, limits).best(), std::nullopt};
}

}  // namespace evenrank
