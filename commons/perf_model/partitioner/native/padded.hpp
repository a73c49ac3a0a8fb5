// Groups of rows that are padded to their longest row: a group costs its number of rows times the cost of its heaviest row.
//
// Some optimal grouping is contiguous in the rows sorted by cost, heaviest first: exchanging rows so that a group takes the
// next heaviest ones raises the heaviest row of no group. For a limit on the cost of a group, filling each group up to the
// limit gives the fewest groups, and this number does not grow with the limit. So bisection finds the least limit for a
// number of groups (parametric search; Pınar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D
// partitioning").
#pragma once

#include <queue>
#include <tuple>

#include "problem.hpp"

namespace evenrank {

class PaddedGroups {
  using Sum = unsigned __int128;  // of costs, each below 2^63

 public:
  // `costs`, descending.
  PaddedGroups(const Weight* costs, Weight num_rows, Weight max_rows)
      : costs_(costs), num_rows_(num_rows), max_rows_(max_rows), sums_(static_cast<std::size_t>(num_rows) + 1) {
    for (Weight row = 0; row < num_rows; ++row) sums_[row + 1] = sums_[row] + static_cast<Sum>(costs[row]);
  }

  // The least number of groups that cost at most `limit` each; `limit` is at least the cost of the heaviest row.
  Weight fewest(Weight limit) const { return fewest_of({0, num_rows_}, limit, num_rows_); }

  // The sizes of `num_groups` groups whose largest cost is minimal; `high` is a limit that such groups keep. With several
  // `steps` of equally many groups, also lowers the sum of the steps' largest costs.
  Weights of_least_cost(Weight num_groups, Weight high, Weight steps) const {
    const Weight limit = least_limit({0, num_rows_}, num_groups, high), per_step = num_groups / steps;
    Weights sizes = sizes_within({0, num_rows_}, limit, num_groups);
    if (steps == 1) return sizes;
    Weight low = 0, threshold = limit;
    while (low < threshold) {
      const Weight middle = low + (threshold - low) / 2;
      if (ends_at(middle, steps, per_step).back() == num_rows_) {
        threshold = middle;
      } else {
        low = middle + 1;
      }
    }
    Weights ends = ends_at(threshold, steps, per_step), plain;
    lower_sum(ends, per_step, limit);
    for (Weight step = 1; step <= steps; ++step) {
      plain.push_back(std::accumulate(sizes.begin(), sizes.begin() + step * per_step, Weight{0}));
    }
    if (sum_of(plain, per_step, limit) < sum_of(ends, per_step, limit)) ends = plain;
    sizes.clear();
    for (Weight step = 0; step < steps; ++step) {
      const Range rows{step == 0 ? 0 : ends[step - 1], ends[step]};
      const Weights of_step = sizes_within(rows, least_limit(rows, per_step, limit), per_step);
      sizes.insert(sizes.end(), of_step.begin(), of_step.end());
    }
    return sizes;
  }

 private:
  static constexpr Sum kNone = ~Sum{0};
  struct Range {
    Weight begin;
    Weight end;
  };

  // The ends of steps that take as many rows as their groups have room for within the threshold, or the cost of their
  // heaviest row if that is more; leaves one row for every later group.
  Weights ends_at(Weight threshold, Weight steps, Weight per_step) const {
    Weights ends;
    Weight end = 0;
    for (Weight step = 1; step <= steps; ++step) {
      const Weight most = num_rows_ - (steps - step) * per_step, limit = std::max(costs_[end], threshold);
      for (Weight group = 0; group < per_step && end < most; ++group) end += most_from(end, most, limit);
      ends.push_back(end);
    }
    return ends;
  }

  // Moves the ends of steps, one after another, as long as that lowers the sum of the steps' largest costs. Tries an end on
  // a grid between its neighbours, then on finer grids around the best value.
  void lower_sum(Weights& ends, Weight per_step, Weight limit) const {
    constexpr int kRounds = 8;
    constexpr Weight kPoints = 32;
    bool improves = true;
    for (int round = 0; improves && round < kRounds; ++round) {
      improves = false;
      for (std::size_t at = 0; at + 1 < ends.size(); ++at) {
        const Weight begin = at == 0 ? 0 : ends[at - 1], end = ends[at + 1];
        // The sum for an end, kNone if it is above `most`; each part is searched only up to what the other leaves of it.
        const auto sum_within = [&](Weight middle, Sum most) {
          const auto left = [&](Weight other) { return static_cast<Weight>(std::min<Sum>(limit, most - other)); };
          const Weight least_other = at_least({middle, end}, per_step);
          if (most < static_cast<Sum>(least_other)) return kNone;
          const Weight one = cost_of({begin, middle}, per_step, left(least_other));
          if (one == kMax) return kNone;
          const Weight other = cost_of({middle, end}, per_step, left(one));
          return other == kMax ? kNone : static_cast<Sum>(one) + static_cast<Sum>(other);
        };
        Sum least = sum_within(ends[at], kNone);
        Weight first = begin + per_step, last = end - per_step;
        for (Weight stride = kMax; stride > 1;) {
          stride = std::max<Weight>(1, (last - first) / kPoints);
          Weight best = ends[at];
          for (Weight middle = first; middle <= last; middle += stride) {
            const Sum sum = sum_within(middle, least);
            if (sum > least) continue;
            improves = improves || sum < least;
            least = sum;
            best = middle;  // of equal costs the later end, which takes rows from the next step at no cost
          }
          ends[at] = best;
          first = std::max(begin + per_step, best - stride);
          last = std::min(end - per_step, best + stride);
        }
      }
    }
  }

  Sum sum_of(const Weights& ends, Weight per_step, Weight limit) const {
    Sum sum = 0;
    Weight begin = 0;
    for (const Weight end : ends) sum += static_cast<Sum>(cost_of({std::exchange(begin, end), end}, per_step, limit));
    return sum;
  }

  // The largest cost if a range is divided into `num_groups` groups; kMax if it is above the limit.
  Weight cost_of(const Range& rows, Weight num_groups, Weight limit) const {
    const bool fits = rows.end - rows.begin >= num_groups && fewest_of(rows, limit, num_groups) <= num_groups;
    return fits ? least_limit(rows, num_groups, limit) : kMax;
  }

  // A lower bound of the largest cost of groups of a range: its heaviest row, and the mean.
  Weight at_least(const Range& rows, Weight num_groups) const {
    const Sum mean = (sums_[rows.end] - sums_[rows.begin]) / static_cast<Sum>(num_groups);
    return std::max(costs_[rows.begin], static_cast<Weight>(std::min(mean, Sum{kMax})));
  }

  // The least limit for this number of groups. The number of groups changes only at costs that a group has, or would have
  // with one more row, so the bisection moves from one such cost to another.
  Weight least_limit(const Range& rows, Weight num_groups, Weight high) const {
    Weight low = std::min(high, at_least(rows, num_groups));
    while (low < high) {
      const Weight limit = low + (high - low) / 2;
      Weight groups = 0, begin = rows.begin, costliest = 0, next = high;
      for (; begin < rows.end && groups <= num_groups; ++groups) {
        const Weight size = most_from(begin, rows.end, limit), cost = size * costs_[begin];
        costliest = std::max(costliest, cost);
        if (size < std::min(max_rows_, rows.end - begin)) next = std::min(next - costs_[begin], cost) + costs_[begin];
        begin += size;
      }
      if (groups <= num_groups) {
        high = costliest;
      } else {
        low = next;
      }
    }
    return high;
  }

  // The least number of groups of a range within a limit; counts to `most` + 1 at most.
  Weight fewest_of(const Range& rows, Weight limit, Weight most) const {
    Weight groups = 0;
    for (Weight begin = rows.begin; begin < rows.end && groups <= most; begin += most_from(begin, rows.end, limit)) {
      ++groups;
    }
    return groups;
  }

  Weight most_from(Weight begin, Weight end, Weight limit) const {
    const Weight rest = std::min(max_rows_, end - begin);
    return costs_[begin] == 0 ? rest : std::min(rest, limit / costs_[begin]);
  }

  // The sizes of the fewest groups within a limit; the costliest are halved until there are `num_groups`.
  Weights sizes_within(const Range& rows, Weight limit, Weight num_groups) const {
    std::priority_queue<std::tuple<Weight, Weight, Weight>> divisible;  // cost, begin, size
    std::vector<std::pair<Weight, Weight>> groups;                      // begin, size
    const auto add = [&](Weight begin, Weight size) {
      if (size > 1) {
        divisible.emplace(size * costs_[begin], begin, size);
      } else {
        groups.emplace_back(begin, size);
      }
    };
    for (Weight begin = rows.begin, size = 0; begin < rows.end; begin += size) {
      size = most_from(begin, rows.end, limit);
      add(begin, size);
    }
    while (static_cast<Weight>(groups.size() + divisible.size()) < num_groups) {
      const auto [cost, begin, size] = divisible.top();
      divisible.pop();
      add(begin, size / 2);
      add(begin + size / 2, size - size / 2);
    }
    for (; !divisible.empty(); divisible.pop()) {
      groups.emplace_back(std::get<1>(divisible.top()), std::get<2>(divisible.top()));
    }
    std::sort(groups.begin(), groups.end());
    Weights sizes;
    for (const auto& [begin, size] : groups) sizes.push_back(size);
    return sizes;
  }

  const Weight* costs_;
  Weight num_rows_;
  Weight max_rows_;
  std::vector<Sum> sums_;  // prefix sums of the costs
};

}  // namespace evenrank
