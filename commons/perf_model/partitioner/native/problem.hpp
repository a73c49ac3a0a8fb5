// The problem that every algorithm solves: workloads sorted once, and the constraints.
//
// Algorithms number rows by weight: row 0 is the heaviest sample, ties in the order of the samples. They return `parts`,
// the partition of each row; a plan by sample is an `assignment`. All numbers are integers, so that plans are the same
// on every CPU.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "speeds.hpp"

namespace evenrank {

using Index = std::int32_t;
using Indices = std::vector<Index>;

constexpr Weight kMax = INT64_MAX;
constexpr Index kNone = -1;  // no row, or no partition

// The fewest and the most rows of a partition.
struct Limits {
  Weight min_count;
  Weight max_count;

  // Counts that differ by at most one with equal sizes; any counts otherwise.
  static Limits of(Weight num_rows, Weight num_parts, bool equal_size) {
    if (!equal_size) return {0, num_rows};
    return {num_rows / num_parts, num_rows / num_parts + (num_rows % num_parts > 0)};
  }

  // Whether all `counts`, rows per partition, are within the limits.
  bool keep(const Indices& counts) const {
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    return min_count <= *least && *most <= max_count;
  }
  // Whether counts within `other` are within these limits.
  bool include(const Limits& other) const { return min_count <= other.min_count && other.max_count <= max_count; }
};

// Sums of the first n of some values, for every n.
class PrefixSums {
 public:
  explicit PrefixSums(const Weights& values) : sums_(values.size() + 1, 0) {
    std::partial_sum(values.begin(), values.end(), sums_.begin() + 1);
  }

  Weight total() const { return sums_.back(); }
  Weight first(Weight count) const { return sums_[count]; }
  Weight between(Weight begin, Weight end) const { return sums_[end] - sums_[begin]; }
  // The sum of the last `count` values; 0 for a negative count.
  Weight last(Weight count) const { return sums_.back() - sums_[sums_.size() - 1 - std::max<Weight>(count, 0)]; }

 private:
  Weights sums_;
};

// Adds `value(row)` of every row to the sum of its partition. Neighbouring rows are often in one partition; a block of
// such rows is added at once, without a store per row.
template <typename Part, typename Value, typename Sum>
void add_by_part(const Part* parts, std::size_t num_rows, const Value& value, Sum* sums) {
  constexpr std::size_t kBlock = 8;
  std::size_t row = 0;
  for (; row + kBlock <= num_rows; row += kBlock) {
    Part differs = 0;
    for (std::size_t at = row; at < row + kBlock; ++at) differs |= parts[at] ^ parts[row];
    Sum sum = 0;
    if (differs == 0) {
      for (std::size_t at = row; at < row + kBlock; ++at) sum += value(at);
      sums[parts[row]] += sum;
    } else {
      for (std::size_t at = row; at < row + kBlock; ++at) sums[parts[at]] += value(at);
    }
  }
  for (; row < num_rows; ++row) sums[parts[row]] += value(row);
}

inline Weight largest_of(const Weights& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// The sum of the weights in each partition, plus `base`.
inline Weights sum_by_rank(const Indices& parts, const Weights& weights, Index num_parts, const Weights& base = {}) {
  Weights loads = base.empty() ? Weights(num_parts, 0) : base;
  add_by_part(parts.data(), parts.size(), [&](std::size_t row) { return weights[row]; }, loads.data());
  return loads;
}

inline Weight largest_load(const Weights& weights, const Indices& parts, Index num_parts, const Weights& base = {}) {
  const Weights loads = sum_by_rank(parts, weights, num_parts, base);
  return *std::max_element(loads.begin(), loads.end());
}

inline Indices count_per_part(const Indices& parts, Index num_parts) {
  Indices counts(num_parts, 0);
  add_by_part(parts.data(), parts.size(), [](std::size_t) { return Index{1}; }, counts.data());
  return counts;
}

// The rows of each partition, ascending.
inline std::vector<Indices> rows_by_part(const Indices& parts, Index num_parts) {
  std::vector<Indices> rows_of(num_parts);
  for (std::size_t row = 0; row < parts.size(); ++row) rows_of[parts[row]].push_back(static_cast<Index>(row));
  return rows_of;
}

// The bits of a number that is not negative.
inline int bit_length(Weight value) {
  int bits = 0;
  for (; value > 0; value >>= 1) ++bits;
  return bits;
}

// 0, 1, ..., size - 1.
inline Indices range(Index size) {
  Indices result(size);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

// Sorts keys by their bits [first, last): a stable radix sort, lowest digit first. One pass counts the values of all
// digits. Keys have no bits from `last` on.
inline void radix_sort(std::vector<std::uint64_t>& keys, int first, int last) {
  const int most = keys.size() < 4096 ? 8 : 11;  // bits of a digit: few keys should not need many counters
  const int num_digits = (last - first + most - 1) / most;
  const std::uint64_t mask = (std::uint64_t{1} << most) - 1;
  std::vector<Indices> ends(num_digits, Indices(mask + 1, 0));
  for (const std::uint64_t key : keys) {
    std::uint64_t digits = key >> first;
    for (Indices& of_digit : ends) ++of_digit[digits & mask], digits >>= most;
  }
  std::vector<std::uint64_t> sorted(keys.size());
  for (int digit = 0; digit < num_digits; ++digit) {
    Index before = 0;
    for (Index& end : ends[digit]) before += std::exchange(end, before);
    for (const std::uint64_t key : keys) sorted[ends[digit][key >> (first + digit * most) & mask]++] = key;
    keys.swap(sorted);
  }
}

inline Weight sum_of(const Weights& values) { return std::accumulate(values.begin(), values.end(), Weight{0}); }

// The values at some positions.
template <typename Values>
Values take(const Values& values, const Indices& at) {
  Values taken;
  taken.reserve(at.size());
  for (const Index index : at) taken.push_back(values[index]);
  return taken;
}

// Values in descending order, ties in ascending order of position, and the position of each.
struct Sorted {
  Weights values;
  Indices order;

  // Sorts `values`, which are not negative.
  static Sorted of(const Weights& values) {
    const Weight size = static_cast<Weight>(values.size());
    Weight largest = 0, bits = 0;
    for (const Weight value : values) {
      largest = std::max(largest, value);
      bits |= value;
    }
    // A key has the value and the position. Workloads are often multiples of a power of two, which is divided out.
    const int zeros = bits > 0 ? bit_length(bits & -bits) - 1 : 0;
    const int value_bits = bit_length(largest >> zeros), place_bits = bit_length(size);
    if (value_bits + place_bits > 64 || size <= 64) {  // the key is too small, or a radix sort would not pay
      Indices order = range(static_cast<Index>(size));
      std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return values[a] > values[b]; });
      return {take(values, order), std::move(order)};
    }
    std::vector<std::uint64_t> keys(size);
    for (Weight at = 0; at < size; ++at) {
      keys[at] = static_cast<std::uint64_t>((largest - values[at]) >> zeros) << place_bits | static_cast<std::uint64_t>(at);
    }
    radix_sort(keys, place_bits, place_bits + value_bits);
    Sorted sorted{Weights(size), Indices(size)};
    const std::uint64_t places = (std::uint64_t{1} << place_bits) - 1;
    for (Weight at = 0; at < size; ++at) {
      sorted.values[at] = largest - (static_cast<Weight>(keys[at] >> place_bits) << zeros);
      sorted.order[at] = static_cast<Index>(keys[at] & places);
    }
    return sorted;
  }
};

// A cap: no partition may have more than `limit` of a second weight, such as tokens. Empty weights mean no cap.
struct Cap {
  Weights weights{};
  Weight limit = 0;
  Weights base{};  // the second weight of each partition without rows; empty for zeros

  bool exists() const { return !weights.empty(); }
  // The cap for rows in another order.
  Cap in_order(const Indices& order) const { return exists() ? Cap{take(weights, order), limit} : Cap{}; }
  bool keeps(const Indices& parts, Index num_parts) const {
    return !exists() || largest_load(weights, parts, num_parts) <= limit;
  }
};

// Up to this many rows times partitions, a second start is worth its time, and so are the n merges of k sums of
// Karmarkar-Karp with free sizes; and rows are kept at home even where nearly all have to move.
constexpr Weight kFew = 1 << 16;

// Sorted workloads, and the constraints of a plan.
struct Problem {
  Weights weights;  // descending
  Indices order;    // the sample of each row
  Index num_parts;
  bool equal_size;  // whether sizes of partitions differ by at most one
  Limits limits;    // of the sizes; follow from `equal_size` unless the caller gives others
  Weights base{};   // the load of each partition without rows; empty for zeros
  Speeds speeds{};  // of the partitions; loads ignore them, except for the base that aim() sets

  static Problem of(const Weights& workloads, Index num_parts, bool equal_size,
                    const std::optional<Limits>& limits = std::nullopt, Speeds speeds = {}) {
    auto [weights, order] = Sorted::of(workloads);
    const Limits kept = limits ? *limits : Limits::of(static_cast<Weight>(weights.size()), num_parts, equal_size);
    return {std::move(weights), std::move(order), num_parts, equal_size, kept, {}, std::move(speeds)};
  }

  // Whether there are few rows times partitions, see kFew.
  bool is_few() const { return static_cast<Weight>(weights.size()) * num_parts <= kFew; }
  // Converts values by row to values by sample.
  template <typename Values>
  Values by_sample(const Values& by_row) const {
    Values result(by_row.size());
    for (std::size_t row = 0; row < by_row.size(); ++row) result[order[row]] = by_row[row];
    return result;
  }

  // The load of every partition, and the largest load; `parts` are by row.
  Weights loads(const Indices& parts) const { return sum_by_rank(parts, weights, num_parts, base); }
  Weight largest(const Indices& parts) const { return largest_load(weights, parts, num_parts, base); }
  // The time of the slowest partition; the largest load, if all are equally fast.
  Weight time(const Indices& parts) const {
    if (speeds.empty()) return largest(parts);
    const Weights loads = sum_by_rank(parts, weights, num_parts);
    return speeds.largest_time(loads.data(), loads.size());
  }
  // Sets bases such that a partition's base and load reach `target` exactly when its time does.
  Problem& aim(Weight target) {
    if (!speeds.empty()) base = speeds.bases(target);
    return *this;
  }
  // The load of every partition without rows.
  Weights first_loads() const { return base.empty() ? Weights(num_parts, 0) : base; }
  // Whether the sizes of partitions, by row or by sample, are within the limits.
  bool keeps_limits(const Indices& parts) const { return limits.keep(count_per_part(parts, num_parts)); }
};

}  // namespace evenrank
