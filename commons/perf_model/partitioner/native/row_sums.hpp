// Counts and sums over all rows of a global batch, each in one pass.
#pragma once

#include "drawn_order.hpp"
#include "gathered_rows.hpp"

namespace evenrank {

// The largest sum of workloads or tokens, so that loads fit into int64 even if a slack of 1 doubles them.
constexpr Weight kMostLoad = (Weight{1} << 62) - 1;

// Whether all values are in [0, largest] and their sum is at most largest_sum; computed without overflow.
inline bool all_within(const Weight* values, Weight size, Weight largest, Weight largest_sum) {
  unsigned __int128 sum = 0;
  bool within = true;
  for (Weight at = 0; at < size; ++at) {
    within &= (values[at] >= 0) & (values[at] <= largest);
    sum += static_cast<std::uint64_t>(values[at]);
  }
  return within && sum <= static_cast<unsigned __int128>(largest_sum);
}

// Whether speeds are in [1, kMostSpeed] and the time of all loads on the slowest rank is below 2^61, so that a base plus a
// load fits into int64.
inline bool are_speeds_of(const Weight* speeds, Weight size, const Weight* loads, Weight num_loads) {
  const auto [slowest, fastest] = std::minmax_element(speeds, speeds + size);
  if (size == 0 || *slowest < 1 || *fastest > kMostSpeed) return false;
  const auto sum = std::accumulate(loads, loads + num_loads, static_cast<__int128>(0));
  return sum * *fastest / *slowest <= kMostLoad / 2;
}

// The sums of `values` by place; for null, the numbers of rows.
inline void sum_at(const Weight* place, const Weight* values, Weight num_rows, Weight num_places, Weight* sums) {
  std::fill_n(sums, num_places, 0);
  const auto value = [&](std::size_t row) { return values ? values[row] : Weight{1}; };
  add_by_part(place, static_cast<std::size_t>(num_rows), value, sums);
}

// Counts moved rows by the step that trains them; `destination` is the place that trains each row. Out: counts (6, steps),
// the rows and tokens of all rows, of those that change rank, and of those that leave their node; rows_at (num_places,),
// the number of rows of each place.
inline void count_moves(const GatheredRows& rows, const Weight* destination, Weight ranks_per_node, Weight* rows_at,
                        Weight* counts) {
  const Weight steps = rows.steps;
  std::fill_n(counts, 6 * steps, 0);
  std::copy_n(rows.real_rows, rows.num_places, rows_at);
  const Weight* tokens = rows.tokens;
  for (Weight place = 0; place < rows.num_places; ++place) {
    counts[place % steps] += rows_at[place];
    counts[steps + place % steps] += std::accumulate(tokens, tokens + rows_at[place], Weight{0});
    tokens += rows_at[place];
  }
  const auto count = [&](Weight kind, Weight step, Weight row, Weight sign) {
    counts[2 * kind * steps + step] += sign;
    counts[(2 * kind + 1) * steps + step] += sign * rows.tokens[row];
  };
  for (Weight row = 0; row < rows.num_rows; ++row) {
    const Weight home = rows.home[row], place = destination[row];
    if (home == place) continue;
    --rows_at[home];
    ++rows_at[place];
    const Weight from = rows.rank_of(home), to = rows.rank_of(place);
    count(0, home - from * steps, row, -1);
    count(0, place - to * steps, row, 1);
    if (from != to) count(1, place - to * steps, row, 1);
    if (from / ranks_per_node != to / ranks_per_node) count(2, place - to * steps, row, 1);
  }
}

// A 63-bit digest of numbers: the sum of their hashes, each mixed with its position times kGolden, as in splitmix64. It
// detects accidental differences, not deliberate ones.
class Digest {
 public:
  void add(const Weight* values, Weight size) {
    for (Weight at = 0; at < size; ++at) {
      state_ += kGolden;
      sum_ += mixed(static_cast<std::uint64_t>(values[at]) + state_);
    }
  }
  Weight value() const { return static_cast<Weight>(mixed(sum_) >> 1); }

 private:
  std::uint64_t state_ = 0;
  std::uint64_t sum_ = 0;
};

}  // namespace evenrank
