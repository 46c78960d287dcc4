// OverlapKind::kSerial: S, P and O of a K tile one after the other. S and P need not be live at the
// same time, so tiles may be larger. Only the GEMMs of other warpgroups overlap with the
// softmax.
#pragma once

#include "forward/consumer.h"

namespace fa3 {

// SumsKind::kFast: PV is added to O on the tensor cores.
struct SerialFastSums {
  template <class Consumer>
  CUTE_DEVICE static void add_product(Consumer& c, typename Consumer::Tile const& tile) {
    c.issue_output(tile);
    wait_gemm<0>(c.tOrO);
  }
};

// SumsKind::kPromoted: PV of a K tile is summed from zero, some columns at a time in the registers
// of S, and then added to O in fp32.
struct SerialPromotedSums {
  template <class Consumer>
  CUTE_DEVICE static void add_product(Consumer& c, typename Consumer::Tile const& tile) {
    using Traits = typename Consumer::Traits;
    using Mma = typename Traits::MmaPart;
    using Columns = cute::Int<Traits::kPartColumns>;
    int const stage = c.v_ring.stage;
    c.shared.v_full[stage].wait(c.v_ring.phase);
    auto sV = cute::make_tensor(cute::make_smem_ptr(c.shared.v[stage]),
                                typename Traits::SmemLayoutV{});  // (columns, N)
    if (tile.o_is_zero) {
      cute::clear(c.tOrO);
    }
    CUTE_UNROLL
    for (int part = 0; part < Traits::kHeadDimV / Traits::kPartColumns; ++part) {
      auto sPart = cute::local_tile(sV, cute::Shape<Columns, typename Traits::KeysV>{},
                                    cute::make_coord(part, 0));
      auto tPrV = Mma{}.get_slice(0).partition_fragment_B(sPart);  // (MMA, 1, N / 32)
      auto tPrO = cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, Columns>{});
      issue_gemm<Traits::kOutputSteps>(Mma{}, c.tOrP, tPrV, tPrO, true);
      wait_gemm<0>(tPrO);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tPrO); ++i) {
        c.tOrO(part * int(cute::size(tPrO)) + i) += tPrO(i);
      }
    }
  }
};

template <class Consumer>
struct SerialLoop {
  using Tile = typename Consumer::Tile;
  using Limits = decltype(Tile::limits);
  using Sums = cute::conditional_t<Consumer::k.is_promoted(), SerialPromotedSums, SerialFastSums>;

  Consumer& c;

  // Visits all tiles of this CTA; with packed sequences there may be none.
  CUTE_DEVICE void run() {
    c.ping_pong.begin();
    for (Tile tile = c.take_tile(); tile.work.valid(); tile = c.take_tile()) {
      c.scales.wait_for_queries(c.k_ring);
      c.start_rows(tile);
      visit_keys(tile);
      c.store(tile);
    }
    c.ping_pong.end();
  }

  template <Masked kMasked>
  CUTE_DEVICE void step(int n, Tile& tile) {
    c.wait_for_k();
    c.ping_pong.wait();
    c.issue_scores(tile);
    auto const& scale = c.scales.take();
    wait_gemm<0>(c.tSrS);
    c.ping_pong.pass();
    c.release_k();
    c.template exponentiate<kMasked>(n, tile, scale, [] {});
    c.pack(n, tile);
    c.softmax.rescale_output(c.tOrO, scale);
    c.softmax.complete_sums(c.tSrS, scale);
    Sums::add_product(c, tile);
    c.release_v();
    tile.o_is_zero = false;
  }

 private:
  CUTE_DEVICE void visit_keys(Tile& tile) {
    fa3::visit_keys(*this, tile, tile.work.keys.first(), tile.work.keys.begin);
  }
};

}  // namespace fa3
