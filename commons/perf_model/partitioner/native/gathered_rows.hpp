// What one call of the worker is given, and the rows of all ranks that it is about.
//
// A place is rank * steps + step: with one batch a rank, with a window a batch of a rank.
#pragma once

#include "row_table.hpp"

namespace evenrank {

// What ranks say of their rows, or the rows as arrays, and what to do with them; see core.py.
struct ShuffleArguments {
  const Weight* messages;     // (num_ranks, stride): header and packed rows of every rank; or null, and then
  const Weight* rows;         // (num_places,)
  const Weight* real_rows;    // (num_places,)
  const Weight* workloads;    // (num_rows,)
  const Weight* tokens;       // (num_rows,)
  const Weight* first;        // (num_places,), of the packed rows in `words`
  const Weight* words;        // (num_ranks, stride), or null
  const Weight* destination;  // (num_rows,), a plan that has been made; or null
  const Weight* parts;        // (num_parts, 3), of the payload; or null for no exchange
  const Weight* speeds;       // (num_ranks,), or null
  Weight num_ranks;
  Weight steps;  // with messages, the most batches of a rank
  Weight stride;
  Weight num_words;
  Weight capacity;  // words that a message has room for
  Weight num_keys;
  Weight num_kept;
  Weight num_parts;
  Weight rank;
  Weight all_gather;
  Weight has_plan;  // whether to go on behind the header
  Weight method;
  Weight equal_size;
  Weight has_cap;
  Weight max_tokens;
  Weight ranks_per_node;
  Weight carry_out;
  Weight pads;
  Weight has_groups;  // whether the last kept column is the group of each row
  double slack;
  double min_gain;
};

// The rows of a global batch, or of a window of batches.
struct GatheredRows {
  Weight num_ranks;
  Weight steps;
  Weight num_places;
  Weight num_rows;
  const Weight* rows;       // of every place, padding included
  const Weight* real_rows;  // of every place, without padding
  const Weight* workloads;  // of every real row
  const Weight* tokens;
  const Weight* home;  // the place of every real row
  RowTable table;

  // No division where steps is 1: divisions would be most of the time.
  Weight rank_of(Weight place) const { return steps == 1 ? place : place / steps; }
};

}  // namespace evenrank
