// Minimum bin slack and repacking. The twin of bin_slack.py and repacking.py in commons/micro_batching.
#pragma once

#include "first_fit.hpp"
#include "refinement.hpp"

namespace evenrank {

constexpr int kSearch = 200;
constexpr Index kNeighborhood = 16;
constexpr Index kLightest = 5;
constexpr Weight kMostRepacks = 200;

// Rows that have no group yet, heaviest first.
class RowsLeft {
 public:
  explicit RowsLeft(const Weights& weights) {
    for (std::size_t row = 0; row < weights.size() && weights[row] > 0; ++row) {
      items_.push_back({weights[row], static_cast<Index>(row)});
    }
  }

  bool empty() const { return items_.empty(); }
  Weight weight(std::size_t at) const { return items_[at].weight; }

  // Removes the rows at these ascending positions and puts them into `group`; returns what they weigh.
  Weight give(const std::vector<std::size_t>& positions, Index group, Indices& groups) {
    Weight given = 0;
    for (std::size_t i = positions.size(); i-- > 0;) {
      given += items_[positions[i]].weight;
      groups[items_[positions[i]].row] = group;
      items_.erase(items_.begin() + positions[i]);
    }
    return given;
  }

  // The first position from `from` on whose row weighs at most `room`.
  std::size_t first_at_most(Weight room, std::size_t from) const {
    const auto heavier = [](const Item& item, Weight weight) { return item.weight > weight; };
    return std::lower_bound(items_.begin() + from, items_.end(), room, heavier) - items_.begin();
  }

  // The positions from `from` on that leave the least of `room`, or as little as `enough`: depth first, the heaviest
  // row that fits comes next.
  std::vector<std::size_t> best_filling(Weight room, Weight enough, std::size_t from) const {
    std::vector<std::size_t> best;
    std::vector<std::size_t> chosen;
    Weight least = room;
    int looked_at = 0;
    std::size_t at = from;
    while (least > enough && looked_at < kSearch) {
      at = first_at_most(room, at);
      if (at == items_.size()) {
        if (chosen.empty()) break;
        const std::size_t last = chosen.back();
        chosen.pop_back();
        room += weight(last);
        // Another row of the same weight would lead to the same fillings.
        at = first_at_most(weight(last) - 1, last);
        continue;
      }
      ++looked_at;
      chosen.push_back(at);
      room -= weight(at);
      ++at;
      if (room < least) {
        best = chosen;
        least = room;
      }
    }
    return best;
  }

 private:
  std::vector<Item> items_;
};

inline Indices minimum_bin_slack(const Weights& weights, Weight capacity, Index num_groups) {
  Indices groups(weights.size(), kNone);
  RowsLeft left(weights);
  __int128 slack = static_cast<__int128>(capacity) * num_groups - sum_of(weights);
  for (Index group = 0; group < num_groups && !left.empty(); ++group) {
    const Weight enough = slack > 0 ? static_cast<Weight>(slack / (num_groups - group)) : 0;
    std::vector<std::size_t> positions = left.best_filling(capacity - left.weight(0), enough, 1);
    positions.insert(positions.begin(), 0);
    slack -= capacity - left.give(positions, group, groups);
  }
  Weights loads(num_groups, 0);
  for (std::size_t row = 0; row < weights.size(); ++row) {
    if (groups[row] != kNone) loads[groups[row]] += weights[row];
  }
  for (std::size_t row = 0; row < weights.size(); ++row) {
    if (groups[row] != kNone) continue;
    groups[row] = static_cast<Index>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    loads[groups[row]] += weights[row];
  }
  return groups;
}

// Exchanges until no load is above the capacity, or as far as they go.
inline Indices bring_under(const Weights& weights, Indices groups, Index num_groups, Weight capacity) {
  const Limits limits = Limits::of(static_cast<Weight>(weights.size()), num_groups, false);
  return refine(weights, std::move(groups), num_groups, limits, capacity);
}

inline Weight excess(const Weights& loads, Weight capacity) {
  Weight sum = 0;
  for (const Weight load : loads) sum += std::max<Weight>(0, load - capacity);
  return sum;
}

// The heaviest group, the lightest ones, and others in turn.
inline Indices pick_neighborhood(const Weights& loads, Index size, Index& turn) {
  Indices picked = {static_cast<Index>(std::max_element(loads.begin(), loads.end()) - loads.begin())};
  Indices ranked = range(static_cast<Index>(loads.size()));
  const Index num_lightest = std::min(kLightest, size - 1);
  std::partial_sort(ranked.begin(), ranked.begin() + num_lightest, ranked.end(),
                    [&](Index a, Index b) { return loads[a] != loads[b] ? loads[a] < loads[b] : a > b; });
  picked.insert(picked.end(), ranked.begin(), ranked.begin() + num_lightest);
  for (; static_cast<Index>(picked.size()) < size; ++turn) {
    const Index next = turn % static_cast<Index>(loads.size());
    if (std::find(picked.begin(), picked.end(), next) == picked.end()) picked.push_back(next);
  }
  return picked;
}

inline Indices repack(const Weights& weights, Indices groups, Index num_groups, Weight capacity) {
  if (num_groups < 3) return groups;
  const Index size = std::min(kNeighborhood, (num_groups + 1) / 2);
  const Weight repacks = std::min<Weight>(kMostRepacks, Weight{4} * num_groups);
  Weights loads = load_per_part(weights, groups, num_groups);
  Index turn = 0;
  for (Weight count = 0; count < repacks && *std::max_element(loads.begin(), loads.end()) > capacity; ++count) {
    const Indices picked = pick_neighborhood(loads, size, turn);
    Indices place(num_groups, kNone);
    for (Index at = 0; at < size; ++at) place[picked[at]] = at;
    Indices rows;
    for (std::size_t row = 0; row < groups.size(); ++row) {
      if (place[groups[row]] != kNone) rows.push_back(static_cast<Index>(row));
    }
    const Weights chosen = take(weights, rows);
    const Indices parts = bring_under(chosen, minimum_bin_slack(chosen, capacity, size), size, capacity);
    const Weights new_loads = load_per_part(chosen, parts, size);
    // Equal is taken too, to come to other rows.
    if (excess(new_loads, capacity) > excess(take(loads, picked), capacity)) continue;
    for (std::size_t at = 0; at < rows.size(); ++at) groups[rows[at]] = picked[parts[at]];
    for (Index at = 0; at < size; ++at) loads[picked[at]] = new_loads[at];
  }
  return groups;
}

// The same groups numbered without gaps: filled to the brim, fewer may do.
inline Packing without_gaps(Indices groups, Index num_groups) {
  const Indices counts = count_per_part(groups, num_groups);
  Indices number(num_groups, kNone);
  Packing packing{std::move(groups), 0};
  for (Index group = 0; group < num_groups; ++group) {
    if (counts[group] > 0) number[group] = packing.num_groups++;
  }
  for (Index& group : packing.groups) group = number[group];
  return packing;
}

inline std::optional<Indices> pack_under(const Weights& weights, Index num_groups, Weight capacity) {
  Indices groups = bring_under(weights, minimum_bin_slack(weights, capacity, num_groups), num_groups, capacity);
  if (largest_load(weights, groups, num_groups) > capacity) {
    groups = repack(weights, std::move(groups), num_groups, capacity);
  }
  if (largest_load(weights, groups, num_groups) > capacity) return std::nullopt;
  return split_heaviest(weights, without_gaps(std::move(groups), num_groups), num_groups);
}

}  // namespace evenrank
