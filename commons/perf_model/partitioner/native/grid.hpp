// Plans of a grid: rows to ranks * steps, so that the sum over the steps of the largest load is small.
//
// A step that must hold a very heavy row has room below its load on all other ranks. Rows of other steps can fill it,
// so that these take less. Every step therefore gets a limit of its own. Each cell of a step begins with the difference
// between the largest limit and that of its step, so that one target serves all cells, and the starts and swaps for one
// batch do the rest. The cell of rank r and step s is r * num_steps + s.
#pragma once

#include "grid_bound.hpp"
#include "home_deal.hpp"
#include "whole_plan.hpp"

namespace evenrank {

// A sum within 1 / kGridTolerance of the bound cannot be told from an ideal one; half of that is room in the limits of
// the steps, half is room above them.
constexpr Weight kGridTolerance = 1000;

// Tries at a lower limit of a step, for grids of up to `most` rows times cells: every try takes a part of the time that
// the plan takes, so large grids get fewer.
struct Tries {
  Weight most;
  int number;
};
constexpr std::array<Tries, 3> kTries = {{{1 << 21, 24}, {1 << 24, 8}, {1 << 27, 4}}};

struct Candidate {
  Indices cells;       // by sample
  Weights largest;     // the largest load of each step
  Weight most_tokens;  // of a cell, or the cap if that is more; 0 without a cap

  // The sum over the steps of the largest load: what a plan minimises.
  Weight total() const { return std::accumulate(largest.begin(), largest.end(), Weight{0}); }

  // Fewer tokens above the cap, or as many and a smaller sum.
  bool beats(const Candidate& other) const {
    return most_tokens != other.most_tokens ? most_tokens < other.most_tokens : total() < other.total();
  }
};

class GridPlanner {
 public:
  explicit GridPlanner(const Request& request)
      : request_(request),
        num_cells_(request.num_parts * request.num_steps),
        limits_(limits_of(request)),
        problem_(Problem::of(request.workloads, num_cells_, request.equal_size, limits_)),
        bound_(grid_bound(problem_.weights, request.num_parts, request.num_steps, limits_)) {}

  // The best of the grid, every batch alone, and the rows as they were loaded; then one in which few rows change rank.
  Plan plan() const {
    std::optional<Candidate> near = near_ranks_of_many();
    Candidate chosen = near ? std::move(*near) : choose(free_plan());
    Weight total = bound_.total;
    if (!limits_.keep(count_per_part(chosen.cells, num_cells_))) {
      // Rows as they were loaded, or batches of different sizes: only the bound for free sizes holds for these.
      const Weight num_rows = static_cast<Weight>(problem_.weights.size());
      total = grid_bound(problem_.weights, request_.num_parts, request_.num_steps, {0, num_rows}).total;
    }
    Weights loads = sum_by_rank(chosen.cells, request_.workloads, num_cells_);
    return {std::move(chosen.cells), std::move(loads), total, chosen.most_tokens};
  }

 private:
  // `best`, or what it does not beat; with a home, a plan near it within the slack.
  Candidate choose(Candidate best) const {
    std::optional<Candidate> loaded = as_loaded();
    std::optional<Candidate> alone;
    if (!request_.home_step.empty() && !(keeps_cap(best) && is_below_batches(best.total()))) alone = batches_alone();
    // Batches of different sizes have other counts than were asked for; home wins over equal counts.
    if (alone && request_.home.empty() && !limits_.keep(count_per_part(alone->cells, num_cells_))) alone.reset();
    if (alone && !best.beats(*alone)) return std::move(!loaded || alone->beats(*loaded) ? *alone : *loaded);
    if (request_.home.empty()) return best;
    Weight most = with_slack(best.total(), request_.slack);
    // The batches alone had the slack too, so nothing worse than them is worth its moves.
    if (alone) most = std::min(most, std::max(alone->total(), best.total()));
    if (loaded) {
      const bool even = limits_.keep(count_per_part(loaded->cells, num_cells_));
      if (!best.beats(*loaded) || (even && loaded->total() <= most)) return std::move(*loaded);
      most = std::min(most, loaded->total() - 1);
    }
    return near_ranks(best, most);
  }

  // Equal counts, or free ones down to a row per cell: a step without rows would be one batch less.
  static Limits limits_of(const Request& request) {
    const Weight num_rows = static_cast<Weight>(request.workloads.size());
    const Weight num_cells = static_cast<Weight>(request.num_parts) * request.num_steps;
    if (request.equal_size) return Limits::of(num_rows, num_cells, true);
    return {std::min<Weight>(1, num_rows / num_cells), num_rows};
  }

  Candidate candidate(Indices cells) const {
    const Weights loads = sum_by_rank(cells, request_.workloads, num_cells_);
    Weights largest(request_.num_steps, 0);
    for (Index cell = 0; cell < num_cells_; ++cell) {
      Weight& load = largest[cell % request_.num_steps];
      load = std::max(load, loads[cell]);
    }
    Weight most_tokens = 0;
    if (request_.max_tokens) {
      most_tokens = std::max(*request_.max_tokens, largest_load(request_.tokens, cells, num_cells_));
    }
    return {std::move(cells), std::move(largest), most_tokens};
  }

  bool keeps_cap(const Candidate& plan) const { return !request_.max_tokens || plan.most_tokens <= *request_.max_tokens; }

  // `cells`, changed until they keep the cap, if there is one.
  Indices capped(const Problem& problem, Indices cells, Weight target) const {
    if (!request_.max_tokens) return cells;
    return under_cap(problem, std::move(cells), target, Cap{request_.tokens, *request_.max_tokens});
  }

  // The problem in which every cell begins with what the limit of its step, one of `largest`, is below the largest
  // limit.
  Problem above(const Weights& largest) const {
    const Weight most = largest_of(largest);
    Problem problem = problem_;
    problem.base.resize(num_cells_);
    for (Index cell = 0; cell < num_cells_; ++cell) problem.base[cell] = most - largest[cell % request_.num_steps];
    return problem;
  }

  // The best plan that does not look at where rows are.
  //
  // The refined method first tries limits that sum up to the bound, unless all steps have the same. Then come even
  // partitions, sorted by load and cut into steps. The refined method improves the better of both step by step; if the
  // halves of the batches, each as a grid of its own, are better still, it goes on from these.
  Candidate free_plan() const {
    const bool is_refined = request_.method == Method::kRefined;
    std::optional<Candidate> best;
    if (is_refined) {
      const Weights first = share_out(bound_.total + half(bound_.total), bound_.largest);
      if (std::adjacent_find(first.begin(), first.end(), std::not_equal_to<>()) != first.end()) {
        best = within(first);
        if (best->total() <= good(bound_.total) && keeps_cap(*best)) return std::move(*best);
      }
    }
    Candidate cut = cut_into_steps();
    if (!best || cut.beats(*best)) best = std::move(cut);
    if (!is_refined) return std::move(*best);
    best = lower_steps(std::move(*best));
    std::optional<Candidate> halves = in_halves(*best);
    return halves && halves->beats(*best) ? lower_steps(std::move(*halves)) : std::move(*best);
  }

  // The batches [0, steps / 2) and the others, each planned as a grid of its own; none where they are not known, where
  // the counts would differ, or where `best` keeps the cap and is not above the sum of their lower bounds. So a window
  // is never worse than two of half as many batches, unless it is within the tolerance of its bound.
  std::optional<Candidate> in_halves(const Candidate& best) const {
    if (request_.home_step.empty() || best.total() <= good(bound_.total)) return std::nullopt;
    const Index middle = request_.num_steps / 2;
    std::array<Indices, 2> rows;
    for (std::size_t row = 0; row < request_.home_step.size(); ++row) {
      rows[request_.home_step[row] >= middle].push_back(static_cast<Index>(row));
    }
    if (rows[0].empty() || rows[1].empty()) return std::nullopt;
    const std::array<Request, 2> halves{some_batches(rows[0], 0, middle),
                                        some_batches(rows[1], middle, request_.num_steps)};
    const std::array<GridPlanner, 2> planners{GridPlanner(halves[0]), GridPlanner(halves[1])};
    if (keeps_cap(best) && best.total() <= planners[0].bound_.total + planners[1].bound_.total) return std::nullopt;
    Indices cells(request_.workloads.size());
    for (const int half : {0, 1}) {
      const Index steps = halves[half].num_steps;
      const Indices planned = steps == 1 ? make_plan(halves[half]).assignment : planners[half].free_plan().cells;
      for (std::size_t at = 0; at < planned.size(); ++at) {
        cells[rows[half][at]] = planned[at] / steps * request_.num_steps + half * middle + planned[at] % steps;
      }
    }
    if (!limits_.keep(count_per_part(cells, num_cells_))) return std::nullopt;
    return candidate(std::move(cells));
  }

  // The request for `rows`, which are those of the batches [first, last), without a home.
  Request some_batches(const Indices& rows, Index first, Index last) const {
    Indices home_step = take(request_.home_step, rows);
    for (Index& step : home_step) step -= first;
    return {take(request_.workloads, rows),
            request_.num_parts,
            request_.method,
            request_.equal_size,
            request_.tokens.empty() ? Weights{} : take(request_.tokens, rows),
            request_.max_tokens,
            {},
            request_.ranks_per_node,
            request_.slack,
            last - first,
            std::move(home_step)};
  }

  // Takes half of what is left above the bound off the largest load of one step after the other, where swaps can, until
  // the sum is good, no step gives way, or the tries are used up.
  Candidate lower_steps(Candidate best) const {
    Index failed = 0;
    Index step = 0;
    Cap cap;
    if (request_.max_tokens) cap.weights = take(request_.tokens, problem_.order);
    for (int tries = num_tries(); tries > 0; --tries, step = (step + 1) % request_.num_steps) {
      if (failed == request_.num_steps || best.total() <= good(bound_.total)) break;
      Weights wanted = best.largest;
      wanted[step] = std::max<Weight>(wanted[step] - (best.total() - bound_.total) / 2, 0);
      const Problem problem = above(wanted);
      cap.limit = best.most_tokens;
      const Indices parts = refine(problem, take(best.cells, problem.order), largest_of(wanted),
                                   request_.max_tokens ? &cap : nullptr);
      Candidate tried = candidate(problem.by_sample(parts));
      if (tried.beats(best)) {
        best = std::move(tried);
        failed = 0;
      } else {
        ++failed;
      }
    }
    return best;
  }

  // Half the tolerance of a sum, and the sum at which a grid is good enough, given a lower bound of it.
  static Weight half(Weight total) { return total / (2 * kGridTolerance); }
  static Weight good(Weight bound) { return bound + bound / kGridTolerance; }

  int num_tries() const {
    const Weight size = static_cast<Weight>(problem_.weights.size()) * num_cells_;
    for (const Tries& tries : kTries) {
      if (size <= tries.most) return tries.number;
    }
    return 0;
  }

  // LPT and swaps towards a largest load per step.
  Candidate within(const Weights& largest) const {
    const Problem problem = above(largest);
    const Weight sum = std::accumulate(largest.begin(), largest.end(), Weight{0});
    const Weight target = largest_of(largest) + half(sum) / request_.num_steps;
    Indices parts = refine(problem, lpt(problem.weights, num_cells_, problem.limits, problem.base), target);
    return candidate(capped(problem, problem.by_sample(parts), target));
  }

  // Even partitions by the algorithm of the request, sorted by load and cut into steps.
  Candidate cut_into_steps() const {
    const Bound bound = counting_bound(problem_.weights, num_cells_, limits_);
    Indices cells = problem_.by_sample(by_method(request_.method, problem_, bound));
    cells = capped(problem_, std::move(cells), near(bound.load));
    Indices ranked = range(num_cells_);
    rank_by_load(sum_by_rank(cells, request_.workloads, num_cells_), ranked);
    Indices place(num_cells_);
    for (Index at = 0; at < num_cells_; ++at) {
      place[ranked[at]] = at % request_.num_parts * request_.num_steps + at / request_.num_parts;
    }
    return candidate(take(place, cells));
  }

  // The rows where they are, if that is known and keeps the cap.
  std::optional<Candidate> as_loaded() const {
    if (request_.home.empty() || request_.home_step.empty()) return std::nullopt;
    Indices cells(request_.home.size());
    for (std::size_t row = 0; row < cells.size(); ++row) {
      cells[row] = request_.home[row] * request_.num_steps + request_.home_step[row];
    }
    Candidate plan = candidate(std::move(cells));
    if (!keeps_cap(plan)) return std::nullopt;
    return plan;
  }

  // The rows of each batch, but for empty ones.
  std::vector<Indices> rows_of_batches() const {
    std::vector<Indices> batches(request_.num_steps);
    for (std::size_t row = 0; row < request_.home_step.size(); ++row) {
      batches[request_.home_step[row]].push_back(static_cast<Index>(row));
    }
    batches.erase(std::remove_if(batches.begin(), batches.end(), [](const Indices& rows) { return rows.empty(); }),
                  batches.end());
    return batches;
  }

  // Whether `total` is below what the batches take, each by itself, by the heaviest row and the mean load of each.
  bool is_clearly_below_batches(Weight total) const {
    Weights heaviest(request_.num_steps, 0);
    Weights sums(request_.num_steps, 0);
    for (std::size_t row = 0; row < request_.home_step.size(); ++row) {
      const Index step = request_.home_step[row];
      heaviest[step] = std::max(heaviest[step], request_.workloads[row]);
      sums[step] += request_.workloads[row];
    }
    Weight least = 0;
    for (Index step = 0; step < request_.num_steps; ++step) {
      least += std::max(heaviest[step], divide_up(sums[step], request_.num_parts));
    }
    return total < least;
  }

  // The same by their counting bounds.
  bool is_below_batches(Weight total) const {
    for (const Indices& rows : rows_of_batches()) {
      const Problem batch = Problem::of(take(request_.workloads, rows), request_.num_parts, false);
      total -= counting_bound(batch.weights, batch.num_parts, batch.limits).load;
    }
    return total < 0;
  }

  // Each batch planned by itself.
  Candidate batches_alone() const {
    Indices cells(request_.workloads.size());
    for (const Indices& rows : rows_of_batches()) {
      const Request alone{take(request_.workloads, rows),
                          request_.num_parts,
                          request_.method,
                          request_.equal_size,
                          request_.tokens.empty() ? Weights{} : take(request_.tokens, rows),
                          request_.max_tokens,
                          request_.home.empty() ? Indices{} : take(request_.home, rows),
                          request_.ranks_per_node,
                          request_.slack};
      const Plan plan = make_plan(alone);
      for (std::size_t at = 0; at < rows.size(); ++at) {
        cells[rows[at]] = plan.assignment[at] * request_.num_steps + request_.home_step[rows[at]];
      }
    }
    return candidate(std::move(cells));
  }

  // With many ranks: as they were loaded, or a plan within 1 + slack of the bound with few tokens that change rank, which
  // begins with the rows at home; its time grows with the rows that move. None where swaps do not find one, where what
  // it would be compared with is no worse, or where the slack leaves too little room for swaps.
  std::optional<Candidate> near_ranks_of_many() const {
    Weight most = with_slack(bound_.total, request_.slack);
    if (request_.method != Method::kRefined || request_.num_parts < kMany || request_.home.empty()) return std::nullopt;
    std::optional<Candidate> loaded = as_loaded();
    if (loaded && loaded->total() <= bound_.total) return loaded;
    if (most <= good(bound_.total)) return std::nullopt;
    if (!request_.home_step.empty() && !is_clearly_below_batches(most)) {
      const Candidate alone = batches_alone();
      if (!keeps_cap(alone)) return std::nullopt;
      most = std::min(most, alone.total());
    }
    if (loaded) {
      const bool even = limits_.keep(count_per_part(loaded->cells, num_cells_));
      if (even && loaded->total() <= most) return loaded;
      most = std::min(most, loaded->total() - 1);
    }
    if (most <= good(bound_.total)) return std::nullopt;
    const Weights largest = with_room(share_out(bound_.total, bound_.largest), most);
    const Problem problem = above(largest);
    const Weights sizes = movable(request_.tokens.empty() ? request_.workloads : request_.tokens);
    std::optional<Indices> cells = evenrank::near_ranks_of_many(request_, problem, sizes, largest_of(largest));
    if (!cells || !limits_.keep(count_per_part(*cells, num_cells_))) return std::nullopt;
    Candidate found = candidate(std::move(*cells));
    if (found.total() > most || !keeps_cap(found)) return std::nullopt;
    return found;
  }

  // Largest loads of the steps with a sum of at most `most`: half of the room above `largest` in proportion to the load,
  // half in equal parts, because beside a very heavy step the others have little of their own.
  Weights with_room(Weights largest, Weight most) const {
    const Weight sum = std::accumulate(largest.begin(), largest.end(), Weight{0});
    const Weight room = most - sum;
    const __int128 total = std::max<Weight>(sum, 1);
    for (Weight& load : largest) {
      load += static_cast<Weight>(load * static_cast<__int128>(room) / (2 * total)) + room / (2 * Weight{request_.num_steps});
    }
    return largest;
  }

  // A plan whose sum is at most `most`, which is at least that of `best`, with few tokens that change rank.
  Candidate near_ranks(const Candidate& best, Weight most) const {
    const Weights largest = with_room(best.largest, most);
    const Weight limit = largest_of(largest);
    const Problem problem = above(largest);
    const Home home{take(request_.home, problem.order),
                    movable(take(request_.tokens.empty() ? request_.workloads : request_.tokens, problem.order)),
                    request_.ranks_per_node, request_.num_steps};
    Cap cap;
    if (request_.max_tokens) cap = {take(request_.tokens, problem.order), best.most_tokens};
    const Indices parts = near_home(problem, take(best.cells, problem.order), deal_at_home(problem, home, limit), home,
                                    limit, request_.max_tokens ? &cap : nullptr);
    return candidate(problem.by_sample(parts));
  }

  const Request& request_;
  Index num_cells_;
  Limits limits_;
  Problem problem_;
  GridBound bound_;
};

inline Plan plan_grid(const Request& request) { return GridPlanner(request).plan(); }

}  // namespace evenrank
