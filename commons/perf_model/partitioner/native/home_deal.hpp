// A start for the repair of a grid: the rows of each rank dealt to its own steps, but for those that do not fit.
#pragma once

#include "locality.hpp"
#include "starts.hpp"

namespace evenrank {

// A row of less than 1 / kLarge of what the lightest step may hold goes home even where it is too much there: swaps find
// better rows to give away for it. A larger row seldom leaves by a swap.
constexpr Weight kLarge = 8;

// LPT that prefers the cells of a row's own rank, then those of its node. Returns the cell of each row.
//
// Among the cells that a row prefers it goes to the lightest one with room for one more row. A large row that would
// take that above the limit goes to its node's lightest, or the lightest of all, if it fits there. Rows beyond the
// number that the cells of a rank may take go the same way. A row is large from 1 / `fraction` of what the lightest
// step may hold on.
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
