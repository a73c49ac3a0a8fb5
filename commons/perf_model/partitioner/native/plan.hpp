// The request of a plan, the default algorithm, plans under a cap on tokens, and plans that keep rows at home.
#pragma once

#include <cmath>

#include "differencing.hpp"
#include "home_deal.hpp"
#include "speed_plan.hpp"

namespace evenrank {

// While tokens are lowered, loads may rise by 2^-8 of the largest load; if that is not enough, by 2^-6, and so on, and
// finally without a limit.
constexpr std::array<int, 7> kLoadRoom = {8, 6, 5, 4, 3, 2, 1};

enum class Method { kKarmarkarKarp, kLpt, kRefined, kSnake, kEnd };  // kEnd follows the last one

// floor(load * (1 + slack)) for a slack in [0, 1], computed exactly: a float times a load of 60 bits would be rounded,
// and a plan must not depend on rounding. A double is a 53-bit integer times a power of two.
inline Weight with_slack(Weight load, double slack) {
  int exponent;
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(slack, &exponent), 53));
  const auto product = static_cast<unsigned __int128>(load) * mantissa;
  return load + static_cast<Weight>(product >> std::min(53 - exponent, 127));
}

// The arguments of a plan, checked; all by sample.
struct Request {
  Weights workloads;  // at least one
  Index num_parts;
  Method method;
  bool equal_size;                   // whether sizes of partitions differ by at most one
  Weights tokens;                    // empty if not given
  std::optional<Weight> max_tokens;  // most tokens of a partition; needs tokens
  Indices home;                      // the present partition of each sample; empty if not given
  Index ranks_per_node;              // partitions per node
  double slack;                      // fraction by which the largest load may exceed the best one, to keep rows at home
  Index num_steps = 1;  // of a grid, whose partitions are ranks; the cell of rank r, step s is r * num_steps + s
  Indices home_step{};  // the step in which each sample was loaded; empty if not given
  Weights speeds{};     // of the partitions, in a grid of the ranks; empty if all are equally fast
  bool home_splits = false;  // whether a group has rows in several homes; `home` is then that of most of its tokens

  // The request for a subset of the samples.
  Request of_rows(const Indices& rows) const {
    const auto some = [&](const auto& values) { return values.empty() ? values : take(values, rows); };
    return {some(workloads), num_parts,      method, equal_size, some(tokens),   max_tokens,
            some(home),      ranks_per_node, slack,  num_steps,  some(home_step), speeds, home_splits};
  }
  // The tokens of a plan's fullest partition, but at least the cap; 0 without a cap.
  Weight most_tokens(const Indices& parts, Index number) const {
    return max_tokens ? std::max(*max_tokens, largest_load(tokens, parts, number)) : 0;
  }
  // The cap on tokens, if any.
  Cap cap() const { return max_tokens ? Cap{tokens, *max_tokens} : Cap{}; }
};

// The cost of moving each sample, scaled so that kNodeCost times the sum fits into an int64. Only ratios matter.
inline Weights sizes_of(const Request& request) {
  Weights sizes = request.tokens.empty() ? request.workloads : request.tokens;
  const int shift = std::max(0, bit_length(sum_of(sizes)) - 60);
  for (Weight& size : sizes) size >>= shift;
  return sizes;
}

inline Home home_by_row(const Request& request, const Indices& order, const Weights& sizes) {
  return {take(request.home, order), take(sizes, order), request.ranks_per_node, request.num_steps,
          Speeds(request.speeds).empty()};
}

struct Plan {
  Indices assignment;  // the partition (in a grid, the cell) of each sample
  Weights loads;       // sum of workloads per partition
  Weight bound;        // lower bound of the largest time; in a grid, of its sum over the steps
  Weight most_tokens;  // see Request
};

// Makes several starts, and improves the best by swaps until the largest load is at most `target`. Returns LPT's plan if
// its largest load is at most `bound`.
//
// The starts are LPT; LPT on each side of the split at which the bound is attained; and Karmarkar-Karp if its merges are
// cheap, with equal sizes or few rows. Swaps improve the start with the smallest largest load. With few rows they also
// improve the second one, if the first remains above the target. So the result is at least as good as every start.
inline Indices refined_to(const Problem& problem, Weight bound, Weight target, const std::optional<Split>& split) {
  struct Start {
    Weight load;
    Indices parts;
  };
  std::vector<Start> starts;
  const auto add = [&](Indices parts) {
    const Weight load = problem.largest(parts);
    starts.push_back({load, std::move(parts)});
  };
  add(lpt(problem));
  const Weight largest = starts[0].load;
  if (largest <= bound) return std::move(starts[0].parts);
  if (split && largest > target) {
    if (std::optional<Indices> parts = split_start(problem, *split)) add(std::move(*parts));
  }
  const bool few = problem.is_few();
  if (problem.equal_size || few) add(differencing(problem.weights, problem.num_parts, problem.equal_size));
  std::stable_sort(starts.begin(), starts.end(), [](const Start& a, const Start& b) { return a.load < b.load; });
  Indices best = refine(problem, std::move(starts[0].parts), target);
  if (!few || starts.size() == 1) return best;
  const Weight load = problem.largest(best);
  if (load <= target) return best;
  Indices other = refine(problem, std::move(starts[1].parts), target);
  return problem.largest(other) < load ? other : best;
}

// The problem with equal sizes, if sizes are free to be equal: its plan is one more start, so that free sizes are no worse.
inline std::optional<Problem> with_equal_sizes(const Problem& problem) {
  const Limits limits = Limits::of(static_cast<Weight>(problem.weights.size()), problem.num_parts, true);
  if (problem.equal_size || !problem.limits.include(limits)) return std::nullopt;
  Problem even = problem;
  even.equal_size = true;
  even.limits = limits;
  return even;
}

// The default algorithm: refined_to() until the largest load is near the bound, then from the plan with equal sizes.
inline Indices refined(const Problem& problem, const Bound& bound) {
  const Weight target = near(bound.load);
  Indices best = refined_to(problem, bound.load, target, bound.split);
  const Weight load = problem.largest(best);
  if (load <= target) return best;
  const std::optional<Problem> even = with_equal_sizes(problem);
  if (!even) return best;
  Indices other = refine(problem, refined(*even, counting_bound(*even)), target);
  return problem.largest(other) < load ? other : best;
}

// The default algorithm for partitions of different speeds: LPT with the bases of a target near the bound, then swaps and
// lower_time(); with few rows also from the plans of lpt_at_speeds(), for equal speeds and with equal sizes, if the time
// is still above the target.
inline Indices refined_at_speeds(const Problem& given, Weight bound) {
  const Weight target = near_time(bound);
  Problem problem = given;
  problem.aim(target);
  Indices best = lpt(problem);
  if (problem.time(best) <= target) return best;
  best = refine(problem, std::move(best), target);
  if (problem.time(best) <= target) return best;
  if (!problem.is_few()) return lower_time(problem, std::move(best), bound, kTargets);
  best = lower_time(problem, std::move(best), bound, kTargetsOfFew);
  Problem alike = given;
  alike.speeds = {};
  std::vector<Indices> starts{lpt_at_speeds(problem), refined(alike, counting_bound(alike))};
  if (const auto even = with_equal_sizes(given)) {
    starts.push_back(refined_at_speeds(*even, bound_of(even->weights, even->num_parts, even->limits, even->speeds).load));
  }
  for (Indices& start : starts) {
    Indices other = lower_time(problem, larger_loads_on_faster(problem, std::move(start)), bound, kTargetsOfFew);
    if (problem.time(other) < problem.time(best)) best = std::move(other);
  }
  return best;
}

// Changes a plan until it keeps the cap on tokens, then balances its loads under the cap. The plan and `cap.weights` are
// by sample.
//
// Swaps lower tokens as they lower loads elsewhere, with a growing limit on loads (kLoadRoom) in the role of the cap. If
// the plan still breaks the cap, a plan that balances only tokens is tried. If that breaks it too, loads are balanced
// under the least tokens reached; the caller checks whether the plan keeps the cap.
inline Indices under_cap(const Problem& problem, Indices assignment, Weight target, const Cap& cap) {
  const Index num_parts = problem.num_parts;
  const Problem tokens = Problem::of(cap.weights, num_parts, problem.equal_size, problem.limits);
  Indices parts = take(assignment, tokens.order);
  if (tokens.largest(parts) <= cap.limit) return assignment;
  const Weight largest = problem.largest(take(assignment, problem.order));
  Cap room{take(problem.by_sample(problem.weights), tokens.order), 0, problem.base};
  for (const int shift : kLoadRoom) {
    room.limit = largest + (largest >> shift);
    parts = refine(tokens, std::move(parts), cap.limit, room);
  }
  parts = refine(tokens, std::move(parts), cap.limit);
  Weight reached = tokens.largest(parts);
  if (reached > cap.limit) {
    Indices other = refined(tokens, counting_bound(tokens));
    if (tokens.largest(other) < reached) {
      reached = tokens.largest(other);
      parts = std::move(other);
    }
  }
  const Cap by_row{take(cap.weights, problem.order), std::max(reached, cap.limit)};
  parts = take(tokens.by_sample(parts), problem.order);
  return problem.by_sample(refine(problem, std::move(parts), target, by_row));
}

// under_cap() for partitions of different speeds, whose largest time is lowered near the bound.
inline Indices under_cap_at_speeds(Problem problem, Indices assignment, Weight bound, const Cap& cap) {
  const auto time = [&] { return problem.time(take(assignment, problem.order)); };
  problem.aim(std::max(near(bound), time()));
  assignment = under_cap(problem, std::move(assignment), near(bound), cap);
  const Weight reached = largest_load(cap.weights, assignment, problem.num_parts);
  const Cap by_row{take(cap.weights, problem.order), std::max(reached, cap.limit)};
  const int targets = problem.is_few() ? kTargetsOfFew : kTargets;
  return problem.by_sample(lower_time(problem, take(assignment, problem.order), bound, targets, by_row));
}

// Replans the partitions above the limit, together with equally many of the lightest ones; doubles their number until
// the new plan is within the limit. Nothing if that would need all partitions. By row.
inline std::optional<Indices> redeal_heaviest(const Problem& problem, Indices parts, const Home& home,
                                              Weight load_limit, const Cap& cap) {
  const Index num_parts = problem.num_parts;
  const Weights loads = problem.loads(parts);
  Indices ranked = range(num_parts);
  rank_by_load(loads, ranked);
  Index num_over = 0;
  while (num_over < num_parts && loads[ranked[num_over]] > load_limit) ++num_over;
  if (num_over == 0) return parts;
  for (Index num_light = num_over; num_over + num_light < num_parts; num_light *= 2) {
    Indices names(ranked.begin(), ranked.begin() + num_over);
    names.insert(names.end(), ranked.end() - num_light, ranked.end());
    std::sort(names.begin(), names.end());
    std::vector<char> is_named(num_parts, false);
    for (const Index name : names) is_named[name] = true;
    Indices rows;
    for (std::size_t row = 0; row < parts.size(); ++row) {
      if (is_named[parts[row]]) rows.push_back(static_cast<Index>(row));
    }
    const Problem chosen{take(problem.weights, rows), range(static_cast<Index>(rows.size())),
                         static_cast<Index>(names.size()), problem.equal_size, problem.limits,
                         problem.base.empty() ? Weights{} : take(problem.base, names)};
    Indices dealt = refined_to(chosen, load_limit, load_limit, std::nullopt);
    const Cap chosen_cap = cap.in_order(rows);
    if (chosen_cap.exists()) dealt = under_cap(chosen, std::move(dealt), load_limit, chosen_cap);
    if (chosen_cap.keeps(dealt, chosen.num_parts) && chosen.largest(dealt) <= load_limit) {
      const Indices named = relabel(dealt, rows, names, home);
      for (std::size_t at = 0; at < rows.size(); ++at) parts[rows[at]] = named[at];
      return parts;
    }
  }
  return std::nullopt;
}

// Lowers tokens to the cap by swaps that move few tokens, then by any swaps. By row.
inline Indices repair_tokens(const Problem& problem, const Indices& parts, const Home& home, const Cap& cap) {
  const Problem tokens = Problem::of(cap.weights, problem.num_parts, problem.equal_size, problem.limits);
  const Home by_tokens{take(home.parts, tokens.order), take(home.sizes, tokens.order), home.ranks_per_node, home.steps,
                       home.alike};
  Indices repaired = repair(tokens, take(parts, tokens.order), cap.limit, by_tokens);
  return tokens.by_sample(refine(tokens, std::move(repaired), cap.limit));
}

// Repairs `parts`, by row, first for the cap, then for the limit of the loads: by repair(), then by refine(), which
// ignores where rows are, then by redeal_heaviest(). Nothing if the result is not within the limits.
inline std::optional<Indices> repair_start(const Problem& problem, Indices parts, const Home& home, Weight load_limit,
                                           const Cap& cap) {
  if (!cap.keeps(parts, problem.num_parts)) {
    parts = repair_tokens(problem, parts, home, cap);
    if (!cap.keeps(parts, problem.num_parts)) return std::nullopt;
  }
  parts = repair(problem, std::move(parts), load_limit, home, cap);
  if (problem.largest(parts) > load_limit) parts = refine(problem, std::move(parts), load_limit, cap);
  return redeal_heaviest(problem, std::move(parts), home, load_limit, cap);
}

// Repairs `start` until no load is above the limit; all by row. `plan` is within the limit. If the repair fails, or
// moves more tokens than `plan` with its partitions renamed (see relabel()), the result is the renamed `plan`. A repair
// moves far fewer tokens, unless almost all rows have to move, so renaming is tried only if it moves over half of all
// tokens.
inline Indices near_home(const Problem& problem, const Indices& plan, Indices start, const Home& home,
                         Weight load_limit, const Cap& cap) {
  std::optional<Indices> repaired = repair_start(problem, std::move(start), home, load_limit, cap);
  if (!repaired || home.cost(*repaired) > sum_of(home.sizes) / 2) {
    Indices renamed = relabel(plan, range(static_cast<Index>(plan.size())), range(problem.num_parts), home);
    if (!repaired || home.cost(renamed) < home.cost(*repaired)) return renamed;
  }
  return std::move(*repaired);
}

// Home as a plan, which other plans must be better than. A home that keeps the cap beats all plans that do not.
struct AtHome {
  Weight load;  // the largest load or time; in a grid their sum over the steps
  bool even;    // whether its counts are within the limits
  bool splits;  // see Request

  // Whether rows stay at home, given the load of the best plan, and `limit`, which a plan near home may reach: if no plan
  // lowers the load, whatever the counts at home, or if home is within the limit with even counts. Where groups are split,
  // rows move anyhow, so that uneven counts are not kept. If rows move to a plan that is better than home, lowers `limit`
  // below the load of home.
  bool stays(Weight best, Weight& limit) const {
    if (!(splits && !even) && (best >= load || (even && load <= limit))) return true;
    if (best < load) limit = std::min(limit, load - 1);
    return false;
  }
};

// A plan whose largest load is within 1 + slack of that of `assignment`, with many rows at home, or home itself; by sample.
inline Indices keep_rows_home(Problem& problem, Indices assignment, const Request& request, const Cap& cap) {
  const Index num_parts = problem.num_parts;
  const Weight best_load = problem.time(take(assignment, problem.order));
  const AtHome at_home{problem.time(take(request.home, problem.order)), problem.keeps_limits(request.home),
                       request.home_splits};
  Weight load_limit = with_slack(best_load, request.slack);
  if (cap.keeps(request.home, num_parts)) {
    if (!cap.keeps(assignment, num_parts) || at_home.stays(best_load, load_limit)) return request.home;
  }
  problem.aim(load_limit);
  const Home home = home_by_row(request, problem.order, sizes_of(request));
  const bool fits = at_home.even && (problem.equal_size || problem.is_few());
  Indices start = fits ? home.parts : start_at_home(problem, load_limit, home);
  return problem.by_sample(near_home(problem, take(assignment, problem.order), std::move(start), home, load_limit,
                                     cap.in_order(problem.order)));
}

// The partition of each row by one of the algorithms, which Method lists in the order of METHODS in core.py.
inline Indices by_method(Method method, const Problem& problem, const Bound& bound) {
  const bool has_speeds = !problem.speeds.empty();
  switch (method) {
    case Method::kKarmarkarKarp:
      return differencing(problem.weights, problem.num_parts, problem.equal_size);
    case Method::kLpt:
      return has_speeds ? lpt_at_speeds(problem) : lpt(problem);
    case Method::kSnake:
      return snake(static_cast<Index>(problem.weights.size()), problem.num_parts);
    default:
      return has_speeds ? refined_at_speeds(problem, bound.load) : refined(problem, bound);
  }
}

}  // namespace evenrank
