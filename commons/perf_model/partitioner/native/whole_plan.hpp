// A whole plan: the algorithm of the request, then the cap on tokens, then rows kept at home.
#pragma once

#include "many_parts.hpp"

namespace evenrank {

// Up to this many rows times partitions, lpt_at_speeds() takes a few milliseconds: it looks at every partition for each row.
constexpr Weight kScanned = 1 << 20;

// The plan of the request's method, changed to keep the cap, if there is one. Swaps under a cap depend much on where they
// start. So "refined" starts from the plans of the other methods too, and from LPT that keeps the cap, until a plan is near
// the bound, and takes the best: it is no worse than theirs. With many rows it starts only from that of snake, the one that
// gains the most there; with speeds from LPT that keeps the cap, up to kScanned.
inline Indices planned_under_cap(const Request& request, const Problem& problem, const Bound& bound) {
  const Cap cap = request.cap();
  const auto changed = [&](Indices plan) {
    return problem.speeds.empty() ? under_cap(problem, std::move(plan), near(bound.load), cap)
                                  : under_cap_at_speeds(problem, std::move(plan), bound.load, cap);
  };
  const auto plan_by = [&](Method method) {
    Indices plan = problem.by_sample(by_method(method, problem, bound));
    return cap.exists() ? changed(std::move(plan)) : plan;
  };
  Indices best = plan_by(request.method);
  if (!cap.exists() || request.method != Method::kRefined) return best;
  const auto cost_of = [&](const Indices& plan) {  // first the tokens above the cap, then the time
    return std::pair(request.most_tokens(plan, problem.num_parts), problem.time(take(plan, problem.order)));
  };
  auto least = cost_of(best);
  const auto is_good = [&] { return least.first <= cap.limit && least.second <= near(bound.load); };
  const auto take_if_better = [&](Indices other) {
    const auto cost = cost_of(other);
    if (cost < least) least = cost, best = std::move(other);
  };
  for (const Method method : {Method::kLpt, Method::kSnake, Method::kKarmarkarKarp}) {
    if (is_good()) break;
    if (!problem.speeds.empty() && method != Method::kLpt) break;
    if (!problem.is_few() && method != Method::kSnake) continue;
    take_if_better(plan_by(method));
  }
  const Weight size = static_cast<Weight>(request.workloads.size()) * problem.num_parts;
  if (!is_good() && (problem.is_few() || (!problem.speeds.empty() && size <= kScanned))) {
    take_if_better(changed(problem.by_sample(lpt_at_speeds(problem, cap.in_order(problem.order)))));
  }
  return best;
}

// Plans without regard to home, then lowers tokens to the cap, then brings rows home; by sample. If the plan breaks the
// cap, the smaller of its and home's most tokens becomes the cap for bringing rows home.
inline Indices plan_freely(const Request& request, Problem& problem, const Bound& bound) {
  const Index num_parts = request.num_parts;
  Indices assignment = planned_under_cap(request, problem, bound);
  Cap cap = request.cap();
  if (cap.exists()) {
    Weight reached = largest_load(cap.weights, assignment, num_parts);
    if (!request.home.empty()) reached = std::min(reached, largest_load(cap.weights, request.home, num_parts));
    cap.limit = std::max(cap.limit, reached);
  }
  if (request.home.empty()) return assignment;
  return keep_rows_home(problem, std::move(assignment), request, cap);
}

// The plan of one batch. With the refined method, many partitions and a home, a plan near home is tried first
// (many_parts.hpp), whose time grows with the number of rows that have to move, not with all rows.
inline Plan make_plan(const Request& request) {
  const Index num_parts = request.num_parts;
  Problem problem =
      Problem::of(request.workloads, num_parts, request.equal_size, std::nullopt, Speeds(request.speeds));
  Bound bound = bound_of(problem.weights, num_parts, problem.limits, problem.speeds);
  std::optional<Indices> parts;
  if (request.method == Method::kRefined && num_parts >= kMany) parts = near_home_of_many(request, problem, bound.load);
  if (!parts) parts = plan_freely(request, problem, bound);
  if (!request.home.empty() && !problem.keeps_limits(*parts)) {
    // The result is a home with unequal sizes, for which only the bound for free sizes holds.
    const Limits free = Limits::of(static_cast<Weight>(problem.weights.size()), num_parts, false);
    bound = bound_of(problem.weights, num_parts, free, problem.speeds);
  }
  Weights loads = sum_by_rank(*parts, request.workloads, num_parts);
  const Weight most_tokens = request.most_tokens(*parts, num_parts);
  return {std::move(*parts), std::move(loads), bound.load, most_tokens};
}

}  // namespace evenrank
