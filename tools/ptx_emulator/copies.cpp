// The copy engine: each copy happens at a drawn time between its start and the wait for it. Until
// then its target, in shared memory, is nonsense.
#include "copies.h"

#include <algorithm>

#include "machine.h"
#include "memory.h"

namespace emulator {
namespace {

constexpr u32 kPiece = 16;  // bytes that a swizzle leaves together

TensorMap const& map_of(u64 address) {
  auto const& map = *reinterpret_cast<TensorMap const*>(address);
  if (map.magic != TensorMap::kMagic) {
    fail("a copy without a tensor map");
  }
  return map;
}

// Where a row of a box begins in the tensor, and whether it exists.
struct Row {
  u64 address;
  bool exists;
};

Row find_row(TensorMap const& map, std::array<i32, 5> const& coordinates, u32 row) {
  Row found{map.base, true};
  for (u32 i = 1; i < map.rank; ++i) {
    i64 const at = i64(coordinates[i]) + row % map.boxes[i];
    row /= map.boxes[i];
    found.exists = found.exists && at >= 0 && u64(at) < map.sizes[i];
    found.address += u64(at) * map.strides[i];
  }
  return found;
}

// Copies 16 bytes of a row that begins at `column`. What is outside reads as 0.
void copy_piece(TensorMap const& map, Row const& row, i64 column, u8* shared, bool is_load) {
  u32 const bytes = u32(map.strides[0]);
  for (u32 at = 0; at < kPiece; at += bytes, ++column) {
    bool const is_inside = row.exists && column >= 0 && u64(column) < map.sizes[0];
    u64 const address = row.address + u64(column) * bytes;
    if (is_inside && !may_access(address, bytes, is_load ? Access::kRead : Access::kWrite)) {
      fail("a copy of a tensor goes outside it");
    }
    void* const global = reinterpret_cast<void*>(address);
    if (is_load) {
      is_inside ? memcpy(shared + at, global, bytes) : memset(shared + at, 0, bytes);
    } else if (is_inside) {
      memcpy(global, shared + at, bytes);
    }
  }
}

void copy_tensor(Copy const& copy) {
  TensorMap const& map = map_of(copy.tensor_map);
  bool const is_load = copy.kind == CopyKind::kTensorLoad;
  Cta& cta = *copy.owner->cta;
  u32 const begin = offset_of(is_load ? copy.target : copy.source);
  for (u32 i = 0; i < map.rows(); ++i) {
    Row const row = find_row(map, copy.coordinates, i);
    for (u32 at = 0; at < map.row_bytes(); at += kPiece) {
      u32 const offset = swizzle(begin + i * map.row_bytes() + at, map.row_bytes());
      if (!is_load) {
        cta.check_visible(offset, kPiece, "the copy engine");
      }
      copy_piece(map, row, copy.coordinates[0] + i64(at / map.strides[0]), cta.at(offset, kPiece),
                 is_load);
    }
  }
  if (is_load) {
    complete_bytes(cta, copy.barrier, copy.bytes);
  }
}

u8 const* source_of(Copy const& copy) {
  if (copy.kind == CopyKind::kWords) {
    return reinterpret_cast<u8 const*>(copy.coordinates.data());
  }
  if (copy.kind == CopyKind::kLoad) {
    if (!may_access(copy.source, copy.bytes, Access::kRead)) {
      fail("a bulk copy reads outside the tensors");
    }
    return reinterpret_cast<u8 const*>(copy.source);
  }
  Cta& cta = *copy.owner->cta;
  cta.check_visible(offset_of(copy.source), copy.bytes, "the copy engine");
  return cta.at(offset_of(copy.source), copy.bytes);
}

void run(Copy const& copy) {
  if (copy.kind == CopyKind::kTensorLoad || copy.kind == CopyKind::kTensorStore) {
    return copy_tensor(copy);
  }
  if (copy.kind == CopyKind::kArrival) {
    copy.owner->end_copies_before(copy.group);
    return copy.owner->arrive_at_mbarrier(copy.barrier, 0);
  }
  u8 const* const source = source_of(copy);
  if (copy.kind == CopyKind::kLoad || copy.kind == CopyKind::kSend ||
      copy.kind == CopyKind::kWords) {
    Cta& cta = cta_of(*copy.owner, copy.target);
    memcpy(cta.at(offset_of(copy.target), copy.bytes), source, copy.bytes);
    return complete_bytes(cta_of(*copy.owner, copy.barrier), copy.barrier, copy.bytes);
  }
  if (!may_access(copy.target, copy.bytes, Access::kWrite)) {
    fail("a bulk copy writes outside the results");
  }
  auto* const target = reinterpret_cast<float*>(copy.target);
  if (copy.kind == CopyKind::kStore) {
    memcpy(target, source, copy.bytes);
    return;
  }
  for (u32 i = 0; i < copy.bytes / sizeof(float); ++i) {
    target[i] += read_as<float>(source + i * sizeof(float));
  }
}

void run_and_remove(std::vector<Copy>& copies, size_t number) {
  Copy const copy = copies[number];
  copies.erase(copies.begin() + i64(number));
  run(copy);
}

void spoil(Cta& cta, u64 target, u32 bytes) {
  memset(cta.at(offset_of(target), bytes), 0xff, bytes);
  std::fill_n(&cta.writer[offset_of(target)], bytes, u16(0));
}

void check_aligned(std::initializer_list<u64> addresses, int site) {
  for (u64 address : addresses) {
    if (address % kPiece != 0) {
      fail(text("a bulk copy at an odd address, instruction ", site));
    }
  }
}

}  // namespace

bool advance_copies(Cta& cta, bool must) {
  bool any = false;
  while (!cta.loads.empty() && (must || draw(3) == 0)) {
    run_and_remove(cta.loads, draw(u32(cta.loads.size())));
    any = true;
    must = false;
  }
  while (!cta.stores.empty() && draw(8) == 0) {
    run_and_remove(cta.stores, draw(u32(cta.stores.size())));
  }
  return any;
}

// ---------------------------------------------------------------------------------------- cp.async
void Thread::copy_later(u64 target, u64 source, u32 bytes, u32 read, int site) {
  if (read > 0) {
    readable(source, read, site);
  }
  memset(shared(target, bytes, site), 0xff, bytes);
  own_copies.push_back(
      Copy{CopyKind::kLoad, target, source, bytes, 0, {}, 0, this, copy_groups, bytes - read});
}

void Thread::end_copies_before(u32 group) {
  auto const ends = [&](Copy const& copy) { return copy.group < group; };
  for (Copy const& copy : own_copies) {
    if (ends(copy)) {
      u8* const target = cta->at(offset_of(copy.target), copy.bytes);
      u32 const read = copy.bytes - copy.zeros;
      memcpy(target, reinterpret_cast<void*>(copy.source), read);
      memset(target + read, 0, copy.zeros);
    }
  }
  std::erase_if(own_copies, ends);
}

void Thread::wait_for_copies(u32 groups_left) {
  end_copies_before(copy_groups > groups_left ? copy_groups - groups_left : 0);
}

void Thread::arrive_after_copies(u64 barrier) {
  commit_copies();
  cta->loads.push_back(Copy{CopyKind::kArrival, 0, 0, 0, 0, {}, barrier, this, copy_groups});
}

// ----------------------------------------------------------------------------------- cp.async.bulk
void Thread::load_tensor(u64 target, u64 tensor_map, std::array<i32, 5> const& coordinates,
                         u64 barrier, int site) {
  check_aligned({target}, site);
  TensorMap const& map = map_of(tensor_map);
  u32 const bytes = map.rows() * map.row_bytes();
  spoil(*cta, target, bytes);
  cta->loads.push_back(
      Copy{CopyKind::kTensorLoad, target, 0, bytes, tensor_map, coordinates, barrier, this, 0});
}

void Thread::store_tensor(u64 tensor_map, std::array<i32, 5> const& coordinates, u64 source,
                          int site) {
  check_aligned({source}, site);
  cta->stores.push_back(
      Copy{CopyKind::kTensorStore, 0, source, 0, tensor_map, coordinates, 0, this, store_groups});
}

void Thread::start_bulk(CopyKind kind, u64 target, u64 source, u32 bytes, u64 barrier, int site) {
  check_aligned({target, source, bytes}, site);
  bool const is_load = kind == CopyKind::kLoad || kind == CopyKind::kSend;
  auto& copies = is_load ? cta->loads : cta->stores;
  copies.push_back(Copy{kind, target, source, bytes, 0, {}, barrier, this, store_groups});
}

void Thread::bulk_load(u64 target, u64 source, u32 bytes, u64 barrier, int site) {
  spoil(*cta, target, bytes);
  start_bulk(CopyKind::kLoad, target, source, bytes, barrier, site);
}

void Thread::bulk_send(u64 target, u64 source, u32 bytes, u64 barrier, int site) {
  start_bulk(CopyKind::kSend, target, source, bytes, barrier, site);
}

void Thread::bulk_store(u64 target, u64 source, u32 bytes, int site) {
  start_bulk(CopyKind::kStore, target, source, bytes, 0, site);
}

void Thread::bulk_add(u64 target, u64 source, u32 bytes, int site) {
  start_bulk(CopyKind::kAdd, target, source, bytes, 0, site);
}

void Thread::wait_for_stores(u32 groups_left) {
  auto& stores = cta->stores;
  auto is_due = [&](Copy const& copy) {
    return copy.owner == this && copy.group + groups_left < store_groups;
  };
  for (auto due = stores.begin(); due != stores.end();) {
    due = std::find_if(stores.begin(), stores.end(), is_due);
    if (due != stores.end()) {
      run_and_remove(stores, size_t(due - stores.begin()));
      due = stores.begin();
    }
  }
}

void Thread::send_words(u64 target, std::array<u32, 4> const& words, u64 barrier, int site) {
  check_aligned({target}, site);
  spoil(cta_of(*this, target), target, sizeof words);
  std::array<i32, 5> const values{i32(words[0]), i32(words[1]), i32(words[2]), i32(words[3])};
  cta->loads.push_back(
      Copy{CopyKind::kWords, target, 0, sizeof words, 0, values, barrier, this, 0});
}

}  // namespace emulator
