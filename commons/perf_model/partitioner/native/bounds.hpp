// Lower bounds of the largest load: no plan can beat them, so that every plan can say how near the optimum it is.
#pragma once

#include <optional>

#include "problem.hpp"

namespace evenrank {

// Where the counting bound is attained: `num_parts` partitions must hold `num_top` of the `end_top` heaviest rows.
// A plan that meets the bound gives these partitions the lightest rows that they can have: the rows
// [end_top - num_top, end_top) and the `num_fill` last ones.
struct Split {
  Weight num_parts;
  Weight end_top;
  Weight num_top;
  Weight num_fill;
};

struct Bound {
  Weight load;
  std::optional<Split> split;  // none where the bound is the mean load
};

// One candidate T of counting_bound(): T = tops = quotient * k + remainder. `sums` are those of the weights.
class Group {
 public:
  Group(const PrefixSums& sums, Weight tops, Weight quotient, Weight remainder, const Limits& limits)
      : sums_(sums), tops_(tops), quotient_(quotient), remainder_(remainder), limits_(limits) {}

  // Whether a partition may hold quotient + beyond of the top rows.
  bool may_hold(Weight beyond) const { return quotient_ + beyond <= std::min(limits_.max_count, tops_); }

  // The group in which `extra` partitions hold quotient + 2 of the top rows and remainder - 2 * extra others hold
  // quotient + 1; fillers are the rows that these partitions lack of min_count.
  Split make_up(Weight extra) const {
    const Weight single = std::max<Weight>(remainder_ - 2 * extra, 0);
    return {extra + single, tops_, (quotient_ + 2) * extra + (quotient_ + 1) * single,
            num_fill(quotient_ + 2) * extra + num_fill(quotient_ + 1) * single};
  }

  // Whether mean_load(0) > load. It rules most candidates out, so it avoids the division.
  bool is_above(Weight load) const {
    return lightest((quotient_ + 1) * remainder_, num_fill(quotient_ + 1) * remainder_) >
           static_cast<__int128>(load) * remainder_;
  }

  // Least mean load of that group, rounded up; kMax if there are too few top rows for it.
  Weight mean_load(Weight extra) const {
    const Split group = make_up(extra);
    if (group.num_top > tops_) return kMax;
    return divide_up(lightest(group.num_top, group.num_fill), group.num_parts);
  }

  // Least load of one partition with quotient + 3 of the top rows; kMax if none can have so many.
  Weight load_of_three() const {
    return may_hold(3) ? lightest(quotient_ + 3, num_fill(quotient_ + 3)) : kMax;
  }

  Weight remainder() const { return remainder_; }

 private:
  // Rows that a partition with so many of the top rows lacks of min_count.
  Weight num_fill(Weight num_top) const { return std::max<Weight>(limits_.min_count - num_top, 0); }

  // Load of the `num_top` lightest of the top rows and the `num_fill` lightest of all.
  Weight lightest(Weight num_top, Weight num_fill) const {
    // Top rows and fillers are disjoint, so these two sums together are at most the sum of all.
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
// Look at the T heaviest rows, T = q * k + m with 0 < m < k. However they are dealt, the rows beyond q in each
// partition are at least m in all. So for some e, either one partition has q + 3 of them, or e partitions have q + 2
// and m - 2e others have q + 1. These partitions also have to be filled up to min_count rows. The mean load of such a
// group is at least that of the lightest rows it can be made of, and its largest load is at least the mean. For one T
// the bound is the smallest over the cases; the result is the largest over all T. T = 1 is the heaviest row with the
// lightest fillers.
//
// Each case alone is an upper bound of what its T can give. A few cases per T (e of 0, m / 4 and m / 2, and q + 3) give
// a ceiling; candidates are tried from the highest ceiling down, all cases each, until no ceiling is above the bound.
inline Bound counting_bound(const Weights& weights, Index num_parts, const Limits& limits) {
  const Weight num_rows = static_cast<Weight>(weights.size());
  const PrefixSums sums(weights);
  Bound bound{divide_up(sums.total(), num_parts), std::nullopt};

  struct Candidate {
    Weight ceiling;
    Group group;
  };
  std::vector<Candidate> candidates;
  Weight quotient = 0;
  Weight remainder = 0;
  for (Weight tops = 1; tops <= num_rows; ++tops) {
    if (++remainder == num_parts) {
      remainder = 0;
      ++quotient;
      continue;
    }
    const Group group(sums, tops, quotient, remainder, limits);
    if (!group.is_above(bound.load)) continue;
    Weight ceiling = group.mean_load(0);
    if (group.may_hold(2)) {
      ceiling = std::min({ceiling, group.mean_load(remainder / 2), group.mean_load(remainder / 4)});
    }
    candidates.push_back({std::min(ceiling, group.load_of_three()), group});
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
