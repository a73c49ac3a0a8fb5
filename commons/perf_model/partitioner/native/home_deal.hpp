// A start for the repair of a grid: the rows of each rank dealt to its own steps, but for those that do not fit.
#pragma once

#include <tuple>

#include "locality.hpp"
#include "starts.hpp"

namespace evenrank {

// A row of less than 1 / kLarge of what the lightest step may hold goes home even where it is too much there: swaps find
// better rows to give away for it. A larger row seldom leaves by a swap.
constexpr Weight kLarge = 8;

// Loads and counts of the cells while they fill, and which of them may take one more row.
class FillingCells {
 public:
  explicit FillingCells(const Problem& problem)
      : limits_(problem.limits),
        loads_(problem.first_loads()),
        counts_(problem.num_parts, 0),
        spare_(static_cast<Weight>(problem.weights.size()) - limits_.min_count * problem.num_parts),
        lightest_(loads_) {}

  Weight load(Index cell) const { return loads_[cell]; }
  Weight largest() const { return largest_of(loads_); }

  // The lightest of [first, last) with room for a row, ties by fewest rows, then by index; kNone if all are full.
  Index lightest(Index first, Index last) const {
    Index best = kNone;
    for (Index cell = first; cell < last; ++cell) {
      if (is_open(cell) && (best == kNone || key(cell) < key(best))) best = cell;
    }
    return best;
  }

  // The same among all cells, one of which has room.
  Index lightest_of_all() {
    while (true) {
      const LightestFirst::Entry known = lightest_.top();
      const LightestFirst::Entry now{loads_[known.part], counts_[known.part], known.part};
      if (!is_open(known.part)) {
        lightest_.pop();
      } else if (known.before(now)) {
        lightest_.replace_top(now);
      } else {
        return known.part;
      }
    }
  }

  void add(Index cell, Weight weight) {
    spare_ -= counts_[cell] >= limits_.min_count;
    ++counts_[cell];
    loads_[cell] += weight;
  }

 private:
  using Key = std::tuple<Weight, Index, Index>;

  Key key(Index cell) const { return {loads_[cell], counts_[cell], cell}; }

  bool is_open(Index cell) const {
    return counts_[cell] < limits_.min_count || (counts_[cell] < limits_.max_count && spare_ > 0);
  }

  Limits limits_;
  Weights loads_;
  Indices counts_;
  Weight spare_;  // rows beyond min_count that cells may still take; see lpt()
  LightestFirst lightest_;  // cells as they were when each was last on top: they have only become heavier since
};

// LPT that prefers the cells of a row's own rank, then those of its node. Returns the cell of each row.
//
// Among the cells that a row prefers it goes to the lightest one with room for one more row. A large row that would
// take that above the limit goes to its node's lightest, or the lightest of all, if it fits there. Rows beyond the
// number that the cells of a rank may take go the same way. A row is large from 1 / `fraction` of what the lightest
// step may hold on.
inline Indices deal_at_home(const Problem& problem, const Home& home, Weight limit, Weight fraction = kLarge) {
  FillingCells cells(problem);
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
