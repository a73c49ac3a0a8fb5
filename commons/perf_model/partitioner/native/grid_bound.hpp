// A lower bound of what the steps of a grid take together: the sum over the steps of the largest load.
#pragma once

#include "level_bound.hpp"

namespace evenrank {

struct GridBound {
  Weight total;     // no plan has a smaller sum over the steps of the largest load
  Weights largest;  // a largest load per step, heaviest step first; together at most `total`
};

// A largest load per step where one of `level`'s heavy rows goes to every cell of as few steps as it takes: its first
// heavy row and the fillers; the rest of `level.total` in the other steps. `others`, if these steps are too few.
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

// With W ranks and T steps, follow the steps of any plan from the one with the largest largest load to the one with the
// smallest. Let M_1 >= M_2 >= ... >= M_T be these loads, P_i = M_1 + ... + M_i, and S_r the sum of the r heaviest rows.
// M_1 is at least the counting bound for all rows in all T * W cells. Number rows from 0, and let r be the first
// (heaviest) row that the first i - 1 steps do not hold.
//
// - It is in a later step, so M_i >= w_r.
// - The first i - 1 steps hold all rows before it, and at least (i-1) * W * min_count in all. No cell of step j holds
//   more than M_j, so W * P_(i-1) >= S_r + the lightest rows (fillers) that make up this number.
// - They hold at most c = (i-1) * W * max_count rows, so r <= c, and the others hold no less than the rows from c on,
//   whichever these steps hold. Of the q * m + 1 heaviest of these, in the m = (T-i+1) * W cells of the other steps,
//   some cell has q + 1, so M_i is at least L_i, the lightest q + 1 of them, for the best q.
//
// So from any lower bound P of P_(i-1), P_i >= max(P, ceil((S_r + fillers) / W)) + max(w_r, L_i) for some r, and the
// smallest over all r is a lower bound of P_i. For every i the steps after the first i hold what the i * W * max_count
// heaviest rows leave over, so the sum is at least P_i + ceil(rest / W). The best over all i counts; i = 0 is the mean
// load, i = T the last P_i.
//
// With speeds, W is the sum of the speeds ÷ the largest: what all ranks together hold within a time of 1; and M_1 is at
// least the bound of all cells with their speeds. Loads are at most times, so all else stays true.
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
    // L_i: one cell has q + 1 rows, of which the lightest possible end with `last`.
    Weight least = 0;
    for (Weight q = 0, last = most_rows; last < num_rows; ++q, last += (num_steps - step) * num_ranks) {
      least = std::max(least, sums.between(last - q, last + 1));
    }
    // S_r + fillers; it does not fall as r grows, and load() does not rise.
    const auto before = [&](Weight rows) {
      return sums.first(rows) + sums.last(step * num_ranks * limits.min_count - rows);
    };
    const auto load = [&](Weight rows) { return std::max(rows < num_rows ? weights[rows] : 0, least); };
    // As long as before() is within what the first steps have reached anyway, a larger r only lowers the load: search
    // for the largest such r, and begin there.
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
