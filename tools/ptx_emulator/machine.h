// A GPU as far as the kernels see it. Each of its threads is a fiber. The scheduler (launch.cpp)
// runs a thread until it waits for others, and draws the next one. Copies, which the engines of an
// SM execute asynchronously, happen at a drawn time between their start and the wait for them.
//
// An address of shared memory has the rank of a CTA of the cluster, plus one, in its upper 8 bits;
// with 0 there it is an address of the thread's own CTA.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "types.h"

namespace emulator {

struct Cta;
struct Thread;

constexpr u32 kWarpLanes = 32;
constexpr u32 kWarpgroupWarps = 4;
constexpr u32 kStaticBegin = 1024;  // static shared memory, as in ptx.py

// The value that a lane received; its own value where the other lane is outside the segment.
struct Shuffled {
  u32 value;
  bool is_inside;
};

enum class Element { k_e4m3, k_f16, k_bf16 };

// An operand of a product, in shared memory. is_column: neighbours differ in the row or column of
// the result, not in the index of the sum.
struct Operand {
  u64 descriptor;
  bool is_column;
};

// Bytes that a product has read; they must not change before the product is waited for.
struct ReadOperand {
  Operand operand;
  u32 first_row;
  u32 rows;
  u64 group;
  std::vector<u8> bytes;
};

struct Warp {
  std::array<Thread*, kWarpLanes> lanes{};
  // Two alternating sets: one collective writes its set while some lanes still read the other.
  u32 slots[2][kWarpLanes] = {};
  u32 arrived = 0;
  int site = 0;  // where they arrived
  // Products:
  u32* sums[kWarpLanes] = {};
  u32 const* words[kWarpLanes] = {};
  u64 issued = 0;
  std::vector<u64> issued_in_groups;  // up to the end of each group
  std::vector<ReadOperand> read;
};

// bar.sync and bar.arrive of a CTA.
struct Meeting {
  u32 arrived = 0;
  u32 expected = 0;  // 0: all threads
  std::vector<Thread*> waiting;
  u32 against = 0;  // votes
};

// kArrival: at an mbarrier, once the thread's own copies before it have ended.
enum class CopyKind { kTensorLoad, kTensorStore, kLoad, kSend, kWords, kStore, kAdd, kArrival };

// A copy of the copy engine.
struct Copy {
  CopyKind kind;
  u64 target;
  u64 source;
  u32 bytes;
  u64 tensor_map;
  std::array<i32, 5> coordinates;  // kWords: four words
  u64 barrier;
  Thread* owner;
  u32 group;
  u32 zeros = 0;  // the last bytes of the target, not read
};

struct Cluster {
  u32 number;
  u32 threads = 0;
  u32 arrived = 0;
  u32 ended = 0;
  u32 phase = 0;
  std::vector<Cta*> ctas;
  std::vector<Thread*> waiting;
};

struct Thread {
  void* stack = nullptr;  // where it resumes
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  bool is_done = false;
  bool is_blocked = false;
  bool has_arrived = false;  // at the cluster's barrier
  u32 number = 0;
  u32 collectives = 0;
  u32 cluster_phase = 0;
  u32 store_groups = 0;
  u32 copy_groups = 0;
  std::vector<Copy> own_copies;  // cp.async

  u32 index() const { return number; }
  u32 lane() const { return number % kWarpLanes; }

  // Lets others run: yield() comes back by itself.
  void yield();
  void block();

  // ------------------------------------------------------------------------------------- memory
  template <class T, int kCount>
  std::array<u64, kCount> load_parameter(u64 address, int) const {
    return read_all<T, kCount>(reinterpret_cast<void const*>(address));
  }
  template <class T, int kCount>
  std::array<u64, kCount> load_shared(u64 address, int site) const {
    return read_all<T, kCount>(shared(address, sizeof(T) * kCount, site));
  }
  // Generic addresses of shared memory lie in this window.
  static constexpr u64 kSharedWindow = u64(1) << 62;
  template <class T, int kCount>
  std::array<u64, kCount> load_global(u64 address, int site) const {
    if (address >= kSharedWindow) {
      return load_shared<T, kCount>(address - kSharedWindow, site);
    }
    return read_all<T, kCount>(readable(address, sizeof(T) * kCount, site));
  }
  template <class T, size_t kCount>
  void store_shared(u64 address, std::array<T, kCount> const& values, int site) {
    memcpy(shared(address, sizeof values, site), values.data(), sizeof values);
    mark_unfenced(address, sizeof values);
  }
  template <class T, size_t kCount>
  void store_global(u64 address, std::array<T, kCount> const& values, int site) {
    memcpy(writable(address, sizeof values, site), values.data(), sizeof values);
  }
  // Both store change(value) and return the value before.
  template <class T, class Change>
  T update_shared(u64 address, Change const& change, int site) {
    T const old = read_as<T>(shared(address, sizeof old, site));
    store_shared<T, 1>(address, {change(old)}, site);
    return old;
  }
  template <class T, class Change>
  T update_global(u64 address, Change const& change, int site) {
    T const old = read_as<T>(readable(address, sizeof old, site));
    store_global<T, 1>(address, {change(old)}, site);
    return old;
  }
  u32 compare_and_swap(u64 address, u32 expected, u32 value, int site);  // in global memory
  void add_floats(u64 address, std::array<u32, 4> const& values, int site);

  // Engines may not read what a thread writes to shared memory before a fence.
  void mark_unfenced(u64 address, u32 bytes);
  void mark_fenced();

  // -------------------------------------------------------------------------- warp, CTA, cluster
  u32 ballot(bool vote, u32 mask, int site);
  u32 reduce_max(u32 value, u32 mask, int site);
  u32 reduce_min(u32 value, u32 mask, int site);
  u32 reduce_add(u32 value, u32 mask, int site);
  u32 reduce_and(u32 value, u32 mask, int site);
  u32 reduce_or(u32 value, u32 mask, int site);
  Shuffled shuffle_bfly(u32 value, u32 distance, u32 bounds, u32 mask, int site);
  Shuffled shuffle_idx(u32 value, u32 lane, u32 bounds, u32 mask, int site);
  Shuffled shuffle_up(u32 value, u32 distance, u32 bounds, u32 mask, int site);
  void load_matrices(u32* words, int count, bool transposed, u64 address, int site);
  void store_matrices(u32 const* words, int count, bool transposed, u64 address, int site);
  void meet(u32 barrier, u32 threads, int site);
  void arrive(u32 barrier, u32 threads, int site);
  bool all_agree(u32 barrier, bool vote, int site);
  void cluster_arrive();
  void cluster_wait();
  u32 address_of_rank(u64 address, u32 rank) const;
  void init_mbarrier(u64 address, u32 count);
  void arrive_at_mbarrier(u64 address, u32 expected_bytes);
  void expect_at_mbarrier(u64 address, u32 bytes);
  bool try_mbarrier(u64 address, u32 phase);

  // ------------------------------------------------------------------------------------- copies
  void copy_later(u64 target, u64 source, u32 bytes, u32 read, int site);
  void commit_copies() { ++copy_groups; }
  void wait_for_copies(u32 groups_left);
  // Counts as a group of copies: no kernel has both.
  void arrive_after_copies(u64 barrier);
  void end_copies_before(u32 group);
  void load_tensor(u64 target, u64 tensor_map, std::array<i32, 5> const& coordinates, u64 barrier,
                   int site);
  void store_tensor(u64 tensor_map, std::array<i32, 5> const& coordinates, u64 source, int site);
  void bulk_load(u64 target, u64 source, u32 bytes, u64 barrier, int site);
  void bulk_send(u64 target, u64 source, u32 bytes, u64 barrier, int site);
  void bulk_store(u64 target, u64 source, u32 bytes, int site);
  void bulk_add(u64 target, u64 source, u32 bytes, int site);
  void commit_stores() { ++store_groups; }
  void wait_for_stores(u32 groups_left);
  void send_words(u64 target, std::array<u32, 4> const& words, u64 barrier, int site);

  // ----------------------------------------------------------------------------------- products
  // sums: of this thread, in the order of the registers. words: of the first operand; null: it is
  // in shared memory.
  void multiply(u32* sums, u32 const* words, Operand first, Operand second, u32 columns,
                Element element, bool adds, bool has_plain_signs, int site);
  void commit_products();
  void wait_for_products(u32 groups_left, int site);

 private:
  template <class T, int kCount>
  static std::array<u64, kCount> read_all(void const* from) {
    std::array<u64, kCount> found;
    for (int i = 0; i < kCount; ++i) {
      found[i] = u64(read_as<T>(static_cast<T const*>(from) + i));  // a sign goes on
    }
    return found;
  }

  // All lanes of the warp meet; gives what each brought.
  u32 const* exchange(u32 value, u32 mask, int site);
  u8* shared(u64 address, u32 bytes, int site) const;
  void* readable(u64 address, u32 bytes, int site) const;
  void* writable(u64 address, u32 bytes, int site) const;
  void start_bulk(CopyKind kind, u64 target, u64 source, u32 bytes, u64 barrier, int site);
};

struct Cta {
  Cluster* cluster;
  u32 number;
  u32 rank;
  u32 grid;
  u32 threads_count;
  u32 running;
  u32 dynamic_begin;
  u8 const* parameters;
  std::vector<u8> memory;   // shared; its first bytes stand for what the GPU keeps
  std::vector<u16> writer;  // for each byte without a fence yet: thread + 1
  std::vector<std::vector<std::pair<u32, u32>>> unfenced;  // by thread: offset, bytes
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::array<Meeting, 16> meetings;
  std::vector<Copy> loads;  // in flight
  std::vector<Copy> stores;

  u8* at(u32 offset, u32 bytes);
  // Ends the launch if a thread wrote there and no fence followed.
  void check_visible(u32 offset, u32 bytes, char const* reader) const;
};

// ------------------------------------------------------------------------------- between the files
constexpr u32 offset_of(u64 shared_address) { return u32(shared_address & 0xffffff); }
constexpr u32 rank_of(u64 shared_address) { return u32(shared_address >> 24); }

// Bits of an address that the swizzle of rows of so many bytes changes: those of 16 bytes, by the
// number of the row.
constexpr u32 swizzle(u32 address, u32 row_bytes) {
  return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

Cta& cta_of(Thread const& thread, u64 shared_address);
void release_if_complete(Meeting& meeting, Cta const& cta);
void release_if_complete(Cluster& cluster);
// Counts bytes that have arrived on an mbarrier.
void complete_bytes(Cta& cta, u64 barrier, u32 bytes);
// Finishes drawn copies of a CTA, `must`: one at least; gives whether there was one.
bool advance_copies(Cta& cta, bool must);
// The next random number, and where they begin.
u32 draw(u32 below);
void seed(u32 value);

struct Kernel {
  char const* name;
  void (*function)(Thread&);
  int most_registers;
  int static_bytes;
  int cluster_ctas;
};

void add_kernel(Kernel const& kernel);

struct LaunchSize {
  u32 grid;
  u32 threads;
  u32 dynamic_bytes;
  u32 cluster_ctas;
  bool is_together;  // all CTAs at once
};

// Throws std::runtime_error with the first error of a thread.
void launch(Kernel const& kernel, LaunchSize const& size, void const* parameters);

}  // namespace emulator
