// Lower bounds of the largest load of every plan, which prove how near a plan is to the optimum.
#pragma once

#include <optional>

#include "problem.hpp"

namespace evenrank {

// The case that attains the counting bound: `num_parts` partitions together have `num_top` of the `end_top` heaviest
// rows. A plan that meets the bound gives these partitions the lightest possible rows: the rows
// [end_top - num_top, end_top) and the last `num_fill` ones.
struct Split {
  Weight num_parts;
  Weight end_top;
  Weight num_top;
  Weight num_fill;
};

// Candidates of the counting bound to exclude together.
constexpr Weight kTogether = 32;

struct Bound {
  Weight load;
  std::optional<Split> split;  // nothing if the bound is the mean load
};

// One candidate T of counting_bound(): T = tops = quotient * k + remainder. `sums` are prefix sums of the weights.
class Group {
 public:
  Group(const PrefixSums& sums, Weight tops, Weight quotient, Weight remainder, const Limits& limits)
      : sums_(sums), tops_(tops), quotient_(quotient), remainder_(remainder), limits_(limits) {}

  // Whether a partition may have quotient + beyond of the top rows.
  bool may_hold(Weight beyond) const { return quotient_ + beyond <= std::min(limits_.max_count, tops_); }

  // The group of `extra` partitions with quotient + 2 of the top rows and remainder - 2 * extra others with quotient + 1,
  // and the fillers that these partitions need to have min_count rows.
  Split make_up(Weight extra) const {
    const Weight single = std::max<Weight>(remainder_ - 2 * extra, 0);
    return {extra + single, tops_, (quotient_ + 2) * extra + (quotient_ + 1) * single,
            num_fill(quotient_ + 2) * extra + num_fill(quotient_ + 1) * single};
  }

  // Whether mean_load(0) > load, without a division, because this excludes most candidates.
  bool is_above(Weight load) const {
    return lightest((quotient_ + 1) * remainder_, num_fill(quotient_ + 1) * remainder_) >
           static_cast<__int128>(load) * remainder_;
  }

  // The least mean load of the group of make_up(extra), rounded up; kMax if there are too few top rows for it.
  Weight mean_load(Weight extra) const {
    const Split group = make_up(extra);
    if (group.num_top > tops_) return kMax;
    return divide_up(lightest(group.num_top, group.num_fill), group.num_parts);
  }

  // The least load of a partition with quotient + 3 of the top rows; kMax if no partition can have so many.
  Weight load_of_three() const {
    return may_hold(3) ? lightest(quotient_ + 3, num_fill(quotient_ + 3)) : kMax;
  }

  Weight remainder() const { return remainder_; }

 private:
  // The fillers that a partition with `num_top` of the top rows needs to have min_count rows.
  Weight num_fill(Weight num_top) const { return std::max<Weight>(limits_.min_count - num_top, 0); }

  // The load of the `num_top` lightest of the top rows and the `num_fill` lightest of all rows.
  Weight lightest(Weight num_top, Weight num_fill) const {
    // No overflow: top rows and fillers are disjoint, so both sums together are at most the sum of all weights.
    return sums_.between(tops_ - num_top, tops_) + sums_.last(num_fill);
  }

  const PrefixSums& sums_;
  Weight tops_;
  Weight quotient_;
  Weight remainder_;
  Limits limits_;
};

// The larger of the mean load and the counting bound. `weights` descend; k is num_parts.
//
// Consider the T heaviest rows, T = q * k + m with 0 < m < k. In every plan, the numbers of these rows above q in each
// partition add up to at least m. So either one partition has q + 3 of them, or for some e, e partitions have q + 2 and
// m - 2e others have q + 1. These partitions also need at least min_count rows. The mean load of such a group is at least
// that of the lightest rows that it can have, and its largest load is at least the mean. The bound of one T is the
// smallest over these cases; the result is the largest over all T. T = 1 is the heaviest row with the lightest fillers.
//
// Each case is an upper bound of the bound of its T. So a few cases (e of 0, m / 4 and m / 2, and q + 3) give a ceiling
// for each T; candidates are evaluated with all cases from the highest ceiling down, until no ceiling is above the bound.
inline Bound counting_bound(const Weights& weights, Index num_parts, const Limits& limits) {
  const Weight num_rows = static_cast<Weight>(weights.size());
  const PrefixSums sums(weights);
  Bound bound{divide_up(sums.total(), num_parts), std::nullopt};

  struct Candidate {
    Weight ceiling;
    Group group;
  };
  std::vector<Candidate> candidates;
  const auto consider = [&](Weight quotient, Weight remainder) {
    const Group group(sums, quotient * num_parts + remainder, quotient, remainder, limits);
    if (!group.is_above(bound.load)) return;
    Weight ceiling = group.mean_load(0);
    if (group.may_hold(2)) {
      ceiling = std::min({ceiling, group.mean_load(remainder / 2), group.mean_load(remainder / 4)});
    }
    candidates.push_back({std::min(ceiling, group.load_of_three()), group});
  };
  // Whether every group with a remainder of at most `most` is within the mean load, even if each of its top rows weighs
  // as much as the heaviest possible one, and each filler too. This excludes most candidates at once.
  const auto excludes = [&](Weight quotient, Weight most) {
    const Weight num_fill = std::max<Weight>(limits.min_count - quotient - 1, 0);
    const Weight fill = num_fill > 0 ? weights[num_rows - num_fill * most] : 0;
    const __int128 top = weights[quotient * (num_parts - most)];
    return top * (quotient + 1) + static_cast<__int128>(fill) * num_fill <= bound.load;
  };
  for (Weight quotient = 0; quotient * num_parts < num_rows; ++quotient) {
    const Weight end = std::min<Weight>(num_parts, num_rows - quotient * num_parts + 1);
    for (Weight first = 1; first < end; first += kTogether) {
      const Weight last = std::min(first + kTogether, end);
      if (excludes(quotient, last - 1)) continue;
      for (Weight remainder = first; remainder < last; ++remainder) consider(quotient, remainder);
    }
  }
  std::vector<const Candidate*> best_first;
  best_first.reserve(candidates.size());
  for (const Candidate& candidate : candidates) best_first.push_back(&candidate);
  std::stable_sort(best_first.begin(), best_first.end(),
                   [](const Candidate* a, const Candidate* b) { return a->ceiling > b->ceiling; });
  for (const Candidate* candidate : best_first) {
    if (candidate->ceiling <= bound.load) break;
    const Group& group = candidate->group;
    const Weight most_extra = group.may_hold(2) ? (group.remainder() + 1) / 2 : 0;
    Weight least = kMax;
    Weight least_extra = 0;
    for (Weight extra = 0; extra <= most_extra; ++extra) {
      const Weight load = group.mean_load(extra);
      if (load < least) {
        least = load;
        least_extra = extra;
      }
    }
    const Weight value = std::min(least, group.load_of_three());
    if (value > bound.load) bound = {value, group.make_up(least_extra)};
  }
  return bound;
}

inline Bound counting_bound(const Problem& problem) {
  return counting_bound(problem.weights, problem.num_parts, problem.limits);
}

}  // namespace evenrank
