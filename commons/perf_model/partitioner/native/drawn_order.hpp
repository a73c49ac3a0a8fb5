// Puts the steps of a grid in a random order, the same on every machine, so that heavy steps are not always first.
#pragma once

#include "plan.hpp"

namespace evenrank {

// The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
inline std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// 2^64 / golden ratio, the increment of splitmix64.
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

// 0, 1, ..., size - 1 in a random order: Fisher-Yates with splitmix64.
inline Weights shuffled(Weight size, std::uint64_t seed) {
  Weights order(size);
  std::iota(order.begin(), order.end(), Weight{0});
  for (Weight left = size; left > 1; --left) {
    seed += kGolden;
    const auto product = static_cast<unsigned __int128>(mixed(seed)) * static_cast<std::uint64_t>(left);
    std::swap(order[left - 1], order[static_cast<Weight>(product >> 64)]);
  }
  return order;
}

// The plan of a grid with its steps in an order drawn from the seed; unchanged if every row is in its `home_step`.
inline Plan in_drawn_order(Plan plan, Index steps, const Indices& home_step, std::uint64_t seed) {
  Indices step_of = range(static_cast<Index>(plan.loads.size()));
  for (Index& cell : step_of) cell %= steps;
  if (take(step_of, plan.assignment) == home_step) return plan;
  const Weights order = shuffled(steps, seed);
  Indices new_step(steps), new_cell = range(static_cast<Index>(plan.loads.size()));
  for (Index step = 0; step < steps; ++step) new_step[order[step]] = step;
  for (Index& cell : new_cell) cell += new_step[step_of[cell]] - step_of[cell];
  Weights loads(plan.loads.size());
  for (std::size_t cell = 0; cell < loads.size(); ++cell) loads[new_cell[cell]] = plan.loads[cell];
  plan.assignment = take(new_cell, plan.assignment);
  plan.loads = std::move(loads);
  return plan;
}

}  // namespace evenrank
