// Plans where the rows of a global batch, or of a window of batches, are trained, and decides whether the gain is worth
// moving rows. commons/perf_model/shuffle_plan.py explains the options.
#pragma once

#include "gathered_rows.hpp"
#include "groups.hpp"
#include "row_sums.hpp"

namespace evenrank {

// The speeds of the ranks, each with `steps` places; empty if all are equally fast.
inline Speeds speeds_of(const ShuffleArguments& given, Weight steps = 1) {
  return given.speeds ? Speeds({given.speeds, given.speeds + given.num_ranks}, steps) : Speeds();
}

class ShufflePlanner {
 public:
  // `groups` is (num_rows,), or null.
  ShufflePlanner(const GatheredRows& rows, const Weight* groups, const ShuffleArguments& options)
      : rows_(rows), options_(options), groups_(RowGroups::of(groups, rows.num_rows, options.equal_size != 0)),
        speeds_(speeds_of(options, rows.steps)), splits_(groups_ && !groups_->are_together(rows.home)) {}

  Weight bound = 0;
  bool gated = false;
  Weights loads;  // of the places under `planned`
  Weight excess_tokens = 0;

  // Plans; `before` is the loads of the places at home. Returns whether the plan is carried out. Out: `planned`, the best
  // plan, and `destination`, which is `planned` if it is carried out and else home. It is never worse than home, and it is
  // home if the gain is below min_gain. Only three reasons can move rows at the price of a larger load: home breaks the cap
  // on tokens, home splits a group, or a rank without rows cannot be padded.
  bool plan(const Weight* before, Weight* planned, Weight* destination) {
    if (rows_.num_rows == 0 || (rows_.num_ranks == 1 && !splits_ && !may_keep_cap())) {
      bound = std::accumulate(rows_.workloads, rows_.workloads + rows_.num_rows, Weight{0});
      stay(before, planned);
    } else {
      gated = !is_worth_it(before, planned);
    }
    const bool is_carried_out = options_.carry_out && !gated;
    std::copy_n(is_carried_out ? planned : rows_.home, rows_.num_rows, destination);
    excess_tokens = excess_of(destination);
    return is_carried_out;
  }

 private:
  Index num_ranks() const { return static_cast<Index>(rows_.num_ranks); }

  void stay(const Weight* before, Weight* planned) {
    std::copy_n(rows_.home, rows_.num_rows, planned);
    loads.assign(before, before + rows_.num_places);
  }

  // Whether a window as loaded exceeds the cap on tokens; rows in other steps may keep it.
  bool may_keep_cap() const { return rows_.steps > 1 && excess_of(rows_.home) > 0; }

  // Plans, with home as the plan if nothing is gained; returns whether the gain reaches min_gain.
  bool is_worth_it(const Weight* loads_before, Weight* planned) {
    Plan plan = plan_anew(options_.equal_size, true);
    std::copy(plan.assignment.begin(), plan.assignment.end(), planned);
    if (!options_.pads && rows_.steps == 1 && !has_rows_at(planned)) {
      // A plan near home may leave a rank without rows; one with equal counts does not, if there are enough rows.
      plan = plan_anew(true, false);
      std::copy(plan.assignment.begin(), plan.assignment.end(), planned);
    }
    bound = plan.bound;
    loads = std::move(plan.loads);
    const Weight before = time_of(loads_before), after = time_of(loads.data());
    const Weight excess_before = excess_of(rows_.home), excess_after = excess_of(planned);
    const bool fills = !options_.pads && !has_rows_at(rows_.home) && has_rows_at(planned);
    if (excess_after < excess_before || fills || splits_) return true;
    if (after >= before || excess_after > excess_before) {
      stay(loads_before, planned);
      bound = std::min(bound, before);  // the bound of plans of equal sizes, which home may not have
    }
    const Weight gain = before - after;
    return gain <= 0 || static_cast<double>(gain) / static_cast<double>(before) >= options_.min_gain;
  }

  Request request(bool equal_size, bool near_home) const {
    Request request{{rows_.workloads, rows_.workloads + rows_.num_rows},
                    num_ranks(),
                    static_cast<Method>(options_.method),
                    equal_size,
                    {rows_.tokens, rows_.tokens + rows_.num_rows},
                    options_.has_cap ? std::optional(options_.max_tokens) : std::nullopt,
                    {},
                    static_cast<Index>(options_.ranks_per_node),
                    options_.slack,
                    static_cast<Index>(rows_.steps)};
    request.speeds = speeds_of(options_).by_part();
    request.home.reserve(near_home ? rows_.num_rows : 0);
    request.home_step.reserve(near_home && rows_.steps > 1 ? rows_.num_rows : 0);
    for (Weight place = 0; near_home && place < rows_.num_places; ++place) {  // by place, to avoid a division per row
      const auto rank = static_cast<Index>(place / rows_.steps), step = static_cast<Index>(place % rows_.steps);
      request.home.insert(request.home.end(), rows_.real_rows[place], rank);
      if (rows_.steps > 1) request.home_step.insert(request.home_step.end(), rows_.real_rows[place], step);
    }
    return request;
  }

  // Plans; the steps of a window come in a random order that depends only on the workloads.
  Plan plan_anew(bool equal_size, bool near_home) const {
    Digest drawn_from;
    if (rows_.steps > 1) drawn_from.add(rows_.workloads, rows_.num_rows);
    return plan_rows(request(equal_size, near_home), groups_, static_cast<std::uint64_t>(drawn_from.value()));
  }

  // The sum over the steps of the largest time.
  Weight time_of(const Weight* loads) const {
    return sum_of(speeds_.times_of_steps(loads, rows_.num_places, rows_.steps));
  }

  // By how many tokens the fullest place exceeds the cap.
  Weight excess_of(const Weight* place) const {
    if (!options_.has_cap || rows_.num_rows == 0) return 0;
    Weights sums(rows_.num_places);
    sum_at(place, rows_.tokens, rows_.num_rows, rows_.num_places, sums.data());
    return std::max<Weight>(0, *std::max_element(sums.begin(), sums.end()) - options_.max_tokens);
  }

  bool has_rows_at(const Weight* place) const {
    Weights counts(rows_.num_places);
    sum_at(place, nullptr, rows_.num_rows, rows_.num_places, counts.data());
    return std::all_of(counts.begin(), counts.end(), [](Weight count) { return count > 0; });
  }

  const GatheredRows& rows_;
  const ShuffleArguments& options_;
  const std::optional<RowGroups> groups_;
  const Speeds speeds_;  // of the places
  bool splits_;  // whether a group has rows in several places
};

}  // namespace evenrank
