// One rank's index array for a plan: the position, receiver and length of every segment that the rank exchanges.
// commons/distributed/exchange/row_exchange.py uses it.
//
// The rank exchanges rows through a buffer of 4-byte words. A segment is the words of one key (or of a dense part) of
// one row. The buffer has three regions:
//   own        for each batch of the rank: the segments of all its rows, padding included, key by key; then a segment that
//              aligns the next batch
//   received   the rows from other ranks, by sender, row by row; in an all-gather the rows that each rank sends, in a block
//              per sender, which ends in a segment that pads it to the largest sender
//   zero row   one row of padding
// Sent rows are sorted by sender, receiver and row, in the same way on every rank.
//
// The index array consists of the words of every segment of the buffer; for each result (a batch that the rank trains) the
// lengths (num_keys, rows) and host values (num_kept, rows) of its rows; then, as int32, the segments of the own region
// that are sent and, for each result, the segments of the buffer that make it up. Only the lengths of this rank's rows,
// before and after the exchange, are read.
#pragma once

#include "gathered_rows.hpp"

namespace evenrank {

// Every batch in the buffer begins at a multiple of the largest element, a complex number of two doubles.
constexpr Weight kAlignedWords = 4;

class Router {
 public:
  // `destination` (num_rows,) is the place that trains each row, real_after (num_places,) the number of rows of each place.
  Router(const GatheredRows& rows, const Weight* destination, const Weight* real_after, const ShuffleArguments& given)
      : rows_(rows), destination_(destination), real_after_(real_after), rank_(given.rank),
        num_keys_(given.num_keys), num_columns_(given.num_keys + given.num_kept - (given.has_groups != 0)),
        num_parts_(given.num_parts), all_gather_(given.all_gather != 0), pads_(given.pads != 0) {
    for (Weight part = 0; part < num_parts_; ++part) {
      const Weight first_key = given.parts[3 * part], count = given.parts[3 * part + 1], words = given.parts[3 * part + 2];
      require(count >= 0 && words >= 0 && (first_key < 0 || count <= num_keys_ - first_key),
              "shuffle takes a plan: a number is out of its range");
      for (Weight segment = 0; segment < count; ++segment) {
        segments_.push_back({first_key < 0 ? kNoKey : first_key + segment, words, part});
      }
    }
    first_of_place_.assign(rows.num_places + 1, 0);
    std::partial_sum(rows.real_rows, rows.real_rows + rows.num_places, first_of_place_.begin() + 1);
    find_moved();
  }

  // The size of the index array in int64 numbers; the int32 part has two numbers in each.
  Weight room() const { return num_lengths() + (num_orders() + 1) / 2; }

  // Writes the index array, of size `room()`.
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

  // The further numbers of the answer, see core.py; call it after write().
  Weights head() const {
    // Whether a collective is needed; equal on all ranks. Only in an all-gather has a rank the words of all moved rows.
    const bool moves = all_gather_ ? block_words_ > 0 : any_moved_ && num_segments() > 0;
    return {moves, block_words_, sum_of(input_splits_), own_segments_, buffer_segments_, sent_segments_};
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
  static constexpr Weight kPadding = -1;  // the slot of a padding row
  struct Segment {
    Weight key;    // kNoKey for a dense part
    Weight words;  // of an entry; in a dense part, of a row
    Weight part;
  };
  struct Moved {
    Weight row;
    Weight slot;  // in lengths_
    Weight sender;
    Weight receiver;
    Weight words;
  };
  // The position of a row's segments in the buffer: the first one, and the distance between them.
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

  Weight num_segments() const { return static_cast<Weight>(segments_.size()); }
  Weight first_place() const { return rank_ * rows_.steps; }
  Weight end_place() const { return first_place() + rows_.steps; }
  Weight first_own() const { return first_of_place_[first_place()]; }
  Weight num_own() const { return first_of_place_[end_place()] - first_own(); }
  // The rows of a place after the exchange, padding included.
  Weight result_rows(Weight place) const {
    return pads_ ? std::max({Weight{1}, rows_.rows[place], real_after_[place]}) : real_after_[place];
  }

  Weight length(Weight slot, Weight key) const {
    return slot == kPadding ? 0 : lengths_[slot * num_columns_ + key];
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
    Weight numbers = num_segments() + rows_.steps;  // the zero row, and the segments that align own batches
    for (Weight place = first_place(); place < end_place(); ++place) {
      numbers += rows_.rows[place] * num_segments() + result_rows(place) * num_columns_;
    }
    if (all_gather_) return numbers + static_cast<Weight>(moved_.size()) * num_segments() + rows_.num_ranks;
    return numbers + num_arrived_ * num_segments();
  }
  Weight num_orders() const {
    Weight rows = num_sent_;
    for (Weight place = first_place(); place < end_place(); ++place) rows += result_rows(place);
    return rows * num_segments();
  }

  // The number of the next segment of the buffer.
  Weight next_segment() const { return at_ - begin_; }
  Weight append(Weight words) { return *at_++ = words; }
  void append_order(const Place& place, Weight segment) {
    *order_at_++ = static_cast<Index>(place.first + segment * place.stride);
  }

  // Collects this rank's rows before and after the exchange (near_), and the moved ones among them, by sender and row.
  void find_moved() {
    for (Weight sender = 0; sender < rows_.num_ranks; ++sender) {
      const bool own = sender == rank_;
      if (own) first_own_slot_ = static_cast<Weight>(near_.size());
      const Weight end = first_of_place_[(sender + 1) * rows_.steps];
      for (Weight row = first_of_place_[sender * rows_.steps]; row < end; ++row) {
        const Weight receiver = rows_.rank_of(destination_[row]);
        const bool moved = receiver != sender;
        any_moved_ |= moved;
        // Most rows are of other ranks; no branch depends on whether these move, because it would be mispredicted.
        if (receiver != rank_ && !own && !(all_gather_ && moved)) continue;
        num_sent_ += moved && own;
        num_arrived_ += moved && receiver == rank_;
        if (moved) moved_.push_back({row, static_cast<Weight>(near_.size()), sender, receiver, 0});
        near_.push_back(row);
      }
    }
  }

  // Reads the lengths of the rows in near_, which are few of all rows with many ranks.
  void read_lengths() {
    lengths_.resize(near_.size() * num_columns_);
    if (num_columns_ > 0) {
      read_rows(rows_.table, near_.data(), static_cast<Weight>(near_.size()), kLengthsFrom, num_columns_,
                lengths_.data());
    }
    for (Moved& each : moved_) each.words = words_of_row(each.slot);
    std::stable_sort(moved_.begin(), moved_.end(), [](const Moved& one, const Moved& other) {
      return std::pair(one.sender, one.receiver) < std::pair(other.sender, other.receiver);
    });
  }

  // Writes the own region. In a batch, real rows come before padding.
  void write_own() {
    place_of_own_.reserve(num_own());
    for (Weight place = first_place(); place < end_place(); ++place) {
      const Weight rows = rows_.rows[place], real = rows_.real_rows[place];
      const Weight first_slot = first_own_slot_ + first_of_place_[place] - first_own();
      for (Weight row = 0; row < real; ++row) place_of_own_.push_back({next_segment() + row, rows});
      Weights words(num_parts_, 0);
      for (const Segment& segment : segments_) {
        for (Weight row = 0; row < rows; ++row) {
          words[segment.part] += append(words_of(segment, row < real ? first_slot + row : kPadding));
        }
      }
      const Weight total = sum_of(words), aligns = (kAlignedWords - total % kAlignedWords) % kAlignedWords;
      own_parts_.insert(own_parts_.end(), words.begin(), words.end());
      own_parts_.push_back(append(aligns));
      regions_[0] += total + aligns;
    }
    own_segments_ = next_segment();
  }

  // Writes the received region, and computes the words to and from every rank.
  void write_received() {
    input_splits_.assign(rows_.num_ranks, 0);
    output_splits_.assign(rows_.num_ranks, 0);
    Weights sent(rows_.num_ranks, 0);
    for (const Moved& each : moved_) {
      sent[each.sender] += each.words;
      if (each.sender == rank_) input_splits_[each.receiver] += each.words;
    }
    if (all_gather_) block_words_ = largest_of(sent);
    auto each = moved_.begin();
    for (Weight sender = 0; sender < rows_.num_ranks; ++sender) {
      for (; each != moved_.end() && each->sender == sender; ++each) {
        if (!all_gather_ && each->receiver != rank_) continue;
        if (each->receiver == rank_) trained_.push_back({each->row, each->slot, {next_segment(), 1}});
        output_splits_[sender] += each->words;
        regions_[1] += each->words;
        for (const Segment& segment : segments_) append(words_of(segment, each->slot));
      }
      if (all_gather_) regions_[1] += append(block_words_ - sent[sender]);
    }
  }

  // Writes the zero row, and the order in which own segments are sent.
  void write_zero_row() {
    first_zero_ = next_segment();
    for (const Segment& segment : segments_) regions_[2] += append(words_of(segment, kPadding));
    buffer_segments_ = next_segment();
    for (const Moved& each : moved_) {
      if (each.sender != rank_) continue;
      for (Weight segment = 0; segment < num_segments(); ++segment) {
        append_order(place_of_own_[each.row - first_own()], segment);
      }
    }
    sent_segments_ = num_sent_ * num_segments();
  }

  // Writes for each result its lengths, and the segments of the buffer that make it up; padding is the zero row.
  void write_results() {
    for (Weight own = 0; own < num_own(); ++own) {
      const Weight row = first_own() + own;
      if (rows_.rank_of(destination_[row]) == rank_) {
        trained_.push_back({row, first_own_slot_ + own, place_of_own_[own]});
      }
    }
    std::sort(trained_.begin(), trained_.end(), [](const Trained& one, const Trained& other) { return one.row < other.row; });
    std::vector<std::vector<Trained>> at_place(rows_.steps);
    for (const Trained& each : trained_) at_place[destination_[each.row] - first_place()].push_back(each);
    for (Weight place = first_place(); place < end_place(); ++place) write_result(place, at_place[place - first_place()]);
  }

  void write_result(Weight place, const std::vector<Trained>& trained) {
    const Weight real = static_cast<Weight>(trained.size()), rows = result_rows(place), padding = rows - real;
    bool changes = rows != rows_.rows[place] || real != rows_.real_rows[place];
    for (Weight row = 0; row < real && !changes; ++row) changes = trained[row].row != first_of_place_[place] + row;
    result_sizes_.insert(result_sizes_.end(), {changes, rows, real});
    Weights words(num_parts_, 0);
    for (Weight segment = 0; segment < num_segments(); ++segment) {
      Weight& of_part = words[segments_[segment].part];
      for (const Trained& each : trained) {
        of_part += words_of(segments_[segment], each.slot);
        append_order(each.place, segment);
      }
      of_part += padding * words_of(segments_[segment], kPadding);
      order_at_ = std::fill_n(order_at_, padding, static_cast<Index>(first_zero_ + segment));
    }
    result_sizes_.insert(result_sizes_.end(), words.begin(), words.end());
    for (Weight column = 0; column < num_columns_; ++column) {
      Weight total = 0;
      for (const Trained& each : trained) total += append(length(each.slot, column));
      at_ = std::fill_n(at_, padding, 0);
      if (column < num_keys_) result_sizes_.push_back(total);
    }
  }

  const GatheredRows& rows_;
  const Weight* destination_;
  const Weight* real_after_;
  Weight rank_;
  Weight num_keys_;
  Weight num_columns_;  // keys and host values
  Weight num_parts_;
  bool all_gather_;  // whether every rank receives all moved rows, else only those that it trains
  bool pads_;        // whether results are padded to the rows of their place, or to one row
  Weights first_of_place_;
  std::vector<Segment> segments_;
  Weights near_;               // own rows, and rows that this rank receives: in an all-gather, all moved rows
  Weight first_own_slot_ = 0;  // a slot is an index into near_
  Weights lengths_;            // (slots, num_columns_)
  std::vector<Moved> moved_;
  std::vector<Place> place_of_own_;
  std::vector<Trained> trained_;
  bool any_moved_ = false;
  Weight num_sent_ = 0;     // own rows that leave the rank
  Weight num_arrived_ = 0;  // rows of other ranks that this rank trains
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
  Weight* at_ = nullptr;     // where its next length is written
  Index* order_at_ = nullptr;
};

constexpr const char* kNoPieces = "permute_words: sizes do not match";

// An array of words on the host.
struct Piece {
  std::int32_t* first;
  Weight words;
};

// A position in several pieces, as if they were concatenated.
struct Pieces {
  const Piece* piece;
  const Piece* end;
  Weight used = 0;  // words before the position in its piece

  // Whether no words are left.
  bool at_end() {
    for (; piece != end && used == piece->words; ++piece) used = 0;
    return piece == end;
  }
  // The address of the next segment of `words` words, which must be within one piece; moves the position behind it.
  std::int32_t* next(Weight words) {
    require(words == 0 || (!at_end() && words > 0 && words <= piece->words - used), kNoPieces);
    if (words == 0) return nullptr;
    return piece->first + std::exchange(used, used + words);
  }
};

// Concatenates segments in a new order.
inline void permute_words(const Weight* lengths, Weight num_segments, const Index* order, Weight num_ordered, Pieces from,
                          Pieces to) {
  std::vector<const std::int32_t*> segments(num_segments, nullptr);
  for (Weight at = 0; at < num_segments; ++at) segments[at] = from.next(lengths[at]);
  for (Weight at = 0; at < num_ordered; ++at) {
    require(order[at] >= 0 && order[at] < num_segments, kNoPieces);
    const Weight words = lengths[order[at]];
    std::copy_n(segments[order[at]], words, to.next(words));
  }
  require(to.at_end(), kNoPieces);
}

}  // namespace evenrank
