// A lower bound of the largest time of partitions with different speeds.
#pragma once

#include "bounds.hpp"

namespace evenrank {

// Time is that of speeds.hpp. What some partitions hold takes them at least what it takes when they share it in proportion
// to their speeds.
class SpeedBound {
 public:
  // `weights` descend.
  SpeedBound(const Weights& weights, const Speeds& speeds, const Limits& limits)
      : speeds_(speeds), limits_(limits), fastest_(descending_values(speeds.by_part())), sums_(weights),
        power_(fastest_), num_rows_(static_cast<Weight>(weights.size())),
        num_parts_(static_cast<Weight>(fastest_.size())) {}

  // The largest of what follows from these, each true of every plan that keeps the limits.
  //
  // - All rows are on all partitions.
  // - The lightest rows that fill up the j slowest partitions to min_count are on these.
  // - Within the time, all partitions have places for the T heaviest rows, for every T.
  // - Either one partition, at best the fastest, has two of the T heaviest rows. Or T partitions have one each, and the i
  //   slowest of these, no faster than T partitions could be, have i of them and the lightest rows that fill them up.
  Weight best() const {
    Weight bound = speeds_.mean_time(sums_.total());
    for (Weight slow = 1; slow < num_parts_; ++slow) {
      bound = std::max(bound, speeds_.time(sums_.last(slow * limits_.min_count), power_.last(slow)));
    }
    // There are not fewer places for more rows: where there are some more than rows, these need not be looked at.
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

  // The last one for T = `tops`, where it can be above the bound.
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

  // Most of the `tops` heaviest rows that partitions can hold within a time, or num_rows if that is less. One that holds q
  // of them has the q lightest of these at least, and the lightest rows that fill it up.
  Weight places(Weight tops, Weight time) const {
    Weight held = 0;
    for (Weight q = 1; q <= std::min(limits_.max_count, tops) && held < num_rows_; ++q) {
      const Weight load = sums_.between(tops - q, tops) + sums_.last(limits_.min_count - q);
      const Weight least = speeds_.least_speed(load, time);
      const auto can = std::partition_point(fastest_.begin(), fastest_.end(), [&](Weight speed) { return speed >= least; });
      if (can == fastest_.begin()) break;  // nor can any hold more
      held += can - fastest_.begin();
    }
    return held;
  }

  const Speeds& speeds_;
  Limits limits_;
  Weights fastest_;   // speeds, descending
  PrefixSums sums_;   // of the weights
  PrefixSums power_;  // of these speeds
  Weight num_rows_;
  Weight num_parts_;
};

// The bound of the largest time: of the largest load, where all partitions are equally fast.
inline Bound bound_of(const Weights& weights, Index num_parts, const Limits& limits, const Speeds& speeds) {
  if (speeds.empty()) return counting_bound(weights, num_parts, limits);
  return {SpeedBound(weights, speeds, limits).best(), std::nullopt};
}

}  // namespace evenrank
