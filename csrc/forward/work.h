// A tile of the schedule, resolved: coordinates and K tiles. The producer works it out and hands it
// to the warpgroups that compute and store it, through shared memory, together with Q.
#pragma once

#include "core/block_range.h"
#include "forward/params.h"

namespace fa3 {

// Where the results of a tile's rows go, beside O.
struct FwdRows {
  int64_t offset;  // of the first query, first head, in the LSE
  int left;        // queries from the first one to the end of the sequence
  int head;        // first of the `pack` query heads
};

template <class Traits>
struct alignas(16) FwdWork {
  BlockRange keys;  // K tiles, at least one; end 0: there are no more tiles
  FwdRows rows;
  int position_begin;  // first query, of the tile or of one warpgroup in it; less than 0: see
                       // lead_positions()
  int kv_head;
  int entry;  // FP8: the sequence's number in the batch, by which scales are found
  typename Traits::Place place;
  HiddenTiles hidden;  // of a warpgroup: K tiles of the tile that are not in `keys`

  CUTE_DEVICE bool valid() const { return keys.end > 0; }

  // Of a warpgroup.
  CUTE_DEVICE bool has_rows() const { return position_begin >= 0; }

  // All K tiles of the tile.
  CUTE_DEVICE int keys_begin() const { return keys.begin - hidden.last; }
  CUTE_DEVICE int keys_end() const { return keys.end + hidden.first; }
};

// Of a sequence of packed ones, in the tensors of queries.
template <class Traits>
CUTE_DEVICE int first_row_of_sequence(FwdWork<Traits> const& work) {
  return work.place.end_q() - work.place.len.q;
}

template <class Traits>
CUTE_DEVICE BlockRange keys_of(FwdDeviceParams const& p, SeqlenPair len, int begin, int end) {
  return block_range(begin, end, len, Traits::kTileN, mask_of<Traits::kMask>(p.mask));
}

// The tile of a sequence that lies there, whose first tile begins `lead` positions before it;
// first_row: of the sequence, first head, in the LSE.
template <class Traits>
CUTE_DEVICE FwdWork<Traits> resolve_tile(FwdDeviceParams const& p, TileCoord tile, int lead,
                                         typename Traits::Place const& place, int64_t first_row) {
  int const positions = Traits::kWarpgroups * p.positions_per_warpgroup;
  SeqlenPair const len = place.lengths(p.seqlen);
  FwdWork<Traits> work;
  work.place = place;
  work.position_begin = tile.m * positions - lead;
  work.rows.head = tile.head * int(p.pack.divisor);
  work.rows.left = len.q - work.position_begin;
  work.rows.offset = first_row + int64_t(work.rows.head) * p.seqlen.q + work.position_begin;
  work.kv_head = p.groups_per_kv_head.div(tile.head);
  work.keys =
      keys_of<Traits>(p, len, max_of(0, work.position_begin), work.position_begin + positions);
  // A tile that sees no key visits one K tile, masked as a whole: no role needs a case of its own.
  work.keys.end = max_of(work.keys.end, work.keys.begin + 1);
  work.hidden = HiddenTiles{0, 0};
  if constexpr (Traits::kFp8) {
    work.entry = tile.batch;
  }
  return work;
}

// The share of one warpgroup: K tiles that all of its own rows see need no mask, and those that
// none of them sees are left out at the ends. Before the first query it has no rows; it goes the
// way of the others, with what comes first in their place.
template <class Traits>
CUTE_DEVICE FwdWork<Traits> share_of_warpgroup(FwdDeviceParams const& p, FwdWork<Traits> work,
                                               int warpgroup) {
  int const first = warpgroup * p.positions_per_warpgroup;
  work.position_begin += first;
  work.rows.offset += first;
  work.rows.left = work.has_rows() ? work.rows.left - first : 0;
  BlockRange const own = keys_of<Traits>(p, work.place.lengths(p.seqlen), work.position_begin,
                                         work.position_begin + p.positions_per_warpgroup);
  work.keys.free_begin = own.free_begin;
  work.keys.free_end = own.free_end;
  if (Traits::kHiddenAtMost > 0 && work.has_rows()) {
    work.hidden = hidden_tiles(work.keys, own, Traits::kHiddenAtMost);
    work.keys.begin += work.hidden.last;
    work.keys.end -= work.hidden.first;
  }
  return work;
}

// The tiles of this CTA, one after the other: next() gives one that is not valid() when there is
// none. Two types, one for each form of a batch.
// WHY: where both ways meet in one function, ptxas keeps the coordinates of the copies in vector
// registers, and each copy waits for them to be moved.

template <class Traits>
CUTE_DEVICE FwdWork<Traits> no_tile() {
  FwdWork<Traits> none{};
  none.keys.end = 0;
  return none;
}

// They follow from the CTA's index.
template <class Traits>
struct DenseTiles {
  FwdDeviceParams const& p;
  TileWalk walk;
  bool is_first = true;

  CUTE_DEVICE explicit DenseTiles(FwdDeviceParams const& p_)
      : p(p_), walk(p_.order, int(blockIdx.x), int(gridDim.x)) {}

  CUTE_DEVICE void draw() {}

  CUTE_DEVICE FwdWork<Traits> next() {
    if (!is_first) {
      walk.next();
    }
    is_first = false;
    if (!walk.valid()) {
      return no_tile<Traits>();
    }
    TileCoord const tile = walk.coord();
    return resolve_tile<Traits>(p, tile, p.lead, Traits::Place::dense(tile.batch, p.seqlen),
                                int64_t(tile.batch) * p.heads_q * p.seqlen.q);
  }
};

// Packed sequences: it draws tickets, one ahead.
template <class Traits>
struct TicketTiles {
  FwdDeviceParams const& p;
  int ticket = 0;

  CUTE_DEVICE explicit TicketTiles(FwdDeviceParams const& p_) : p(p_) {}

  // Of the tile after the one at hand; needed before next().
  CUTE_DEVICE void draw() { ticket = atomicAdd(p.tables.header + PackedTables::kTicket, 1); }

  CUTE_DEVICE FwdWork<Traits> next() {
    int const tile = p.tickets.heads.div(ticket);
    int const place =
        tile < p.tables.tiles ? p.tables.sequence_of_tile[tile] : PackedTables::kNoTile;
    if (place == PackedTables::kNoTile) {
      return no_tile<Traits>();
    }
    SequenceTiles const s = p.tables.sequences[place];
    int const lead =
        lead_positions(s.tiles, s.sequence.len.q, Traits::kWarpgroups, p.positions_per_warpgroup);
    return resolve_tile<Traits>(p, p.tickets.coord(s, ticket), lead < p.least_lead ? 0 : lead,
                                AnyPlace::packed(s.sequence), s.sequence.q_begin);
  }
};

}  // namespace fa3
