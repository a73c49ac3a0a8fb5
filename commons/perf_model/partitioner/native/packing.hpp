// Rows into groups under a capacity. The twin of reference.py in commons/micro_batching.
#pragma once

#include "leveling.hpp"
#include "plan.hpp"
#include "repacking.hpp"

namespace evenrank {

// Raised, here and in commons/micro_batching/native_core.py, whenever the same request gives another packing.
constexpr int kPackings = 1;

constexpr Weight kGoodEnough = 1000;

enum class Packer { kFirstFit, kKarmarkarKarp, kRefined };

struct PackRequest {
  Weights values;
  Weight capacity;
  Packer packer;
  Weight min_groups;
  Weight divisor;
  bool equal_size;

  Weight round_up(Weight num_groups) const {
    return divide_up(std::max(num_groups, min_groups), divisor) * divisor;
  }
};

inline std::optional<Indices> differencing_within(const Problem& problem, Weight capacity) {
  if (counting_bound(problem.weights, problem.num_parts, problem.limits).load > capacity) return std::nullopt;
  Indices groups = differencing(problem.weights, problem.num_parts, problem.equal_size);
  if (problem.largest(groups) > capacity) return std::nullopt;
  return groups;
}

// Whether the n merges of k sums are worth their time before anything else has been tried.
inline bool may_difference(const Problem& problem) {
  return problem.equal_size || static_cast<Weight>(problem.weights.size()) * problem.num_parts <= kFew;
}

inline std::optional<Indices> packed_tightly(const Problem& problem, Weight capacity) {
  const Weights& weights = problem.weights;
  const Index num_groups = problem.num_parts;
  if (problem.equal_size) return first_fit_equal(weights, capacity, num_groups);
  Packing packing = first_fit(weights, capacity);
  if (packing.num_groups <= num_groups) return split_heaviest(weights, std::move(packing), num_groups);
  if (!may_difference(problem)) {
    if (std::optional<Indices> found = differencing_within(problem, capacity)) return found;
  }
  return pack_under(weights, num_groups, capacity);
}

// LPT with exchanges, and where that does not come near the bound, Karmarkar-Karp with exchanges too.
inline Indices balanced(const Problem& problem, Weight bound, Weight capacity) {
  const Weight target = std::min(near(bound), capacity);
  const Weight enough = capacity - bound > bound / kGoodEnough ? bound + bound / kGoodEnough : capacity;
  Indices best = refine(problem, lpt(problem.weights, problem.num_parts, problem.limits), target);
  const Weight load = problem.largest(best);
  if (load <= enough || !may_difference(problem)) return best;
  Indices other = differencing(problem.weights, problem.num_parts, problem.equal_size);
  other = refine(problem, std::move(other), target);
  return problem.largest(other) < load ? other : best;
}

inline std::optional<Indices> refined_within(const Problem& problem, Weight capacity) {
  const Weight bound = counting_bound(problem.weights, problem.num_parts, problem.limits).load;
  if (bound > capacity) return std::nullopt;
  Indices groups = balanced(problem, bound, capacity);
  if (problem.largest(groups) > capacity) {
    std::optional<Indices> packed = packed_tightly(problem, capacity);
    if (!packed) return std::nullopt;
    groups = refine(problem, std::move(*packed), near(bound));
  }
  return level(problem.weights, std::move(groups), problem.num_parts, problem.limits);
}

// The first attempt that succeeds, from the fewest groups on.
template <typename Attempt>
std::optional<Packing> search(const Attempt& attempt, const PackRequest& request, Problem& problem, Weight fewest) {
  const Weight num_rows = static_cast<Weight>(problem.weights.size());
  for (Weight num_groups = fewest; num_groups <= num_rows; num_groups += request.divisor) {
    problem.num_parts = static_cast<Index>(num_groups);
    problem.limits = Limits::of(num_rows, num_groups, request.equal_size);
    if (std::optional<Indices> groups = attempt(problem, request.capacity)) {
      return Packing{std::move(*groups), problem.num_parts};
    }
  }
  return std::nullopt;
}

inline std::optional<Packing> find_packing(const PackRequest& request, Problem& problem) {
  const Weights& weights = problem.weights;
  if (weights[0] > request.capacity) return std::nullopt;
  const Weight fewest = request.round_up(l2_bound(weights, request.capacity));
  std::optional<Packing> packing;
  if (request.packer == Packer::kFirstFit && !request.equal_size) {
    packing = first_fit(weights, request.capacity);
    const Weight num_groups = request.round_up(packing->num_groups);
    if (num_groups > static_cast<Weight>(weights.size())) {
      packing = std::nullopt;
    } else if (num_groups > packing->num_groups) {
      const Index number = static_cast<Index>(num_groups);
      packing = Packing{multifit(weights, request.capacity, std::move(*packing), number), number};
    }
  } else if (request.packer == Packer::kFirstFit) {
    const auto attempt = [](const Problem& each, Weight capacity) {
      return first_fit_equal(each.weights, capacity, each.num_parts);
    };
    packing = search(attempt, request, problem, fewest);
  } else if (request.packer == Packer::kKarmarkarKarp) {
    packing = search(differencing_within, request, problem, fewest);
  }
  return packing ? packing : search(refined_within, request, problem, fewest);
}

// Groups of indices, heaviest first, or none where no packing was found: none for negative values, and for values
// whose sum overflows.
inline std::vector<Indices> pack(const PackRequest& request) {
  Weight total = 0;
  for (const Weight value : request.values) {
    if (value < 0 || __builtin_add_overflow(total, value, &total)) return {};
  }
  Problem problem = Problem::of(request.values, 1, request.equal_size);
  const std::optional<Packing> packing = find_packing(request, problem);
  if (!packing) return {};
  std::vector<Indices> groups(packing->num_groups);
  Weights loads(packing->num_groups, 0);
  const Indices by_sample = problem.by_sample(packing->groups);
  for (std::size_t sample = 0; sample < by_sample.size(); ++sample) {
    groups[by_sample[sample]].push_back(static_cast<Index>(sample));
    loads[by_sample[sample]] += request.values[sample];
  }
  Indices order = range(packing->num_groups);
  std::sort(order.begin(), order.end(), [&](Index a, Index b) {
    return loads[a] != loads[b] ? loads[a] > loads[b] : groups[a][0] < groups[b][0];
  });
  std::vector<Indices> sorted;
  sorted.reserve(groups.size());
  for (const Index group : order) sorted.push_back(std::move(groups[group]));
  return sorted;
}

}  // namespace evenrank
