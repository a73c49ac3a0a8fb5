// Workloads in the form that every algorithm works on, sorted once.
//
// Algorithms see rows: row 0 is the heaviest sample, ties in the order of the samples. They return `parts`, the
// partition of each row. A plan by sample is an `assignment`. All numbers are integers, so that plans are the same on
// every CPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace evenrank {

using Weight = std::int64_t;
using Index = std::int32_t;
using Weights = std::vector<Weight>;
using Indices = std::vector<Index>;

constexpr Weight kMax = INT64_MAX;
constexpr Index kNone = -1;  // no row, or no partition

// Fewest and most rows that a partition may have.
struct Limits {
  Weight min_count;
  Weight max_count;

  // Within one of each other with equal sizes, anything otherwise.
  static Limits of(Weight num_rows, Weight num_parts, bool equal_size) {
    if (!equal_size) return {0, num_rows};
    return {num_rows / num_parts, num_rows / num_parts + (num_rows % num_parts > 0)};
  }

  // Whether all `counts`, rows per partition, are within the limits.
  bool keep(const Indices& counts) const {
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    return min_count <= *least && *most <= max_count;
  }
};

// A second weight, such as tokens, of which no partition may hold more than `limit`.
struct Cap {
  Weights weights;
  Weight limit;
  Weights base{};  // what each partition holds before it has any rows; empty for nothing
};

// Sum of the weights in each partition, on top of `base`.
inline Weights sum_by_rank(const Indices& parts, const Weights& weights, Index num_parts, const Weights& base = {}) {
  Weights loads = base.empty() ? Weights(num_parts, 0) : base;
  for (std::size_t row = 0; row < weights.size(); ++row) loads[parts[row]] += weights[row];
  return loads;
}

inline Weight largest_load(const Weights& weights, const Indices& parts, Index num_parts, const Weights& base = {}) {
  const Weights loads = sum_by_rank(parts, weights, num_parts, base);
  return *std::max_element(loads.begin(), loads.end());
}

inline Indices count_per_part(const Indices& parts, Index num_parts) {
  Indices counts(num_parts, 0);
  for (const Index part : parts) ++counts[part];
  return counts;
}

// 0, 1, ..., size - 1.
inline Indices range(Index size) {
  Indices result(size);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

// Positions of `values`, not negative, in descending order of value, ties in ascending order of position.
inline Indices descending(const Weights& values) {
  const std::size_t size = values.size();
  Indices order = range(static_cast<Index>(size));
  if (size <= 64) {  // insertion sort: a radix sort would fill 256 counters per byte
    for (std::size_t i = 1; i < size; ++i) {
      const Index moved = order[i];
      std::size_t to = i;
      for (; to > 0 && values[order[to - 1]] < values[moved]; --to) order[to] = order[to - 1];
      order[to] = moved;
    }
    return order;
  }
  // Radix sort, lowest byte first, without the high bytes that are zero in all values. A digit is 255 - byte, so that
  // the order descends.
  const std::uint64_t largest = *std::max_element(values.begin(), values.end());
  std::size_t num_digits = 0;
  while (num_digits < sizeof(Weight) && largest >> (8 * num_digits) > 0) ++num_digits;
  const auto digit = [&](Index at, std::size_t place) {
    return 255 - ((static_cast<std::uint64_t>(values[at]) >> (8 * place)) & 255);
  };
  std::array<std::array<Index, 256>, sizeof(Weight)> counts;
  std::fill_n(counts.begin(), num_digits, std::array<Index, 256>{});
  for (std::size_t at = 0; at < size; ++at) {
    for (std::size_t place = 0; place < num_digits; ++place) ++counts[place][digit(static_cast<Index>(at), place)];
  }
  Indices sorted(size);
  for (std::size_t place = 0; place < num_digits; ++place) {
    Index before = 0;
    for (Index& count : counts[place]) before += std::exchange(count, before);
    for (const Index at : order) sorted[counts[place][digit(at, place)]++] = at;
    order.swap(sorted);
  }
  return order;
}

// The values at some positions.
template <typename Values>
Values take(const Values& values, const Indices& at) {
  Values taken;
  taken.reserve(at.size());
  for (const Index index : at) taken.push_back(values[index]);
  return taken;
}

// Sorted workloads and what a plan has to keep.
struct Problem {
  Weights weights;  // descending
  Indices order;    // the sample that each row is
  Index num_parts;
  bool equal_size;  // whether sizes of partitions differ by one at most
  Limits limits;    // the same as fewest and most rows, unless a caller gave others
  Weights base{};   // the load of each partition before it has any rows; empty if all begin with nothing

  static Problem of(const Weights& workloads, Index num_parts, bool equal_size,
                    const std::optional<Limits>& limits = std::nullopt) {
    Indices order = descending(workloads);
    Weights weights = take(workloads, order);
    const Limits kept = limits ? *limits : Limits::of(static_cast<Weight>(weights.size()), num_parts, equal_size);
    return {std::move(weights), std::move(order), num_parts, equal_size, kept};
  }

  // Turns values by row into values by sample.
  template <typename Values>
  Values by_sample(const Values& by_row) const {
    Values result(by_row.size());
    for (std::size_t row = 0; row < by_row.size(); ++row) result[order[row]] = by_row[row];
    return result;
  }

  // Load of the heaviest partition.
  Weight largest(const Indices& parts) const { return largest_load(weights, parts, num_parts, base); }
};

}  // namespace evenrank
