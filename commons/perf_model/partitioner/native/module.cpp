// The Python module `_native`: int64 arrays in, int64 arrays out, the interpreter lock released in between where it takes long.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "grid.hpp"
#include "routes.hpp"
#include "row_sums.hpp"
#include "row_table.hpp"

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

// Work on fewer numbers keeps the interpreter lock: to wait for it once more holds up its other user for longer.
constexpr Weight kFewNumbers = 1 << 15;

class UnlockedIf {
 public:
  explicit UnlockedIf(bool unlocks) {
    if (unlocks) unlocked_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> unlocked_;
};

evenrank::Method method_of(const std::string& name) {
  const auto found = std::find(kMethods.begin(), kMethods.end(), name);
  require(found != kMethods.end(), "unknown method '" + name + "'");
  return static_cast<evenrank::Method>(found - kMethods.begin());
}

void require_sizes(const Array& workloads, Weight num_parts) {
  require(workloads.size() > 0 && workloads.size() <= INT32_MAX && num_parts > 0 && num_parts <= INT32_MAX,
          "there must be at least one row and one partition, and fewer than 2^31 of either");
}

// How many rows all places have; -1 where a count is negative, or where there are more than a plan can be for, whose sum
// could run over.
Weight total_of(const Weight* counts, Weight num_places) {
  Weight total = 0;
  for (Weight place = 0; place < num_places; ++place) {
    if (counts[place] < 0 || counts[place] > INT32_MAX - total) return -1;
    total += counts[place];
  }
  return total;
}

// Whatever a plan holds, nothing outside its arrays is read or written.
void require_rows(const evenrank::RouteRequest& request) {
  const Weight num_rows = total_of(request.real_rows, request.num_places);
  bool holds = num_rows == request.num_rows;
  for (Index place = 0; place < request.num_places; ++place) {
    holds = holds && request.real_rows[place] <= request.rows[place];
  }
  for (Weight row = 0; holds && row < num_rows; ++row) {
    holds = request.destination[row] >= 0 && request.destination[row] < request.num_places;
  }
  for (const evenrank::PayloadPart& part : request.parts) {
    holds = holds && (part.first_key < 0 || part.first_key + part.num_segments <= request.num_keys);
  }
  require(holds, "route_rows takes a plan: a number is out of its range");
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

Array array_of(const evenrank::Weights& values) {
  return Array(static_cast<py::ssize_t>(values.size()), values.data());
}

using Words = py::array_t<std::int64_t, 0>;  // of any strides

evenrank::RowTable table_of(const Words& words, const Array& first, const Array& real_rows, Weight num_columns) {
  constexpr py::ssize_t kItem = sizeof(std::int64_t);
  const bool holds = words.ndim() == 2 && first.ndim() == 1 && first.size() == real_rows.size() && first.size() <= INT32_MAX &&
               num_columns >= 0 && num_columns <= INT32_MAX &&
               (first.size() == 0 || (words.shape(0) > 0 && first.size() % words.shape(0) == 0)) &&
               words.strides(0) % kItem == 0 && (words.strides(1) == kItem || words.shape(1) <= 1) &&
              total_of(real_rows.data(), real_rows.size()) >= 0;
  require(holds, "a gathered table: sizes do not match");
  return {words.data(),     words.shape(0), words.strides(0) / kItem,         words.shape(1), first.data(),
          real_rows.data(), static_cast<Index>(first.size()), num_columns};
}

py::tuple route_rows(const Array& rows, const Array& real_rows, const Array& destination, const Words& words,
                     const Array& first, Weight num_columns, Weight num_keys, const Array& parts, Weight steps,
                     Weight rank, bool all_gather, bool pads) {
  require(steps > 0 && rows.size() > 0 && rows.size() <= INT32_MAX && rows.size() % steps == 0 && rank >= 0 &&
              rank < rows.size() / steps && real_rows.size() == rows.size() && num_keys >= 0 && parts.ndim() == 2 &&
              parts.shape(1) == 3,
          "route_rows takes a plan: sizes do not match");
  evenrank::RouteRequest request{rows.data(), real_rows.data(), destination.data(),
                                 table_of(words, first, real_rows, num_columns), static_cast<Index>(rows.size()),
                                 destination.size(), num_keys, {}, steps, rank, all_gather, pads};
  for (py::ssize_t part = 0; part < parts.shape(0); ++part) {
    request.parts.push_back({parts.at(part, 0), parts.at(part, 1), parts.at(part, 2)});
  }
  Weight num_segments = 0;
  for (const evenrank::PayloadPart& part : request.parts) num_segments += part.num_segments;
  evenrank::Routes routes;
  {
    // Those of an all-to-all concern few rows but the rank's own.
    const UnlockedIf unlocked(request.num_rows * (all_gather ? num_segments : 1) > kFewNumbers);
    require_rows(request);
    routes = evenrank::route_rows(request);
  }
  return py::make_tuple(array_of(routes.indices), array_of(routes.sizes));
}

// Nothing where a number is not what it must be: numpy finds out which.
std::optional<Array> encode_rows(const Array& workloads, const std::vector<Array>& lengths,
                                 const std::vector<Weight>& sums, const std::vector<Array>& kept,
                                 const std::vector<Weight>& counted, Weight rows, Weight real_rows) {
  require(0 <= real_rows && real_rows <= rows && lengths.size() == sums.size(), "encode_rows: sizes do not match");
  if (workloads.size() != rows || !evenrank::all_within(workloads.data(), real_rows, INT64_MAX, evenrank::kMostLoad)) {
    return std::nullopt;
  }
  evenrank::Weights tokens(real_rows, counted.empty());
  std::vector<const Weight*> columns = {workloads.data(), tokens.data()};
  for (std::size_t field = 0; field < lengths.size(); ++field) {
    const Array& of_field = lengths[field];
    if (of_field.ndim() != 2 || of_field.shape(1) != rows) return std::nullopt;
    Weight sum = 0;
    for (py::ssize_t key = 0; key < of_field.shape(0); ++key) {
      const Weight* const of_key = of_field.data() + key * rows;
      columns.push_back(of_key);
      for (Weight row = 0; row < rows; ++row) {
        if (of_key[row] < 0 || of_key[row] > sums[field] - sum || (row >= real_rows && of_key[row] != 0)) {
          return std::nullopt;
        }
        sum += of_key[row];
      }
    }
    if (sum != sums[field]) return std::nullopt;
  }
  const Weight num_keys = static_cast<Weight>(columns.size()) - evenrank::kLengthsFrom;
  for (const Weight key : counted) {
    require(key >= 0 && key < num_keys, "encode_rows: a key is out of its range");
    for (Weight row = 0; row < real_rows; ++row) tokens[row] += columns[evenrank::kLengthsFrom + key][row];
  }
  for (const Array& values : kept) {
    if (values.ndim() != 1 || values.size() != rows) return std::nullopt;
    columns.push_back(values.data());
  }
  return array_of(evenrank::encode_columns(columns, real_rows));
}

Array read_columns(const Words& words, const Array& first, const Array& real_rows, Weight num_columns,
                   const evenrank::Weights& columns) {
  const evenrank::RowTable table = table_of(words, first, real_rows, num_columns);
  const Weight num_rows = total_of(table.real_rows, table.num_places);
  bool holds = true;
  for (const Weight column : columns) holds = holds && column >= 0 && column < num_columns;
  Array numbers({static_cast<py::ssize_t>(columns.size()), static_cast<py::ssize_t>(num_rows)});
  Weight* const out = numbers.mutable_data();
  {
    const UnlockedIf unlocked(num_rows * static_cast<Weight>(columns.size()) > kFewNumbers);
    holds = holds && evenrank::read_columns(table, columns, num_rows, out);
  }
  require(holds, "a gathered table: a size or column is out of its range");
  return numbers;
}

Array read_rows(const Words& words, const Array& first, const Array& real_rows, Weight num_columns, const Array& rows,
                Weight first_column, Weight count) {
  const evenrank::RowTable table = table_of(words, first, real_rows, num_columns);
  bool holds = first_column >= 0 && count >= 0 && count <= num_columns && first_column <= num_columns - count;
  Array numbers({rows.size(), static_cast<py::ssize_t>(std::max<Weight>(count, 0))});
  Weight* const out = numbers.mutable_data();
  {
    const UnlockedIf unlocked(rows.size() * count > kFewNumbers);
    holds = holds && evenrank::read_rows(table, rows.data(), rows.size(), first_column, count, out);
  }
  require(holds, "a gathered table: a size or column is out of its range");
  return numbers;
}

Array place_of_rows(const Array& real_rows) {
  const Weight* const counts = real_rows.data();
  const Weight num_rows = total_of(counts, real_rows.size());
  require(num_rows >= 0, "place_of_rows takes counts: a number is out of its range");
  Array places(num_rows);
  Weight* out = places.mutable_data();
  {
    const UnlockedIf unlocked(num_rows > kFewNumbers);
    for (py::ssize_t place = 0; place < real_rows.size(); ++place) out = std::fill_n(out, counts[place], place);
  }
  return places;
}

Array sum_at(const Array& place, const std::optional<Array>& values, Weight num_places) {
  require(num_places >= 0 && (!values || values->size() == place.size()), "sum_at: sizes do not match");
  Array sums(num_places);
  Weight* const out = std::fill_n(sums.mutable_data(), num_places, 0) - num_places;
  const Weight* const places = place.data();
  const Weight* const weights = values ? values->data() : nullptr;
  bool holds = true;
  {
    const UnlockedIf unlocked(place.size() > kFewNumbers);
    for (py::ssize_t row = 0; row < place.size(); ++row) {
      holds = holds && places[row] >= 0 && places[row] < num_places;
      if (holds) out[places[row]] += weights ? weights[row] : 1;
    }
  }
  require(holds, "sum_at: a place is out of its range");
  return sums;
}

Array count_moves(const Array& home, const Array& destination, const Array& tokens, Weight steps,
                  Weight ranks_per_node) {
  require(home.size() == tokens.size() && destination.size() == tokens.size() && steps > 0 && ranks_per_node > 0,
          "count_moves takes a plan: sizes do not match");
  py::array_t<std::int64_t, py::array::c_style> counts({py::ssize_t{6}, static_cast<py::ssize_t>(steps)});
  Weight* const out = std::fill_n(counts.mutable_data(), 6 * steps, 0) - 6 * steps;
  const Weight *const from = home.data(), *const to = destination.data(), *const sizes = tokens.data();
  const Weight num_rows = tokens.size();
  bool holds = true;
  {
    const UnlockedIf unlocked(num_rows > kFewNumbers);
    for (Weight row = 0; row < num_rows; ++row) holds = holds && from[row] >= 0 && to[row] >= 0;
    if (holds) evenrank::count_moves(from, to, sizes, num_rows, steps, ranks_per_node, out);
  }
  require(holds, "count_moves takes a plan: a number is out of its range");
  return counts;
}

Weight digest(const std::vector<Array>& arrays) {
  Weight size = 0;
  for (const Array& each : arrays) size += each.size();
  const UnlockedIf unlocked(size > kFewNumbers);
  evenrank::Digest digest;
  for (const Array& each : arrays) digest.add(each.data(), each.size());
  return digest.value();
}

bool all_within(const Array& values, Weight largest, Weight largest_sum) {
  const UnlockedIf unlocked(values.size() > kFewNumbers);
  return evenrank::all_within(values.data(), values.size(), largest, largest_sum);
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
  module.doc() = "The planner and what follows from a plan, in C++; the same as the reference. Arguments are checked by the caller.";
  module.attr("METHODS") = py::tuple(py::cast(kMethods));
  module.attr("PLANS") = evenrank::kPlans;
  module.def("plan", &plan, py::arg("workloads").noconvert(), py::arg("num_parts"), py::arg("method"),
             py::arg("equal_size"), py::arg("tokens").noconvert(), py::arg("max_tokens"), py::arg("home").noconvert(),
             py::arg("ranks_per_node"), py::arg("slack"), py::arg("num_steps") = py::none(),
             py::arg("home_step").noconvert() = py::none(), py::pos_only());
  module.def("route_rows", &route_rows, py::arg("rows").noconvert(), py::arg("real_rows").noconvert(),
             py::arg("destination").noconvert(), py::arg("words").noconvert(), py::arg("first").noconvert(),
             py::arg("num_columns"), py::arg("num_keys"), py::arg("parts").noconvert(), py::arg("steps"),
             py::arg("rank"), py::arg("all_gather"), py::arg("pads"), py::pos_only());
  module.def("encode_rows", &encode_rows, py::arg("workloads").noconvert(), py::arg("lengths"), py::arg("sums"),
             py::arg("kept"), py::arg("counted"), py::arg("rows"), py::arg("real_rows"), py::pos_only());
  module.def("read_columns", &read_columns, py::arg("words").noconvert(), py::arg("first"), py::arg("real_rows"),
             py::arg("num_columns"), py::arg("columns"), py::pos_only());
  module.def("read_rows", &read_rows, py::arg("words").noconvert(), py::arg("first"), py::arg("real_rows"),
             py::arg("num_columns"), py::arg("rows"), py::arg("first_column"), py::arg("count"), py::pos_only());
  module.def("place_of_rows", &place_of_rows, py::arg("real_rows"), py::pos_only());
  module.def("sum_at", &sum_at, py::arg("place"), py::arg("values"), py::arg("num_places"), py::pos_only());
  module.def("count_moves", &count_moves, py::arg("home"), py::arg("destination"), py::arg("tokens"),
             py::arg("steps"), py::arg("ranks_per_node"), py::pos_only());
  module.def("digest", &digest, py::arg("arrays"), py::pos_only());
  module.def("all_within", &all_within, py::arg("values").noconvert(), py::arg("largest"), py::arg("largest_sum"),
             py::pos_only());
  module.def("lower_bound", &lower_bound, py::arg("workloads").noconvert(), py::arg("num_parts"),
             py::arg("equal_size"), py::pos_only());
}
