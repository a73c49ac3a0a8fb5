// Partitions of different speeds: what their loads take, and one target that serves all of them.
//
// Time is counted in loads of the fastest partition: a load takes load * (largest speed) / speed, rounded up. So within
// a time T a partition may hold floor(T * speed / (largest speed)). It begins with the difference between T and that as
// its base (problem.hpp): then "base + load is at most T" says the same as "takes at most T", exactly, and all
// algorithms that lower loads to a target lower times. Speeds are below 2^31, so that products stay far below 2^127.
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
  // Those of the ranks, each for `steps` partitions that follow one another; none if all are equal.
  explicit Speeds(const Weights& of_ranks, Weight steps = 1) {
    if (std::adjacent_find(of_ranks.begin(), of_ranks.end(), std::not_equal_to<>()) == of_ranks.end()) return;
    for (const Weight speed : of_ranks) of_.insert(of_.end(), steps, speed);
    fastest_ = *std::max_element(of_.begin(), of_.end());
    sum_ = std::accumulate(of_.begin(), of_.end(), Weight{0});
  }

  bool empty() const { return of_.empty(); }
  const Weights& by_part() const { return of_; }

  // What a load takes on partitions whose speeds add up to `speed`; one part.
  Weight time(Weight load, Weight speed) const {
    return static_cast<Weight>((static_cast<Wide>(load) * fastest_ + speed - 1) / speed);
  }
  // What a load takes that all partitions share in proportion to their speeds.
  Weight mean_time(Weight load) const { return time(load, sum_); }
  // Most that a partition may hold within a time.
  Weight limit(Weight time, std::size_t part) const {
    return static_cast<Weight>(static_cast<Wide>(time) * of_[part] / fastest_);
  }
  // Least speed at which a partition takes no longer than `time` for a load; above every speed where none does.
  Weight least_speed(Weight load, Weight time) const {
    if (load == 0) return 0;
    if (time == 0) return kMostSpeed + 1;
    const Wide speed = (static_cast<Wide>(load) * fastest_ + time - 1) / time;
    return static_cast<Weight>(std::min<Wide>(speed, kMostSpeed + 1));
  }
  // What the slowest of some partitions takes: of every `stride`-th one from `first` on. Without speeds, the largest load.
  Weight largest_time(const Weight* loads, std::size_t size, std::size_t first = 0, std::size_t stride = 1) const {
    std::size_t last = first;
    for (std::size_t part = first; part < size; part += stride) {
      const bool is_later = empty() ? loads[part] > loads[last]
                                    : static_cast<Wide>(loads[part]) * of_[last] > static_cast<Wide>(loads[last]) * of_[part];
      if (is_later) last = part;
    }
    return empty() ? loads[last] : time(loads[last], of_[last]);
  }
  // What every partition begins with, so that it is at `time` where it takes that long.
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
