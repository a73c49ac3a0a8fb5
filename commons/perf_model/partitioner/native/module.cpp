// The Python module `_native`: int64 arrays in, int64 arrays out, the interpreter lock released in between.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "grid.hpp"

namespace py = pybind11;

namespace {

using Array = py::array_t<std::int64_t, py::array::c_style>;
using evenrank::Index;
using evenrank::Weight;

const std::array<std::string, 4> kMethods = {"karmarkar_karp", "lpt", "refined", "snake"};

template <typename Values>
Values values_of(const Array& array) {
  return {array.data(), array.data() + array.size()};
}

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw py::value_error(otherwise);
}

evenrank::Method method_of(const std::string& name) {
  const auto found = std::find(kMethods.begin(), kMethods.end(), name);
  require(found != kMethods.end(), "unknown method '" + name + "'");
  return static_cast<evenrank::Method>(found - kMethods.begin());
}

void require_sizes(const Array& workloads, Weight num_parts) {
  require(workloads.size() > 0 && workloads.size() <= INT32_MAX && num_parts > 0 && num_parts <= INT32_MAX,
          "there must be at least one row and one partition, and fewer than 2^31 of either");
}

py::tuple plan(const Array& workloads, Weight num_parts, const std::string& method, bool equal_size,
               const std::optional<Array>& tokens, std::optional<Weight> max_tokens, const std::optional<Array>& home,
               Weight ranks_per_node, double slack, std::optional<Weight> num_steps,
               const std::optional<Array>& home_step) {
  require_sizes(workloads, num_parts);
  require(!num_steps || (*num_steps > 0 && *num_steps <= INT32_MAX / num_parts),
          "there must be at least one step, and fewer than 2^31 cells");
  const py::ssize_t num_rows = workloads.size();
  require((!tokens || tokens->size() == num_rows) && (!home || home->size() == num_rows) &&
              (!home_step || (home_step->size() == num_rows && num_steps)) && (tokens || !max_tokens) &&
              ranks_per_node > 0 && slack >= 0 && slack <= 1,
          "plan takes checked arguments: sizes do not match, or a number is out of its range");
  evenrank::Request request{{}, static_cast<Index>(num_parts), method_of(method), equal_size, {}, max_tokens, {},
                            static_cast<Index>(std::min(ranks_per_node, num_parts)), slack,
                            static_cast<Index>(num_steps.value_or(1))};
  Array assignment(num_rows), loads(num_parts * request.num_steps);
  std::int64_t* const assignment_out = assignment.mutable_data();
  std::int64_t* const loads_out = loads.mutable_data();
  evenrank::Plan plan;
  {
    const py::gil_scoped_release unlocked;
    request.workloads = values_of<evenrank::Weights>(workloads);
    if (tokens) request.tokens = values_of<evenrank::Weights>(*tokens);
    if (home) request.home = values_of<evenrank::Indices>(*home);
    if (home_step) request.home_step = values_of<evenrank::Indices>(*home_step);
    plan = num_steps ? evenrank::plan_grid(request) : evenrank::make_plan(request);
    std::copy(plan.assignment.begin(), plan.assignment.end(), assignment_out);
    std::copy(plan.loads.begin(), plan.loads.end(), loads_out);
  }
  return py::make_tuple(assignment, loads, plan.bound, plan.most_tokens);
}

Weight lower_bound(const Array& workloads, Weight num_parts, bool equal_size) {
  require_sizes(workloads, num_parts);
  const py::gil_scoped_release unlocked;
  const auto problem = evenrank::Problem::of(values_of<evenrank::Weights>(workloads),
                                             static_cast<Index>(num_parts), equal_size);
  return evenrank::counting_bound(problem.weights, problem.num_parts, problem.limits).load;
}

}  // namespace

PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.doc() = "The planner in C++; the same plans as the reference. Arguments are checked by the caller.";
  module.attr("METHODS") = py::tuple(py::cast(kMethods));
  module.attr("PLANS") = evenrank::kPlans;
  module.def("plan", &plan, py::arg("workloads").noconvert(), py::arg("num_parts"), py::arg("method"),
             py::arg("equal_size"), py::arg("tokens").noconvert(), py::arg("max_tokens"), py::arg("home").noconvert(),
             py::arg("ranks_per_node"), py::arg("slack"), py::arg("num_steps") = py::none(),
             py::arg("home_step").noconvert() = py::none(), py::pos_only());
  module.def("lower_bound", &lower_bound, py::arg("workloads").noconvert(), py::arg("num_parts"),
             py::arg("equal_size"), py::pos_only());
}
