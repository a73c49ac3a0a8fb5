// A lower bound of a grid's objective: the sum over the steps of the largest load.
#pragma once

#include "level_bound.hpp"

namespace evenrank {

struct GridBound {
  Weight total;     // no plan has a smaller sum over the steps of the largest load
  Weights largest;  // a largest load per step, heaviest step first; together at most `total`
};

// Largest loads of steps if the heavy rows of `level` go to as few steps as possible, one to each cell: the heaviest row
// of the step and the fillers; zeros for the other steps. `others` if the steps do not suffice, or exceed level.total.
inline Weights level_loads(const Weights& weights, Weight num_ranks, Weight num_steps, const LevelBound& level,
                           Weights others) {
  if (level.num_heavy > num_steps * num_ranks) return others;
  Weights loads;
  Weight left = level.total;
  for (Weight first = 0; first < level.num_heavy; first += num_ranks) {
    loads.push_back(weights[first] + level.fill);
    left -= loads.back();
  }
  if (left < 0) return others;
  loads.resize(num_steps, 0);
  return loads;
}

// Consider any plan with W ranks and T steps, its steps sorted by their largest loads M_1 >= M_2 >= ... >= M_T. Let
// P_i = M_1 + ... + M_i, w_r the weight of row r (numbered from 0), and S_r the sum of the r heaviest rows. M_1 is at
// least the counting bound for all rows in all T * W cells. For a step i, let r be the heaviest row that is not in the
// first i - 1 steps.
//
// - Row r is in a later step, so M_i >= w_r.
// - The first i - 1 steps have all rows before r, and at least (i-1) * W * min_count rows. No cell of step j has a load
//   above M_j, so W * P_(i-1) >= S_r + the lightest rows (fillers) up to this number.
// - The first i - 1 steps have at most c = (i-1) * W * max_count rows. So r <= c, and the rows of the other steps weigh,
//   rank by rank, at least as much as the rows from c on. Of the q * m + 1 heaviest of these, in the m = (T-i+1) * W cells
//   of the other steps, some cell has q + 1. So M_i is at least L_i, the sum of the lightest q + 1 of them, for the best q.
//
// So if P is a lower bound of P_(i-1), then P_i >= max(P, ceil((S_r + fillers) / W)) + max(w_r, L_i) for some r, and the
// smallest value over all r is a lower bound of P_i. Further, for every i the steps after the first i have at least the
// rows behind the i * W * max_count heaviest ones, so the sum is at least P_i + ceil(rest / W). The result is the largest
// of these bounds over all i; i = 0 gives the mean load, i = T the last P_i.
//
// With speeds, W is the sum of the speeds ÷ the largest speed, the load that all ranks together do within a time of 1; and
// M_1 is at least the bound of all cells with their speeds. Times are at least loads, so the other statements hold too.
inline GridBound grid_bound(const Weights& weights, Weight num_ranks, Weight num_steps, const Limits& limits,
                            const Speeds& of_ranks = {}, const Speeds& of_cells = {}) {
  const auto share = [&](Weight load) {
    return of_ranks.empty() ? divide_up(load, num_ranks) : of_ranks.mean_time(load);
  };
  const Weight num_rows = static_cast<Weight>(weights.size());
  const PrefixSums sums(weights);
  Weight reached = bound_of(weights, static_cast<Index>(num_ranks * num_steps), limits, of_cells).load;
  GridBound bound{std::max(reached, share(sums.total())), {reached}};
  for (Weight step = 1; step < num_steps; ++step) {
    const Weight most_rows = std::min(step * num_ranks * limits.max_count, num_rows);
    bound.total = std::max(bound.total, reached + share(sums.last(num_rows - most_rows)));
    // L_i: some cell has q + 1 rows, the lightest possible ones end with row `last`.
    Weight least = 0;
    for (Weight q = 0, last = most_rows; last < num_rows; ++q, last += (num_steps - step) * num_ranks) {
      least = std::max(least, sums.between(last - q, last + 1));
    }
    // S_r + fillers. As r grows, it does not fall, and load() does not rise.
    const auto before = [&](Weight rows) {
      return sums.first(rows) + sums.last(step * num_ranks * limits.min_count - rows);
    };
    const auto load = [&](Weight rows) { return std::max(rows < num_rows ? weights[rows] : 0, least); };
    // While before() is below the bound of the first steps, a larger r only lowers the load. So begin with the largest
    // such r, found by bisection.
    Weight most = 0;
    for (Weight above = most_rows + 1; above - most > 1;) {
      const Weight middle = most + (above - most) / 2;
      (share(before(middle)) <= reached ? most : above) = middle;
    }
    Weight together = kMax;
    Weight chosen = 0;
    for (Weight rows = most; rows <= most_rows; ++rows) {
      const Weight loaded = std::max(share(before(rows)), reached);
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
  if (num_steps == 1 || !of_ranks.empty()) return bound;
  const LevelBound level = LevelBounds(weights, sums, num_ranks, num_steps, limits).best(bound.total);
  if (level.total > bound.total) {
    bound.total = level.total;
    bound.largest = level_loads(weights, num_ranks, num_steps, level, std::move(bound.largest));
  }
  return bound;
}

}  // namespace evenrank
