// OverlapKind::kSkewed (paper, section 3.2): S of K tile n is issued together with PV of K tile n +
// 1, which is visited before it. The source is ordered so that the softmax of S(n) overlaps with
// that PV:
//
//   tensor cores   S(3) | S(2) PV(3) | S(1) PV(2) | S(0) PV(1) | PV(0)
//   softmax             3            2            1            0
//
// TRAP: the wait for PV does not depend on the softmax, so ptxas (13.0) moves it up. At head dims
// 64 and 128 it then comes before the exponentials, which do not overlap with PV. With two
// warpgroups at head dim 128 this costs up to 3 %, and PtxasTuning::late_wait prevents it
// (docs/journal/forward.md).
//
// For e4m3 the source waits after the maxima. With a wait between the exponentials and the packing,
// ptxas needs three instructions to pack four values, otherwise two.
//
// With overlap of tiles the skew continues from one tile of Q to the next: the first S of a tile is
// issued together with the last PV of the tile before, whose O is stored while that S is computed.
#pragma once

#include "forward/consumer.h"

namespace fa3 {

template <class Consumer>
struct SkewedLoop {
  using Tile = typename Consumer::Tile;
  using Limits = decltype(Tile::limits);

  Consumer& c;

  // Visits all tiles of this CTA; with packed sequences there may be none.
  CUTE_DEVICE void run() {
    c.ping_pong.begin();
    Tile tile = c.take_tile();
    if (Consumer::k.overlap.tiles) {
      if (tile.work.valid()) {
        visit_overlapped(tile);
      }
    } else {
      for (; tile.work.valid(); tile = c.take_tile()) {
        begin(tile);
        c.clear_first_values(tile);
        visit_keys(tile);
        c.clear_last_values(tile);
        end(tile);
      }
    }
    c.ping_pong.end();
  }

  // S and P of the tile's last K tile, which is visited first.
  CUTE_DEVICE void begin(Tile& tile) {
    c.skip_keys(tile.work.skipped.first);
    c.skip_values(tile.work.skipped.first);
    c.wait_for_k();
    c.load_queries(tile);
    c.ping_pong.wait();
    c.issue_scores(tile);
    c.ping_pong.pass();
    c.template complete_scores<0>();
    first_probabilities(tile);
  }

  // Visits the K tiles after the one that begin() has visited.
  CUTE_DEVICE void visit_keys(Tile& tile) {
    auto const& keys = tile.work.keys;
    if constexpr (Tile::kFolds) {
      KeyTilePart part = c.first_part(tile);
      while (true) {
        fa3::visit_keys(*this, tile, part.end - 2, part.begin);
        if (part.end == keys.end) {
          break;
        }
        part = part.next(keys, c.p.part_tiles);
        change_part(tile, part.end - 1);
      }
    } else {
      fa3::visit_keys(*this, tile, keys.next(keys.first()), keys.begin);
    }
  }

  // PV of the K tile that is visited last, then the results are stored.
  CUTE_DEVICE void end(Tile const& tile) {
    c.ping_pong.wait();
    c.issue_output(tile);
    c.ping_pong.pass();
    wait_gemm<0>(c.tOrO);
    c.release_v();
    c.store(tile);
  }

  // Computes S and P of K tile n, and O of K tile n + 1.
  template <Masked kMasked>
  CUTE_DEVICE void step(int n, Tile& tile) {
    c.wait_for_k();
    c.ping_pong.wait();
    c.issue_scores(tile);
    c.issue_output(tile);
    c.ping_pong.pass();
    auto const& scale = c.scales.take();
    c.template complete_scores<1>();
    constexpr bool kEndsFirst = Consumer::Traits::kMasksLate && kMasked != Masked::kNothing;
    if (kEndsFirst) {
      end_output();
    }
    c.template exponentiate<kMasked>(n, tile, scale, [&] {
      if (!kEndsFirst) {
        end_output();
      }
    });
    c.pack(n, tile);
    c.sums.add(c.tOrO, c.softmax, scale);
    tile.o_is_zero = false;
  }

 private:
  // The first tile and all after it, with overlap of tiles.
  CUTE_DEVICE void visit_overlapped(Tile tile) {
    begin(tile);
    while (true) {
      visit_keys(tile);
      Tile next = c.take_tile();
      if (!next.work.valid()) {
        break;
      }
      change_tile(tile, next);
      tile = next;
    }
    end(tile);
  }

  // end() of one tile and begin() of the next.
  CUTE_DEVICE void change_tile(Tile const& tile, Tile& next) {
    // Read here, as in FwdConsumer::store().
    int const skipped =
        c.shared.work[tile.q_stage][c.warpgroup].skipped.last + next.work.skipped.first;
    c.skip_keys(skipped);
    c.wait_for_k();
    c.load_queries(next);
    c.ping_pong.wait();
    c.issue_scores(next);
    c.issue_output(tile);
    c.ping_pong.pass();
    c.template complete_scores<1>();
    wait_gemm<0>(c.tOrO);
    c.release_v();
    c.skip_values(skipped);
    c.store(tile);
    first_probabilities(next);
  }

  // The last PV of a part and the first S of the next, which begins with K tile n.
  CUTE_DEVICE void change_part(Tile& tile, int n) {
    c.wait_for_k();
    c.ping_pong.wait();
    c.issue_scores(tile);
    c.issue_output(tile);
    c.ping_pong.pass();
    c.template complete_scores<1>();
    c.sums.end_part(c.tOrO, c.softmax, [&] { end_output(); });
    c.softmax.reset();
    first_probabilities(tile, n);
    tile.o_is_zero = true;
  }

  // Waits for PV.
  CUTE_DEVICE void end_output() {
    wait_gemm<0>(c.tOrO);
    c.release_v();
  }

  CUTE_DEVICE void first_probabilities(Tile& tile) {
    c.start_rows(tile);
    first_probabilities(tile, c.first_keys(tile));
  }

  // n: the K tile of S, the first one of a tile or a part.
  CUTE_DEVICE void first_probabilities(Tile& tile, int n) {
    auto const& scale = c.scales.take();
    c.transform_scores(n, tile, scale);
    KeyRange<typename Consumer::Traits> const& keys = tile.work.keys;
    if (n >= keys.free_end || (Limits::kHasBegin && n < keys.free_begin)) {
      constexpr Masked kMasked = Limits::kHasBegin ? Masked::kBothEnds : Masked::kEnd;
      c.template mask_scores<kMasked>(n, tile);
    }
    c.softmax.template update<true>(c.tSrS, scale, [] {});
    c.pack(n, tile);
    c.sums.begin();
  }
};

}  // namespace fa3
