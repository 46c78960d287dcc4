// wgmma, and the loads and stores of matrices of 8 x 8. A warp computes its 16 rows of a product
// when all of its lanes have issued it; a wait ends when the four warps have computed theirs. Sums
// are float32, which is more than the tensor cores keep with FP8.
#include <algorithm>

#include "instructions.h"
#include "machine.h"

namespace emulator {
namespace {

constexpr u32 kRows = 16;        // a warp has
constexpr u32 kDepthBytes = 32;  // a row or column of an operand has
constexpr u32 kPiece = 16;

// What a descriptor says; rows of 128, 64 or 32 bytes, by the swizzle, or of 16 bytes without one.
struct Layout {
  u32 begin;
  u32 leading;  // stride between blocks of a row, is_column
  u32 stride;   // between groups of 8 rows
  u32 row_bytes;

  Layout(u64 descriptor, bool is_column)
      : begin(u32(descriptor & 0x3fff) << 4),
        leading(u32(descriptor >> 16 & 0x3fff) << 4),
        stride(u32(descriptor >> 32 & 0x3fff) << 4),
        row_bytes(descriptor >> 62 == 0 ? kPiece : 256u >> (descriptor >> 62)) {
    bool const has_swizzle = descriptor >> 62 != 0;
    if ((!has_swizzle && !is_column) || (descriptor >> 49 & 7) != 0) {
      fail(text("an operand by rows without a swizzle, or with a base, descriptor ", descriptor));
    }
    if (!has_swizzle) {
      std::swap(leading, stride);
    }
  }
};

u8 const* piece_at(Cta& cta, Layout const& layout, u32 address) {
  u32 const offset = swizzle(address, layout.row_bytes);
  cta.check_visible(offset, kPiece, "a product");
  return cta.at(offset, kPiece);
}

// Rows of an operand, or columns, each with the bytes of what is summed over.
std::vector<u8> read_operand(Cta& cta, Operand operand, u32 first, u32 rows) {
  Layout const layout(operand.descriptor, operand.is_column);
  std::vector<u8> bytes(rows * kDepthBytes);
  if (!operand.is_column) {
    for (u32 i = 0; i < 2 * rows; ++i) {
      u32 const row = first + i / 2;
      u32 const address =
          layout.begin + row / 8 * layout.stride + row % 8 * layout.row_bytes + i % 2 * kPiece;
      memcpy(&bytes[i * kPiece], piece_at(cta, layout, address), kPiece);
    }
    return bytes;
  }
  constexpr u32 kDepth = kDepthBytes / sizeof(u16);
  constexpr u32 kStep = kPiece / sizeof(u16);
  u32 const block = layout.row_bytes / sizeof(u16);
  for (u32 i = 0; i < kDepth * rows / kStep; ++i) {
    u32 const depth = i % kDepth;
    u32 const begin = i / kDepth * kStep;
    u32 const row = first + begin;
    u32 const address = layout.begin + row / block * layout.leading + depth / 8 * layout.stride +
                        depth % 8 * layout.row_bytes + row % block * u32(sizeof(u16));
    u8 const* const piece = piece_at(cta, layout, address);
    for (u32 j = 0; j < kStep; ++j) {
      memcpy(&bytes[(begin + j) * kDepthBytes + depth * sizeof(u16)], piece + j * sizeof(u16),
             sizeof(u16));
    }
  }
  return bytes;
}

u32 depth_of(Element element) { return element == Element::k_e4m3 ? 32 : 16; }

float value_at(u8 const* bytes, u32 number, Element element) {
  if (element == Element::k_e4m3) {
    return e4m3_value(bytes[number]);
  }
  u16 const bits = read_as<u16>(bytes + number * sizeof(u16));
  return element == Element::k_f16 ? half_value(bits) : bfloat_value(bits);
}

// Row by row, as read_operand() gives them.
std::vector<float> values_of(std::vector<u8> const& bytes, Element element) {
  u32 const depth = depth_of(element);
  std::vector<float> values(bytes.size() / kDepthBytes * depth);
  for (u32 i = 0; i < values.size(); ++i) {
    values[i] = value_at(&bytes[i / depth * kDepthBytes], i % depth, element);
  }
  return values;
}

// The 16 rows that the lanes hold together.
std::vector<float> values_of_words(u32 const* const (&words)[kWarpLanes], Element element) {
  u32 const depth = depth_of(element);
  u32 const in_word = depth / 8;
  std::vector<float> values(kRows * depth);
  for (u32 i = 0; i < kWarpLanes * 4 * in_word; ++i) {
    u32 const lane = i / (4 * in_word);
    u32 const word = i / in_word % 4;
    u32 const row = lane / 4 + 8 * (word % 2);
    u32 const column = lane % 4 * in_word + word / 2 * (depth / 2) + i % in_word;
    u32 const bits = words[lane][word];
    values[row * depth + column] =
        value_at(reinterpret_cast<u8 const*>(&bits), i % in_word, element);
  }
  return values;
}

// Where the sum of a row and column is.
u32& sum_at(Warp& warp, u32 row, u32 column) {
  return warp.sums[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
}

// sums: rows x columns, contiguous. second: by column.
void add_products(std::vector<float>& sums, std::vector<float> const& first,
                  std::vector<float> const& second, u32 columns, u32 depth) {
  std::vector<float> by_depth(second.size());
  for (u32 i = 0; i < second.size(); ++i) {
    by_depth[i % depth * columns + i / depth] = second[i];
  }
  for (u32 i = 0; i < kRows * depth; ++i) {
    float* const row = &sums[i / depth * columns];
    float const* const factors = &by_depth[i % depth * columns];
    for (u32 j = 0; j < columns; ++j) {
      row[j] += first[i] * factors[j];
    }
  }
}

}  // namespace

void Thread::multiply(u32* sums, u32 const* words, Operand first, Operand second, u32 columns,
                      Element element, bool adds, bool has_plain_signs, int site) {
  Warp& own = *warp;
  own.sums[lane()] = sums;
  own.words[lane()] = words;
  if (!has_plain_signs) {
    fail("a product with changed signs");
  }
  if (own.arrived + 1 == kWarpLanes) {
    u64 const group = own.issued_in_groups.size();
    auto read = [&](Operand operand, u32 first_row, u32 rows) {
      own.read.push_back(ReadOperand{operand, first_row, rows, group,
                                     read_operand(*cta, operand, first_row, rows)});
      return values_of(own.read.back().bytes, element);
    };
    u32 const first_row = number / kWarpLanes % kWarpgroupWarps * kRows;
    auto const rows =
        words == nullptr ? read(first, first_row, kRows) : values_of_words(own.words, element);
    std::vector<float> found(kRows * columns);
    for (u32 i = 0; i < found.size() && adds; ++i) {
      found[i] = to_float(sum_at(own, i / columns, i % columns));
    }
    add_products(found, rows, read(second, 0, columns), columns, depth_of(element));
    for (u32 i = 0; i < found.size(); ++i) {
      sum_at(own, i / columns, i % columns) = to_bits(found[i]);
    }
    ++own.issued;
  }
  exchange(0, ~0u, site);
}

void Thread::commit_products() {
  if (lane() == 0) {
    warp->issued_in_groups.push_back(warp->issued);
  }
}

void Thread::wait_for_products(u32 groups_left, int site) {
  exchange(0, ~0u, site);  // lane 0 has committed
  auto const& groups = warp->issued_in_groups;
  u64 const due = groups.size() > groups_left ? groups.size() - groups_left : 0;
  u64 const issued = due > 0 ? groups[due - 1] : 0;
  Warp* const siblings = &cta->warps[number / kWarpLanes / kWarpgroupWarps * kWarpgroupWarps];
  for (u32 i = 0; i < kWarpgroupWarps; ++i) {
    while (siblings[i].issued < issued) {
      yield();
    }
    // The first warp that has waited releases the operands of all four.
    auto& read = siblings[i].read;
    for (ReadOperand const& one : read) {
      if (one.group < due &&
          read_operand(*cta, one.operand, one.first_row, one.rows) != one.bytes) {
        fail(text("an operand of a product changed before the wait, instruction ", site));
      }
    }
    std::erase_if(read, [&](ReadOperand const& one) { return one.group < due; });
  }
  exchange(0, ~0u, -site);
}

// ----------------------------------------------------------------------------- matrices of 8 x 8
void Thread::load_matrices(u32* words, int count, bool transposed, u64 address, int site) {
  shared(address, kPiece, site);
  u32 const* const rows = exchange(u32(address), ~0u, site);
  u32 const high = lane() / 4;
  u32 const low = lane() % 4;
  for (int i = 0; i < count; ++i) {
    if (!transposed) {
      words[i] = read_as<u32>(shared(rows[8 * i + high] + low * 4, 4, site));
      continue;
    }
    u32 const first = read_as<u16>(shared(rows[8 * i + 2 * low] + high * 2, 2, site));
    u32 const second = read_as<u16>(shared(rows[8 * i + 2 * low + 1] + high * 2, 2, site));
    words[i] = first | second << 16;
  }
}

void Thread::store_matrices(u32 const* words, int count, bool transposed, u64 address, int site) {
  shared(address, kPiece, site);
  u32 const* const rows = exchange(u32(address), ~0u, site);
  u32 const high = lane() / 4;
  u32 const low = lane() % 4;
  for (int i = 0; i < count; ++i) {
    if (!transposed) {
      store_shared<u32, 1>(rows[8 * i + high] + low * 4, {words[i]}, site);
      continue;
    }
    store_shared<u16, 1>(rows[8 * i + 2 * low] + high * 2, {u16(words[i])}, site);
    store_shared<u16, 1>(rows[8 * i + 2 * low + 1] + high * 2, {u16(words[i] >> 16)}, site);
  }
}

}  // namespace emulator
