// A lower bound of a grid with many heavy rows of about equal weight that do not fill a whole number of steps.
#pragma once

#include "speed_bound.hpp"

namespace evenrank {

// The largest number k of heavy rows in a cell to consider, per step; a cell with more is heavier than in good plans.
constexpr Weight kMostHeavy = 4;

struct LevelBound {
  Weight total = 0;      // no plan has a smaller sum over the steps of the largest load
  Weight num_heavy = 0;  // number of heavy rows that gives this bound; 0 for none
  Weight fill = 0;       // least load beside a heavy row, in cells with one heavy row each
};

// W ranks, T steps; a cell has at least b rows and at most B. Heavy rows are the H heaviest, with weights w to w + e; the
// others are light rows. For a step, let k be the largest number of heavy rows in a cell, n the number of cells with k of
// them, and M the largest load. Light rows fill these cells to at least b rows, so M >= k * w + fill_k(n), where fill_k(n)
// is the sum of the (b - k) * n lightest rows ÷ n, rounded up.
//
// For a price t, let Phi be the sum over all light rows of their weight above t. The light rows of a cell weigh at most t
// for each of its places, plus their part of Phi. So in a cell with j heavy rows, the light rows weigh at most their part
// of Phi plus min(M - its heavy rows, t * (B - j)). A step without heavy rows has W * M >= the sum of its rows. So for the
// sum P over the steps of the largest load, W * P >= (sum of all rows) - Phi + waste, where a cell with j = k - d wastes
//
//   M - (its heavy rows) - t * (B - j) >= d * (w + e - t) + (fill_k(n) - t * (B - k) - k * e) >= d * v_k(n),
//   v_k(n) = min(first bracket, sum of both brackets), or 0.
//
// Let K = ceil(H / W) and Z = K * W - H. The k of all steps add up to at least K. If they add up to K, the d of all cells
// add up to Z; then every step with heavy rows has n >= W - Z, and the waste is at least Z * min over k of v_k(W - Z). If
// they add up to more, the waste is at least (Z + W) * min over k of v_k(1). A step with k > m has M >= (m + 1) * w, which
// excludes all but a few k. The best t is the weight of the light row that follows as many light rows as Z cells (or
// Z + W cells) have places.
class LevelBounds {
 public:
  // `weights` descend, `sums` are their prefix sums.
  LevelBounds(const Weights& weights, const PrefixSums& sums, Weight num_ranks, Weight num_steps, const Limits& limits)
      : weights_(weights), sums_(sums), ranks_(num_ranks), steps_(num_steps), limits_(limits),
        rows_(static_cast<Weight>(weights.size())) {}

  // The best bound over all H, if it is above `reached`, a known bound.
  LevelBound best(Weight reached) const {
    LevelBound best{reached};
    for (Weight heavy = 1; heavy < std::min(rows_, 2 * steps_ * ranks_); ++heavy) {
      // Equal rows are all heavy or all light: light rows of weight w would fill the room that the bound counts as waste.
      if (heavy % ranks_ == 0 || weights_[heavy - 1] == weights_[heavy]) continue;
      const Weight units = heavy / ranks_ + 1;
      const Weight empty = units * ranks_ - heavy;
      const Weight most = std::min(limits_.max_count, kMostHeavy * steps_);
      // Only k = 1 first, which excludes most H.
      Wide least = at_price(heavy, empty, ranks_ - empty, 1);
      if (least <= static_cast<Wide>(best.total) * ranks_) continue;
      least = std::min(least, at_price(heavy, empty, ranks_ - empty, std::min(units, most)));
      least = std::min(least, at_price(heavy, empty + ranks_, 1, most));
      if (most < limits_.max_count) least = std::min(least, static_cast<Wide>(most + 1) * weights_[heavy - 1] * ranks_);
      const Wide total = least / ranks_ + (least % ranks_ != 0);
      if (total > best.total) best = {static_cast<Weight>(total), heavy, fill(heavy, 1, heavy)};
    }
    return best;
  }

 private:
  using Wide = __int128;

  // fill_k(n).
  Weight fill(Weight heavy, Weight k, Weight n) const {
    const Wide places = static_cast<Wide>(std::max<Weight>(limits_.min_count - k, 0)) * n;
    const Weight lightest = static_cast<Weight>(std::min<Wide>(places, rows_ - heavy));
    return divide_up(sums_.last(lightest), n);
  }

  // The bound of W * P if the d add up to `missing`, k is at most `most`, and at least n cells of a step have k heavy rows.
  Wide at_price(Weight heavy, Weight missing, Weight n, Weight most) const {
    const Wide places = static_cast<Wide>(missing) * limits_.max_count;
    const Weight above = static_cast<Weight>(std::min<Wide>(places, rows_ - heavy));
    const Weight price = heavy + above < rows_ ? weights_[heavy + above] : 0;
    const Wide phi = sums_.between(heavy, heavy + above) - static_cast<Wide>(price) * above;
    const Weight spread = weights_[0] - weights_[heavy - 1];
    const Wide each = static_cast<Wide>(weights_[0]) - price;  // w + e - t
    Wide least = each;
    for (Weight k = 1; k <= most; ++k) {
      const Wide rest = fill(heavy, k, n) - static_cast<Wide>(price) * (limits_.max_count - k) -
                        static_cast<Wide>(k) * spread;
      least = std::min(least, each + rest);
    }
    return sums_.total() - phi + missing * std::max<Wide>(least, 0);
  }

  const Weights& weights_;
  const PrefixSums& sums_;
  Weight ranks_;
  Weight steps_;
  Limits limits_;
  Weight rows_;
};

}  // namespace evenrank
