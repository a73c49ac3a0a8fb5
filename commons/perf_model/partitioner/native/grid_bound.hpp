// The lower bound of a grid. The twin of grid_bound.py, which derives it.
#pragma once

#include "bounds.hpp"

namespace evenrank {

struct GridBound {
  Weight total;
  Weights largest;  // per step, heaviest first
};

inline GridBound grid_bound(const Weights& weights, Weight num_ranks, Weight num_steps, const Limits& limits) {
  const Weight num_rows = static_cast<Weight>(weights.size());
  Weights sums(num_rows + 1, 0);
  std::partial_sum(weights.begin(), weights.end(), sums.begin() + 1);
  const Weight total = sums.back();
  Weight reached = counting_bound(weights, static_cast<Index>(num_ranks * num_steps), limits).load;
  GridBound bound{std::max(reached, divide_up(total, num_ranks)), {reached}};
  for (Weight step = 1; step < num_steps; ++step) {
    const Weight most_rows = std::min(step * num_ranks * limits.max_count, num_rows);
    bound.total = std::max(bound.total, reached + divide_up(total - sums[most_rows], num_ranks));
    // In one cell q + 1 rows up to and with `last`.
    Weight least = 0;
    for (Weight q = 0, last = most_rows; last < num_rows; ++q, last += (num_steps - step) * num_ranks) {
      least = std::max(least, sums[last + 1] - sums[last - q]);
    }
    const auto before = [&](Weight rows) {
      const Weight fillers = std::max<Weight>(step * num_ranks * limits.min_count - rows, 0);
      return sums[rows] + total - sums[num_rows - fillers];
    };
    const auto load = [&](Weight rows) { return std::max(rows < num_rows ? weights[rows] : 0, least); };
    // The steps before can hold ever more rows at the load they have reached anyway: the first of the best of these.
    Weight most = 0;
    for (Weight above = most_rows + 1; above - most > 1;) {
      const Weight middle = most + (above - most) / 2;
      (divide_up(before(middle), num_ranks) <= reached ? most : above) = middle;
    }
    Weight together = kMax;
    Weight chosen = 0;
    for (Weight rows = most; rows <= most_rows; ++rows) {
      const Weight loaded = std::max(divide_up(before(rows), num_ranks), reached);
      if (loaded >= together) break;
      if (loaded + load(rows) < together) {
        together = loaded + load(rows);
        chosen = load(rows);
      }
    }
    reached = together;
    bound.largest.push_back(chosen);
  }
  bound.total = std::max(bound.total, reached);
  return bound;
}

// `total` in even shares, but no step below its part of the bound.
inline Weights share_out(Weight total, const Weights& largest) {
  Weights shares;
  const Weight num_steps = static_cast<Weight>(largest.size());
  for (Weight step = 0; step < num_steps; ++step) {
    const Weight even = divide_up(total, num_steps - step);
    if (even >= largest[step]) {
      shares.resize(num_steps, even);
      break;
    }
    shares.push_back(largest[step]);
    total -= largest[step];
  }
  return shares;
}

}  // namespace evenrank
