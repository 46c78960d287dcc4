// Every access to memory is checked: its bounds, its alignment, who may see what was written.
#include "memory.h"

#include <algorithm>

#include "machine.h"

namespace emulator {
namespace {

struct Piece {
  u64 begin;
  u64 end;
  bool is_writable;
};

std::vector<Piece> pieces;
std::vector<Piece> kept;

// Words that kernels have written, of memory that was allocated without a value.
struct Unwritten {
  u64 begin;
  std::vector<bool> is_written;
};

std::vector<Unwritten> unwritten;
bool checks_unwritten = true;

Unwritten* unwritten_at(u64 address) {
  auto const found = std::find_if(unwritten.begin(), unwritten.end(), [&](Unwritten const& one) {
    return address >= one.begin && (address - one.begin) / sizeof(u32) < one.is_written.size();
  });
  return found == unwritten.end() ? nullptr : &*found;
}

// A word that is not all 0xff has been written by the host.
bool reads_unwritten(u64 address, u32 bytes) {
  Unwritten const* const found = unwritten_at(address);
  for (u32 i = 0; found != nullptr && i + sizeof(u32) <= bytes; i += sizeof(u32)) {
    bool const is_written = found->is_written[(address + i - found->begin) / sizeof(u32)];
    if (!is_written && read_as<u32>(reinterpret_cast<void const*>(address + i)) == ~0u) {
      return true;
    }
  }
  return false;
}

void mark_written(u64 address, u32 bytes) {
  if (Unwritten* const found = unwritten_at(address)) {
    u64 const first = (address - found->begin) / sizeof(u32);
    std::fill_n(found->is_written.begin() + first, (bytes + 3) / sizeof(u32), true);
  }
}

void check_alignment(u64 address, u32 bytes, int site) {
  if (address % bytes != 0) {
    fail(text("an access of ", bytes, " bytes at an odd address, instruction ", site));
  }
}

}  // namespace

void add_memory(u64 begin, u64 bytes, Access access) {
  auto same = std::find_if(pieces.begin(), pieces.end(), [&](Piece const& piece) {
    return piece.begin == begin && piece.end == begin + bytes;
  });
  if (same == pieces.end()) {
    same = pieces.insert(same, Piece{begin, begin + bytes, false});
  }
  same->is_writable |= access == Access::kWrite;
}

void forget_memory() {
  pieces = kept;
  unwritten.clear();
}

// Memory at the same address has been freed.
void add_unwritten(u64 begin, u64 bytes) {
  std::erase_if(unwritten, [&](Unwritten const& one) {
    return one.begin < begin + bytes && begin < one.begin + one.is_written.size() * sizeof(u32);
  });
  unwritten.push_back(Unwritten{begin, std::vector<bool>(bytes / sizeof(u32))});
}

void keep_memory(u64 begin, u64 bytes) {
  kept.push_back(Piece{begin, begin + bytes, true});
  add_memory(begin, bytes, Access::kWrite);
}

void check_unwritten(bool checks) { checks_unwritten = checks; }

bool may_access(u64 begin, u64 bytes, Access access) {
  return std::any_of(pieces.begin(), pieces.end(), [&](Piece const& piece) {
    return begin >= piece.begin && begin + bytes <= piece.end &&
           (piece.is_writable || access == Access::kRead);
  });
}

void* Thread::readable(u64 address, u32 bytes, int site) const {
  check_alignment(address, bytes, site);
  if (!may_access(address, bytes, Access::kRead)) {
    fail(text("it reads ", bytes, " bytes outside the tensors, instruction ", site));
  }
  if (checks_unwritten && reads_unwritten(address, bytes)) {
    fail(text("it reads ", bytes, " bytes that nothing has written, instruction ", site));
  }
  return reinterpret_cast<void*>(address);
}

void* Thread::writable(u64 address, u32 bytes, int site) const {
  check_alignment(address, bytes, site);
  if (!may_access(address, bytes, Access::kWrite)) {
    fail(text("it writes ", bytes, " bytes outside the results, instruction ", site));
  }
  mark_written(address, bytes);
  return reinterpret_cast<void*>(address);
}

Cta& cta_of(Thread const& thread, u64 address) {
  u32 const rank = rank_of(address);
  Cta& cta = rank == 0 ? *thread.cta : *thread.cta->cluster->ctas[rank - 1];
  if (cta.running == 0) {
    fail("it uses the shared memory of a CTA that has ended");
  }
  return cta;
}

u8* Cta::at(u32 offset, u32 bytes) {
  if (offset < kStaticBegin || offset + bytes > memory.size()) {
    fail(text("shared memory ", offset, " of ", memory.size()));
  }
  return memory.data() + offset;
}

u8* Thread::shared(u64 address, u32 bytes, int site) const {
  check_alignment(address, bytes, site);
  return cta_of(*this, address).at(offset_of(address), bytes);
}

u32 Thread::compare_and_swap(u64 address, u32 expected, u32 value, int site) {
  u32 const old = read_as<u32>(readable(address, sizeof value, site));
  store_global<u32, 1>(address, {old == expected ? value : old}, site);
  return old;
}

void Thread::add_floats(u64 address, std::array<u32, 4> const& values, int site) {
  auto sums = read_as<std::array<float, 4>>(readable(address, sizeof values, site));
  std::array<u32, 4> bits;
  for (size_t i = 0; i < values.size(); ++i) {
    bits[i] = to_bits(sums[i] + to_float(values[i]));
  }
  store_global(address, bits, site);
}

// ------------------------------------------------------------------------- threads and the engines
void Thread::mark_unfenced(u64 address, u32 bytes) {
  if (rank_of(address) != 0) {
    return;
  }
  u32 const offset = offset_of(address);
  std::fill_n(&cta->writer[offset], bytes, u16(number + 1));
  auto& own = cta->unfenced[number];
  if (!own.empty() && own.back().first + own.back().second == offset) {
    own.back().second += bytes;
  } else {
    own.emplace_back(offset, bytes);
  }
}

void Thread::mark_fenced() {
  for (auto [offset, bytes] : cta->unfenced[number]) {
    std::replace(&cta->writer[offset], &cta->writer[offset] + bytes, u16(number + 1), u16(0));
  }
  cta->unfenced[number].clear();
}

void Cta::check_visible(u32 offset, u32 bytes, char const* reader) const {
  auto const begin = writer.begin() + offset;
  auto const found = std::find_if(begin, begin + bytes, [](u16 who) { return who != 0; });
  if (found != begin + bytes) {
    fail(text(reader, " reads shared memory that thread ", *found - 1, " of CTA ", number,
              " wrote, with no fence between"));
  }
}

}  // namespace emulator
