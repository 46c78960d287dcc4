// What threads do together: in a warp, at the barriers of a CTA and of a cluster, at mbarriers.
#include <algorithm>
#include <functional>
#include <numeric>

#include "machine.h"

namespace emulator {
namespace {

// As it lies in shared memory.
struct Mbarrier {
  u16 count;
  u16 pending : 15;
  u16 phase : 1;
  i32 bytes;  // that are still to come
};
static_assert(sizeof(Mbarrier) == 8);

void settle(Mbarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
  }
}

Mbarrier& mbarrier_at(Cta& cta, u64 address) {
  return *reinterpret_cast<Mbarrier*>(cta.at(offset_of(address), sizeof(Mbarrier)));
}

void release(std::vector<Thread*>& waiting) {
  for (Thread* thread : waiting) {
    thread->is_blocked = false;
  }
  waiting.clear();
}

}  // namespace

// -------------------------------------------------------------------------------------------- warp
u32 const* Thread::exchange(u32 value, u32 mask, int site) {
  u32* const slots = warp->slots[collectives++ % 2];
  if (mask != ~0u) {
    fail(text("a collective of some lanes, mask ", mask));
  }
  slots[lane()] = value;
  if (warp->arrived > 0 && warp->site != site) {
    fail(text("lanes of a warp meet at instructions ", warp->site, " and ", site));
  }
  warp->site = site;
  if (++warp->arrived < kWarpLanes) {
    block();
    return slots;
  }
  warp->arrived = 0;
  for (Thread* other : warp->lanes) {
    other->is_blocked = false;
  }
  return slots;
}

u32 Thread::ballot(bool vote, u32 mask, int site) {
  u32 const* const votes = exchange(vote, mask, site);
  u32 found = 0;
  for (u32 i = 0; i < kWarpLanes; ++i) {
    found |= votes[i] << i;
  }
  return found;
}

u32 Thread::reduce_max(u32 value, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  return *std::max_element(values, values + kWarpLanes);
}

u32 Thread::reduce_min(u32 value, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  return *std::min_element(values, values + kWarpLanes);
}

u32 Thread::reduce_add(u32 value, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  u32 sum = 0;
  for (u32 i = 0; i < kWarpLanes; ++i) {
    sum += values[i];
  }
  return sum;
}

u32 Thread::reduce_and(u32 value, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  return std::accumulate(values, values + kWarpLanes, ~0u, std::bit_and<>());
}

u32 Thread::reduce_or(u32 value, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  return std::accumulate(values, values + kWarpLanes, 0u, std::bit_or<>());
}

// bounds: the last lane of a segment below, the bits that all lanes of a segment share above.
Shuffled Thread::shuffle_bfly(u32 value, u32 distance, u32 bounds, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  u32 const segment = bounds >> 8 & 31;
  u32 const last = (lane() & segment) | (bounds & 31 & ~segment);
  u32 const from = lane() ^ (distance & 31);
  return Shuffled{values[from <= last ? from : lane()], from <= last};
}

Shuffled Thread::shuffle_idx(u32 value, u32 wanted, u32 bounds, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  u32 const segment = bounds >> 8 & 31;
  u32 const first = lane() & segment;
  u32 const last = first | (bounds & 31 & ~segment);
  u32 const from = first | (wanted & 31 & ~segment);
  return Shuffled{values[from <= last ? from : lane()], from <= last};
}

Shuffled Thread::shuffle_up(u32 value, u32 distance, u32 bounds, u32 mask, int site) {
  u32 const* const values = exchange(value, mask, site);
  u32 const segment = bounds >> 8 & 31;
  i32 const first = i32((lane() & segment) | (bounds & 31 & ~segment));
  i32 const from = i32(lane()) - i32(distance & 31);
  return Shuffled{values[from >= first ? u32(from) : lane()], from >= first};
}

// --------------------------------------------------------------------------------------------- CTA
void release_if_complete(Meeting& meeting, Cta const& cta) {
  if (meeting.arrived > 0 &&
      meeting.arrived == (meeting.expected > 0 ? meeting.expected : cta.running)) {
    meeting.arrived = meeting.expected = 0;
    release(meeting.waiting);
  }
}

void Thread::arrive(u32 barrier, u32 threads, int site) {
  if (barrier >= cta->meetings.size()) {
    fail(text("named barrier ", barrier, ", instruction ", site));
  }
  Meeting& meeting = cta->meetings[barrier];
  if (meeting.arrived > 0 && meeting.expected != threads) {
    fail(text("named barrier ", barrier, " of ", meeting.expected, " and of ", threads,
              " threads, instruction ", site));
  }
  meeting.expected = threads;
  ++meeting.arrived;
  release_if_complete(meeting, *cta);
}

void Thread::meet(u32 barrier, u32 threads, int site) {
  cta->meetings[barrier % cta->meetings.size()].waiting.push_back(this);
  is_blocked = true;
  arrive(barrier, threads, site);
  if (is_blocked) {
    block();
  }
}

bool Thread::all_agree(u32 barrier, bool vote, int site) {
  Meeting& meeting = cta->meetings[barrier % cta->meetings.size()];
  meeting.against += !vote;
  meet(barrier, 0, site);
  bool const all = meeting.against == 0;
  meet(barrier, 0, site);  // all have read
  meeting.against = 0;
  meet(barrier, 0, site);
  return all;
}

// ----------------------------------------------------------------------------------------- cluster
void release_if_complete(Cluster& cluster) {
  if (cluster.arrived > 0 && cluster.arrived + cluster.ended == cluster.threads) {
    cluster.arrived = 0;
    ++cluster.phase;
    release(cluster.waiting);
  }
}

void Thread::cluster_arrive() {
  if (has_arrived) {
    fail("it arrives at the cluster's barrier twice");
  }
  has_arrived = true;
  cluster_phase = cta->cluster->phase;
  ++cta->cluster->arrived;
  release_if_complete(*cta->cluster);
}

void Thread::cluster_wait() {
  if (!has_arrived) {
    fail("it waits at the cluster's barrier without an arrival");
  }
  while (cta->cluster->phase == cluster_phase) {
    cta->cluster->waiting.push_back(this);
    block();
  }
  has_arrived = false;
}

u32 Thread::address_of_rank(u64 address, u32 rank) const {
  if (rank >= cta->cluster->ctas.size()) {
    fail(text("rank ", rank, " of a cluster of ", cta->cluster->ctas.size()));
  }
  return (rank + 1) << 24 | offset_of(address);
}

// --------------------------------------------------------------------------------------- mbarriers
void Thread::init_mbarrier(u64 address, u32 count) {
  mbarrier_at(cta_of(*this, address), address) = Mbarrier{u16(count), u16(count), 0, 0};
}

void Thread::arrive_at_mbarrier(u64 address, u32 expected_bytes) {
  Mbarrier& barrier = mbarrier_at(cta_of(*this, address), address);
  if (barrier.pending == 0) {
    fail("more arrivals than the mbarrier counts");
  }
  barrier.bytes += i32(expected_bytes);
  barrier.pending = u16(barrier.pending - 1);
  settle(barrier);
}

void Thread::expect_at_mbarrier(u64 address, u32 bytes) {
  mbarrier_at(cta_of(*this, address), address).bytes += i32(bytes);
}

bool Thread::try_mbarrier(u64 address, u32 phase) {
  auto is_complete = [&] { return mbarrier_at(cta_of(*this, address), address).phase != phase; };
  if (!is_complete()) {
    yield();
  }
  return is_complete();
}

void complete_bytes(Cta& cta, u64 address, u32 bytes) {
  Mbarrier& barrier = mbarrier_at(cta, address);
  barrier.bytes -= i32(bytes);
  settle(barrier);
}

}  // namespace emulator
