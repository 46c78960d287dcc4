// A tile of the schedule, resolved: coordinates and K tiles. The producer computes it and publishes
// it in shared memory, together with Q, to the warpgroups that compute and store the tile.
#pragma once

#include "core/key_list.h"
#include "forward/column_ctas.h"
#include "forward/params.h"

namespace fa3 {

// Where the results other than O of a tile's rows are stored.
struct FwdRows {
  int64_t offset;  // offset in the LSE: first query, first head
  int left;        // queries from the first one to the end of the sequence
  int head;        // first of the `pack` query heads
};

// The slot KeyRange: which K tiles a tile visits, in which order, and which of them are masked.
template <class Traits>
using KeyRange = cute::conditional_t<Traits::kKind.has_lists(), KeyList, BlockRange>;

template <class Traits>
struct alignas(16) FwdWork {
  KeyRange<Traits> keys;  // K tiles, at least one; end 0: there are no more tiles
  FwdRows rows;
  int position_begin;  // first query, of the tile or of one warpgroup; negative: lead_positions()
  int kv_head;
  int entry;  // the sequence's index in the batch, where scales or plain stores of O need it
  typename Traits::Location location;
  SkippedTiles skipped;  // by a warpgroup: K tiles of the tile that are not in `keys`

  CUTE_DEVICE bool valid() const { return keys.end > 0; }
  CUTE_DEVICE void invalidate() { keys.end = 0; }

  // Whether a warpgroup has a row of the sequence.
  CUTE_DEVICE bool has_rows() const { return position_begin >= 0; }

  // The K tiles of the tile, with those that the warpgroup skips.
  CUTE_DEVICE KeyRange<Traits> all_keys() const { return keys.visits_with(skipped); }
  CUTE_DEVICE int all_key_count() const { return keys.count_with(skipped); }
};

// Whether scales or plain stores of O need the index of the tile's sequence in the batch.
template <class Traits>
constexpr bool kNeedsEntry = Traits::kHasScales || Traits::k.output == OutputKind::kRegisters;

// First row of the tile's packed sequence in the tensor of queries.
template <class Traits>
CUTE_DEVICE int first_row_of_sequence(FwdDeviceParams const& p, FwdWork<Traits> const& work) {
  return work.location.end_q() - work.location.lengths(p.seqlen).q;
}

template <class Traits>
CUTE_DEVICE BlockRange keys_of(FwdDeviceParams const& p, typename Traits::Location const& location,
                               int begin, int end) {
  return block_range(begin, end, location.lengths(p.seqlen), Traits::kTileN,
                     mask_of<Traits::kKind.mask>(p.mask), location.first_slot());
}

// The K tiles of a tile of queries.
template <class Traits>
CUTE_DEVICE void find_keys(BlockRange& keys, FwdDeviceParams const& p, FwdWork<Traits> const& work,
                           TileCoord) {
  int const positions = Traits::kWarpgroups * p.positions_per_warpgroup;
  keys = keys_of<Traits>(p, work.location, max_of(0, work.position_begin),
                         work.position_begin + positions);
  // WHY at least one K tile: it is masked as a whole, and no role needs a special case for a tile
  // that sees no key.
  keys.end = max_of(keys.end, keys.begin + 1);
}

template <class Traits>
CUTE_DEVICE void find_keys(KeyList& keys, ListDeviceParams const& p, FwdWork<Traits> const& work,
                           TileCoord tile) {
  MaskLists const& listed = p.listed;
  int const q_begin = work.location.end_q() - work.location.len.q;
  int const index = p.is_packed() ? q_begin / kListedRows + tile.batch + tile.m : tile.m;
  keys = KeyList::at(listed.lists_of(p.is_packed() ? 0 : tile.batch, tile.head) +
                     int64_t(index) * listed.tile_stride);
}

// The K tiles of a warpgroup's share of a tile: those that all of its rows see need no mask, and
// those at the ends that none of its rows sees are skipped.
template <class Traits>
CUTE_DEVICE void share_keys(BlockRange& keys, FwdDeviceParams const& p, FwdWork<Traits>& work) {
  BlockRange const own = keys_of<Traits>(p, work.location, work.position_begin,
                                         work.position_begin + p.positions_per_warpgroup);
  keys.free_begin = own.free_begin;
  keys.free_end = own.free_end;
  if (Traits::kMostSkipped > 0 && work.has_rows()) {
    work.skipped = skipped_tiles(keys, own, Traits::kMostSkipped);
    keys.narrow(work.skipped);
  }
}

// A list says what the whole tile sees.
template <class Traits>
CUTE_DEVICE void share_keys(KeyList&, FwdDeviceParams const&, FwdWork<Traits>&) {}

// A tile of the sequence at a location. The first tile begins `lead` positions before the sequence.
// first_row: index in the LSE of the first query, first head.
template <class Traits>
CUTE_DEVICE FwdWork<Traits> resolve_tile(typename Traits::Params const& p, TileCoord tile, int lead,
                                         typename Traits::Location const& location,
                                         int64_t first_row) {
  int const positions = Traits::kWarpgroups * p.positions_per_warpgroup;
  SeqlenPair const len = location.lengths(p.seqlen);
  FwdWork<Traits> work;
  work.location = location;
  work.position_begin = tile.m * positions - lead;
  work.rows.head = tile.head * int(p.pack.divisor);
  work.rows.left = len.q - work.position_begin;
  work.rows.offset = first_row + int64_t(work.rows.head) * p.seqlen.q + work.position_begin;
  work.kv_head = p.groups_per_kv_head.div(tile.head);
  find_keys(work.keys, p, work, tile);
  work.skipped = SkippedTiles{0, 0};
  if (kNeedsEntry<Traits>) {
    work.entry = tile.batch;
  }
  return work;
}

// The share of one warpgroup. A warpgroup before the first query has no rows: it computes the first
// rows of the sequence, and stores nothing.
template <class Traits>
CUTE_DEVICE FwdWork<Traits> share_of_warpgroup(FwdDeviceParams const& p, FwdWork<Traits> work,
                                               int warpgroup) {
  int const first = warpgroup * p.positions_per_warpgroup;
  work.position_begin += first;
  work.rows.offset += first;
  work.rows.left = work.has_rows() ? work.rows.left - first : 0;
  share_keys(work.keys, p, work);
  return work;
}

// The tiles of this CTA: next() gives the one whose ticket was drawn last, and one that is not
// valid() after the last tile. The first ticket is there from the beginning; draw() gets the next.
// WHY one type for each form of a batch: where both paths join in one function, ptxas keeps the
// coordinates of the copies in vector registers, and each copy waits for them to be moved.

template <class Traits>
CUTE_DEVICE FwdWork<Traits> no_tile() {
  FwdWork<Traits> none{};
  none.invalidate();
  return none;
}

CUTE_DEVICE TileCoord tile_of(FwdDeviceParams const& p, int number) {
  return p.order.coord(number);
}

CUTE_DEVICE TileCoord tile_of(ListDeviceParams const& p, int number) {
  return p.listed.tile_of(p.order, number, 1);
}

// A dense batch: tickets are numbers in the order of tiles. The first of a CTA is its index.
template <class Traits>
struct DenseTiles {
  using Columns = ColumnsOf<Traits>;

  typename Traits::Params const& p;
  int drawn;  // a ticket less the CTAs, of which each has one from the beginning

  CUTE_DEVICE explicit DenseTiles(typename Traits::Params const& p_)
      : p(p_), drawn(Columns::own_cta() - Columns::ctas()) {}

  // WHY nothing is done with it here: the thread would wait for it.
  CUTE_DEVICE void draw() { drawn = Columns::draw(drawn, p.ticket_counter); }

  // Each CTA draws one ticket that is not valid. The last of them is the last draw of the launch,
  // and leaves zero for the next one.
  CUTE_DEVICE FwdWork<Traits> next() {
    int const ticket = Columns::ctas() + drawn;
    if (ticket >= p.tiles) {
      if (drawn == p.tiles - 1) {
        *p.ticket_counter = 0;
      }
      return no_tile<Traits>();
    }
    TileCoord const tile = tile_of(p, ticket);
    return resolve_tile<Traits>(p, tile, p.lead, Traits::Location::dense(tile.batch, p.seqlen),
                                int64_t(tile.batch) * p.lse_heads * p.seqlen.q);
  }
};

// Packed sequences: tickets lead to tiles by the tables.
template <class Traits>
struct PackedTiles {
  using Columns = ColumnsOf<Traits>;

  typename Traits::Params const& p;
  int ticket;

  CUTE_DEVICE explicit PackedTiles(typename Traits::Params const& p_)
      : p(p_), ticket(Columns::own_cta() - Columns::ctas()) {
    draw();
  }

  CUTE_DEVICE void draw() {
    ticket = Columns::draw(ticket, p.tables.header + PackedTables::kTicket);
  }

  CUTE_DEVICE FwdWork<Traits> next() {
    int const tile = p.tickets.heads.div(ticket);
    int const index =
        tile < p.tables.tiles ? p.tables.sequence_of_tile[tile] : PackedTables::kNoTile;
    if (index == PackedTables::kNoTile) {
      return no_tile<Traits>();
    }
    SequenceTiles const s = p.tables.sequences[index];
    int const lead =
        lead_positions(s.tiles, s.sequence.len.q, Traits::kWarpgroups, p.positions_per_warpgroup);
    return resolve_tile<Traits>(p, p.tickets.coord(s, ticket), lead < p.least_lead ? 0 : lead,
                                AnyLocation::packed(s.sequence), s.sequence.q_begin);
  }
};

// BatchKind::kDense and kAny: calls visit(tiles) with the type of the batch.
struct DenseBatch {
  template <class Traits, class Visit>
  CUTE_DEVICE static void visit_tiles(typename Traits::Params const& p, Visit const& visit) {
    visit(DenseTiles<Traits>(p));
  }
};

struct AnyBatch {
  template <class Traits, class Visit>
  CUTE_DEVICE static void visit_tiles(typename Traits::Params const& p, Visit const& visit) {
    if (p.is_packed()) {
      visit(PackedTiles<Traits>(p));
    } else {
      visit(DenseTiles<Traits>(p));
    }
  }
};

}  // namespace fa3
