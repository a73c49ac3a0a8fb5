// Karmarkar-Karp, the largest differencing method.
//
// A state is a plan of some of the rows into k sets. The two states with the largest spread (largest set - smallest set)
// are merged: the largest set of one with the smallest of the other, and so on; until one state is left. Of equal
// spreads the older state comes first, and sets of equal sums keep their order, so that the plan is deterministic.
//
// Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD 82/113 (1982). For equal sizes: Michiels,
// Korst, Aarts and van Leeuwen, "Performance ratios for the differencing method applied to the balanced number
// partitioning problem" (2003).
#pragma once

#include <utility>

#include "starts.hpp"

namespace evenrank {

// The sets of all states as linked lists of rows, so that merging two sets takes one link.
class RowLists {
 public:
  explicit RowLists(std::size_t num_rows) : next_(num_rows, kNone), last_(range(static_cast<Index>(num_rows))) {}

  // Appends the list with head `other` to the list with head `head`.
  void append(Index head, Index other) {
    next_[last_[head]] = other;
    last_[head] = last_[other];
  }

  Index next(Index row) const { return next_[row]; }

 private:
  Indices next_;
  Indices last_;  // valid at the head of a list
};

// One set of a state: the sum of its rows and the first row, kNone for an empty set.
struct Set {
  Weight sum;
  Index head;
};

// The sets, heaviest first; sets beyond the vector's size are empty. A padding row is a set without a row.
using State = std::vector<Set>;

// Appends the sets of `state` from `from` on that have a sum above `above`; of equal sums the later set first.
inline void append_reversed_runs(const State& state, State& result, std::size_t& from, Weight above) {
  while (from < state.size() && state[from].sum > above) {
    std::size_t end = from;
    while (end < state.size() && state[end].sum == state[from].sum) ++end;
    for (std::size_t at = end; at-- > from;) result.push_back(state[at]);
    from = end;
  }
}

// Merges the sets of `left` with those of `right` in reverse order, and sorts the result; equal sums keep their order.
inline State merge(State&& left, const State& right, std::size_t num_parts, RowLists& lists) {
  const auto descends = [](const Set& a, const Set& b) { return a.sum > b.sum; };
  const auto join = [&lists](Set& set, const Set& other) {
    set.sum += other.sum;
    if (set.head == kNone) {
      set.head = other.head;
    } else if (other.head != kNone) {
      lists.append(set.head, other.head);
    }
  };
  if (left.size() + right.size() <= num_parts) {
    // Every set of one state is merged with an empty set of the other.
    if (right.size() == 1 && left.back().sum >= right.front().sum) {
      left.push_back(right.front());
      return std::move(left);
    }
    State result;
    result.reserve(num_parts);
    std::size_t from = 0;
    for (const Set& set : left) {
      append_reversed_runs(right, result, from, set.sum);
      result.push_back(set);
    }
    append_reversed_runs(right, result, from, -1);
    return result;
  }
  if (right.size() == 1) {
    Set last = left.back();
    left.pop_back();
    join(last, right.front());
    left.insert(std::upper_bound(left.begin(), left.end(), last, descends), last);
    return std::move(left);
  }
  left.resize(num_parts, {0, kNone});
  for (std::size_t at = 0; at < right.size(); ++at) join(left[num_parts - 1 - at], right[at]);
  std::stable_sort(left.begin(), left.end(), descends);
  return std::move(left);
}

// Merges the states in a heap, largest spread first, until one is left.
inline State merge_all(std::vector<State> states, std::size_t num_parts, RowLists& lists) {
  struct Entry {
    Weight spread;
    std::size_t age;
    std::size_t state;

    bool operator<(const Entry& other) const {  // std heaps keep the largest on top
      return spread != other.spread ? spread < other.spread : age > other.age;
    }
  };
  const auto spread = [&](const State& state) {
    return state.front().sum - (state.size() == num_parts ? state.back().sum : 0);
  };
  std::vector<Entry> heap;
  heap.reserve(states.size());
  for (std::size_t age = 0; age < states.size(); ++age) heap.push_back({spread(states[age]), age, age});
  std::make_heap(heap.begin(), heap.end());
  for (std::size_t age = states.size(); heap.size() > 1; ++age) {
    std::pop_heap(heap.begin(), heap.end());
    State& left = states[heap.back().state];
    heap.pop_back();
    std::pop_heap(heap.begin(), heap.end());
    const std::size_t slot = heap.back().state;
    State merged = merge(std::move(left), states[slot], num_parts, lists);
    states[slot] = std::move(merged);
    heap.back() = {spread(states[slot]), age, slot};
    std::push_heap(heap.begin(), heap.end());
  }
  return std::move(states[heap.front().state]);
}

// The partition of each row; `weights` descend, and partition 0 is the heaviest.
//
// Equal sizes: the first states are blocks of k consecutive rows, one row per set, the last block padded with empty sets.
// A merge joins each set of one state with one of the other, so every partition gets one row of each block. Free sizes:
// the first states are single rows. Rows of weight zero do not change sums; each goes to the partition with the fewest
// rows.
inline Indices differencing(const Weights& weights, Index num_parts, bool equal_size) {
  const std::size_t num_rows = weights.size();
  Indices parts(num_rows);
  RowLists lists(num_rows);
  std::vector<State> states;
  std::size_t num_merged = num_rows;
  if (equal_size) {
    for (std::size_t first = 0; first < num_rows; first += num_parts) {
      State& state = states.emplace_back();
      for (std::size_t row = first; row < first + num_parts; ++row) {
        state.push_back(row < num_rows ? Set{weights[row], static_cast<Index>(row)} : Set{0, kNone});
      }
    }
  } else {
    num_merged = std::find(weights.begin(), weights.end(), 0) - weights.begin();
    for (std::size_t row = 0; row < num_merged; ++row) {
      states.push_back({{weights[row], static_cast<Index>(row)}});
    }
  }
  if (!states.empty()) {
    const State root = merge_all(std::move(states), num_parts, lists);
    for (std::size_t part = 0; part < root.size(); ++part) {
      for (Index row = root[part].head; row != kNone; row = lists.next(row)) parts[row] = static_cast<Index>(part);
    }
  }
  if (num_merged < num_rows) {
    Weights counts(num_parts, 0);
    for (std::size_t row = 0; row < num_merged; ++row) ++counts[parts[row]];
    Tournament<false> fewest(counts);
    for (std::size_t row = num_merged; row < num_rows; ++row) {
      parts[row] = fewest.winner();
      fewest.enter(parts[row], ++counts[parts[row]]);
    }
  }
  return parts;
}

}  // namespace evenrank
