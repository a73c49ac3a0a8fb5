// From a plan to one rank's index array: which segment of which row lies where, who gets it, and how long it is.
// commons/distributed/exchange/row_exchange.py names the results.
//
// The rank exchanges rows through a buffer of 4-byte words. A segment is the words of one key (or of a dense part) of
// one row. The buffer has three regions:
//   own        per batch that the rank brought: the segments of all its rows, padding included, key by key; then a
//              segment that aligns the next batch
//   received   the rows that arrive, by sender, row by row; in an all-gather what every rank sends, a block per sender
//              that ends in a segment that pads it to the largest sender
//   zero row   one row of padding
// Sent rows are sorted by sender, receiver and row, on every rank alike.
//
// The index array holds, one after another: the words of every segment of the buffer; by result (a batch that the rank
// trains) the lengths (num_keys, rows) and what else the host keeps of its rows (num_kept, rows); then, as int32, the
// segments of the own region that are sent and, by result, the segments of the buffer that it is made of. Only the lengths
// of rows that concern this rank are read.
#pragma once

#include <stdexcept>

#include "row_table.hpp"

namespace evenrank {

// Every batch in the buffer begins at a multiple of the largest element, a complex number of two doubles.
constexpr Weight kAlignedWords = 4;

struct PayloadPart {
  Weight first_key;     // its first column in the table of lengths; negative for a dense part
  Weight num_segments;  // of a row
  Weight words;         // of an element; of a dense part, of a row
};

// A place is rank * steps + step.
struct RouteRequest {
  const Weight* rows;         // of every place, padding included
  const Weight* real_rows;    // of every place, without padding
  const Weight* real_after;   // of every place, when the rows are where they are trained
  const Weight* destination;  // the place that trains each real row
  RowTable table;
  Index num_places;
  Weight num_keys;
  Weight num_kept;
  std::vector<PayloadPart> parts;
  Weight steps;
  Weight rank;
  bool all_gather;  // whether every rank receives all rows that move, else only those it trains
  bool pads;        // whether results are padded to the rows of their place, or one
};

// Rows of a place when they are where they are trained, with padding.
inline Weight result_rows(const RouteRequest& request, Weight place) {
  const Weight real = request.real_after[place];
  return request.pads ? std::max({Weight{1}, request.rows[place], real}) : real;
}

class Router {
 public:
  explicit Router(const RouteRequest& request) : request_(request), first_of_place_(request.num_places + 1, 0) {
    for (const PayloadPart& part : request.parts) {
      for (Weight segment = 0; segment < part.num_segments; ++segment) {
        segments_.push_back({part.first_key < 0 ? kNoKey : part.first_key + segment, part.words});
      }
    }
    for (Index place = 0; place < request.num_places; ++place) {
      first_of_place_[place + 1] = first_of_place_[place] + request.real_rows[place];
    }
    find_moved();
  }

  // Numbers of the index array: the int64 ones, then two int32 in each.
  Weight room() const { return num_lengths() + (num_orders() + 1) / 2; }

  // Writes the index array, which has `room()` numbers.
  void write(Weight* indices) {
    begin_ = at_ = indices;
    order_at_ = reinterpret_cast<Index*>(indices + num_lengths());
    if (num_orders() % 2) order_at_[num_orders()] = 0;
    read_lengths();
    write_own();
    write_received();
    write_zero_row();
    write_results();
  }

  // The numbers beside the index array, once it is written; see core.py.
  Weights head() const {
    // Whether a collective is needed, the same on all ranks: only in an all-gather does a rank know the words of all rows
    // that move.
    const bool moves = request_.all_gather ? block_words_ > 0 : any_moved_ && num_segments() > 0;
    const Weight sent_words = std::accumulate(input_splits_.begin(), input_splits_.end(), Weight{0});
    return {moves, block_words_, sent_words, own_segments_, buffer_segments_, sent_segments_};
  }
  Weights sizes() const {
    Weights sizes(regions_.begin(), regions_.end());
    for (const Weights* each : {&input_splits_, &output_splits_, &own_parts_, &result_sizes_}) {
      sizes.insert(sizes.end(), each->begin(), each->end());
    }
    return sizes;
  }

 private:
  static constexpr Weight kNoKey = -1;
  static constexpr Weight kPadding = -1;  // the slot of a row of no elements
  struct Segment {
    Weight key;
    Weight words;
  };
  struct Moved {
    Weight row;
    Weight slot;  // in lengths_
    Weight sender;
    Weight receiver;
    Weight words;
  };
  // Where the segments of a row are in the buffer: the first one, and how far it is to the next.
  struct Place {
    Weight first;
    Weight stride;
  };

  // A row that this rank trains.
  struct Trained {
    Weight row;
    Weight slot;
    Place place;
  };

  // No division where steps is 1: divisions would be most of the time.
  Weight rank_of(Weight place) const { return request_.steps == 1 ? place : place / request_.steps; }

  Weight num_columns() const { return request_.num_keys + request_.num_kept; }
  Weight num_segments() const { return static_cast<Weight>(segments_.size()); }
  Weight num_ranks() const { return request_.num_places / request_.steps; }
  Weight first_own() const { return first_of_place_[request_.rank * request_.steps]; }
  Weight num_own() const { return first_of_place_[(request_.rank + 1) * request_.steps] - first_own(); }

  Weight length(Weight slot, Weight key) const {
    return slot == kPadding ? 0 : lengths_[slot * num_columns() + key];
  }
  Weight words_of(const Segment& segment, Weight slot) const {
    return segment.key == kNoKey ? segment.words : length(slot, segment.key) * segment.words;
  }
  Weight words_of_row(Weight slot) const {
    Weight words = 0;
    for (const Segment& segment : segments_) words += words_of(segment, slot);
    return words;
  }

  Weight num_lengths() const {
    const Weight first_place = request_.rank * request_.steps;
    Weight numbers = num_segments() + request_.steps;  // the zero row, and what aligns own batches
    for (Weight place = first_place; place < first_place + request_.steps; ++place) {
      numbers += request_.rows[place] * num_segments() + result_rows(request_, place) * num_columns();
    }
    if (request_.all_gather) return numbers + static_cast<Weight>(moved_.size()) * num_segments() + num_ranks();
    return numbers + num_arrived_ * num_segments();
  }
  Weight num_orders() const {
    Weight rows = num_sent_;
    for (Weight step = 0; step < request_.steps; ++step) {
      rows += result_rows(request_, request_.rank * request_.steps + step);
    }
    return rows * num_segments();
  }

  // The segment of the buffer that comes next.
  Weight next_segment() const { return at_ - begin_; }
  Weight append(Weight words) { return *at_++ = words; }

  // Finds the rows that concern this rank, and those of them that move, by sender and row.
  void find_moved() {
    for (Weight sender = 0; sender < num_ranks(); ++sender) {
      const bool own = sender == request_.rank;
      if (own) first_own_slot_ = static_cast<Weight>(near_.size());
      const Weight end = first_of_place_[(sender + 1) * request_.steps];
      for (Weight row = first_of_place_[sender * request_.steps]; row < end; ++row) {
        const Weight receiver = rank_of(request_.destination[row]);
        const bool moved = receiver != sender;
        any_moved_ |= moved;
        // Most rows concern other ranks. Whether these move cannot be predicted, so that no branch depends on it.
        if (receiver != request_.rank && !own && !(request_.all_gather && moved)) continue;
        num_sent_ += moved && own;
        num_arrived_ += moved && receiver == request_.rank;
        if (moved) moved_.push_back({row, static_cast<Weight>(near_.size()), sender, receiver, 0});
        near_.push_back(row);
      }
    }
  }

  // Reads the lengths of the rows that concern this rank; with many ranks these are few of all rows.
  void read_lengths() {
    lengths_.resize(near_.size() * num_columns());
    if (num_columns() > 0 && !read_rows(request_.table, near_.data(), static_cast<Weight>(near_.size()), kLengthsFrom,
                                        num_columns(), lengths_.data())) {
      throw std::invalid_argument("a gathered table: a size or column is out of its range");
    }
    for (Moved& each : moved_) each.words = words_of_row(each.slot);
    std::stable_sort(moved_.begin(), moved_.end(), [](const Moved& one, const Moved& other) {
      return std::pair(one.sender, one.receiver) < std::pair(other.sender, other.receiver);
    });
  }

  // The own region. Real rows come first in their batch, then padding.
  void write_own() {
    const Weight first_place = request_.rank * request_.steps;
    place_of_own_.reserve(num_own());
    for (Weight place = first_place; place < first_place + request_.steps; ++place) {
      const Weight rows = request_.rows[place], real = request_.real_rows[place], first = first_of_place_[place];
      for (Weight row = 0; row < real; ++row) {
        place_of_own_.push_back({next_segment() + row, rows});
      }
      Weight total = 0;
      for (const PayloadPart& part : request_.parts) {
        const Weight words = write_part(part, first_own_slot_ + first - first_own(), real, rows);
        own_parts_.push_back(words);
        total += words;
      }
      const Weight aligns = (kAlignedWords - total % kAlignedWords) % kAlignedWords;
      own_parts_.push_back(append(aligns));
      regions_[0] += total + aligns;
    }
    own_segments_ = next_segment();
  }

  // One part of a batch; returns its words. `first` is the slot of the first of its `real` rows.
  Weight write_part(const PayloadPart& part, Weight first, Weight real, Weight rows) {
    Weight total = 0;
    for (Weight index = 0; index < part.num_segments; ++index) {
      const Segment segment{part.first_key < 0 ? kNoKey : part.first_key + index, part.words};
      for (Weight row = 0; row < rows; ++row) {
        total += append(words_of(segment, row < real ? first + row : kPadding));
      }
    }
    return total;
  }

  // The received region, and the words to and from every rank.
  void write_received() {
    input_splits_.assign(num_ranks(), 0);
    output_splits_.assign(num_ranks(), 0);
    Weights sent(num_ranks(), 0);
    for (const Moved& each : moved_) {
      sent[each.sender] += each.words;
      if (each.sender == request_.rank) input_splits_[each.receiver] += each.words;
    }
    if (request_.all_gather) block_words_ = *std::max_element(sent.begin(), sent.end());
    auto each = moved_.begin();
    for (Weight sender = 0; sender < num_ranks(); ++sender) {
      for (; each != moved_.end() && each->sender == sender; ++each) {
        if (!request_.all_gather && each->receiver != request_.rank) continue;
        if (each->receiver == request_.rank) trained_.push_back({each->row, each->slot, {next_segment(), 1}});
        output_splits_[sender] += each->words;
        regions_[1] += each->words;
        for (const Segment& segment : segments_) append(words_of(segment, each->slot));
      }
      if (request_.all_gather) regions_[1] += append(block_words_ - sent[sender]);
    }
  }

  // The zero row, and the order in which own segments are sent.
  void write_zero_row() {
    first_zero_ = next_segment();
    for (const Segment& segment : segments_) regions_[2] += append(words_of(segment, kPadding));
    buffer_segments_ = next_segment();
    for (const Moved& each : moved_) {
      if (each.sender != request_.rank) continue;
      const Place place = place_of_own_[each.row - first_own()];
      for (Weight segment = 0; segment < num_segments(); ++segment) {
        *order_at_++ = static_cast<Index>(place.first + segment * place.stride);
      }
    }
    sent_segments_ = num_sent_ * num_segments();
  }

  // By result, its lengths and the segments of the buffer that it is made of; padding is the zero row.
  void write_results() {
    const Weight first_place = request_.rank * request_.steps;
    for (Weight own = 0; own < num_own(); ++own) {
      const Weight row = first_own() + own;
      if (rank_of(request_.destination[row]) == request_.rank) {
        trained_.push_back({row, first_own_slot_ + own, place_of_own_[own]});
      }
    }
    std::sort(trained_.begin(), trained_.end(), [](const Trained& one, const Trained& other) { return one.row < other.row; });
    std::vector<std::vector<Trained>> of_step(request_.steps);
    for (const Trained& each : trained_) of_step[request_.destination[each.row] - first_place].push_back(each);
    for (Weight step = 0; step < request_.steps; ++step) {
      const Weight place = first_place + step;
      const std::vector<Trained>& here = of_step[step];
      const Weight real = static_cast<Weight>(here.size());
      const Weight rows = result_rows(request_, place);
      bool changes = rows != request_.rows[place] || real != request_.real_rows[place];
      for (Weight row = 0; row < real && !changes; ++row) changes = here[row].row != first_of_place_[place] + row;
      result_sizes_.insert(result_sizes_.end(), {changes, rows, real});
      for (const PayloadPart& part : request_.parts) {
        Weight words = part.first_key < 0 ? rows * part.words : 0;
        for (Weight segment = 0; part.first_key >= 0 && segment < part.num_segments; ++segment) {
          for (const Trained& each : here) words += length(each.slot, part.first_key + segment) * part.words;
        }
        result_sizes_.push_back(words);
      }
      for (Weight column = 0; column < num_columns(); ++column) {
        Weight total = 0;
        for (const Trained& each : here) total += append(length(each.slot, column));
        at_ = std::fill_n(at_, rows - real, 0);
        if (column < request_.num_keys) result_sizes_.push_back(total);
      }
      for (Weight segment = 0; segment < num_segments(); ++segment) {
        for (const Trained& each : here) {
          *order_at_++ = static_cast<Index>(each.place.first + segment * each.place.stride);
        }
        order_at_ = std::fill_n(order_at_, rows - real, static_cast<Index>(first_zero_ + segment));
      }
    }
  }

  const RouteRequest& request_;
  Weights first_of_place_;
  std::vector<Segment> segments_;
  Weights near_;               // own rows, and those that this rank gets; in an all-gather, all that move
  Weight first_own_slot_ = 0;  // a slot is an index into near_
  Weights lengths_;            // (slots, num_columns())
  std::vector<Moved> moved_;
  std::vector<Place> place_of_own_;
  std::vector<Trained> trained_;
  bool any_moved_ = false;
  Weight num_sent_ = 0;     // own rows that leave the rank
  Weight num_arrived_ = 0;  // rows that come to it
  Weight block_words_ = 0;
  Weight own_segments_ = 0;
  Weight buffer_segments_ = 0;
  Weight sent_segments_ = 0;
  Weight first_zero_ = 0;
  std::array<Weight, 3> regions_{};
  Weights input_splits_;
  Weights output_splits_;
  Weights own_parts_;
  Weights result_sizes_;
  Weight* begin_ = nullptr;  // the index array
  Weight* at_ = nullptr;     // where its next length goes
  Index* order_at_ = nullptr;
};

// Words on the host.
struct Piece {
  std::int32_t* first;
  Weight words;
};

// Pieces that count as one after another.
struct Pieces {
  const Piece* piece;
  const Piece* end;
  Weight used = 0;  // words of the piece

  // Where the next segment of so many words lies, which is within one piece; null where it is not.
  std::int32_t* next(Weight words) {
    for (; piece != end && used == piece->words; ++piece) used = 0;
    if (piece == end || words < 0 || words > piece->words - used) return nullptr;
    return piece->first + std::exchange(used, used + words);
  }
};

// Concatenates segments in a new order; false where a size or a segment is not what it must be.
inline bool permute_words(const Weight* lengths, Weight num_segments, const Index* order, Weight num_ordered, Pieces from,
                          Pieces to) {
  std::vector<const std::int32_t*> segments(num_segments, nullptr);
  for (Weight at = 0; at < num_segments; ++at) {
    if (lengths[at] != 0 && (segments[at] = from.next(lengths[at])) == nullptr) return false;
  }
  for (Weight at = 0; at < num_ordered; ++at) {
    if (order[at] < 0 || order[at] >= num_segments) return false;
    const Weight words = lengths[order[at]];
    std::int32_t* const out = words == 0 ? nullptr : to.next(words);
    if (words != 0 && out == nullptr) return false;
    std::copy_n(segments[order[at]], words, out);
  }
  return to.next(0) == nullptr;  // every output is full
}

}  // namespace evenrank
