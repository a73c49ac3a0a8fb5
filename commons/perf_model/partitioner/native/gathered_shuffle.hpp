// The worker's call: reads the messages of all ranks (or rows as arrays), plans, and makes the exchange of one rank.
#pragma once

#include "routes.hpp"
#include "shuffle.hpp"

namespace evenrank {

constexpr const char* kNoSpeeds =
    "speeds are not positive integers below 2^31, or all workloads × the largest ÷ the smallest speed are 2^61 or more: "
    "scale them down";

// The first numbers of the answer, in the order of SHUFFLE_HEAD in core.py.
enum Head {
  kOtherSteps,  // whether ranks are at different steps
  kSteps,
  kMostWords,
  kNumRows,
  kRoom,  // size of the whole answer
  kIndexRoom,
  kBound,
  kGated,
  kExcessTokens,
  kDigest,
  kChanges,   // whether a row is trained at another place
  kExchange,  // then those of Router::head()
  kHeadSize = kExchange + 6
};

// A message begins with the step and the number of batches; then, for each batch, its rows, real rows and words.
constexpr Weight kMessageNumbers = 2, kBatchNumbers = 3;

class Shuffle {
 public:
  Shuffle(const ShuffleArguments& given, Weight* out, Weight room, Weight* indices, Weight index_room)
      : given_(given), out_(out), at_(out + kHeadSize), room_(room), indices_(indices), index_room_(index_room) {
    require(given.num_ranks > 0 && given.steps > 0 && given.num_ranks <= INT32_MAX / given.steps && room >= kHeadSize,
            "shuffle: sizes do not match");
    require(given.method >= 0 && given.method < static_cast<Weight>(Method::kEnd) && given.slack >= 0 &&
                given.slack <= 1 && given.ranks_per_node > 0 && given.num_keys >= 0 && given.num_kept >= 0,
            "shuffle takes checked arguments: a number is out of its range");
    const auto method = static_cast<Method>(given.method);
    const bool follows_speeds = method == Method::kRefined || method == Method::kLpt;
    require(follows_speeds || speeds_of(given).empty(),
            "ranks have different speeds, and the method makes equal loads: take refined or lpt");
    require(given.parts == nullptr || (given.rank >= 0 && given.rank < given.num_ranks), "shuffle: sizes do not match");
    std::fill_n(out, kHeadSize, 0);
  }

  // Writes the answer; only its head if the room does not suffice, ranks are at different steps, or a message was cut off.
  void run() {
    if (!read_header()) return;
    const Weight num_places = given_.num_ranks * out_[kSteps], num_rows = out_[kNumRows];
    out_[kRoom] = kHeadSize + 7 * num_places + 6 * out_[kSteps] + 4 * num_rows + exchange_room();
    if (out_[kRoom] > room_) return;
    Weight* const rows = take(num_places);
    Weight* const real_rows = take(num_places);
    Weight* const first = take(num_places);
    write_places(rows, real_rows, first);
    Weight* const before = take(num_places);
    Weight* const as_planned = take(num_places);
    Weight* const after = take(num_places);
    Weight* const real_after = take(num_places);
    Weight* const moves = take(6 * out_[kSteps]);
    Weight* const exchange = take(exchange_room());
    Weight* const workloads = take(num_rows);
    Weight* const tokens = take(num_rows);
    Weight* const planned = take(num_rows);
    Weight* const destination = take(num_rows);
    Weights home;
    home.reserve(num_rows);
    for (Weight place = 0; place < num_places; ++place) home.insert(home.end(), real_rows[place], place);
    const GatheredRows gathered{given_.num_ranks, out_[kSteps], num_places, num_rows, rows, real_rows,
                                workloads, tokens, home.data(), packed_rows(real_rows, first)};
    read_rows(gathered.table, workloads, tokens);
    sum_at(gathered.home, workloads, num_rows, num_places, before);
    plan(gathered, before, planned, destination, as_planned, after);
    out_[kChanges] = !std::equal(home.begin(), home.end(), destination);
    count_moves(gathered, destination, given_.ranks_per_node, real_after, moves);
    Digest digest;
    for (const Weight* places : {rows, real_rows}) digest.add(places, num_places);
    for (const Weight* of_rows : {workloads, tokens, destination}) digest.add(of_rows, num_rows);
    const Weights speeds = speeds_of(given_).by_part();
    digest.add(speeds.data(), static_cast<Weight>(speeds.size()));
    out_[kDigest] = digest.value();
    if (given_.parts) route(Router(gathered, destination, real_after, given_), exchange);
  }

 private:
  Weight* take(Weight size) { return std::exchange(at_, at_ + size); }

  // The message of a rank.
  const Weight* message(Weight rank) const { return given_.messages + rank * given_.stride; }
  Weight header_size() const { return kMessageNumbers + kBatchNumbers * given_.steps; }

  // Reads the headers of the messages; returns whether there are rows to plan.
  bool read_header() {
    out_[kSteps] = given_.steps;
    if (given_.messages == nullptr) {
      out_[kNumRows] = total_of(given_.real_rows, given_.num_ranks * given_.steps);
      require(out_[kNumRows] >= 0, "shuffle: sizes do not match");
      return true;
    }
    out_[kSteps] = 0;
    Weight num_rows = 0;
    for (Weight rank = 0; rank < given_.num_ranks; ++rank) {
      const Weight* const said = message(rank);
      const Weight batches = said[1];
      require(batches >= 0 && batches <= given_.steps, kNoTable);
      out_[kOtherSteps] = out_[kOtherSteps] || said[0] != given_.messages[0];
      out_[kSteps] = std::max(out_[kSteps], batches);
      Weight words = 0;
      for (Weight batch = 0; batch < batches; ++batch) {
        const Weight* const numbers = said + kMessageNumbers + kBatchNumbers * batch;
        require(numbers[0] >= numbers[1] && numbers[0] <= INT32_MAX && numbers[1] >= 0 &&
                    numbers[1] <= INT32_MAX - num_rows && numbers[2] >= 0 && numbers[2] <= INT64_MAX - words,
                kNoTable);
        num_rows += numbers[1];
        words += numbers[2];
      }
      out_[kMostWords] = std::max(out_[kMostWords], words);
    }
    out_[kNumRows] = num_rows;
    return given_.has_plan && out_[kSteps] > 0 && !out_[kOtherSteps] && out_[kMostWords] <= given_.capacity;
  }

  void write_places(Weight* rows, Weight* real_rows, Weight* first) const {
    const Weight steps = out_[kSteps];
    for (Weight place = 0; place < given_.num_ranks * steps; ++place) {
      if (given_.messages == nullptr) {
        rows[place] = given_.rows[place];
        real_rows[place] = given_.real_rows[place];
        first[place] = given_.first ? given_.first[place] : 0;
        require(real_rows[place] <= rows[place] && rows[place] <= INT32_MAX, "shuffle: sizes do not match");
        continue;
      }
      const Weight* const said = message(place / steps);
      const Weight batch = place % steps;
      const Weight* const numbers = said + kMessageNumbers + kBatchNumbers * batch;
      const bool brought = batch < said[1];
      rows[place] = brought ? numbers[0] : 0;
      real_rows[place] = brought ? numbers[1] : 0;
      first[place] = batch == 0 ? 0 : first[place - 1] + (numbers - kBatchNumbers)[2] * (batch <= said[1]);
    }
  }

  RowTable packed_rows(const Weight* real_rows, const Weight* first) const {
    const Weight* const words = given_.messages ? given_.messages + header_size() : given_.words;
    const Weight num_words = given_.messages ? given_.num_words - header_size() : given_.num_words;
    const RowTable table{words, first, real_rows, given_.num_ranks, given_.stride, num_words,
                         given_.num_ranks * out_[kSteps], kLengthsFrom + given_.num_keys + given_.num_kept};
    table.require_sizes();
    return table;
  }

  void read_rows(const RowTable& table, Weight* workloads, Weight* tokens) const {
    const Weight num_rows = out_[kNumRows];
    if (given_.messages == nullptr) {
      std::copy_n(given_.workloads, num_rows, workloads);
      std::copy_n(given_.tokens, num_rows, tokens);
    } else {
      read_columns(table, {0, 1}, num_rows, workloads);  // tokens follow workloads in memory
    }
    require(all_within(workloads, num_rows, INT64_MAX, kMostLoad) &&
                all_within(tokens, num_rows, INT64_MAX, kMostLoad),
            "the sum of the workloads or of the tokens of all ranks is 2^62 or more; it must be below: scale them down");
    require(given_.speeds == nullptr || are_speeds_of(given_.speeds, given_.num_ranks, workloads, num_rows), kNoSpeeds);
  }

  void plan(const GatheredRows& rows, const Weight* before, Weight* planned, Weight* destination, Weight* as_planned,
            Weight* after) {
    if (given_.destination) {
      for (Weight row = 0; row < rows.num_rows; ++row) {
        const Weight place = given_.destination[row];
        require(place >= 0 && place < rows.num_places, "shuffle takes a plan: a number is out of its range");
        planned[row] = destination[row] = place;
      }
      for (Weight* const loads : {as_planned, after}) sum_at(planned, rows.workloads, rows.num_rows, rows.num_places, loads);
      return;
    }
    Weights groups(given_.has_groups ? rows.num_rows : 0);
    if (!groups.empty()) {
      require(given_.num_kept > 0, kNoTable);
      read_columns(rows.table, {rows.table.num_columns - 1}, rows.num_rows, groups.data());
    }
    ShufflePlanner planner(rows, groups.empty() ? nullptr : groups.data(), given_);
    const bool is_carried_out = planner.plan(before, planned, destination);
    std::copy(planner.loads.begin(), planner.loads.end(), as_planned);
    std::copy_n(is_carried_out ? as_planned : before, rows.num_places, after);
    out_[kBound] = planner.bound;
    out_[kGated] = planner.gated;
    out_[kExcessTokens] = planner.excess_tokens;
  }

  // The size of the exchange's numbers, see ShufflePlanner.exchange in shuffle_plan.py.
  Weight exchange_room() const {
    if (given_.parts == nullptr) return 0;
    return 3 + 2 * given_.num_ranks + out_[kSteps] * (2 * given_.num_parts + 4 + given_.num_keys);
  }
  void route(Router router, Weight* exchange) {
    out_[kIndexRoom] = router.room();
    if (out_[kIndexRoom] > index_room_) return;
    router.write(indices_);
    const Weights head = router.head(), sizes = router.sizes();
    std::copy(head.begin(), head.end(), out_ + kExchange);
    std::copy(sizes.begin(), sizes.end(), exchange);
  }

  const ShuffleArguments& given_;
  Weight* out_;
  Weight* at_;  // where the answer continues
  Weight room_;
  Weight* indices_;
  Weight index_room_;
};

}  // namespace evenrank
