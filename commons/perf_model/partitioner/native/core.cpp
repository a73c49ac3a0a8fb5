// The plain C library: functions on int64 arrays, called only by core.py beside this folder.
//
// Every function returns 0, or 1 with a message in `error`, of kErrorSize bytes. Functions throw nothing, keep no state and
// do not use Python, so that one file serves every Python version and any number of threads.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "gathered_shuffle.hpp"
#include "padded.hpp"

#ifndef EVENRANK_SOURCES
#define EVENRANK_SOURCES "unknown"
#endif
#ifndef EVENRANK_COMPILER
#define EVENRANK_COMPILER "an unknown compiler"
#endif

namespace {

using namespace evenrank;

constexpr std::size_t kErrorSize = 256;

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

void require_sizes(Weight num_rows, Weight num_parts) {
  require(num_rows > 0 && num_rows <= INT32_MAX && num_parts > 0 && num_parts <= INT32_MAX,
          "there must be at least one row and one partition, and fewer than 2^31 of either");
}

// The fields of the structure in core.py: pointers, int64, and one double. arguments.py has checked them.
struct PlanArguments {
  const Weight* workloads;
  const Weight* tokens;     // or null
  const Weight* home;       // or null
  const Weight* home_step;  // or null
  const Weight* groups;     // or null
  const Weight* speeds;     // (num_parts,), or null
  Weight num_rows;
  Weight num_parts;
  Weight method;
  Weight equal_size;
  Weight has_cap;
  Weight max_tokens;
  Weight ranks_per_node;
  Weight num_steps;  // of a grid; 1 for the plan of a batch
  Weight seed;       // of the order of the steps
  double slack;
};

Request request_of(const PlanArguments& given) {
  require_sizes(given.num_rows, given.num_parts);
  return {values_of<Weights>(given.workloads, given.num_rows),
          static_cast<Index>(given.num_parts),
          static_cast<Method>(given.method),
          given.equal_size != 0,
          values_of<Weights>(given.tokens, given.num_rows),
          given.has_cap ? std::optional(given.max_tokens) : std::nullopt,
          values_of<Indices>(given.home, given.num_rows),
          static_cast<Index>(given.ranks_per_node),
          given.slack,
          static_cast<Index>(given.num_steps),
          values_of<Indices>(given.home_step, given.num_rows),
          values_of<Weights>(given.speeds, given.num_parts)};
}

// A rank's own rows, see shuffle_plan.py.
struct OwnField {
  const Weight* lengths;  // (keys, rows)
  Weight keys;
  Weight sum;
};
struct OwnRows {
  const Weight* workloads;
  const OwnField* fields;
  const Weight* const* kept;  // (rows,) each
  const Weight* counted;
  Weight num_fields;
  Weight num_kept;
  Weight num_counted;
  Weight rows;
  Weight real_rows;
};

// Encodes a rank's rows; returns the number of words, or -1 if a number is invalid.
Weight encode(const OwnRows& own, Weight* words, Weight room) {
  require(0 <= own.real_rows && own.real_rows <= own.rows, "encode_rows: sizes do not match");
  if (!all_within(own.workloads, own.real_rows, INT64_MAX, kMostLoad)) return -1;
  Weights tokens(own.real_rows, own.num_counted == 0);
  std::vector<const Weight*> columns = {own.workloads, tokens.data()};
  for (Weight at = 0; at < own.num_fields; ++at) {
    const OwnField& field = own.fields[at];
    Weight sum = 0;
    for (Weight key = 0; key < field.keys; ++key) {
      const Weight* const of_key = field.lengths + key * own.rows;
      const Weight* const padding = of_key + own.real_rows;
      if (!all_within(of_key, own.real_rows, INT64_MAX, field.sum - sum)) return -1;
      if (std::any_of(padding, of_key + own.rows, [](Weight length) { return length != 0; })) return -1;
      sum = std::accumulate(of_key, padding, sum);
      columns.push_back(of_key);
    }
    if (sum != field.sum) return -1;
  }
  const Weight num_keys = static_cast<Weight>(columns.size()) - kLengthsFrom;
  for (Weight at = 0; at < own.num_counted; ++at) {
    const Weight key = own.counted[at];
    require(key >= 0 && key < num_keys, "encode_rows: a key is out of its range");
    for (Weight row = 0; row < own.real_rows; ++row) tokens[row] += columns[kLengthsFrom + key][row];
  }
  columns.insert(columns.end(), own.kept, own.kept + own.num_kept);
  const Weights encoded = encode_columns(columns, own.real_rows);
  require(static_cast<Weight>(encoded.size()) <= room, "encode_rows: there is no room for the words");
  std::copy(encoded.begin(), encoded.end(), words);
  return static_cast<Weight>(encoded.size());
}

}  // namespace

extern "C" {

// The hash of the library's sources, and the compiler.
const char* evenrank_sources() { return EVENRANK_SOURCES; }
const char* evenrank_compiler() { return EVENRANK_COMPILER; }

// Out: assignment (num_rows,), loads (num_parts * num_steps,), numbers (bound, most tokens).
int evenrank_plan(const PlanArguments* given, Weight* assignment, Weight* loads, Weight* numbers, char* error) {
  return guarded(error, [&] {
    Request request = request_of(*given);
    const auto groups = RowGroups::of(given->groups, given->num_rows, request.equal_size);
    const Plan plan = plan_rows(std::move(request), groups, static_cast<std::uint64_t>(given->seed));
    std::copy(plan.assignment.begin(), plan.assignment.end(), assignment);
    std::copy(plan.loads.begin(), plan.loads.end(), loads);
    numbers[0] = plan.bound;
    numbers[1] = plan.most_tokens;
  });
}

int evenrank_lower_bound(const PlanArguments* given, Weight* bound, char* error) {
  return guarded(error, [&] {
    const Request request = request_of(*given);
    *bound = counting_bound(Problem::of(request.workloads, request.num_parts, request.equal_size)).load;
  });
}

// Swaps rows of the plan `home` until its largest load is near the bound. Out: assignment (num_rows,).
int evenrank_refine(const PlanArguments* given, Weight* assignment, char* error) {
  return guarded(error, [&] {
    const Request request = request_of(*given);
    const auto problem = Problem::of(request.workloads, request.num_parts, request.equal_size);
    const Cap cap = request.cap().in_order(problem.order);
    const Weight target = near(counting_bound(problem).load);
    const Indices parts = refine(problem, take(request.home, problem.order), target, cap);
    const Indices refined = problem.by_sample(parts);
    std::copy(refined.begin(), refined.end(), assignment);
  });
}

// `costs` are in descending order. Out: the sizes of consecutive groups, and their number: `num_groups`, or for 0 the
// fewest that cost at most `max_cost` each.
int evenrank_padded_groups(const Weight* costs, Weight num_rows, Weight num_groups, Weight max_cost, Weight max_rows,
                           Weight steps, Weight* sizes, Weight* count, char* error) {
  return guarded(error, [&] {
    require_sizes(num_rows, 1);
    const PaddedGroups padded(costs, num_rows, max_rows);
    if (num_groups) max_cost = costs[0] * divide_up(num_rows, num_groups);
    *count = num_groups ? num_groups : padded.fewest(max_cost);
    const Weights found = padded.of_least_cost(*count, max_cost, steps);
    std::copy(found.begin(), found.end(), sizes);
  });
}

// Out: the answer, see Shuffle; if its room or that of the index array does not suffice, its head has the sizes needed.
int evenrank_shuffle(const ShuffleArguments* given, Weight* out, Weight room, Weight* indices, Weight index_room,
                     char* error) {
  return guarded(error, [&] { Shuffle(*given, out, room, indices, index_room).run(); });
}

int evenrank_encode_rows(const OwnRows* own, Weight* words, Weight room, Weight* num_words, char* error) {
  return guarded(error, [&] { *num_words = encode(*own, words, room); });
}

// `pieces` are the arrays to read, then the arrays to write.
int evenrank_permute_words(const Weight* lengths, Weight num_segments, const Index* order, Weight num_ordered,
                           const Piece* pieces, Weight num_read, Weight num_pieces, char* error) {
  return guarded(error, [&] {
    const Piece* const written = pieces + num_read;
    permute_words(lengths, num_segments, order, num_ordered, {pieces, written}, {written, pieces + num_pieces});
  });
}

int evenrank_read_columns(const RowTable* table, const Weight* columns, Weight num_columns, Weight num_rows,
                          Weight* out, char* error) {
  return guarded(error, [&] {
    table->require_sizes();
    bool holds = num_rows == total_of(table->real_rows, table->num_places);
    for (Weight at = 0; at < num_columns; ++at) holds = holds && columns[at] >= 0 && columns[at] < table->num_columns;
    require(holds, kNoTable);
    read_columns(*table, values_of<Weights>(columns, num_columns), num_rows, out);
  });
}

Weight evenrank_all_within(const Weight* values, Weight size, Weight largest, Weight largest_sum) {
  return all_within(values, size, largest, largest_sum);
}

// For std::set_terminate: keeps a thread that Python unwinds, so that the main thread can end the process in order.
void evenrank_hold_thread() {
  if (syscall(SYS_gettid) == getpid() || std::current_exception()) std::abort();
  while (true) pause();
}

}  // extern "C"
