"""What the kernels of quantize_fp8 work out: rows and columns of threads, signs, tiles of rows,
scales. By brute force, and against flash_attn3/quantize.py."""
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn3 import quantize
from flash_attn3.quantize import PER_HEAD, PER_TENSOR

from tests import _host
from tests.cpu.test_reference_packed import starts

CHUNK, SPAN = 8, 16
PIECES, ROWS, CHUNKS = range(3)    # LaneOrder
LENGTHS = st.lists(st.integers(0, 200), min_size=0, max_size=6)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@pytest.mark.parametrize('head_dim', range(CHUNK, 257, CHUNK))
@pytest.mark.parametrize('tile', [32, 96])
def test_threads_have_every_value_once(head_dim, tile):
    """A warp has one width, and the columns that its lanes exchange are those of butterflies."""
    counts = torch.zeros(tile, head_dim, dtype=torch.int32)
    warps = _host.warps_of_tile(PIECES, head_dim, tile)
    for warp in range(warps):
        lanes = [_host.thread_place(False, 32 * warp + lane, head_dim, tile) for lane in range(32)]
        assert len({width for _, _, width, _ in lanes}) == 1
        check_exchanges(lanes, head_dim)
        for first, second, width, row in lanes:
            if row < tile:
                counts[row, first:first + min(width, SPAN)] += 1
            if row < tile and second >= 0:
                counts[row, second:second + SPAN] += 1
    assert (counts == 1).all()
    lanes_of_pieces = [max(width // (2 * SPAN), 1) for _, width in pieces(head_dim)]
    assert warps == sum(-(-tile * lanes // 32) for lanes in lanes_of_pieces)


@pytest.mark.parametrize('head_dim', [80, 96])
@pytest.mark.parametrize('tile', [1, 21, 22, 32, 48, 64, 300])
def test_lanes_of_a_row_next_to_each_other(head_dim, tile):
    """The two lanes of the piece of 64 columns are in one warp."""
    counts = torch.zeros(tile, head_dim, dtype=torch.int32)
    threads = 32 * _host.warps_of_tile(ROWS, head_dim, tile)
    assert threads - 32 < 3 * tile <= threads
    places = [_host.thread_place(True, thread, head_dim, tile) for thread in range(threads)]
    for thread, (first, second, width, row) in enumerate(places):
        assert width == (64 if first < 64 else head_dim - 64)
        assert second == (-1 if width == 16 else first + width // 2)
        if row < tile:
            counts[row, first:first + SPAN] += 1
        if row < tile and second >= 0:
            counts[row, second:second + SPAN] += 1
        if row < tile and first == 0:
            assert thread % 32 < 31 and places[thread + 1] == (SPAN, 3 * SPAN, 64, row)
    assert (counts == 1).all()


@pytest.mark.parametrize('head_dim', range(CHUNK, 257, CHUNK))
@pytest.mark.parametrize('tile', [30, 32, 48, 96])
def test_chunks_are_there_once(head_dim, tile):
    """Neighbours have neighbouring columns."""
    counts = torch.zeros(tile + 4, head_dim, dtype=torch.int32)
    places = [_host.chunk_place(thread, head_dim, tile)
              for thread in range(32 * _host.warps_of_tile(CHUNKS, head_dim, tile))]
    for (column, rows), after in zip(places, [*places[1:], None]):
        for row in rows:
            counts[min(row, tile), column:column + CHUNK] += 1
        if after is not None and column + CHUNK < head_dim:
            assert after == (column + CHUNK, rows)
    assert (counts[:tile] == 1).all()


def write_heads(address: int, head_dim: int, heads: int) -> list[tuple[int, int]]:
    """What RowWriter does for a row: the instruction and the address of every chunk."""
    found, waits = [], set()
    for head in range(heads):
        place, waited = address + head * head_dim, waits
        waits = set()
        for column in range(0, head_dim, CHUNK):
            completes, part = _host.sector_part(place, column, head_dim, head == 0,
                                                head == heads - 1)
            assert not (completes and (part or column in waited))
            if completes:
                found.append((2 * head + 1, place + column))
            elif part:
                waits.add(column)
            else:
                found.append((2 * head, place + column))
            if column in waited:
                found.append((2 * head + 1, place - head_dim + column))
    assert not waits
    return found


@pytest.mark.parametrize('address', [0, 8, 16, 24, (1 << 31) - 64, (1 << 31) + 8, (1 << 32) - 64,
                                     (5 << 31) + 16])
@pytest.mark.parametrize('head_dim', range(40, 257, CHUNK))
def test_sectors_that_heads_share_are_written_once(head_dim, address):
    """Every byte once; but for the ends of the row, all of a sector in one instruction."""
    assert _host.shares_sectors(head_dim, 8) == (head_dim % 32 != 0)
    for heads in (1, 2, 5, 16):
        found = write_heads(address, head_dim, heads)
        assert sorted(place for _, place in found) == [
            *range(address, address + heads * head_dim, CHUNK)]
        instructions = {}
        for instruction, place in found:
            instructions.setdefault(place // 32, set()).add(instruction)
        assert all(len(numbers) == 1 for numbers in instructions.values())


def write_heads_in_spans(address: int, head_dim: int, heads: int) -> list[tuple[int, int]]:
    """What RowWriterInSectors does for a row: the store and the address of every 16 bytes."""
    found, waiting = [], None
    lanes = [_host.thread_place(True, thread, head_dim, 1)[:2] for thread in range(3)]
    for head in range(heads):
        row, waited = address + head * head_dim, waiting
        waiting = None
        if waited is not None:
            found.append((3 * head, waited))
        for first, second in lanes:
            stores = _host.span_stores(row, first, head == heads - 1)
            assert (stores[0] < 0) == (second < 0) and stores[1] in (1, 2, 3)
            if second < 0 and stores[1] == 3:
                waiting = row + first
                continue
            found += [(3 * head + store, row + column)
                      for store, column in zip(stores, (first, second)) if column >= 0 <= store]
            found += [(3 * head + stores[1], row + first)] if second < 0 else []
    assert waiting is None
    return found


@pytest.mark.parametrize('address', [0, 16, (1 << 31) - 16, 1 << 32])
@pytest.mark.parametrize('heads', [1, 2, 5, 16])
def test_spans_fill_sectors(address, heads):
    """Every 16 bytes once; but for the ends of the row, all of a sector in one store."""
    found = write_heads_in_spans(address, 80, heads)
    assert sorted(place for _, place in found) == [*range(address, address + heads * 80, SPAN)]
    stores = {}
    for store, place in found:
        stores.setdefault(place // 32, set()).add(store)
    assert all(len(numbers) == 1 for numbers in stores.values())


@given(turns=st.sampled_from([1, 2, 4, 8]), items=st.integers(0, 100), group=st.integers(0, 20),
       data=st.data())
def test_items_in_turns(turns, items, group, data):
    """Each item is one CTA's, whatever tiles they fall into, and shares are as equal as can be."""
    ends = sorted({*data.draw(st.sets(st.integers(0, items), max_size=5)), items})
    shares = []
    for cta in range(group * turns, (group + 1) * turns):
        own, begin = [], 0
        for end in ends:
            first = begin + _host.place_in_turn(cta, begin, turns)
            own += range(first, end, turns)
            begin = end
        shares.append(own)
    assert sorted(itertools.chain(*shares)) == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize('head_dim, row_step', [(8, 8), (16, 8), (24, 8), (32, 8), (80, 9),
                                                (72, 6), (96, 8), (128, 8)])
def test_no_shared_sectors(head_dim, row_step):
    assert not _host.shares_sectors(head_dim, row_step)


def check_exchanges(lanes: list[tuple[int, ...]], head_dim: int) -> None:
    """lanes: thread_place() of those of a warp."""
    piece_of = {column: (start, width) for start, width in pieces(head_dim)
                for column in range(start, start + width)}
    for lane, (first, second, width, row) in enumerate(lanes):
        start, wanted = piece_of[first]
        assert width == wanted and first % SPAN == 0
        assert second == (first + width // 2 if width > SPAN else -1)
        distance = 1
        while 2 * SPAN * distance < width:
            other = lanes[lane ^ distance]
            sign = -1 if lane & distance else 1
            assert other[3] == row
            assert other[0] - first == other[1] - second == sign * SPAN * distance
            assert bool((first - start) & SPAN * distance) == (sign < 0)
            distance *= 2


def pieces(head_dim: int) -> list[tuple[int, int]]:
    found, start = [], 0
    for width in quantize.pieces(head_dim):
        found.append((start, width))
        start += width
    return found


def test_norms():
    for bit in range(9):
        assert _host.hadamard_norm(1 << bit) == torch.tensor((1 << bit) ** -0.5).item()


@pytest.mark.parametrize('seed', [0, 1, 77, (1 << 32) - 1])
def test_signs(seed):
    expected = quantize.signs(seed, 5, 256)
    for head in range(5):
        for column in range(0, 256, SPAN):
            bits = _host.sign_bits(seed, head, column)
            got = [1 - 2 * (bits >> i & 1) for i in range(SPAN)]
            assert bits < 1 << SPAN and got == expected[head, column:column + SPAN].tolist()


def scale_of_rows(block: int, group: int, rows: range, entry: int, head: int,
                  first_block: int, shape: tuple[int, ...]) -> int:
    """The place of the scale of rows of an entry, in a tensor of scales."""
    if block == PER_TENSOR:
        return 0
    if block == PER_HEAD:
        return entry * shape[1] + head // group
    assert rows[0] // block == rows[-1] // block
    at = (entry if len(shape) == 3 and shape[0] > 1 else 0, head, first_block + rows[0] // block)
    return (at[0] * shape[1] + at[1]) * shape[2] + at[2]


def check_tiles(tiles, entries, rows: int, heads: int, group: int, block: int,
                shape: tuple[int, ...]) -> None:
    """entries: (first row, used rows, all rows, number of the first block) of each; of a dense
    tensor the rows of one behind the other."""
    counts = [[0, 0] for _ in range(rows)]
    writers: dict[int, int] = {}
    for tile in tiles:
        entry, begin, used, written = tile.rows
        assert 0 <= used <= written and 0 <= begin and begin + written <= rows
        for row in range(begin, begin + written):
            counts[row][row < begin + used] += 1
        for head, (place, writes) in enumerate(tile.scales):
            if used:
                first, _, _, first_block = entries[entry]
                assert place == scale_of_rows(block, group, range(begin - first,
                                                                  begin - first + used),
                                              entry, head, first_block, shape)
            if writes:
                writers[place] = writers.get(place, 0) + 1
    expected = [[1, 0] for _ in range(rows)]
    for first, used, _, _ in entries:
        expected[first:first + used] = [[0, 1]] * used
    assert counts == expected
    assert set(writers.values()) <= {1}
    if block in (PER_HEAD, PER_TENSOR):
        assert len(writers) == (1 if block == PER_TENSOR else len(entries) * heads // group)
    else:
        assert len(writers) == heads * sum(-(-used // block) for _, used, _, _ in entries)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, behind=st.integers(0, 150), data=st.data(),
       block_tile=st.sampled_from([(32, 32), (64, 64), (64, 32), (96, 32), (PER_HEAD, 32),
                                   (PER_TENSOR, 32)]))
def test_packed_tiles_have_every_row_once(lengths, behind, block_tile, data):
    block, tile = block_tile
    used = [data.draw(st.integers(0, length)) for length in lengths]
    cu = starts(lengths).tolist()
    rows, heads, group = cu[-1] + behind, 4, 2
    shape = ((1, heads, rows // block + len(lengths)) if block > 0
             else (len(lengths), heads // group))
    firsts = [0] * (len(lengths) + 1) if block <= 0 else quantize.first_blocks(
        torch.tensor(cu), block).tolist()
    entries = list(zip(cu, used, lengths, firsts))
    tiles = _host.quantized_tiles((len(lengths), rows, heads, group, block, tile), cu, used)
    check_tiles(tiles, entries, rows, heads, group, block, shape)
    cluster = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    check_teams((len(lengths), rows, heads, group, block, tile), cu, cluster, tiles)
    if block == tile:
        check_numbers_are_places(tiles, shape[2])


def check_teams(sizes: tuple[int, ...], cu: list[int], cluster: tuple[int, int], tiles) -> None:
    """cluster: CTAs, sizes of teams. Every tile with rows has one team, the smallest that it fits;
    who is in one team has been so in all bundles before, and has had as many tiles."""
    ctas, count = cluster
    teams, bundles = _host.team_tiles(sizes, cu, (ctas, -(-sizes[5] // ctas), count))
    found, done, together = {}, [0] * ctas, [set(range(ctas)) for _ in range(ctas)]
    for parts in bundles:
        before = list(done)
        for rank, (size, number, rank_in_team, first) in enumerate(parts):
            if number >= 0:
                found.setdefault(number, []).append((rank_in_team, size))
                own = set(range(first, first + teams[size][0]))
                assert rank - first == rank_in_team and rank in own <= together[rank]
                assert {before[other] for other in own} == {before[rank]}
                together[rank] = own
                done[rank] += 1
    assert sorted(found) == [number for number, tile in enumerate(tiles) if tile.rows[3]]
    assert all(number < 0 for _, number, _, _ in bundles[-1])
    for number, parts in found.items():
        size = parts[0][1]
        assert sorted(parts) == [(rank, size) for rank in range(teams[size][0])]
        assert tiles[number].rows[3] <= teams[size][1]
        assert all(tiles[number].rows[3] > most for _, most in teams[size + 1:])


def check_numbers_are_places(tiles, places: int) -> None:
    """Tile n of a block each has scale n - 1; all places have a tile."""
    assert len(tiles) == places + 2
    for number, tile in enumerate(tiles):
        if tile.rows[2]:
            assert [place for place, _ in tile.scales] == [
                head * places + number - 1 for head in range(len(tile.scales))]


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 4), rows=st.integers(1, 300),
       block_tile=st.sampled_from([(32, 32), (64, 64), (64, 32), (PER_HEAD, 32), (PER_TENSOR, 32)]))
def test_dense_tiles_have_every_row_once(batch, rows, block_tile):
    block, tile = block_tile
    heads, group = 6, 3
    tiles = _host.quantized_tiles((batch, rows, heads, group, block, tile), None, None)
    shape = (batch, heads, -(-rows // block)) if block > 0 else (batch, heads // group)
    for entry in range(batch):
        own = [one for one in tiles if one.rows[0] == entry]
        assert sum(one.rows[3] for one in own) == rows
        assert [one.rows[1] for one in own] == list(range(0, rows, tile))
        for one in own:
            assert one.rows[2] == one.rows[3]
            for head, (place, _) in enumerate(one.scales):
                assert place == scale_of_rows(block, group,
                                              range(one.rows[1], one.rows[1] + one.rows[2]),
                                              entry, head, 0, shape)
    writers = [place for one in tiles for place, writes in one.scales if writes]
    expected = 1 if block == PER_TENSOR else torch.Size(shape).numel()
    assert sorted(writers) == list(range(expected))


@settings(max_examples=100, deadline=None)
@given(cu=st.lists(st.one_of(INT32, st.integers(-9, 300)), min_size=1, max_size=8),
       rows=st.integers(1, 200), data=st.data(),
       block_tile=st.sampled_from([(32, 32), (64, 32), (PER_HEAD, 32), (PER_TENSOR, 32)]))
def test_nonsense_stays_inside(cu, rows, block_tile, data):
    block, tile = block_tile
    batch, heads, group = len(cu) - 1, 4, 2
    used = data.draw(st.lists(INT32, min_size=batch, max_size=batch))
    places = (heads * (rows // block + batch) if block > 0
              else 1 if block == PER_TENSOR else batch * heads // group)
    for one in _host.quantized_tiles((batch, rows, heads, group, block, tile), cu, used):
        _, begin, count, written = one.rows
        assert 0 <= count <= written <= tile and 0 <= begin and begin + written <= rows
        assert all(-1 <= place < places for place, _ in one.scales)


@given(begin=st.integers(0, (1 << 31) - 1 - 4096), ctas=st.integers(1, 8), rows=st.integers(1, 512),
       data=st.data())
def test_ctas_share_a_tile(begin, ctas, rows, data):
    """Every row once, those that count first; a CTA without rows begins inside as well."""
    written = data.draw(st.integers(0, ctas * rows))
    used = data.draw(st.integers(0, written))
    found = [_host.part_of_tile((begin, used, written), rank, rows) for rank in range(ctas)]
    next_row = begin
    for first, count, everything in found:
        assert first == next_row and 0 <= count <= everything <= rows
        assert count == min(max(begin + used - first, 0), everything)
        next_row += everything
    assert next_row == begin + written and sum(count for _, count, _ in found) == used


# ------------------------------------------------------------------------------------------- items
ORDERS = st.sampled_from([(PER_HEAD, 32), (PER_HEAD, 64), (PER_TENSOR, 32), (96, 32), (128, 64)])


def check_items(sizes: tuple[int, ...], cu: list[int] | None, used: list[int] | None) -> None:
    """Every tile of every head is an item, and those that share a scale know of each other."""
    items, span = _host.quantized_items(sizes, cu, used)
    tiles = _host.quantized_tiles(sizes, cu, used)
    wanted = sorted((tile.rows, head) for tile in tiles for head in range(sizes[2]))
    assert sorted((item.tile.rows, item.head) for item in items) == wanted
    of_scales: dict[int, set[int]] = {}
    for number, item in enumerate(items):
        assert 0 <= item.first <= number < item.first + item.count <= len(items)
        assert item.count <= span
        place, _ = item.tile.scales[item.head]
        if item.tile.rows[2]:
            of_scales.setdefault(place, set()).add(number)
    for place, numbers in of_scales.items():
        ranges = {(items[number].first, items[number].count) for number in numbers}
        assert len(ranges) == 1
        (first, count), = ranges
        others = set(range(first, first + count)) - numbers
        assert numbers <= set(range(first, first + count))
        assert all(not items[number].tile.rows[2] for number in others)
        writers = [number for number, item in enumerate(items)
                   if item.tile.scales[item.head] == (place, True)]
        assert len(writers) == 1 and first <= writers[0] < first + count


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, behind=st.integers(0, 150), data=st.data(), order=ORDERS,
       heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]))
def test_packed_items(lengths, behind, data, order, heads):
    used = [data.draw(st.integers(0, length)) for length in lengths]
    cu = starts(lengths).tolist()
    check_items((len(lengths), cu[-1] + behind, *heads, *order), cu, used)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 4), rows=st.integers(1, 300), order=ORDERS,
       heads=st.sampled_from([(6, 3), (3, 1), (2, 2)]))
def test_dense_items(batch, rows, order, heads):
    check_items((batch, rows, *heads, *order), None, None)


@settings(max_examples=150, deadline=None)
@given(cu=st.lists(st.one_of(INT32, st.integers(-9, 300)), min_size=1, max_size=8),
       rows=st.integers(1, 200), data=st.data(), order=ORDERS)
def test_nonsense_items_wait_for_no_later_ones(cu, rows, data, order):
    """What a CTA reads, writes and waits for stays inside, and within the span from its item on."""
    batch, heads, group = len(cu) - 1, 4, 2
    used = data.draw(st.lists(INT32, min_size=batch, max_size=batch))
    items, span = _host.quantized_items((batch, rows, heads, group, *order), cu, used)
    for number, item in enumerate(items):
        _, begin, count, written = item.tile.rows
        assert 0 <= count <= written <= order[1] and 0 <= begin and begin + written <= rows
        assert 0 <= item.first <= number and 0 < item.count <= span
        assert 0 <= item.head
