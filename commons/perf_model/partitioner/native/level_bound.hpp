// A lower bound of a grid for many heavy rows of about equal weight, of which one step is full only in part.
#pragma once

#include "speed_bound.hpp"

namespace evenrank {

// Numbers k of heavy rows in a cell that are looked at, per step; a cell with more is heavier than plans are.
constexpr Weight kMostHeavy = 4;

struct LevelBound {
  Weight total = 0;      // no plan has a smaller sum over the steps of the largest load
  Weight num_heavy = 0;  // of the rows for which this was found; 0 for none
  Weight fill = 0;       // what a cell with one of them holds at least beside it, if all others have one too
};

// W ranks, T steps; a cell holds b rows at least and B at most. Take the H heaviest rows, which weigh w to w + e. Let k
// be the largest number of them in a cell of some step, n the number of its cells with so many, and M its largest load.
// Light rows (those after the H) make up these cells to b rows, so that M >= k * w + fill_k(n), where fill_k(n) is the
// sum of the (b - k) * n lightest ÷ n, rounded up.
//
// Let light rows pay a price t for their place, and Phi be what they all weigh above it. Those of some cells weigh at
// most t for each place and their part of Phi. So a cell with j of the H has light rows of at most that part of Phi and
// min(M - its heavy rows, t * (B - j)). Steps without any of the H have W * M >= their rows. Together, for P, the sum
// over the steps of the largest load, W * P >= (sum of all rows) - Phi + waste, where a cell with j = k - d wastes
//
//   M - (its heavy rows) - t * (B - j) >= d * (w + e - t) + (fill_k(n) - t * (B - k) - k * e) >= d * v_k(n),
//   v_k(n) = min(first bracket, sum of both brackets), or 0.
//
// Let K = ceil(H / W) and Z = K * W - H. The k of all steps sum up to K at least. If to K, the d of all cells sum up to
// Z, so that every such step has n >= W - Z, and the waste is at least Z * min over k of v_k(W - Z). If to more, it is at
// least (Z + W) * min over k of v_k(1). A step with k > m has M >= (m + 1) * w; that rules out all k but a few. The best
// t is the weight of the light row after as many as Z cells (or Z + W) have places.
class LevelBounds {
 public:
  // `weights` descend, `sums` are theirs.
  LevelBounds(const Weights& weights, const PrefixSums& sums, Weight num_ranks, Weight num_steps, const Limits& limits)
      : weights_(weights), sums_(sums), ranks_(num_ranks), steps_(num_steps), limits_(limits),
        rows_(static_cast<Weight>(weights.size())) {}

  // The best of all H, if it is above `reached`, a bound that is known.
  LevelBound best(Weight reached) const {
    LevelBound best{reached};
    for (Weight heavy = 1; heavy < std::min(rows_, 2 * steps_ * ranks_); ++heavy) {
      // Of equal rows all are heavy or none: light rows as heavy as w would fill the room that the bound counts.
      if (heavy % ranks_ == 0 || weights_[heavy - 1] == weights_[heavy]) continue;
      const Weight units = heavy / ranks_ + 1;
      const Weight empty = units * ranks_ - heavy;
      const Weight most = std::min(limits_.max_count, kMostHeavy * steps_);
      // One k first: that rules most H out.
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

  // W * P where the d sum up to `missing` and k is at most `most`, in steps in which n cells at least have k rows.
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
