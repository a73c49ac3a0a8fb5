// Packed rows, as ranks send them: columns of numbers, each as narrow as possible, decoded only where they are needed.
//
// The rows of one batch are a block of bytes, empty without rows: a code of one byte for every column, then the
// columns. A code is the width of the column's numbers, 1, 2, 4 or 8 bytes, unsigned but for the last, plus kSameForAll
// if all rows have the same number, which is then written once. Zeros fill the last word of eight bytes. Bytes are in the
// machine's order. See GatheredRows in commons/perf_model/shuffle_plan.py.
#pragma once

#include <cstring>
#include <stdexcept>

#include "problem.hpp"

namespace evenrank {

using Byte = unsigned char;

constexpr Byte kSameForAll = 16;
// The columns are workload and tokens, then the lengths of every key, then host values.
constexpr Weight kLengthsFrom = 2;

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

// The number of rows of all places; -1 if a count is negative, or the sum is above the most rows of a plan.
inline Weight total_of(const Weight* counts, Weight num_places) {
  Weight total = 0;
  for (Weight place = 0; place < num_places; ++place) {
    if (counts[place] < 0 || counts[place] > INT32_MAX - total) return -1;
    total += counts[place];
  }
  return total;
}

// The width in bytes of numbers whose bitwise OR is `bits`.
inline Weight width_of(Weight bits) {
  if (bits < 0) return 8;
  return bits <= UINT8_MAX ? 1 : bits <= UINT16_MAX ? 2 : bits <= UINT32_MAX ? 4 : 8;
}

// Calls `work` with a number of the type of a column of this width.
template <typename Work>
auto with_number(Weight width, const Work& work) {
  switch (width) {
    case 1: return work(std::uint8_t{});
    case 2: return work(std::uint16_t{});
    case 4: return work(std::uint32_t{});
    default: return work(Weight{});
  }
}

// The block of a batch's rows, in words of eight bytes; empty without rows.
inline Weights encode_columns(const std::vector<const Weight*>& columns, Weight rows) {
  if (rows == 0) return {};
  std::vector<Byte> codes;
  std::size_t bytes = columns.size();
  for (const Weight* const column : columns) {
    Weight bits = 0, differ = 0;
    for (Weight row = 0; row < rows; ++row) {
      bits |= column[row];
      differ |= column[row] ^ column[0];
    }
    const Weight width = width_of(bits);
    const bool same = differ == 0;
    codes.push_back(static_cast<Byte>(width | (same ? kSameForAll : 0)));
    bytes += static_cast<std::size_t>(same ? width : width * rows);
  }
  Weights words((bytes + 7) / 8, 0);
  Byte* out = reinterpret_cast<Byte*>(words.data());
  out = std::copy(codes.begin(), codes.end(), out);
  for (std::size_t column = 0; column < columns.size(); ++column) {
    const Weight width = codes[column] & ~kSameForAll, count = codes[column] & kSameForAll ? 1 : rows;
    with_number(width, [&](auto number) {
      for (Weight row = 0; row < count; ++row, out += sizeof(number)) {
        number = static_cast<decltype(number)>(columns[column][row]);
        std::memcpy(out, &number, sizeof(number));
      }
    });
  }
  return words;
}

// One column of a block.
struct Column {
  const Byte* first;
  Weight width;
  Weight stride;  // 0 where all rows have the same number

  Weight at(Weight row) const {
    return with_number(width, [&](auto number) {
      std::memcpy(&number, first + row * stride, sizeof(number));
      return static_cast<Weight>(number);
    });
  }
  void copy(Weight rows, Weight* out) const {
    if (stride == 0) {
      std::fill_n(out, rows, at(0));
      return;
    }
    with_number(width, [&](auto number) {
      for (Weight row = 0; row < rows; ++row) {
        std::memcpy(&number, first + row * sizeof(number), sizeof(number));
        out[row] = static_cast<Weight>(number);
      }
    });
  }
};

constexpr const char* kNoTable = "a gathered table: a size or column is out of its range";

// The packed rows of all ranks. Every rank has the same number of places (batches), and every place one block.
struct RowTable {
  const Weight* words;      // (num_ranks, num_words): the blocks of each rank's places, then unused words
  const Weight* first;      // where the block of every place begins in its rank's words
  const Weight* real_rows;  // rows of every place, without padding
  Weight num_ranks;
  Weight stride;     // from one rank's words to the next rank's
  Weight num_words;  // of a rank
  Weight num_places;
  Weight num_columns;

  // Throws if sizes do not match.
  void require_sizes() const {
    require(num_places >= 0 && num_places <= INT32_MAX && num_columns >= 0 && num_columns <= INT32_MAX && num_words >= 0 &&
                (num_places == 0 || (num_ranks > 0 && num_places % num_ranks == 0)) && total_of(real_rows, num_places) >= 0,
            "a gathered table: sizes do not match");
  }

  // Opens the first `count` columns of a place that has rows. Words come from other ranks, so every size is checked against
  // the rank's words.
  void open(Weight place, Weight count, std::vector<Column>& columns) const {
    columns.clear();
    const Weight offset = first[place];
    require(offset >= 0 && offset <= num_words && count <= num_columns, kNoTable);
    const Byte* const block = reinterpret_cast<const Byte*>(words + place / (num_places / num_ranks) * stride + offset);
    const Weight bytes = (num_words - offset) * static_cast<Weight>(sizeof(Weight)), rows = real_rows[place];
    Weight at = num_columns;
    require(at <= bytes, kNoTable);
    for (Weight column = 0; column < count; ++column) {
      const Weight width = block[column] & ~kSameForAll, stride_of = block[column] & kSameForAll ? 0 : width;
      require(width == 1 || width == 2 || width == 4 || width == 8, kNoTable);
      require(stride_of == 0 || rows <= (bytes - at) / width, kNoTable);
      columns.push_back({block + at, width, stride_of});
      at += stride_of > 0 ? width * rows : width;
      require(at <= bytes, kNoTable);
    }
  }
};

// Reads some columns of all rows, column after column.
inline void read_columns(const RowTable& table, const Weights& wanted, Weight num_rows, Weight* out) {
  const Weight count = wanted.empty() ? 0 : *std::max_element(wanted.begin(), wanted.end()) + 1;
  std::vector<Column> columns;
  for (Weight place = 0; place < table.num_places; ++place) {
    const Weight rows = table.real_rows[place];
    if (rows == 0) continue;
    table.open(place, count, columns);
    for (std::size_t each = 0; each < wanted.size(); ++each) {
      columns[wanted[each]].copy(rows, out + static_cast<Weight>(each) * num_rows);
    }
    out += rows;
  }
}

// Reads neighbouring columns of some of the rows, which ascend, row after row.
inline void read_rows(const RowTable& table, const Weight* rows, Weight num_rows, Weight first_column, Weight count,
                      Weight* out) {
  std::vector<Column> columns;
  Weight place = 0, first_row = 0, opened = -1;
  for (Weight at = 0; at < num_rows; ++at) {
    while (rows[at] >= first_row + table.real_rows[place]) first_row += table.real_rows[place++];
    if (opened != place) table.open(place, first_column + count, columns);
    opened = place;
    for (Weight column = first_column; column < first_column + count; ++column) {
      *out++ = columns[column].at(rows[at] - first_row);
    }
  }
}

}  // namespace evenrank
