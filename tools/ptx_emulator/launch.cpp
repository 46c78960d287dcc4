// Fibers, and the choice of the next one to run.
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>

#include "machine.h"
#include "memory.h"

// Leaves a stack for another one: what the calling convention of x86-64 Linux keeps.
extern "C" void emulator_switch(void** leave, void* enter);
asm(R"(
.globl emulator_switch
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace emulator {
namespace {

constexpr size_t kStackBytes = size_t(256) << 10;
constexpr u32 kSavedRegisters = 6;
constexpr u64 kMostRounds = 30'000'000;
constexpr u32 kAlignment = 1024;  // dynamic shared memory begins at multiples

std::mt19937 generator(1);
Kernel const* running_kernel = nullptr;
Thread* running_thread = nullptr;
void* scheduler_stack = nullptr;
std::string first_error;

// Never released: a later launch uses them again.
u8* stack_end(size_t number) {
  static std::vector<u8*> ends;
  while (ends.size() <= number) {
    constexpr size_t kMany = 256;
    void* const memory = mmap(nullptr, kMany * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    for (size_t i = 1; i <= kMany; ++i) {
      ends.push_back(static_cast<u8*>(memory) + i * kStackBytes);
    }
  }
  return ends[number];
}

void to_scheduler(Thread& thread) {
  emulator_switch(&thread.stack, scheduler_stack);
  running_thread = &thread;
}

void end_of_thread(Thread& thread) {
  Cta& cta = *thread.cta;
  thread.is_done = true;
  if (thread.has_arrived) {
    fail("it ends between its arrival at the cluster's barrier and the wait");
  }
  --cta.running;
  ++cta.cluster->ended;
  if (cta.running == 0 && !(cta.loads.empty() && cta.stores.empty())) {
    fail("the CTA ends with copies in flight");
  }
  for (Meeting& meeting : cta.meetings) {
    release_if_complete(meeting, cta);
  }
  release_if_complete(*cta.cluster);
}

void run_thread() {
  Thread& thread = *running_thread;
  running_kernel->function(thread);
  end_of_thread(thread);
  to_scheduler(thread);
}

void prepare_stack(Thread& thread, size_t number) {
  void** top = reinterpret_cast<void**>(stack_end(number));
  *--top = nullptr;  // where run_thread() never returns to
  *--top = reinterpret_cast<void*>(&run_thread);
  for (u32 i = 0; i < kSavedRegisters; ++i) {
    *--top = nullptr;
  }
  thread.stack = top;
}

// Runs the lanes of a warp that can run; gives how many.
u32 resume(Warp& warp) {
  bool const is_backwards = draw(2) != 0;
  u32 resumed = 0;
  for (u32 i = 0; i < kWarpLanes && first_error.empty(); ++i) {
    Thread& thread = *warp.lanes[is_backwards ? kWarpLanes - 1 - i : i];
    if (!thread.is_done && !thread.is_blocked) {
      running_thread = &thread;
      emulator_switch(&scheduler_stack, thread.stack);
      running_thread = nullptr;
      ++resumed;
    }
  }
  return resumed;
}

using Ctas = std::vector<std::unique_ptr<Cta>>;

bool advance_all_copies(Ctas& ctas, bool must) {
  bool any = false;
  for (auto& cta : ctas) {
    any = (first_error.empty() && advance_copies(*cta, must)) || any;
  }
  return any;
}

// A round: every warp once, in a drawn order, but for those that sit it out. How many do is drawn
// for all rounds, so that some launches run in step and others far apart.
void run_rounds(Ctas& ctas, std::vector<Warp*>& warps) {
  u32 const idle_quarters = draw(3);
  u64 rounds = 0;
  auto is_running = [](auto const& cta) { return cta->running > 0; };
  while (std::any_of(ctas.begin(), ctas.end(), is_running) && first_error.empty()) {
    std::shuffle(warps.begin(), warps.end(), generator);
    bool const all_run = ++rounds % 16 == 0;
    bool has_moved = !all_run && idle_quarters > 0;
    for (Warp* warp : warps) {
      if ((all_run || draw(4) >= idle_quarters) && first_error.empty()) {
        has_moved = resume(*warp) > 0 || has_moved;
      }
    }
    has_moved = advance_all_copies(ctas, false) || has_moved;
    has_moved = has_moved || advance_all_copies(ctas, true);
    if (first_error.empty() && (!has_moved || rounds > kMostRounds)) {
      fail(has_moved ? "it does not end" : "all threads wait for each other");
    }
  }
}

std::unique_ptr<Cta> make_cta(Kernel const& kernel, LaunchSize const& size, Cluster& cluster,
                              u32 rank, void const* parameters) {
  auto cta = std::make_unique<Cta>();
  cta->cluster = &cluster;
  cta->number = cluster.number * size.cluster_ctas + rank;
  cta->rank = rank;
  cta->grid = size.grid;
  cta->threads_count = cta->running = size.threads;
  cta->parameters = static_cast<u8 const*>(parameters);
  u32 const end = kStaticBegin + u32(kernel.static_bytes);
  cta->dynamic_begin = (end + kAlignment - 1) / kAlignment * kAlignment;
  cta->memory.resize(cta->dynamic_begin + size.dynamic_bytes);
  std::generate(cta->memory.begin(), cta->memory.end(), [] { return u8(generator()); });
  cta->writer.resize(cta->memory.size());
  cta->unfenced.resize(size.threads);
  cta->threads.resize(size.threads);
  cta->warps.resize(size.threads / kWarpLanes);
  for (u32 i = 0; i < size.threads; ++i) {
    Thread& thread = cta->threads[i];
    thread.cta = cta.get();
    thread.warp = &cta->warps[i / kWarpLanes];
    thread.number = i;
    thread.warp->lanes[i % kWarpLanes] = &thread;
  }
  return cta;
}

// Some clusters, which are on the GPU at once.
void run_clusters(Kernel const& kernel, LaunchSize const& size, u32 const* numbers, u32 count,
                  void const* parameters) {
  std::vector<Cluster> clusters(count);
  Ctas ctas;
  std::vector<Warp*> warps;
  size_t stacks = 0;
  for (u32 i = 0; i < count; ++i) {
    clusters[i].number = numbers[i];
    clusters[i].threads = size.cluster_ctas * size.threads;
    for (u32 rank = 0; rank < size.cluster_ctas; ++rank) {
      ctas.push_back(make_cta(kernel, size, clusters[i], rank, parameters));
      clusters[i].ctas.push_back(ctas.back().get());
      for (Thread& thread : ctas.back()->threads) {
        prepare_stack(thread, stacks++);
      }
      for (Warp& warp : ctas.back()->warps) {
        warps.push_back(&warp);
      }
    }
  }
  run_rounds(ctas, warps);
}

}  // namespace

u32 draw(u32 below) { return u32(generator() % below); }

void seed(u32 value) { generator.seed(value); }

void fail(std::string const& what) {
  if (first_error.empty()) {
    first_error =
        text("emulator: ", running_kernel ? running_kernel->name : "no kernel", ": ", what);
    if (running_thread != nullptr) {
      first_error +=
          text("; CTA ", running_thread->cta->number, ", thread ", running_thread->number);
    }
  }
  if (running_thread == nullptr) {
    throw std::runtime_error(first_error);
  }
  to_scheduler(*running_thread);
  std::abort();  // nobody resumes it
}

void Thread::yield() { to_scheduler(*this); }

void Thread::block() {
  is_blocked = true;
  to_scheduler(*this);
}

void launch(Kernel const& kernel, LaunchSize const& size, void const* parameters) {
  constexpr u32 kMostSharedBytes = 227 * 1024;
  running_kernel = &kernel;
  first_error.clear();
  // This kernel reads a tile before it knows whether there is one (csrc/mla/combine.h).
  check_unwritten(std::string(kernel.name).find("mla_combine_kernel") == std::string::npos);
  if (size.grid == 0 || size.threads % kWarpLanes != 0 || size.threads > 1024 ||
      size.grid % size.cluster_ctas != 0 ||
      size.dynamic_bytes + u32(kernel.static_bytes) > kMostSharedBytes) {
    fail(text("a launch of ", size.grid, " CTAs of ", size.threads, " threads, clusters of ",
              size.cluster_ctas, ", ", size.dynamic_bytes, " bytes of shared memory"));
  }
  u32 const clusters = size.grid / size.cluster_ctas;
  u32 const at_once = size.is_together ? clusters : 1 + draw(3);
  std::vector<u32> numbers(clusters);
  for (u32 i = 0; i < clusters; ++i) {
    numbers[i] = i;
  }
  std::shuffle(numbers.begin(), numbers.end(), generator);
  for (u32 begin = 0; begin < clusters; begin += at_once) {
    run_clusters(kernel, size, &numbers[begin], std::min(at_once, clusters - begin), parameters);
    if (!first_error.empty()) {
      throw std::runtime_error(first_error);
    }
  }
}

}  // namespace emulator
