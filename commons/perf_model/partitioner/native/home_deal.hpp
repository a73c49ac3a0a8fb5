// A start for the repair of a grid: deals the rows of each rank to its own steps, except for rows that do not fit.
#pragma once

#include "locality.hpp"
#include "starts.hpp"

namespace evenrank {

// A row below 1 / kLarge of the smallest limit of a step goes home even if it exceeds the limit there: swaps will find a
// better row to give away. A larger row seldom leaves by a swap.
constexpr Weight kLarge = 8;

// LPT that prefers the cells of a row's own rank, then those of its node. Returns the cell of each row.
//
// A row goes to the lightest cell of its rank that may take a row. A large row that would exceed the limit there goes to
// the lightest cell of its node, or of all, if it fits there; so do rows for which the cells of their rank have no room. A
// row is large if it weighs at least 1 / `fraction` of the smallest limit of a step.
inline Indices deal_at_home(const Problem& problem, const Home& home, Weight limit, Weight fraction = kLarge) {
  FillingParts cells(problem);
  const Index steps = home.steps;
  const Index node = steps * home.ranks_per_node;
  const Weight large = (limit - cells.largest()) / fraction;
  Indices parts(problem.weights.size());
  for (std::size_t row = 0; row < parts.size(); ++row) {
    const Weight weight = problem.weights[row];
    const Index rank = home.parts[row];
    Index chosen = cells.lightest(rank * steps, (rank + 1) * steps);
    if (chosen == kNone || (weight >= large && cells.load(chosen) + weight > limit)) {
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
