// The tables of packed sequences (core/packed_tiles.h), as the kernel of schedule/prepare.cu makes
// them, one sequence after the other.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "schedule/prepare.h"

namespace fa3::host {

inline int scheduled_tiles(PrepareParams const& p, Sequence const& s) {
  return p.schedules_keys() ? ceil_div(s.len.k, p.tile_keys) : ceil_div(s.len.q, p.tile_positions);
}

inline int cost_of(PrepareParams const& p, int b) {
  Sequence const entry = entry_of(p.lengths, b, p.batch, p.total_q, p.total_k);
  Sequence const s = scheduled_part(entry, b >= p.batch, p.schedules_keys());
  return p.schedules_keys() ? min_of(s.len.q, p.most_queries) : min_of(s.len.k, p.most_keys);
}

// The tiles of queries, in the order of the batch; gives the sequences as they are used.
inline std::vector<SequenceTiles> number_row_tiles(PrepareParams const& p) {
  std::vector<SequenceTiles> sequences;
  std::fill_n(p.tables.row_tiles, p.tables.row_tile_count, RowTile{0, 0});
  int base = 0;
  for (int b = 0; b < p.entries; ++b) {
    Sequence s = entry_of(p.lengths, b, p.batch, p.total_q, p.total_k);
    if (p.schedules_keys()) {
      s = clip_to_capacity(s, p.tables.row_tile_count - base, p.tile_positions);
    }
    Sequence const part = scheduled_part(s, b >= p.batch, p.schedules_keys());
    sequences.push_back(SequenceTiles{part, 0, scheduled_tiles(p, part), base, b});
    for (int first = 0; p.schedules_keys() && first < s.len.q; first += p.tile_positions) {
      p.tables.row_tiles[base++] =
          RowTile{s.q_begin + first, min_of(p.tile_positions, s.len.q - first)};
    }
  }
  return sequences;
}

inline void fill_tables(PrepareParams const& p) {
  std::vector<SequenceTiles> const sequences = number_row_tiles(p);
  std::vector<int> order(sequences.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return cost_of(p, a) > cost_of(p, b); });
  int count = 0;
  for (int place = 0; place < int(order.size()); ++place) {
    SequenceTiles s = sequences[order[place]];
    s.tile_base = count;
    p.tables.sequences[place] = s;
    int const end = min_of(count + s.tiles, p.tables.tiles);
    std::fill(p.tables.sequence_of_tile + count, p.tables.sequence_of_tile + end, place);
    count = end;
  }
  std::fill(p.tables.sequence_of_tile + count, p.tables.sequence_of_tile + p.tables.tiles,
            PackedTables::kNoTile);
  p.tables.header[PackedTables::kTicket] = 0;
}

}  // namespace fa3::host
