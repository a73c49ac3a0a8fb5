// First-fit decreasing, MULTIFIT, and the L2 bound. The twin of bounds.py and first_fit.py in commons/micro_batching.
#pragma once

#include "starts.hpp"

namespace evenrank {

inline Weight sum_of(const Weights& weights) { return std::accumulate(weights.begin(), weights.end(), Weight{0}); }

// Groups that no packing can do without; `weights` descend.
inline Weight l2_bound(const Weights& weights, Weight capacity) {
  using Wide = __int128;
  const Weight num_rows = static_cast<Weight>(weights.size());
  const Weight total = sum_of(weights);
  capacity = std::min(capacity, std::max<Weight>(1, total));
  Weight num_large = 0;
  Weight sum_large = 0;
  while (num_large < num_rows && weights[num_large] > capacity / 2) sum_large += weights[num_large++];
  // As alpha falls, more rows share with nobody that is left out, and more rows are kept.
  Weight num_alone = num_large;
  Weight sum_alone = sum_large;
  Weight kept = 0;
  Wide beyond = 0;
  for (Weight row = num_large; row < num_rows; ++row) {
    kept += weights[row];
    if (row + 1 < num_rows && weights[row + 1] == weights[row]) continue;
    while (num_alone > 0 && weights[num_alone - 1] <= capacity - weights[row]) sum_alone -= weights[--num_alone];
    const Wide free = static_cast<Wide>(num_large - num_alone) * capacity - (sum_large - sum_alone);
    beyond = std::max(beyond, kept - free);
  }
  while (num_alone > 0 && weights[num_alone - 1] <= capacity) sum_alone -= weights[--num_alone];
  beyond = std::max(beyond, kept - (static_cast<Wide>(num_large) * capacity - sum_large));
  return std::max<Weight>(1, num_large + static_cast<Weight>((beyond + capacity - 1) / capacity));
}

struct Packing {
  Indices groups;  // of each row
  Index num_groups;
};

inline Packing first_fit(const Weights& weights, Weight capacity) {
  // A tree over the room of n groups: every node has the most room among those below it.
  std::size_t size = 1;
  while (size < weights.size()) size *= 2;
  Weights room(2 * size, capacity);
  Packing packing{{}, 0};
  packing.groups.reserve(weights.size());
  for (const Weight weight : weights) {
    std::size_t node = 1;
    while (node < size) {
      node *= 2;
      node += room[node] < weight;
    }
    const Index group = static_cast<Index>(node - size);
    packing.groups.push_back(group);
    packing.num_groups = std::max(packing.num_groups, group + 1);
    room[node] -= weight;
    while (node /= 2) room[node] = std::max(room[2 * node], room[2 * node + 1]);
  }
  return packing;
}

inline std::optional<Indices> first_fit_equal(const Weights& weights, Weight capacity, Index num_groups) {
  const Index size = static_cast<Index>(weights.size()) / num_groups;
  Index num_larger = static_cast<Index>(weights.size()) % num_groups;
  Weights room(num_groups, capacity);
  Indices counts(num_groups, 0);
  Indices groups;
  groups.reserve(weights.size());
  for (const Weight weight : weights) {
    Index group = 0;
    for (; group < num_groups; ++group) {
      const bool has_place = counts[group] < size || (counts[group] == size && num_larger > 0);
      if (has_place && weight <= room[group]) break;
    }
    if (group == num_groups) return std::nullopt;
    num_larger -= counts[group] == size;
    room[group] -= weight;
    ++counts[group];
    groups.push_back(group);
  }
  return groups;
}

inline Indices split_heaviest(const Weights& weights, Packing packing, Index num_groups) {
  for (Index& next = packing.num_groups; next < num_groups; ++next) {
    const Weights loads = load_per_part(weights, packing.groups, next);
    const Indices counts = count_per_part(packing.groups, next);
    Index heaviest = kNone;
    for (Index group = 0; group < next; ++group) {
      if (counts[group] > 1 && (heaviest == kNone || loads[group] > loads[heaviest])) heaviest = group;
    }
    Indices rows;
    for (std::size_t row = 0; row < weights.size(); ++row) {
      if (packing.groups[row] == heaviest) rows.push_back(static_cast<Index>(row));
    }
    const Indices halves = lpt(take(weights, rows), 2, {0, static_cast<Weight>(rows.size())});
    for (std::size_t at = 0; at < rows.size(); ++at) {
      if (halves[at] == 1) packing.groups[rows[at]] = next;
    }
  }
  return std::move(packing.groups);
}

inline Indices multifit(const Weights& weights, Weight capacity, Packing packing, Index num_groups) {
  const Weight total = sum_of(weights);
  Weight low = std::max(weights[0], divide_up(total, num_groups));
  Weight high = std::min(capacity, total);
  while (low < high) {
    const Weight middle = low + (high - low) / 2;
    Packing tried = first_fit(weights, middle);
    if (tried.num_groups <= num_groups) {
      packing = std::move(tried);
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return split_heaviest(weights, std::move(packing), num_groups);
}

}  // namespace evenrank
