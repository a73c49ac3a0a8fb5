// Sorted workloads and what a plan has to keep. The twin of problem.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

namespace evenrank {

using Weight = std::int64_t;
using Index = std::int32_t;
using Weights = std::vector<Weight>;
using Indices = std::vector<Index>;

constexpr Weight kMax = INT64_MAX;
constexpr Index kNone = -1;

// Fewest and most rows that a partition may have.
struct Limits {
  Weight min_count;
  Weight max_count;

  static Limits of(Weight num_rows, Weight num_parts, bool equal_size) {
    if (!equal_size) return {0, num_rows};
    return {num_rows / num_parts, num_rows / num_parts + (num_rows % num_parts > 0)};
  }

  bool keep(const Indices& counts) const {
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    return min_count <= *least && *most <= max_count;
  }
};

// A second weight, such as tokens, of which no partition may hold more than `limit`.
struct Cap {
  Weights weights;
  Weight limit;
};

inline Weights load_per_part(const Weights& weights, const Indices& parts, Index num_parts) {
  Weights loads(num_parts, 0);
  for (std::size_t row = 0; row < weights.size(); ++row) loads[parts[row]] += weights[row];
  return loads;
}

inline Weight largest_load(const Weights& weights, const Indices& parts, Index num_parts) {
  const Weights loads = load_per_part(weights, parts, num_parts);
  return *std::max_element(loads.begin(), loads.end());
}

inline Indices count_per_part(const Indices& parts, Index num_parts) {
  Indices counts(num_parts, 0);
  for (const Index part : parts) ++counts[part];
  return counts;
}

inline Indices range(Index size) {
  Indices result(size);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

// Positions of `values` in descending order of value, ties in ascending order of position.
inline Indices descending(const Weights& values) {
  const std::size_t size = values.size();
  Indices order = range(static_cast<Index>(size));
  if (size <= 64) {
    for (std::size_t i = 1; i < size; ++i) {
      const Index moved = order[i];
      std::size_t to = i;
      for (; to > 0 && values[order[to - 1]] < values[moved]; --to) order[to] = order[to - 1];
      order[to] = moved;
    }
    return order;
  }
  // Radix sort, one byte at a time; bytes that are the same everywhere are skipped.
  constexpr std::size_t kBytes = sizeof(Weight);
  std::array<std::array<Index, 256>, kBytes> counts{};
  const auto digit = [&](Index at, std::size_t byte) {
    return (~static_cast<std::uint64_t>(values[at]) >> (8 * byte)) & 0xFF;
  };
  for (std::size_t at = 0; at < size; ++at) {
    for (std::size_t byte = 0; byte < kBytes; ++byte) ++counts[byte][digit(static_cast<Index>(at), byte)];
  }
  Indices sorted(size);
  for (std::size_t byte = 0; byte < kBytes; ++byte) {
    auto& count = counts[byte];
    if (count[digit(0, byte)] == static_cast<Index>(size)) continue;
    Index before = 0;
    for (Index& each : count) before += std::exchange(each, before);
    for (const Index at : order) sorted[count[digit(at, byte)]++] = at;
    order.swap(sorted);
  }
  return order;
}

template <typename Values>
Values take(const Values& values, const Indices& at) {
  Values taken;
  taken.reserve(at.size());
  for (const Index index : at) taken.push_back(values[index]);
  return taken;
}

struct Problem {
  Weights weights;  // descending
  Indices order;    // the sample that each row is
  Index num_parts;
  bool equal_size;
  Limits limits;

  static Problem of(const Weights& workloads, Index num_parts, bool equal_size) {
    Indices order = descending(workloads);
    Weights weights = take(workloads, order);
    const Limits limits = Limits::of(static_cast<Weight>(weights.size()), num_parts, equal_size);
    return {std::move(weights), std::move(order), num_parts, equal_size, limits};
  }

  template <typename Values>
  Values by_sample(const Values& by_row) const {
    Values result(by_row.size());
    for (std::size_t row = 0; row < by_row.size(); ++row) result[order[row]] = by_row[row];
    return result;
  }

  Weight largest(const Indices& parts) const { return largest_load(weights, parts, num_parts); }
};

}  // namespace evenrank
