// The plain C library: int64 arrays in, int64 arrays out. core.py beside this folder is the only caller.
//
// Every function returns 0, or 1 and a message in `error`, which has room for kErrorSize bytes. It throws nothing, keeps
// nothing and knows no Python, so that one file serves every Python and any number of threads.
#include <cstdio>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "grid.hpp"
#include "routes.hpp"
#include "row_sums.hpp"
#include "row_table.hpp"

#ifndef EVENRANK_SOURCES
#define EVENRANK_SOURCES "unknown"
#endif
#ifndef EVENRANK_COMPILER
#define EVENRANK_COMPILER "an unknown compiler"
#endif

namespace {

using evenrank::Index;
using evenrank::Weight;

constexpr std::size_t kErrorSize = 256;

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

template <typename Work>
int guarded(char* error, const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    std::snprintf(error, kErrorSize, "out of memory");
  } catch (const std::exception& failure) {
    std::snprintf(error, kErrorSize, "%s", failure.what());
  }
  return 1;
}

template <typename Values>
Values values_of(const Weight* values, Weight size) {
  return values == nullptr ? Values{} : Values(values, values + size);
}

// How many rows all places have; -1 where a count is negative, or where there are more than a plan can be for, whose sum
// could overflow.
Weight total_of(const Weight* counts, Weight num_places) {
  Weight total = 0;
  for (Weight place = 0; place < num_places; ++place) {
    if (counts[place] < 0 || counts[place] > INT32_MAX - total) return -1;
    total += counts[place];
  }
  return total;
}

void require_sizes(Weight num_rows, Weight num_parts) {
  require(num_rows > 0 && num_rows <= INT32_MAX && num_parts > 0 && num_parts <= INT32_MAX,
          "there must be at least one row and one partition, and fewer than 2^31 of either");
}

// The widths that core.py's structures have: pointers and int64 alone, and one double.
struct PlanArguments {
  const Weight* workloads;
  const Weight* tokens;     // or null
  const Weight* home;       // or null
  const Weight* home_step;  // or null
  Weight num_rows;
  Weight num_parts;
  Weight method;
  Weight equal_size;
  Weight has_cap;
  Weight max_tokens;
  Weight ranks_per_node;
  Weight num_steps;  // 0 for a plan that is no grid
  double slack;
};

evenrank::Request request_of(const PlanArguments& given) {
  require_sizes(given.num_rows, given.num_parts);
  require(given.num_steps >= 0 && given.num_steps <= INT32_MAX / given.num_parts,
          "there must be fewer than 2^31 cells");
  require(given.method >= 0 && given.method <= static_cast<Weight>(evenrank::Method::kSnake), "unknown method");
  require((given.tokens || !given.has_cap) && (given.num_steps || !given.home_step) && given.ranks_per_node > 0 &&
              given.slack >= 0 && given.slack <= 1,
          "plan takes checked arguments: a number is out of its range");
  const auto within = [&](const Weight* values, Weight largest, Weight largest_sum) {
    return values == nullptr || evenrank::all_within(values, given.num_rows, largest, largest_sum);
  };
  require(within(given.workloads, INT64_MAX, evenrank::kMostLoad) && within(given.tokens, INT64_MAX, evenrank::kMostLoad) &&
              within(given.home, given.num_parts - 1, INT64_MAX) && within(given.home_step, given.num_steps - 1, INT64_MAX),
          "plan takes checked arguments: a number is out of its range");
  evenrank::Request request{values_of<evenrank::Weights>(given.workloads, given.num_rows),
                            static_cast<Index>(given.num_parts),
                            static_cast<evenrank::Method>(given.method),
                            given.equal_size != 0,
                            values_of<evenrank::Weights>(given.tokens, given.num_rows),
                            std::nullopt,
                            values_of<evenrank::Indices>(given.home, given.num_rows),
                            static_cast<Index>(std::min(given.ranks_per_node, given.num_parts)),
                            given.slack,
                            static_cast<Index>(std::max<Weight>(given.num_steps, 1)),
                            values_of<evenrank::Indices>(given.home_step, given.num_rows)};
  if (given.has_cap) request.max_tokens = given.max_tokens;
  return request;
}

// The words of all ranks, see row_table.hpp.
struct TableArguments {
  const Weight* words;
  const Weight* first;
  const Weight* real_rows;
  Weight num_ranks;
  Weight stride;
  Weight num_words;
  Weight num_places;
  Weight num_columns;
};

evenrank::RowTable table_of(const TableArguments& given) {
  const bool holds = given.num_places >= 0 && given.num_places <= INT32_MAX && given.num_columns >= 0 &&
                     given.num_columns <= INT32_MAX && given.num_words >= 0 &&
                     (given.num_places == 0 || (given.num_ranks > 0 && given.num_places % given.num_ranks == 0)) &&
                     total_of(given.real_rows, given.num_places) >= 0;
  require(holds, "a gathered table: sizes do not match");
  return {given.words,     given.num_ranks, given.stride,                          given.num_words, given.first,
          given.real_rows, static_cast<Index>(given.num_places), given.num_columns};
}

struct RouteArguments {
  const Weight* rows;
  const Weight* real_rows;
  const Weight* destination;
  const Weight* parts;  // (num_parts, 3)
  TableArguments table;
  Weight num_places;
  Weight num_rows;
  Weight num_keys;
  Weight num_parts;
  Weight steps;
  Weight rank;
  Weight all_gather;
  Weight pads;
};

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
    holds = holds && part.num_segments >= 0 && part.words >= 0 &&
            (part.first_key < 0 || part.num_segments <= request.num_keys - part.first_key);
  }
  require(holds, "route_rows takes a plan: a number is out of its range");
}

evenrank::RouteRequest route_request_of(const RouteArguments& given) {
  require(given.steps > 0 && given.num_places > 0 && given.num_places <= INT32_MAX &&
              given.num_places % given.steps == 0 && given.rank >= 0 &&
              given.rank < given.num_places / given.steps && given.num_keys >= 0,
          "route_rows takes a plan: sizes do not match");
  evenrank::RouteRequest request{given.rows,
                                 given.real_rows,
                                 given.destination,
                                 table_of(given.table),
                                 static_cast<Index>(given.num_places),
                                 given.num_rows,
                                 given.num_keys,
                                 {},
                                 given.steps,
                                 given.rank,
                                 given.all_gather != 0,
                                 given.pads != 0};
  for (Weight part = 0; part < given.num_parts; ++part) {
    const Weight* const numbers = given.parts + 3 * part;
    request.parts.push_back({numbers[0], numbers[1], numbers[2]});
  }
  require_rows(request);
  return request;
}

// A rank's own rows, see row_table.py.
struct OwnRows {
  const Weight* workloads;
  const Weight* const* lengths;  // of every field (keys, rows)
  const Weight* keys;            // of every field
  const Weight* sums;            // of every field
  const Weight* const* kept;     // (rows,) each
  const Weight* counted;
  Weight num_fields;
  Weight num_kept;
  Weight num_counted;
  Weight rows;
  Weight real_rows;
};

// The number of words; -1 where a number is not what it must be.
Weight encode(const OwnRows& own, Weight* words, Weight room) {
  require(0 <= own.real_rows && own.real_rows <= own.rows, "encode_rows: sizes do not match");
  if (!evenrank::all_within(own.workloads, own.real_rows, INT64_MAX, evenrank::kMostLoad)) return -1;
  evenrank::Weights tokens(own.real_rows, own.num_counted == 0);
  std::vector<const Weight*> columns = {own.workloads, tokens.data()};
  for (Weight field = 0; field < own.num_fields; ++field) {
    Weight sum = 0;
    for (Weight key = 0; key < own.keys[field]; ++key) {
      const Weight* const of_key = own.lengths[field] + key * own.rows;
      columns.push_back(of_key);
      for (Weight row = 0; row < own.rows; ++row) {
        if (of_key[row] < 0 || of_key[row] > own.sums[field] - sum || (row >= own.real_rows && of_key[row] != 0)) {
          return -1;
        }
        sum += of_key[row];
      }
    }
    if (sum != own.sums[field]) return -1;
  }
  const Weight num_keys = static_cast<Weight>(columns.size()) - evenrank::kLengthsFrom;
  for (Weight at = 0; at < own.num_counted; ++at) {
    const Weight key = own.counted[at];
    require(key >= 0 && key < num_keys, "encode_rows: a key is out of its range");
    for (Weight row = 0; row < own.real_rows; ++row) tokens[row] += columns[evenrank::kLengthsFrom + key][row];
  }
  columns.insert(columns.end(), own.kept, own.kept + own.num_kept);
  const evenrank::Weights encoded = evenrank::encode_columns(columns, own.real_rows);
  require(static_cast<Weight>(encoded.size()) <= room, "encode_rows: there is no room for the words");
  std::copy(encoded.begin(), encoded.end(), words);
  return static_cast<Weight>(encoded.size());
}

}  // namespace

extern "C" {

// Which sources the library was built from, and by what.
const char* evenrank_sources() { return EVENRANK_SOURCES; }
const char* evenrank_compiler() { return EVENRANK_COMPILER; }

// out: assignment (num_rows,), loads (num_parts * max(1, num_steps),), and the bound and the most tokens.
int evenrank_plan(const PlanArguments* given, Weight* assignment, Weight* loads, Weight* numbers, char* error) {
  return guarded(error, [&] {
    const evenrank::Request request = request_of(*given);
    const evenrank::Plan plan = given->num_steps ? evenrank::plan_grid(request) : evenrank::make_plan(request);
    std::copy(plan.assignment.begin(), plan.assignment.end(), assignment);
    std::copy(plan.loads.begin(), plan.loads.end(), loads);
    numbers[0] = plan.bound;
    numbers[1] = plan.most_tokens;
  });
}

int evenrank_lower_bound(const Weight* workloads, Weight num_rows, Weight num_parts, Weight equal_size, Weight* bound,
                         char* error) {
  return guarded(error, [&] {
    require_sizes(num_rows, num_parts);
    const auto problem = evenrank::Problem::of(values_of<evenrank::Weights>(workloads, num_rows),
                                               static_cast<Index>(num_parts), equal_size != 0);
    *bound = evenrank::counting_bound(problem.weights, problem.num_parts, problem.limits).load;
  });
}

// Swaps rows of a plan until its largest load is near the bound; in and out: assignment (num_rows,).
int evenrank_refine(const PlanArguments* given, Weight* assignment, char* error) {
  return guarded(error, [&] {
    const evenrank::Request request = request_of(*given);
    for (Weight row = 0; row < given->num_rows; ++row) {
      require(assignment[row] >= 0 && assignment[row] < given->num_parts, "refine: a partition is out of its range");
    }
    const auto problem = evenrank::Problem::of(request.workloads, request.num_parts, request.equal_size);
    std::optional<evenrank::Cap> cap;
    if (request.max_tokens) cap = evenrank::Cap{evenrank::take(request.tokens, problem.order), *request.max_tokens};
    const Weight target =
        evenrank::near(evenrank::counting_bound(problem.weights, problem.num_parts, problem.limits).load);
    const auto parts = values_of<evenrank::Indices>(assignment, given->num_rows);
    const evenrank::Indices refined =
        problem.by_sample(evenrank::refine(problem, evenrank::take(parts, problem.order), target, cap ? &*cap : nullptr));
    std::copy(refined.begin(), refined.end(), assignment);
  });
}

// `result` holds the arrays until evenrank_take_routes; sizes (2,): of the indices and of the numbers beside them.
int evenrank_route_rows(const RouteArguments* given, void** result, Weight* sizes, char* error) {
  return guarded(error, [&] {
    auto routes = std::make_unique<evenrank::Routes>(evenrank::route_rows(route_request_of(*given)));
    sizes[0] = static_cast<Weight>(routes->indices.size());
    sizes[1] = static_cast<Weight>(routes->sizes.size());
    *result = routes.release();
  });
}

void evenrank_take_routes(void* result, Weight* indices, Weight* sizes) {
  const std::unique_ptr<evenrank::Routes> routes(static_cast<evenrank::Routes*>(result));
  std::copy(routes->indices.begin(), routes->indices.end(), indices);
  std::copy(routes->sizes.begin(), routes->sizes.end(), sizes);
}

int evenrank_encode_rows(const OwnRows* own, Weight* words, Weight room, Weight* num_words, char* error) {
  return guarded(error, [&] { *num_words = encode(*own, words, room); });
}

int evenrank_read_columns(const TableArguments* given, const Weight* columns, Weight num_columns, Weight num_rows,
                          Weight* out, char* error) {
  return guarded(error, [&] {
    const evenrank::RowTable table = table_of(*given);
    bool holds = num_rows == total_of(table.real_rows, table.num_places);
    for (Weight at = 0; at < num_columns; ++at) holds = holds && columns[at] >= 0 && columns[at] < table.num_columns;
    holds = holds && evenrank::read_columns(table, values_of<evenrank::Weights>(columns, num_columns), num_rows, out);
    require(holds, "a gathered table: a size or column is out of its range");
  });
}

int evenrank_read_rows(const TableArguments* given, const Weight* rows, Weight num_rows, Weight first_column,
                       Weight count, Weight* out, char* error) {
  return guarded(error, [&] {
    const evenrank::RowTable table = table_of(*given);
    const bool holds = first_column >= 0 && count >= 0 && count <= table.num_columns &&
                       first_column <= table.num_columns - count &&
                       evenrank::read_rows(table, rows, num_rows, first_column, count, out);
    require(holds, "a gathered table: a size or column is out of its range");
  });
}

int evenrank_place_of_rows(const Weight* real_rows, Weight num_places, Weight num_rows, Weight* places, char* error) {
  return guarded(error, [&] {
    require(num_rows == total_of(real_rows, num_places), "place_of_rows takes counts: a number is out of its range");
    for (Weight place = 0; place < num_places; ++place) places = std::fill_n(places, real_rows[place], place);
  });
}

// `values` may be null, then rows are counted.
int evenrank_sum_at(const Weight* place, const Weight* values, Weight num_rows, Weight* sums, Weight num_places,
                    char* error) {
  return guarded(error, [&] {
    std::fill_n(sums, num_places, 0);
    for (Weight row = 0; row < num_rows; ++row) {
      require(place[row] >= 0 && place[row] < num_places, "sum_at: a place is out of its range");
      sums[place[row]] += values ? values[row] : 1;
    }
  });
}

// counts (6, steps)
int evenrank_count_moves(const Weight* home, const Weight* destination, const Weight* tokens, Weight num_rows,
                         Weight steps, Weight ranks_per_node, Weight* counts, char* error) {
  return guarded(error, [&] {
    bool holds = steps > 0 && ranks_per_node > 0;
    for (Weight row = 0; row < num_rows; ++row) holds = holds && home[row] >= 0 && destination[row] >= 0;
    require(holds, "count_moves takes a plan: a number is out of its range");
    std::fill_n(counts, 6 * steps, 0);
    evenrank::count_moves(home, destination, tokens, num_rows, steps, ranks_per_node, counts);
  });
}

Weight evenrank_digest(const Weight* const* arrays, const Weight* sizes, Weight num_arrays) {
  evenrank::Digest digest;
  for (Weight at = 0; at < num_arrays; ++at) digest.add(arrays[at], sizes[at]);
  return digest.value();
}

Weight evenrank_all_within(const Weight* values, Weight size, Weight largest, Weight largest_sum) {
  return evenrank::all_within(values, size, largest, largest_sum);
}

}  // extern "C"
