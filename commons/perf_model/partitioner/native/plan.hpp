// What plans are made of. The twin of refined.py, token_cap.py, home_rows.py and request.py.
#pragma once

#include <cmath>

#include "differencing.hpp"
#include "locality.hpp"
#include "refinement.hpp"

namespace evenrank {

// Raised, here and in native_core.py, whenever the same request gives another plan or a plan another digest, or
// there are new ones.
constexpr int kPlans = 9;

constexpr Weight kTolerance = 10'000;
constexpr Weight kFew = 1 << 16;
constexpr std::array<int, 7> kLoadRoom = {8, 6, 5, 4, 3, 2, 1};

enum class Method { kKarmarkarKarp, kLpt, kRefined, kSnake };

// floor(load * (1 + slack)), exact, for a slack in [0, 1]: a float is 53 bits and a power of two.
inline Weight with_slack(Weight load, double slack) {
  int exponent;
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(slack, &exponent), 53));
  const auto product = static_cast<unsigned __int128>(load) * mantissa;
  return load + static_cast<Weight>(product >> std::min(53 - exponent, 127));
}

struct Request {
  Weights workloads;
  Index num_parts;
  Method method;
  bool equal_size;
  Weights tokens;  // empty if there are none
  std::optional<Weight> max_tokens;
  Indices home;  // empty if there is none
  Index ranks_per_node;
  double slack;
  Index num_steps = 1;
  Indices home_step{};  // empty if it is not known
};

struct Plan {
  Indices assignment;
  Weights loads;
  Weight bound;
  Weight most_tokens;
};

inline Weight near(Weight bound) { return bound + bound / kTolerance; }

inline Indices refine(const Problem& problem, Indices parts, Weight target, const Cap* cap = nullptr) {
  return refine(problem.weights, std::move(parts), problem.num_parts, problem.limits, target, cap,
                problem.base);
}

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
  add(lpt(problem.weights, problem.num_parts, problem.limits, problem.base));
  const Weight largest = starts[0].load;
  if (largest <= bound) return std::move(starts[0].parts);
  if (split && largest > target) {
    if (std::optional<Indices> parts = split_start(problem, *split)) add(std::move(*parts));
  }
  const bool few = static_cast<Weight>(problem.weights.size()) * problem.num_parts <= kFew;
  if (problem.equal_size || few) add(differencing(problem.weights, problem.num_parts, problem.equal_size));
  std::stable_sort(starts.begin(), starts.end(), [](const Start& a, const Start& b) { return a.load < b.load; });
  Indices best = refine(problem, std::move(starts[0].parts), target);
  if (!few || starts.size() == 1) return best;
  const Weight load = problem.largest(best);
  if (load <= target) return best;
  Indices other = refine(problem, std::move(starts[1].parts), target);
  return problem.largest(other) < load ? other : best;
}

inline Indices refined(const Problem& problem, const Bound& bound) {
  return refined_to(problem, bound.load, near(bound.load), bound.split);
}

// A plan by sample in, a plan by sample out; `cap.weights` by sample.
inline Indices under_cap(const Problem& problem, Indices assignment, Weight target, const Cap& cap) {
  const Index num_parts = problem.num_parts;
  const Problem tokens = Problem::of(cap.weights, num_parts, problem.equal_size, problem.limits);
  Indices parts = take(assignment, tokens.order);
  if (tokens.largest(parts) <= cap.limit) return assignment;
  const Weight largest = problem.largest(take(assignment, problem.order));
  Cap room{take(problem.by_sample(problem.weights), tokens.order), 0, problem.base};
  for (const int shift : kLoadRoom) {
    room.limit = largest + (largest >> shift);
    parts = refine(tokens, std::move(parts), cap.limit, &room);
  }
  parts = refine(tokens, std::move(parts), cap.limit);
  Weight reached = tokens.largest(parts);
  if (reached > cap.limit) {
    Indices other = refined(tokens, counting_bound(tokens.weights, num_parts, tokens.limits));
    if (tokens.largest(other) < reached) {
      reached = tokens.largest(other);
      parts = std::move(other);
    }
  }
  const Cap by_row{take(cap.weights, problem.order), std::max(reached, cap.limit)};
  parts = take(tokens.by_sample(parts), problem.order);
  return problem.by_sample(refine(problem, std::move(parts), target, &by_row));
}

inline bool keeps(const Cap* cap, const Indices& parts, Index num_parts) {
  return cap == nullptr || largest_load(cap->weights, parts, num_parts) <= cap->limit;
}

inline std::optional<Indices> redeal_heaviest(const Problem& problem, Indices parts, const Home& home,
                                              Weight load_limit, const Cap* cap) {
  const Index num_parts = problem.num_parts;
  const Weights loads = sum_by_rank(parts, problem.weights, num_parts, problem.base);
  Indices ranked = range(num_parts);
  rank_by_load(loads, ranked);
  Index num_over = 0;
  while (num_over < num_parts && loads[ranked[num_over]] > load_limit) ++num_over;
  if (num_over == 0) return parts;
  for (Index num_light = num_over; num_over + num_light < num_parts; num_light *= 2) {
    Indices names(ranked.begin(), ranked.begin() + num_over);
    names.insert(names.end(), ranked.end() - num_light, ranked.end());
    std::sort(names.begin(), names.end());
    Indices rows;
    for (std::size_t row = 0; row < parts.size(); ++row) {
      if (std::binary_search(names.begin(), names.end(), parts[row])) rows.push_back(static_cast<Index>(row));
    }
    const Problem chosen{take(problem.weights, rows), range(static_cast<Index>(rows.size())),
                         static_cast<Index>(names.size()), problem.equal_size, problem.limits,
                         problem.base.empty() ? Weights{} : take(problem.base, names)};
    Indices dealt = refined_to(chosen, load_limit, load_limit, std::nullopt);
    bool capped = true;
    if (cap != nullptr) {
      const Cap chosen_cap{take(cap->weights, rows), cap->limit};
      dealt = under_cap(chosen, std::move(dealt), load_limit, chosen_cap);
      capped = keeps(&chosen_cap, dealt, chosen.num_parts);
    }
    if (capped && chosen.largest(dealt) <= load_limit) {
      const Indices named = relabel(dealt, rows, names, home);
      for (std::size_t at = 0; at < rows.size(); ++at) parts[rows[at]] = named[at];
      return parts;
    }
  }
  return std::nullopt;
}

inline Indices repair_tokens(const Problem& problem, const Indices& parts, const Home& home, const Cap& cap) {
  const Problem tokens = Problem::of(cap.weights, problem.num_parts, problem.equal_size, problem.limits);
  const Home by_tokens{take(home.parts, tokens.order), take(home.sizes, tokens.order), home.ranks_per_node, home.steps};
  Indices repaired =
      repair(tokens.weights, take(parts, tokens.order), tokens.num_parts, tokens.limits, cap.limit, by_tokens);
  return tokens.by_sample(refine(tokens, std::move(repaired), cap.limit));
}

inline std::optional<Indices> repair_start(const Problem& problem, Indices parts, const Home& home, Weight load_limit,
                                           const Cap* cap) {
  const Index num_parts = problem.num_parts;
  if (!keeps(cap, parts, num_parts)) {
    parts = repair_tokens(problem, parts, home, *cap);
    if (!keeps(cap, parts, num_parts)) return std::nullopt;
  }
  parts = repair(problem.weights, std::move(parts), num_parts, problem.limits, load_limit, home, cap, problem.base);
  if (problem.largest(parts) > load_limit) parts = refine(problem, std::move(parts), load_limit, cap);
  return redeal_heaviest(problem, std::move(parts), home, load_limit, cap);
}

// Repairs `start`, or gives the parts of `plan` good names, whichever moves less; all by row.
inline Indices near_home(const Problem& problem, const Indices& plan, Indices start, const Home& home,
                         Weight load_limit, const Cap* cap) {
  std::optional<Indices> repaired = repair_start(problem, std::move(start), home, load_limit, cap);
  const Weight total = std::accumulate(home.sizes.begin(), home.sizes.end(), Weight{0});
  if (!repaired || home.cost(*repaired) > total / 2) {
    Indices renamed = relabel(plan, range(static_cast<Index>(plan.size())), range(problem.num_parts), home);
    if (!repaired || home.cost(renamed) < home.cost(*repaired)) return renamed;
  }
  return std::move(*repaired);
}

// Sizes whose sum, four times, fits into an int64.
inline Weights movable(Weights sizes) {
  const int shift = std::max(0, bit_length(std::accumulate(sizes.begin(), sizes.end(), Weight{0})) - 60);
  for (Weight& size : sizes) size >>= shift;
  return sizes;
}

inline Indices keep_rows_home(const Problem& problem, Indices assignment, const Request& request, const Cap* cap) {
  const Index num_parts = problem.num_parts;
  const Weight best_load = problem.largest(take(assignment, problem.order));
  Home home{take(request.home, problem.order), {}, request.ranks_per_node};
  const Weight home_load = problem.largest(home.parts);
  Weight load_limit = with_slack(best_load, request.slack);
  const bool even = problem.limits.keep(count_per_part(home.parts, num_parts));
  if (keeps(cap, request.home, num_parts)) {
    const bool no_gain = best_load >= home_load || !keeps(cap, assignment, num_parts);
    if (no_gain || (even && home_load <= load_limit)) return request.home;
    load_limit = std::min(load_limit, home_load - 1);
  }
  home.sizes = movable(take(request.tokens.empty() ? request.workloads : request.tokens, problem.order));
  Cap by_row;
  if (cap != nullptr) by_row = {take(cap->weights, problem.order), cap->limit};
  Indices start = even ? home.parts : even_counts(problem.weights, num_parts, problem.limits, load_limit, home);
  return problem.by_sample(near_home(problem, take(assignment, problem.order), std::move(start), home, load_limit,
                                     cap == nullptr ? nullptr : &by_row));
}

// What the algorithm asked for makes of the rows.
inline Indices by_method(Method method, const Problem& problem, const Bound& bound) {
  switch (method) {
    case Method::kKarmarkarKarp:
      return differencing(problem.weights, problem.num_parts, problem.equal_size);
    case Method::kLpt:
      return lpt(problem.weights, problem.num_parts, problem.limits);
    case Method::kSnake:
      return snake(static_cast<Index>(problem.weights.size()), problem.num_parts);
    default:
      return refined(problem, bound);
  }
}

}  // namespace evenrank
