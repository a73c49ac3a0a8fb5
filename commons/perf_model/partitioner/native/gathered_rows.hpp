// The arguments of the worker's call, and the rows of all ranks.
//
// A place is a rank and a step, rank * steps + step; for one batch it is a rank.
#pragma once

#include "row_table.hpp"

namespace evenrank {

// The messages of all ranks or the rows as arrays, and the settings; see core.py.
struct ShuffleArguments {
  const Weight* messages;     // (num_ranks, stride): header and packed rows of every rank; or null, and rows as arrays:
  const Weight* rows;         // (num_places,)
  const Weight* real_rows;    // (num_places,)
  const Weight* workloads;    // (num_rows,)
  const Weight* tokens;       // (num_rows,)
  const Weight* first;        // (num_places,), where packed rows begin in `words`
  const Weight* words;        // (num_ranks, stride), or null
  const Weight* destination;  // (num_rows,), a finished plan; or null
  const Weight* parts;        // (num_parts, 3), of the payload; or null for no exchange
  const Weight* speeds;       // (num_ranks,), or null
  Weight num_ranks;
  Weight steps;  // with messages, the most batches of a rank
  Weight stride;
  Weight num_words;
  Weight capacity;  // most words of a message
  Weight num_keys;
  Weight num_kept;
  Weight num_parts;
  Weight rank;
  Weight all_gather;
  Weight has_plan;  // whether to plan, or only read the headers
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

  // Without a division if steps is 1, because divisions would take most of the time.
  Weight rank_of(Weight place) const { return steps == 1 ? place : place / steps; }
};

}  // namespace evenrank
