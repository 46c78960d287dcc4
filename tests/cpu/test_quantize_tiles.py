"""The index arithmetic of the quantize_fp8 kernels: columns of lanes, signs, the rows of CTAs, the
locations of scales. By brute force, and against flash_attn3/cpu/quantize.py.
"""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn3.cpu import quantize
from flash_attn3.cpu.quantize import PER_HEAD, PER_TENSOR

from tests.cpu.drawn import examples
from tests.host import _host
from tests.support.lists import starts

CHUNK, SPAN, LANE_COLUMNS = 8, 16, 32
WIDTHS = [8, 16, 32, 64, 128, 256]
HEADS, GROUP = 4, 2
LENGTHS = st.lists(st.integers(0, 200), min_size=0, max_size=6)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
# Rows of a block and of a tile, which differ where a scale covers a head or the tensor.
BLOCK_TILE = st.sampled_from([(32, 32), (64, 64), (96, 96), (PER_HEAD, 32), (PER_TENSOR, 64)])


# ----------------------------------------------------------------------------------------- columns
@pytest.mark.parametrize('width', WIDTHS)
def test_lanes_have_every_column_once(width):
    """Lanes that exchange values differ by the distance of a butterfly, as words of a lane do."""
    lanes = _host.lanes_of_piece(width)
    assert lanes * LANE_COLUMNS == max(width, LANE_COLUMNS)
    columns = [[_host.column_of_lane(width, lane, c) for c in range(min(width, LANE_COLUMNS))]
               for lane in range(lanes)]
    assert sorted(sum(columns, [])) == list(range(width))
    for lane, own in enumerate(columns):
        assert own[:SPAN] == list(range(own[0], own[0] + min(width, SPAN)))
        assert own[SPAN:] == [column + width // 2 for column in own[:SPAN]][:len(own) - SPAN]
        distance = 1
        while distance < lanes:
            sign = -1 if lane & distance else 1
            other = columns[lane ^ distance]
            assert [a - b for a, b in zip(other, own)] == [sign * SPAN * distance] * len(own)
            distance *= 2


@pytest.mark.parametrize('head_dim', range(CHUNK, 257, CHUNK))
def test_fragments_of_a_row(head_dim):
    widths = quantize.pieces(head_dim)
    assert _host.fragments_of_row(head_dim) == sum(-(-width // LANE_COLUMNS) for width in widths)


@pytest.mark.parametrize('width', [1, 2, 4, *WIDTHS])
def test_norms(width):
    assert _host.hadamard_norm(width) == torch.tensor(width ** -0.5).item()


@pytest.mark.parametrize('seed', [0, 1, 77, (1 << 32) - 1])
def test_signs(seed):
    expected = quantize.signs(seed, 5, 256)
    for head in range(5):
        for column in range(0, 256, SPAN):
            bits = _host.sign_bits(seed, head, column)
            got = [1 - 2 * (bits >> i & 1) for i in range(SPAN)]
            assert bits < 1 << SPAN and got == expected[head, column:column + SPAN].tolist()


# ------------------------------------------------------------------------------------ rows, scales
def check_work(sizes, lists, entries: list[tuple[int, int, int]], places: int) -> None:
    """Every row of every head belongs to one CTA, every scale has one writer.

    Args:
        sizes, lists: as quantize_work() takes them.
        entries: (first row of the tensor, rows that count, first block) of each; of a dense tensor
            as if the entries followed each other.
        places: scales of a head by block.
    """
    batch, rows, _, _, block, tile = sizes
    work, scales = _host.quantize_work(sizes, *lists)
    total = rows if lists[0] is not None else batch * rows
    found = [[None] * total for _ in range(HEADS)]
    writers = [0] * scales
    for (entry, begin, used, written), head, (index, writes) in work:
        first = begin if lists[0] is not None else entry * rows + begin
        assert 0 <= used <= written <= tile and 0 <= first and first + written <= total
        for row in range(first, first + written):
            assert found[head][row] is None
            found[head][row] = index if row < first + used else -1
        assert index >= 0 or not writes and not used
        if writes:
            writers[index] += 1
    assert writers == [1] * scales
    expected = [[-1] * total for _ in range(HEADS)]
    for entry, (first, used, first_block) in enumerate(entries):
        for head in range(HEADS):
            for row in range(used):
                expected[head][first + row] = {
                    PER_TENSOR: 0, PER_HEAD: (entry * HEADS + head) // GROUP}.get(
                        block, head * places + first_block + row // max(block, 1))
    assert found == expected


@examples(80)
@given(lengths=LENGTHS, after=st.integers(0, 150), data=st.data(), block_tile=BLOCK_TILE)
def test_packed(lengths, after, data, block_tile):
    block, tile = block_tile
    used = [data.draw(st.integers(0, length)) for length in lengths]
    cu = starts(lengths).tolist()
    rows, batch = cu[-1] + after, len(lengths)
    firsts = [0] * batch if block <= 0 else quantize.first_blocks(
        torch.tensor(cu), block).tolist()
    places = rows // block + batch if block > 0 else 0
    check_work((batch, rows, HEADS, GROUP, block, tile), (cu, used),
               list(zip(cu, used, firsts)), places)


@examples(40)
@given(batch=st.integers(1, 4), rows=st.integers(1, 300), block_tile=BLOCK_TILE)
def test_dense(batch, rows, block_tile):
    """The scales of an entry follow those of all heads of the entry before."""
    block, tile = block_tile
    places = -(-rows // block) if block > 0 else 0
    check_work((batch, rows, HEADS, GROUP, block, tile), (None, None),
               [(entry * rows, rows, entry * HEADS * places) for entry in range(batch)], places)


@examples(150)
@given(cu=st.lists(st.one_of(INT32, st.integers(-9, 300)), min_size=1, max_size=8),
       rows=st.integers(1, 200), data=st.data(), block_tile=BLOCK_TILE)
def test_nonsense_stays_inside(cu, rows, block_tile, data):
    block, tile = block_tile
    batch = len(cu) - 1
    used = data.draw(st.lists(INT32, min_size=batch, max_size=batch))
    work, scales = _host.quantize_work((batch, rows, HEADS, GROUP, block, tile), cu, used)
    for (_, begin, count, written), head, (index, writes) in work:
        assert 0 <= count <= written <= tile and 0 <= begin and begin + written <= rows
        assert 0 <= head < HEADS and -1 <= index < scales
        assert index >= 0 or not count and not writes
