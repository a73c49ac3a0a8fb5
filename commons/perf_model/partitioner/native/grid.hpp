// Plans of a grid: deals rows to ranks * steps so that the sum over the steps of the largest load is small.
//
// A step with a very heavy row has room on all other ranks. Rows of other steps can fill it, which makes those steps
// shorter. So every step gets its own limit. The base of a cell is the difference between the largest limit and that of
// its step; then one target serves all cells, and the algorithms for one batch can be used. The cell of rank r and step s
// is r * num_steps + s.
#pragma once

#include "grid_bound.hpp"
#include "home_deal.hpp"
#include "step_shares.hpp"
#include "whole_plan.hpp"

namespace evenrank {

// A sum within 1 + 1 / kGridTolerance of the bound is good enough. Half of this tolerance is room in the limits of the
// steps, half is room above them.
constexpr Weight kGridTolerance = 1000;

// How many lower limits of a step to try, for grids of up to `most` rows times cells; fewer for large grids, where a try
// takes longer.
struct Tries {
  Weight most;
  int number;
};
constexpr std::array<Tries, 3> kTries = {{{1 << 21, 24}, {1 << 24, 8}, {1 << 27, 4}}};

struct Candidate {
  Indices cells;       // by sample
  Weights largest;     // the largest load of each step; with speeds, the largest time
  Weight most_tokens;  // of a cell; see Request

  // The objective: the sum over the steps of the largest load.
  Weight total() const { return sum_of(largest); }

  // Whether it has fewer tokens above the cap, or as many and a smaller sum.
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
        speeds_(request.speeds),
        problem_(Problem::of(request.workloads, num_cells_, request.equal_size, limits_,
                             Speeds(request.speeds, request.num_steps))),
        bound_(bound_within(limits_)) {}

  // The best of three plans: of the grid, of each batch separately, and the rows as they were loaded. If a home is given,
  // then a plan nearly as good in which few rows change rank.
  Plan plan() const {
    std::optional<Candidate> near = near_ranks_of_many();
    Candidate chosen = near ? std::move(*near) : choose(free_plan());
    Weight total = bound_.total;
    if (!problem_.keeps_limits(chosen.cells)) {
      // Only the bound for free sizes holds for loaded rows, or separate batches, of different sizes.
      total = bound_within(Limits::of(static_cast<Weight>(problem_.weights.size()), num_cells_, false)).total;
    }
    Weights loads = sum_by_rank(chosen.cells, request_.workloads, num_cells_);
    return {std::move(chosen.cells), std::move(loads), total, chosen.most_tokens};
  }

 private:
  GridBound bound_within(const Limits& limits) const {
    return grid_bound(problem_.weights, request_.num_parts, request_.num_steps, limits, speeds_, problem_.speeds);
  }

  // `best`, or a plan that it does not beat; with a home, a plan near home within the slack.
  Candidate choose(Candidate best) const {
    std::optional<Candidate> loaded = as_loaded(!keeps_cap(best));
    std::optional<Candidate> alone;
    Weight most = request_.home.empty() ? best.total() : with_slack(best.total(), request_.slack);
    if (!request_.home_step.empty() && !(keeps_cap(best) && is_below_batches(most))) alone = batches_alone();
    // Separate plans of batches of different sizes break equal counts, which only a home justifies.
    if (alone && request_.home.empty() && !problem_.keeps_limits(alone->cells)) alone.reset();
    if (alone && !best.beats(*alone)) return std::move(!loaded || alone->beats(*loaded) ? *alone : *loaded);
    if (request_.home.empty()) return best;
    // The separate plans have used the slack already: a worse plan is not worth its moves.
    if (alone) most = std::min(most, std::max(alone->total(), best.total()));
    if (loaded) {
      if (!keeps_cap(best) || at_home(*loaded).stays(best.total(), most)) return std::move(*loaded);
    }
    return near_ranks(best, most);
  }

  // Equal counts, or free counts with at least one row per cell, because every step needs a batch.
  static Limits limits_of(const Request& request) {
    const Weight num_rows = static_cast<Weight>(request.workloads.size());
    const Weight num_cells = static_cast<Weight>(request.num_parts) * request.num_steps;
    if (request.equal_size || num_rows < num_cells) return Limits::of(num_rows, num_cells, true);
    return {1, num_rows};
  }

  Candidate candidate(Indices cells) const {
    const Weights loads = sum_by_rank(cells, request_.workloads, num_cells_);
    Weights largest = problem_.speeds.times_of_steps(loads.data(), loads.size(), request_.num_steps);
    const Weight most_tokens = request_.most_tokens(cells, num_cells_);
    return {std::move(cells), std::move(largest), most_tokens};
  }

  bool keeps_cap(const Candidate& plan) const { return !request_.max_tokens || plan.most_tokens <= *request_.max_tokens; }

  // `cells`, changed to keep the cap, if there is one.
  Indices capped(const Problem& problem, Indices cells, Weight target) const {
    if (!request_.max_tokens) return cells;
    const bool at_speeds = problem.base.empty() && !speeds_.empty();
    return at_speeds ? under_cap_at_speeds(problem, std::move(cells), target, request_.cap())
                     : under_cap(problem, std::move(cells), target, request_.cap());
  }

  // The problem with the bases for the limits of the steps, so that the largest limit is the target of all cells.
  Problem above(const Weights& largest) const {
    Problem problem = problem_;
    problem.base = bases_of(largest, num_cells_, problem_.speeds);
    return problem;
  }

  // The best plan without regard to home.
  //
  // The refined method first tries limits that add up to the bound, unless they are equal for all steps. Then all methods
  // make even partitions, sorted by load and cut into steps. The refined method improves the better of both step by step;
  // if the two halves of the batches, each planned as a grid, are better, it improves these; so with rows sorted by weight,
  // cut into steps, and each step planned separately. In small grids the plan with equal counts is one more start for free
  // counts, so that these are no worse.
  Candidate free_plan() const {
    const bool is_refined = request_.method == Method::kRefined;
    std::optional<Candidate> best;
    if (is_refined) {
      Weights first = share_out(bound_.total + half(bound_.total), bound_.largest);
      if (num_cells_ >= kMany && !has_places(problem_, first)) {
        first = shares_by_level(problem_, request_.num_steps, bound_.total + half(bound_.total)).value_or(first);
      }
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
    if (halves && halves->beats(*best)) best = lower_steps(std::move(*halves));
    const auto is_good = [&] { return best->total() <= good(bound_.total) && keeps_cap(*best); };
    std::optional<Candidate> sorted = is_good() || num_tries() == 0 ? std::nullopt : sorted_into_steps();
    if (sorted && sorted->beats(*best)) best = lower_steps(std::move(*sorted));
    if (request_.equal_size || is_good() || num_tries() < kTries[0].number) return std::move(*best);
    Request even = request_;
    even.equal_size = true;
    Candidate equal = candidate(GridPlanner(even).free_plan().cells);
    return equal.beats(*best) ? lower_steps(std::move(equal)) : std::move(*best);
  }

  // The batches [0, steps / 2) and the others, each planned as a grid, so that a window is never worse than two windows of
  // half as many batches. Nothing if `best` is within the tolerance of its bound; if it keeps the cap and is not above the
  // sum of the halves' bounds; if batches are not known; or if counts would differ.
  std::optional<Candidate> in_halves(const Candidate& best) const {
    if (request_.home_step.empty() || best.total() <= good(bound_.total)) return std::nullopt;
    const Index middle = request_.num_steps / 2;
    std::array<Indices, 2> rows;
    for (std::size_t row = 0; row < request_.home_step.size(); ++row) {
      rows[request_.home_step[row] >= middle].push_back(static_cast<Index>(row));
    }
    if (rows[0].empty() || rows[1].empty()) return std::nullopt;
    std::array<Request, 2> halves{request_.of_rows(rows[0]), request_.of_rows(rows[1])};
    for (Request& each : halves) each.home.clear();
    for (Index& step : halves[1].home_step) step -= middle;
    halves[0].num_steps = middle;
    halves[1].num_steps = request_.num_steps - middle;
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
    if (!problem_.keeps_limits(cells)) return std::nullopt;
    return candidate(std::move(cells));
  }

  // Lowers the largest load of one step after another by swaps, each time by half of the sum's excess above the bound,
  // until the sum is good, no step can be lowered, or the tries are used up.
  Candidate lower_steps(Candidate best) const {
    Index failed = 0;
    Index step = 0;
    Cap cap = request_.cap().in_order(problem_.order);
    for (int tries = num_tries(); tries > 0; --tries, step = (step + 1) % request_.num_steps) {
      if (failed == request_.num_steps || best.total() <= good(bound_.total)) break;
      Weights wanted = best.largest;
      wanted[step] = std::max<Weight>(wanted[step] - (best.total() - bound_.total) / 2, 0);
      const Problem problem = above(wanted);
      cap.limit = best.most_tokens;
      const Indices parts = refine(problem, take(best.cells, problem.order), largest_of(wanted), cap);
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

  // A plan by LPT and swaps, with a limit for each step.
  Candidate within(const Weights& largest) const {
    const Problem problem = above(largest);
    const Weight target = largest_of(largest) + half(sum_of(largest)) / request_.num_steps;
    Indices parts = refine(problem, lpt(problem), target);
    return candidate(capped(problem, problem.by_sample(parts), target));
  }

  // Even partitions by the algorithm of the request, sorted by load and cut into steps.
  Candidate cut_into_steps() const {
    const Bound bound = bound_of(problem_.weights, num_cells_, limits_, problem_.speeds);
    const Indices cells = planned_under_cap(request_, problem_, bound);
    const Weights loads = sum_by_rank(cells, request_.workloads, num_cells_);
    Indices ranked = range(num_cells_);
    Indices place(num_cells_);
    if (!speeds_.empty()) {  // sort the cells of each rank, because only these are equally fast
      for (Index first = 0; first < num_cells_; first += request_.num_steps) {
        const auto begin = ranked.begin() + first;
        std::sort(begin, begin + request_.num_steps, ByLoad{loads});
        for (Index step = 0; step < request_.num_steps; ++step) place[begin[step]] = first + step;
      }
      return candidate(take(place, cells));
    }
    rank_by_load(loads, ranked);
    for (Index at = 0; at < num_cells_; ++at) {
      place[ranked[at]] = at % request_.num_parts * request_.num_steps + at / request_.num_parts;
    }
    return candidate(take(place, cells));
  }

  // The rows as they were loaded, if that is known and keeps the cap. Where groups were split, rows move anyhow, so that
  // uneven counts are kept only `for_cap`, because the best plan breaks it.
  std::optional<Candidate> as_loaded(bool for_cap = false) const {
    if (request_.home.empty() || request_.home_step.empty()) return std::nullopt;
    Indices cells(request_.home.size());
    for (std::size_t row = 0; row < cells.size(); ++row) {
      cells[row] = request_.home[row] * request_.num_steps + request_.home_step[row];
    }
    Candidate plan = candidate(std::move(cells));
    const bool excused = !request_.home_splits || for_cap || problem_.keeps_limits(plan.cells);
    if (!excused || !keeps_cap(plan)) return std::nullopt;
    return plan;
  }

  AtHome at_home(const Candidate& loaded) const {
    return {loaded.total(), problem_.keeps_limits(loaded.cells), request_.home_splits};
  }

  // Whether `total` is below the sum of the bounds of the batches, so that separate plans cannot be better.
  bool is_below_batches(Weight total) const {
    std::vector<Weights> batches(request_.num_steps);
    for (std::size_t row = 0; row < problem_.order.size(); ++row) {  // heaviest first, so that no batch is sorted again
      batches[request_.home_step[problem_.order[row]]].push_back(problem_.weights[row]);
    }
    for (const Weights& weights : batches) {
      if (weights.empty()) continue;
      const Limits limits = Limits::of(static_cast<Weight>(weights.size()), request_.num_parts, false);
      total -= bound_of(weights, request_.num_parts, limits, speeds_).load;
    }
    return total < 0;
  }

  // A separate plan for each batch.
  const Candidate& batches_alone() const {
    if (!alone_) alone_ = steps_alone(request_, request_.home_step);
    return *alone_;
  }

  // A separate plan for each step, where all have equally many rows, to one, and the first has the heaviest. Nothing if a
  // cell would have no row.
  std::optional<Candidate> sorted_into_steps() const {
    const Weight num_rows = static_cast<Weight>(problem_.order.size());
    Indices step(num_rows);
    for (Weight row = 0; row < num_rows; ++row) {
      step[problem_.order[row]] = static_cast<Index>(row * request_.num_steps / num_rows);
    }
    Request free = request_;
    free.home.clear();
    Candidate plan = steps_alone(free, step);
    if (!problem_.keeps_limits(plan.cells)) return std::nullopt;
    return plan;
  }

  // A separate plan for each step; `step` is by sample.
  Candidate steps_alone(const Request& request, const Indices& step) const {
    Indices cells(step.size());
    for (const Indices& rows : rows_by_part(step, request.num_steps)) {
      if (rows.empty()) continue;
      Request alone = request.of_rows(rows);
      alone.num_steps = 1;
      const Plan plan = make_plan(alone);
      for (std::size_t at = 0; at < rows.size(); ++at) {
        cells[rows[at]] = plan.assignment[at] * request.num_steps + step[rows[at]];
      }
    }
    return candidate(std::move(cells));
  }

  // With many ranks: the rows as they were loaded, or a plan within 1 + slack of the bound in which few tokens change rank.
  // Starts with the rows at home; its time grows with the number of rows that move. Nothing if swaps find no such plan, if
  // the separate plans of batches are no worse, or if the slack leaves too little room for swaps.
  std::optional<Candidate> near_ranks_of_many() const {
    Weight most = with_slack(bound_.total, request_.slack);
    if (request_.method != Method::kRefined || request_.num_parts < kMany || request_.home.empty()) return std::nullopt;
    std::optional<Candidate> loaded = as_loaded();
    if (loaded && loaded->total() <= bound_.total) return loaded;
    if (most <= good(bound_.total)) return std::nullopt;
    if (!request_.home_step.empty() && !is_below_batches(most)) {
      const Candidate& alone = batches_alone();
      if (!keeps_cap(alone)) return std::nullopt;
      most = std::min(most, alone.total());
    }
    if (loaded && at_home(*loaded).stays(bound_.total, most)) return loaded;
    if (most <= good(bound_.total)) return std::nullopt;
    std::optional<Weights> largest = with_room(share_out(bound_.total, bound_.largest), most);
    if (!has_places(problem_, *largest)) {
      largest = shares_by_level(problem_, request_.num_steps, bound_.total);
      largest = largest ? with_room(*largest, most) : shares_by_level(problem_, request_.num_steps, most);
    }
    if (!largest) return std::nullopt;
    return near_ranks_within(*largest, most);
  }

  // A plan near home within the limits of the steps; nothing if swaps find none.
  std::optional<Candidate> near_ranks_within(const Weights& largest, Weight most) const {
    std::optional<Indices> cells = cells_near_ranks(request_, above(largest), largest_of(largest));
    if (!cells || !problem_.keeps_limits(*cells)) return std::nullopt;
    Candidate found = candidate(std::move(*cells));
    if (found.total() > most || !keeps_cap(found)) return std::nullopt;
    return found;
  }

  // A plan with a sum of at most `most` in which few tokens change rank; `most` is at least the sum of `best`.
  Candidate near_ranks(const Candidate& best, Weight most) const {
    const Weights largest = with_room(best.largest, most);
    if (request_.method == Method::kRefined && request_.num_parts >= kMany) {
      if (std::optional<Candidate> found = near_ranks_within(largest, most)) return std::move(*found);
    }
    const Weight limit = largest_of(largest);
    const Problem problem = above(largest);
    const Home home = home_by_row(request_, problem.order, sizes_of(request_));
    Cap cap = request_.cap().in_order(problem.order);
    cap.limit = best.most_tokens;
    const Indices parts = near_home(problem, take(best.cells, problem.order), deal_at_home(problem, home, limit), home,
                                    limit, cap);
    return candidate(problem.by_sample(parts));
  }

  const Request& request_;
  Index num_cells_;
  Limits limits_;
  Speeds speeds_;  // of the ranks
  Problem problem_;
  GridBound bound_;
  mutable std::optional<Candidate> alone_;  // the result of batches_alone()
};

inline Plan plan_grid(const Request& request) { return GridPlanner(request).plan(); }

}  // namespace evenrank
