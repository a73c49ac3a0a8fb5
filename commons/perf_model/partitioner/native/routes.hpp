// From a plan to one rank's index arrays: which segment of which row lies where, who gets it, and how long it is.
// commons/perf_model/routes.py names the results.
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
// `indices` are, one after another: the words of every segment of the buffer; by result (a batch that the rank trains)
// the lengths (num_keys, rows); then, as int32, the segments of the own region that are sent and, by result, the
// segments of the buffer that it is made of. Only the lengths of rows that concern this rank are read.
#pragma once

#include <cstring>
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
  const Weight* destination;  // the place that trains each real row
  RowTable table;
  Index num_places;
  Weight num_rows;
  Weight num_keys;
  std::vector<PayloadPart> parts;
  Weight steps;
  Weight rank;
  bool all_gather;  // whether every rank receives all rows that move, else only those it trains
  bool pads;        // whether results are padded to the rows of their place, or one
};

struct Routes {
  Weights indices;
  Weights sizes;  // all other numbers, in the order in which routes.py reads them
};

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
  }

  Routes routes() {
    find_moved();
    read_lengths();
    write_own();
    write_received();
    write_zero_row();
    write_results();
    pack_orders();
    return {std::move(indices_), write_sizes()};
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

  // No division where steps is 1: divisions would be most of the time.
  Weight rank_of(Weight place) const { return request_.steps == 1 ? place : place / request_.steps; }

  Weight num_segments() const { return static_cast<Weight>(segments_.size()); }
  Weight num_ranks() const { return request_.num_places / request_.steps; }
  Weight first_own() const { return first_of_place_[request_.rank * request_.steps]; }
  Weight num_own() const { return first_of_place_[(request_.rank + 1) * request_.steps] - first_own(); }

  Weight length(Weight slot, Weight key) const {
    return slot == kPadding ? 0 : lengths_[slot * request_.num_keys + key];
  }
  Weight words_of(const Segment& segment, Weight slot) const {
    return segment.key == kNoKey ? segment.words : length(slot, segment.key) * segment.words;
  }
  Weight words_of_row(Weight slot) const {
    Weight words = 0;
    for (const Segment& segment : segments_) words += words_of(segment, slot);
    return words;
  }

  // Finds the rows that concern this rank, and those of them that move, by sender and row.
  void find_moved() {
    for (Weight sender = 0; sender < num_ranks(); ++sender) {
      const bool own = sender == request_.rank;
      if (own) first_own_slot_ = static_cast<Weight>(near_.size());
      const Weight end = first_of_place_[(sender + 1) * request_.steps];
      for (Weight row = first_of_place_[sender * request_.steps]; row < end; ++row) {
        const Weight receiver = rank_of(request_.destination[row]);
        const bool moved = receiver != sender;
        any_moved_ = any_moved_ || moved;
        if (!own && !(moved && (request_.all_gather || receiver == request_.rank))) continue;
        if (moved) moved_.push_back({row, static_cast<Weight>(near_.size()), sender, receiver, 0});
        near_.push_back(row);
      }
    }
  }

  // Reads the lengths of the rows that concern this rank; with many ranks these are few of all rows.
  void read_lengths() {
    lengths_.resize(near_.size() * request_.num_keys);
    if (request_.num_keys > 0 && !read_rows(request_.table, near_.data(), static_cast<Weight>(near_.size()), kLengthsFrom,
                                            request_.num_keys, lengths_.data())) {
      throw std::invalid_argument("route_rows takes a plan: its table is not one of these rows");
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
        place_of_own_.push_back({static_cast<Weight>(indices_.size()) + row, rows});
      }
      Weight total = 0;
      for (const PayloadPart& part : request_.parts) {
        const Weight words = write_part(part, first_own_slot_ + first - first_own(), real, rows);
        own_parts_.push_back(words);
        total += words;
      }
      const Weight aligns = (kAlignedWords - total % kAlignedWords) % kAlignedWords;
      indices_.push_back(aligns);
      own_parts_.push_back(aligns);
      regions_[0] += total + aligns;
    }
    own_segments_ = static_cast<Weight>(indices_.size());
  }

  // One part of a batch; returns its words. `first` is the slot of the first of its `real` rows.
  Weight write_part(const PayloadPart& part, Weight first, Weight real, Weight rows) {
    Weight total = 0;
    for (Weight index = 0; index < part.num_segments; ++index) {
      const Segment segment{part.first_key < 0 ? kNoKey : part.first_key + index, part.words};
      for (Weight row = 0; row < rows; ++row) {
        indices_.push_back(words_of(segment, row < real ? first + row : kPadding));
        total += indices_.back();
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
        if (each->receiver == request_.rank) {
          arrived_.push_back({each->row, each->slot, static_cast<Weight>(indices_.size())});
        }
        output_splits_[sender] += each->words;
        regions_[1] += each->words;
        for (const Segment& segment : segments_) indices_.push_back(words_of(segment, each->slot));
      }
      if (!request_.all_gather) continue;
      indices_.push_back(block_words_ - sent[sender]);
      regions_[1] += indices_.back();
    }
  }

  // The zero row, and the order in which own segments are sent.
  void write_zero_row() {
    first_zero_ = static_cast<Weight>(indices_.size());
    for (const Segment& segment : segments_) {
      indices_.push_back(words_of(segment, kPadding));
      regions_[2] += indices_.back();
    }
    buffer_segments_ = static_cast<Weight>(indices_.size());
    for (const Moved& each : moved_) {
      if (each.sender != request_.rank) continue;
      const Place place = place_of_own_[each.row - first_own()];
      for (Weight segment = 0; segment < num_segments(); ++segment) {
        orders_.push_back(static_cast<Index>(place.first + segment * place.stride));
      }
    }
    sent_segments_ = static_cast<Weight>(orders_.size());
  }

  // By result, its lengths and the segments of the buffer that it is made of; padding is the zero row.
  void write_results() {
    struct Chosen {
      Weight row;
      Weight slot;
      Place place;
    };
    // The rows of every step, in ascending order. Rows are numbered rank by rank, so those that arrived are before or
    // after all own ones.
    std::vector<std::vector<Chosen>> chosen(request_.steps);
    std::sort(arrived_.begin(), arrived_.end(), [](const Arrived& one, const Arrived& other) { return one.row < other.row; });
    const Weight first_place = request_.rank * request_.steps;
    const auto choose = [&](Weight row, Weight slot, Place place) {
      chosen[request_.destination[row] - first_place].push_back({row, slot, place});
    };
    const auto choose_arrived = [&](const Arrived& each) { choose(each.row, each.slot, {each.first, 1}); };
    auto arrived = arrived_.begin();
    for (; arrived != arrived_.end() && arrived->row < first_own(); ++arrived) choose_arrived(*arrived);
    for (Weight own = 0; own < num_own(); ++own) {
      const Weight row = first_own() + own;
      if (rank_of(request_.destination[row]) != request_.rank) continue;
      choose(row, first_own_slot_ + own, place_of_own_[own]);
    }
    for (; arrived != arrived_.end(); ++arrived) choose_arrived(*arrived);

    for (Weight step = 0; step < request_.steps; ++step) {
      const Weight place = first_place + step;
      const std::vector<Chosen>& here = chosen[step];
      const Weight real = static_cast<Weight>(here.size());
      const Weight rows = request_.pads ? std::max({Weight{1}, request_.rows[place], real}) : real;
      bool changes = rows != request_.rows[place] || real != request_.real_rows[place];
      for (Weight row = 0; row < real && !changes; ++row) changes = here[row].row != first_of_place_[place] + row;
      result_sizes_.insert(result_sizes_.end(), {changes, rows, real});
      for (const PayloadPart& part : request_.parts) {
        Weight words = part.first_key < 0 ? rows * part.words : 0;
        for (Weight segment = 0; part.first_key >= 0 && segment < part.num_segments; ++segment) {
          for (const Chosen& each : here) words += length(each.slot, part.first_key + segment) * part.words;
        }
        result_sizes_.push_back(words);
      }
      for (Weight key = 0; key < request_.num_keys; ++key) {
        Weight total = 0;
        for (const Chosen& each : here) {
          indices_.push_back(length(each.slot, key));
          total += indices_.back();
        }
        indices_.insert(indices_.end(), rows - real, 0);
        result_sizes_.push_back(total);
      }
      for (Weight segment = 0; segment < num_segments(); ++segment) {
        for (const Chosen& each : here) {
          orders_.push_back(static_cast<Index>(each.place.first + segment * each.place.stride));
        }
        orders_.insert(orders_.end(), rows - real, static_cast<Index>(first_zero_ + segment));
      }
    }
  }

  // Appends the int32 orders to the int64 lengths, two to a number.
  void pack_orders() {
    if (orders_.size() % 2) orders_.push_back(0);
    const std::size_t begin = indices_.size();
    indices_.resize(begin + orders_.size() / 2);
    if (!orders_.empty()) std::memcpy(indices_.data() + begin, orders_.data(), orders_.size() * sizeof(Index));
  }

  Weights write_sizes() const {
    Weight sent_words = 0;
    for (const Weight words : input_splits_) sent_words += words;
    // `moves` is the same on all ranks. Only in an all-gather does a rank know the words of all rows that move.
    const bool moves = request_.all_gather ? block_words_ > 0 : any_moved_ && num_segments() > 0;
    Weights sizes = {moves, block_words_, sent_words, own_segments_, buffer_segments_, sent_segments_};
    sizes.insert(sizes.end(), regions_.begin(), regions_.end());
    for (const Weights* each : {&input_splits_, &output_splits_, &own_parts_, &result_sizes_}) {
      sizes.insert(sizes.end(), each->begin(), each->end());
    }
    return sizes;
  }

  struct Arrived {
    Weight row;
    Weight slot;
    Weight first;
  };

  const RouteRequest& request_;
  Weights first_of_place_;
  std::vector<Segment> segments_;
  Weights near_;               // own rows, and those that this rank gets; in an all-gather, all that move
  Weight first_own_slot_ = 0;  // a slot is an index into near_
  Weights lengths_;            // (slots, num_keys)
  std::vector<Moved> moved_;
  std::vector<Place> place_of_own_;
  std::vector<Arrived> arrived_;
  bool any_moved_ = false;
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
  Weights indices_;
  Indices orders_;
};

inline Routes route_rows(const RouteRequest& request) { return Router(request).routes(); }

}  // namespace evenrank
