// Limits of the steps of a grid: how to share a sum of largest loads among the steps, before rows are placed.
#pragma once

#include "locality.hpp"
#include "starts.hpp"

namespace evenrank {

constexpr Weight kLike = 64;         // rows within 1 / kLike of the heaviest row count as equally heavy
constexpr Weight kLargeRow = 16;     // a row is large from 1 / kLargeRow of a limit on
constexpr Weight kMostLevels = 64;   // numbers of rows like the heaviest to try in shares_by_level()
constexpr Weight kMisplaced = 2048;  // swaps find places for up to 1 / kMisplaced of the cells' capacity

// Shares `total` evenly among the steps, heaviest first, but gives no step less than its part of the bound.
// share_out(20, {11, 4, 2}) is {11, 5, 5}.
inline Weights share_out(Weight total, const Weights& largest) {
  Weights shares;
  const Weight num_steps = static_cast<Weight>(largest.size());
  for (Weight step = 0; step < num_steps; ++step) {
    const Weight even = divide_up(total, num_steps - step);
    if (even >= largest[step]) {
      shares.resize(num_steps, even);
      break;
    }
    shares.push_back(largest[step]);
    total -= largest[step];
  }
  return shares;
}

// Raises the limits of the steps to a sum of at most `most`: half of the room in proportion to the limits, half in equal
// parts, because otherwise the other steps would get little beside a very heavy one.
inline Weights with_room(Weights largest, Weight most) {
  const Weight sum = sum_of(largest);
  const Weight room = most - sum, num_steps = static_cast<Weight>(largest.size());
  const __int128 total = std::max<Weight>(sum, 1);
  for (Weight& load : largest) {
    load += static_cast<Weight>(load * static_cast<__int128>(room) / (2 * total)) + room / (2 * num_steps);
  }
  return largest;
}

// The base of every cell: the difference between the largest limit and the limit of its step; with speeds, the largest
// load of the cell within that limit.
inline Weights bases_of(const Weights& largest, Index num_cells, const Speeds& speeds) {
  const Weight most = largest_of(largest);
  Weights bases(num_cells);
  for (Index cell = 0; cell < num_cells; ++cell) {
    const Weight time = largest[cell % largest.size()];
    bases[cell] = most - (speeds.empty() ? time : speeds.limit(time, cell));
  }
  return bases;
}

// Whether LPT of only the large rows keeps the limits of the steps, or exceeds them so little that swaps suffice.
inline bool has_places(const Problem& problem, const Weights& largest) {
  const Weight limit = largest_of(largest);
  const auto is_large = [&](Weight weight) { return weight >= limit / kLargeRow; };
  const auto end = std::partition_point(problem.weights.begin(), problem.weights.end(), is_large);
  const Index num_cells = problem.num_parts;
  const Problem large{{problem.weights.begin(), end}, {}, num_cells, false, {0, problem.limits.max_count},
                      bases_of(largest, num_cells, problem.speeds)};
  return large.weights.empty() || excess_of(large.loads(lpt(large)), limit) / num_cells <= limit / kMisplaced;
}

// Shares for many rows about as heavy as the heaviest, such as histories cut at a maximum length: as many steps as
// necessary, to within 1 / kMostLevels of all, have room for one more of these rows, with its fillers, in every cell.
// Nothing if not all large rows fit.
inline std::optional<Weights> shares_by_level(const Problem& problem, Weight num_steps, Weight total) {
  const Weights& weights = problem.weights;
  const Weight heaviest = weights.front(), num_ranks = problem.num_parts / num_steps;
  const auto is_like = [&](Weight weight) { return weight >= heaviest - heaviest / kLike; };
  const auto last = std::partition_point(weights.begin(), weights.end(), is_like);
  const Weight least = divide_up(last - weights.begin(), num_ranks);
  const Weight stride = divide_up(num_steps, kMostLevels);
  for (Weight places = least; places <= least + num_steps && heaviest <= total / places; places += stride) {
    const Weight in_cell = divide_up(places, num_steps);
    const Weight steps = places - (in_cell - 1) * num_steps, cells = steps * num_ranks;
    const Weight fillers = std::clamp<Weight>((problem.limits.min_count - in_cell) * cells, 0, weights.end() - last);
    const Weight fill = divide_up(std::accumulate(weights.end() - fillers, weights.end(), Weight{0}), cells);
    if (places * heaviest + steps * fill > total) break;
    Weights least_loads(num_steps, (in_cell - 1) * heaviest);
    std::fill_n(least_loads.begin(), steps, in_cell * heaviest + fill);
    const Weights shares = share_out(total, least_loads);
    if (has_places(problem, shares)) return shares;
  }
  return std::nullopt;
}

}  // namespace evenrank
