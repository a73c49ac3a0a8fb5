// Partitions of different speeds: the times of their loads, and one target for all of them.
//
// The unit of time is a load of the fastest partition: a load takes load * (largest speed) / speed, rounded up. So
// within a time T a partition may have a load of floor(T * speed / (largest speed)). The difference between T and this
// limit is the partition's base (problem.hpp). Then "base + load <= T" is equivalent to "time <= T", and every algorithm
// that lowers loads to a target lowers times. Speeds are below 2^31, so that products stay far below 2^127.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

namespace evenrank {

using Weight = std::int64_t;
using Weights = std::vector<Weight>;

constexpr Weight kMostSpeed = INT32_MAX;

inline Weight divide_up(Weight value, Weight by) { return value / by + (value % by != 0); }

class Speeds {
 public:
  Speeds() = default;
  // Speeds of ranks, each with `steps` consecutive partitions; empty if all are equal.
  explicit Speeds(const Weights& of_ranks, Weight steps = 1) {
    if (std::adjacent_find(of_ranks.begin(), of_ranks.end(), std::not_equal_to<>()) == of_ranks.end()) return;
    for (const Weight speed : of_ranks) of_.insert(of_.end(), steps, speed);
    fastest_ = *std::max_element(of_.begin(), of_.end());
    sum_ = std::accumulate(of_.begin(), of_.end(), Weight{0});
  }

  bool empty() const { return of_.empty(); }
  const Weights& by_part() const { return of_; }

  // The time of a load on partitions whose speeds add up to `speed`.
  Weight time(Weight load, Weight speed) const {
    return static_cast<Weight>((static_cast<Wide>(load) * fastest_ + speed - 1) / speed);
  }
  // The time of a load that all partitions share in proportion to their speeds.
  Weight mean_time(Weight load) const { return time(load, sum_); }
  // The largest load of a partition within a time.
  Weight limit(Weight time, std::size_t part) const {
    return static_cast<Weight>(static_cast<Wide>(time) * of_[part] / fastest_);
  }
  // The least speed at which a load takes at most `time`; above every speed if there is none.
  Weight least_speed(Weight load, Weight time) const {
    if (load == 0) return 0;
    if (time == 0) return kMostSpeed + 1;
    const Wide speed = (static_cast<Wide>(load) * fastest_ + time - 1) / time;
    return static_cast<Weight>(std::min<Wide>(speed, kMostSpeed + 1));
  }
  // The largest time of every `stride`-th partition from `first` on; without speeds, the largest load.
  Weight largest_time(const Weight* loads, std::size_t size, std::size_t first = 0, std::size_t stride = 1) const {
    std::size_t last = first;
    for (std::size_t part = first; part < size; part += stride) {
      const bool is_later = empty() ? loads[part] > loads[last]
                                    : static_cast<Wide>(loads[part]) * of_[last] > static_cast<Wide>(loads[last]) * of_[part];
      if (is_later) last = part;
    }
    return empty() ? loads[last] : time(loads[last], of_[last]);
  }
  // By step the largest time of its cells, where every rank has `steps` consecutive cells.
  Weights times_of_steps(const Weight* loads, std::size_t size, std::size_t steps) const {
    Weights times;
    for (std::size_t step = 0; step < steps; ++step) times.push_back(largest_time(loads, size, step, steps));
    return times;
  }
  // The base of every partition for a target `time`.
  Weights bases(Weight time) const {
    Weights bases(of_.size());
    for (std::size_t part = 0; part < of_.size(); ++part) bases[part] = time - limit(time, part);
    return bases;
  }

 private:
  using Wide = __int128;

  Weights of_;  // by partition
  Weight fastest_ = 0;
  Weight sum_ = 0;
};

}  // namespace evenrank
