// Groups of rows that stay together: each is planned like one row, with the sums of its rows' workloads and tokens.
#pragma once

#include <stdexcept>
#include <string>
#include <unordered_map>

#include "drawn_order.hpp"
#include "grid.hpp"

namespace evenrank {

class RowGroups {
 public:
  // The groups of int64 (num_rows,) numbers; nothing for null. Throws unless equal counts of rows are possible, if these are
  // required: all groups have the same size.
  static std::optional<RowGroups> of(const Weight* numbers, Weight num_rows, bool equal_size) {
    if (!numbers) return std::nullopt;
    RowGroups groups(numbers, num_rows);
    if (equal_size) groups.require_equal_sizes();
    return groups;
  }

  // The request with one row for each group.
  Request merged(Request request) const {
    if (!request.home.empty() || !request.home_step.empty()) bring_home(request);
    request.workloads = sums(request.workloads);
    request.tokens = sums(request.tokens);
    return request;
  }

  // Converts values by group to values by row.
  Indices by_row(const Indices& by_group) const { return take(by_group, group_of_); }

  // Whether all rows of every group are at one place; `place` is int64 (num_rows,).
  bool are_together(const Weight* place) const {
    Weights first(sizes_.size(), -1);
    for (std::size_t row = 0; row < group_of_.size(); ++row) {
      Weight& of_group = first[group_of_[row]];
      if (of_group < 0) of_group = place[row];
      if (of_group != place[row]) return false;
    }
    return true;
  }

 private:
  // Rows with equal numbers are a group; groups are numbered in the order of their first rows.
  RowGroups(const Weight* numbers, Weight num_rows) {
    std::unordered_map<Weight, Index> known;
    group_of_.reserve(num_rows);
    for (Weight row = 0; row < num_rows; ++row) {
      const auto [found, is_new] = known.try_emplace(numbers[row], static_cast<Index>(sizes_.size()));
      if (is_new) sizes_.push_back(0);
      group_of_.push_back(found->second);
      ++sizes_[found->second];
    }
  }

  void require_equal_sizes() const {
    if (sizes_.empty()) return;
    const auto [least, most] = std::minmax_element(sizes_.begin(), sizes_.end());
    if (*least == *most) return;
    throw std::invalid_argument("groups have " + std::to_string(*least) + " to " + std::to_string(*most) +
                                " rows, equal_size is True; partitions have equally many rows only if groups do: pass "
                                "equal_size=False, or groups of one size");
  }

  // The sums of the values by group; empty for empty values.
  Weights sums(const Weights& values) const {
    if (values.empty()) return values;
    Weights sums(sizes_.size(), 0);
    for (std::size_t row = 0; row < values.size(); ++row) sums[group_of_[row]] += values[row];
    return sums;
  }

  // Sets the home of each group: the place with the largest cost of moving its rows, the first one in a tie.
  void bring_home(Request& request) const {
    const Weights costs = sizes_of(request);
    const bool has_home = !request.home.empty(), has_steps = !request.home_step.empty();
    const Weight steps = request.num_steps;
    const auto place_of = [&](std::size_t row) {
      return (has_home ? request.home[row] * steps : 0) + (has_steps ? request.home_step[row] : 0);
    };
    const Weight num_places = request.num_parts * steps;
    std::vector<std::pair<Weight, Weight>> cost_at(costs.size());  // of each row, by group and place
    for (std::size_t row = 0; row < costs.size(); ++row) {
      cost_at[row] = {group_of_[row] * num_places + place_of(row), costs[row]};
    }
    std::sort(cost_at.begin(), cost_at.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
    Weights most(sizes_.size(), -1), place(sizes_.size());
    for (auto row = cost_at.begin(); row != cost_at.end();) {
      const Weight at = row->first, group = at / num_places;
      Weight cost = 0;
      for (; row != cost_at.end() && row->first == at; ++row) cost += row->second;
      if (cost > most[group]) most[group] = cost, place[group] = at - group * num_places;
    }
    for (std::size_t row = 0; row < costs.size(); ++row) request.home_splits |= place_of(row) != place[group_of_[row]];
    request.home.resize(has_home ? place.size() : 0);
    request.home_step.resize(has_steps ? place.size() : 0);
    for (std::size_t group = 0; group < place.size(); ++group) {
      if (has_home) request.home[group] = static_cast<Index>(place[group] / steps);
      if (has_steps) request.home_step[group] = static_cast<Index>(place[group] % steps);
    }
  }

  Indices group_of_;  // by row
  Weights sizes_;     // by group
};

// Plans a batch or a grid, with each group as one row. The steps of a grid come in an order drawn from `seed`.
inline Plan plan_rows(Request request, const std::optional<RowGroups>& groups, std::uint64_t seed) {
  const Index steps = request.num_steps;
  const Indices home_step = request.home_step;
  if (groups) request = groups->merged(std::move(request));
  Plan plan = steps > 1 ? plan_grid(request) : make_plan(request);
  if (groups) plan.assignment = groups->by_row(plan.assignment);
  if (steps > 1) plan = in_drawn_order(std::move(plan), steps, home_step, seed);
  return plan;
}

}  // namespace evenrank
