// Starts for a repair: home with even counts, or without the rows that are too many for swaps; for a grid, the rows of each
// rank in its own steps, except for rows that do not fit.
#pragma once

#include "locality.hpp"
#include "starts.hpp"

namespace evenrank {

// A row below 1 / kLarge of the smallest limit of a step goes home even if it exceeds the limit there: swaps will find a
// better row to give away. A larger row seldom leaves by a swap.
constexpr Weight kLarge = 8;

// Starts from home, and moves few and light rows so that counts keep their limits. With free sizes and many rows, also
// moves rows of each partition that would need more than kMaxRounds swaps, the most of repair(), to be within `limit`: small
// rows if these suffice.
//
// The fullest partitions keep the most rows. A partition with too many gives away rows that are consecutive by weight:
// the lightest ones that leave its load within `limit`, or else the heaviest. A row that is given away goes to the lightest
// partition of its node that needs rows, if it fits there, else to the lightest of all that need rows.
inline Indices start_at_home(const Problem& problem, Weight limit, const Home& home) {
  const Weights& weights = problem.weights;
  const Index num_parts = problem.num_parts;
  const Limits& limits = problem.limits;
  const Indices counts = count_per_part(home.parts, num_parts);
  Weights loads = problem.loads(home.parts);
  const std::vector<Indices> rows_of = rows_by_part(home.parts, num_parts);
  Indices quota(num_parts);
  Weight surplus = -static_cast<Weight>(weights.size());
  for (Index part = 0; part < num_parts; ++part) {
    quota[part] = static_cast<Index>(std::clamp<Weight>(counts[part], limits.min_count, limits.max_count));
    surplus += quota[part];
  }
  // Quotas must add up to the number of rows: lower those of the emptiest partitions, or raise those of the fullest.
  Indices fullest = range(num_parts);
  std::stable_sort(fullest.begin(), fullest.end(), [&](Index a, Index b) { return counts[a] > counts[b]; });
  for (auto part = fullest.rbegin(); part != fullest.rend() && surplus > 0; ++part) {
    if (quota[*part] > limits.min_count) --quota[*part], --surplus;
  }
  for (auto part = fullest.begin(); part != fullest.end() && surplus < 0; ++part) {
    if (quota[*part] < limits.max_count) ++quota[*part], ++surplus;
  }

  const bool is_free = !problem.equal_size && !problem.is_few();
  for (Index part = 0; part < num_parts && is_free; ++part) {
    const Indices& rows = rows_of[part];
    const auto is_large = [&](Index row) { return weights[row] >= limit / kLarge; };
    const auto small = std::partition_point(rows.begin(), rows.end(), is_large);
    for (const auto first : {small, rows.begin()}) {
      Weight load = loads[part];
      auto end = first;
      while (load > limit && end != rows.end()) load -= weights[*end++];
      if (load > limit) continue;
      if (end - first > kMaxRounds) quota[part] -= static_cast<Index>(end - first);
      break;
    }
  }
  Indices given;
  for (Index part = 0; part < num_parts; ++part) {
    const Indices& rows = rows_of[part];
    const std::ptrdiff_t num_given = counts[part] - quota[part];
    if (num_given <= 0) continue;
    // Slide the range from the lightest rows to heavier ones until the load is within the limit, or it cannot slide.
    std::ptrdiff_t first = static_cast<std::ptrdiff_t>(rows.size()) - num_given;
    Weight given_load = 0;
    for (std::ptrdiff_t at = first; at < first + num_given; ++at) given_load += weights[rows[at]];
    while (first > 0 && loads[part] - given_load > limit) {
      --first;
      given_load += weights[rows[first]] - weights[rows[first + num_given]];
    }
    given.insert(given.end(), rows.begin() + first, rows.begin() + first + num_given);
    loads[part] -= given_load;
  }
  std::sort(given.begin(), given.end());
  if (is_free) std::fill(quota.begin(), quota.end(), static_cast<Index>(limits.max_count));

  Tournament<false> open(loads);
  for (Index part = 0; part < num_parts; ++part) {
    if (counts[part] >= quota[part]) open.leave(part);
  }
  Indices parts = home.parts;
  for (const Index row : given) {
    const Index node = home.place_of(home.parts[row]).first;
    Index taker = open.winner(node, std::min(node + home.ranks_per_node, num_parts));
    if (taker == kNone || loads[taker] + weights[row] > limit) taker = open.winner();
    parts[row] = taker;
    loads[taker] += weights[row];
    if (--quota[taker] > counts[taker]) {
      open.enter(taker, loads[taker]);
    } else {
      open.leave(taker);
    }
  }
  return parts;
}

// LPT that prefers the cells of a row's own rank, then those of its node. Returns the cell of each row.
//
// A row goes to the lightest cell of its rank that may take a row. A large row that would exceed the limit there goes to
// the lightest cell of its node, or of all, if it fits there; so do rows for which the cells of their rank have no room, and,
// if there are many rows, small ones of a rank of which more exceed the limit than swaps take. A row is large if it weighs
// at least 1 / `fraction` of the smallest limit of a step.
inline Indices deal_at_home(const Problem& problem, const Home& home, Weight limit, Weight fraction = kLarge) {
  FillingParts cells(problem);
  const Index steps = home.steps;
  const Index node = steps * home.ranks_per_node;
  const Weight large = (limit - cells.largest()) / fraction;
  Weights num_over(problem.num_parts / steps, 0);  // small rows of each rank that exceed the limit there
  const Weight most_over = problem.is_few() ? kMax : Weight{kMaxRounds} * steps;
  Indices parts(problem.weights.size());
  for (std::size_t row = 0; row < parts.size(); ++row) {
    const Weight weight = problem.weights[row];
    const Index rank = home.parts[row];
    Index chosen = cells.lightest(rank * steps, (rank + 1) * steps);
    const bool exceeds = chosen != kNone && cells.load(chosen) + weight > limit;
    if (chosen == kNone || (exceeds && (weight >= large || ++num_over[rank] > most_over))) {
      const Index first = rank / home.ranks_per_node * node;
      Index other = cells.lightest(first, std::min(first + node, problem.num_parts));
      if (other == kNone || cells.load(other) + weight > limit) other = cells.lightest_of_all();
      if (chosen == kNone || cells.load(other) + weight <= limit) chosen = other;
    }
    cells.add(chosen, weight);
    parts[row] = chosen;
  }
  return parts;
}

}  // namespace evenrank
