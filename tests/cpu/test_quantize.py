"""quantize_fp8 on the CPU: signs, butterflies, blocks, scales, casts, and its errors."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn3 import quantize_fp8
from flash_attn3.cpu import quantize
from flash_attn3.cpu.quantize import Rotation

from tests.cpu.drawn import examples
from tests.support.lists import ints, starts

E4M3 = torch.float8_e4m3fn
WORD = 0xFFFFFFFF
# Signs of columns 0 to 31 of heads 0 and 1; seeds 0, 1 and the last. A set bit is -1.
KNOWN_WORDS = [[14768737, 1391022734], [1059457021, 1306069828], [2975561548, 2610532176]]
every_head_dim = pytest.mark.parametrize('head_dim', [1, 16, 64, 80, 96, 128, 192, 240, 256])


def bits(x: torch.Tensor) -> list:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).tolist()


# ------------------------------------------------------------------------------------ signs, again
def mixed(x: int) -> int:
    """As C would write it."""
    x = (x + 0x9E3779B9) & WORD
    x = ((x ^ x >> 16) * 0x7FEB352D) & WORD
    x = ((x ^ x >> 15) * 0x846CA68B) & WORD
    return x ^ x >> 16


def sign(seed: int, head: int, column: int) -> int:
    word = mixed((mixed((mixed(seed) + head) & WORD) + column // 32) & WORD)
    return -1 if word >> column % 32 & 1 else 1


@examples(30)
@given(seed=st.integers(0, WORD), heads=st.integers(1, 5), head_dim=st.integers(1, 256))
def test_signs(seed, heads, head_dim):
    assert quantize.signs(seed, heads, head_dim).tolist() == [
        [sign(seed, head, column) for column in range(head_dim)] for head in range(heads)]


def test_signs_are_known():
    """The numbers that a kernel has to give: the first words of three seeds and heads."""
    words = [[sum((row[c] < 0) << c for c in range(32)) for row in quantize.signs(seed, 2, 32)]
             for seed in (0, 1, WORD)]
    assert words == KNOWN_WORDS


def test_signs_are_random():
    """Half of them each, and no two heads or seeds alike."""
    one, other = (quantize.signs(seed, 64, 256).double() for seed in (0, 1))
    limit = 5 / math.sqrt(one.numel())
    assert abs(one.mean()) < limit and abs((one * other).mean()) < limit
    products = one @ one.T / 256 - torch.eye(64)
    assert products.abs().max() < 6 / math.sqrt(256)
    columns = one.T @ one / 64 - torch.eye(256)
    assert columns.abs().max() < 6 / math.sqrt(64)


# ---------------------------------------------------------------------------------------- rotation
def dense_hadamard(head_dim: int) -> torch.Tensor:
    """Entry (i, j) of a piece: -1 to the power of the bits that i and j share, normalised."""
    blocks = []
    for width in quantize.pieces(head_dim):
        rows = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
        blocks.append(torch.tensor(rows, dtype=torch.float64) * width ** -0.5)
    return torch.block_diag(*blocks)


def test_pieces():
    assert [quantize.pieces(dim) for dim in (96, 80, 128, 72, 240)] == [
        [64, 32], [64, 16], [128], [64, 8], [128, 64, 32, 16]]


def rotated(x: torch.Tensor, seed: int, group: int) -> torch.Tensor:
    columns = quantize.rotate(x, Rotation(seed, group))
    return columns.values.double() * columns.unit.double() * columns.norm


def rounding(x: torch.Tensor) -> torch.Tensor:
    """Rotated rows: float16 of x, log2(head_dim) sums and a norm, each half an ulp of at most
    the row's norm."""
    return (x.size(-1).bit_length() + 1) * 2.0 ** -11 * x.double().norm(dim=-1, keepdim=True)


@pytest.mark.parametrize('exponent', [-120, -20, 0, 10, 110])
@every_head_dim
def test_rotation_is_the_dense_product(head_dim, exponent):
    """Whatever the range of the rows, which are far apart here."""
    x = torch.randn(3, 7, 4, head_dim) * 2.0 ** (torch.randn(3, 7, 4, 1) + exponent)
    own = quantize.signs(5, 2, head_dim).double()[[0, 0, 1, 1]]
    expected = (x.double() * own) @ dense_hadamard(head_dim)
    assert ((rotated(x, 5, 2) - expected).abs() <= rounding(x)).all()


@pytest.mark.parametrize('largest', [0.0, 1e-45, 2.0 ** -126, 2.0 ** -125, 1.0, 1.999, 2.0, 3e38])
def test_units(largest):
    """A power of two that brings the largest to 2 .. 4; of what is too small for that, the same."""
    x = torch.full((1, 1, 96), largest / 2)
    x[..., 3] = -largest
    x[..., 70] = largest / 8
    unit = quantize.units(x)
    assert (unit[..., :64] == unit[..., 0]).all() and (unit[..., 64:] == unit[..., 64]).all()
    for part, value in ((unit[0, 0, 0], largest), (unit[0, 0, 64], largest / 2)):
        mantissa, exponent = math.frexp(float(torch.tensor(value)))
        exponent = exponent if mantissa else -200
        assert float(part) == 2.0 ** max(exponent - 2, -126)


def test_rounding_of_the_rotation_does_not_matter():
    """Beside that of e4m3: with butterflies in float64 the error is the same to 1/1000."""
    x = torch.randn(1, 64, 50, 128)
    x += 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3)
    exact = (x.double() * quantize.signs(0, 50, 128).double()) @ dense_hadamard(128)
    scale = (exact.abs().amax((1, 3)) / 448)[:, None, :, None]
    best = (exact / scale).float().to(E4M3).double() * scale
    values, scale = quantize_fp8(x, block=64, rotate=True)
    got = values.double() * scale.double()[..., 0][:, None, :, None]
    assert (got - exact).norm() <= 1.001 * (best - exact).norm()


@every_head_dim
def test_rotation_is_orthogonal(head_dim):
    h = dense_hadamard(head_dim)
    torch.testing.assert_close(h @ h.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-14,
                               rtol=0)


@examples(20)
@given(seed=st.integers(0, WORD), group=st.integers(1, 3), head_dim=st.sampled_from([16, 80, 128]))
def test_rotation_leaves_the_scores(seed, group, head_dim):
    """q head h and KV head h // group have the same signs."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(5, 2 * group, head_dim, generator=generator)
    k = torch.randn(6, 2, head_dim, generator=generator)
    expected, got = (
        torch.einsum('qhd,khd->hqk', a.double(), b.double().repeat_interleave(group, 1))
        for a, b in ((q, k), (rotated(q, seed, group), rotated(k, seed, 1))))
    # Each score is off by what its rows are: |dq| |k| + |q| |dk| + |dq| |dk|.
    q_norm, k_norm = (x.double().norm(dim=-1).mT for x in (q, k.repeat_interleave(group, 1)))
    relative = (head_dim.bit_length() + 1) * 2.0 ** -11
    limit = (2 * relative + relative ** 2) * q_norm[:, :, None] * k_norm[:, None]
    assert ((got - expected).abs() <= limit).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    x = torch.randn(1, 40, 2, 96)
    expected = quantize_fp8(x, rotate=True, block=32)
    with torch.autocast('cpu', dtype=dtype):
        got = quantize_fp8(x, rotate=True, block=32)
    assert bits(got[0]) == bits(expected[0]) and torch.equal(got[1], expected[1])


def test_butterflies_in_order():
    """To the bit, one operation at a time; where order matters, other orders differ."""
    x = (torch.randn(200, 64) * 10 ** torch.randn(200, 64)).half()
    columns = list(x.unbind(-1))
    for distance in (1, 2, 4, 8, 16, 32):
        for i in range(64):
            if not i & distance:
                a, b = columns[i], columns[i + distance]
                columns[i], columns[i + distance] = a + b, a - b
    expected = torch.stack(columns, -1)
    assert bits(quantize.hadamard(x)) == bits(expected)
    assert bits((x.double() @ dense_hadamard(64) * 8).half()) != bits(expected)


def test_a_rotated_value_is_multiplied_once():
    """By norm and unit over the scale, as float16: to the bit, with norms that are no powers of
    two."""
    x = torch.randn(1, 64, 1, 96)
    values, scale = quantize_fp8(x, block=64, rotate=True)
    columns, unit, _ = quantize.rotate(x, Rotation(0, 1))
    norm = torch.tensor([0.125] * 64 + [2 ** -2.5] * 32)
    largest = (columns.abs().float() * norm * unit).max()
    assert scale.item() == (largest / torch.tensor(448.0)).item()
    factor = (norm * (1.0 / scale.reshape(())) * unit).half()
    assert bits(values) == bits((columns * factor).clamp(-448, 448).to(E4M3))


# -------------------------------------------------------------------------------- scales and blocks
@examples(40)
@given(rows=st.integers(0, 200), block=st.sampled_from([32, 64, 96]), seed=st.integers(0, 99))
def test_block_scales(rows, block, seed):
    """One at a time, by NumPy."""
    x = torch.randn(2, rows, 3, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    values, scale = quantize_fp8(x, block=block)
    assert values.shape == x.shape and values.is_contiguous()
    assert scale.shape == (2, 3, -(-rows // block)) and scale.is_contiguous()
    for b in range(scale.size(2)):
        part = x[:, b * block:(b + 1) * block].float().numpy()
        expected = np.abs(part).max((1, 3)) / np.float32(448)
        assert scale[:, :, b].tolist() == expected.tolist()
        inverse = (np.float32(1) / expected)[:, None, :, None]
        assert bits(values[:, b * block:(b + 1) * block]) == bits(
            torch.from_numpy(part * inverse).clamp(-448, 448).to(E4M3))


@pytest.mark.parametrize('group', [1, 2, 4])
def test_scales_per_head_and_per_tensor(group):
    x = torch.randn(2, 50, 4, 32).half()
    _, scale = quantize_fp8(x, group=group)
    assert torch.equal(scale, x.float().abs().unflatten(2, (-1, group)).amax((1, 3, 4)) / 448)
    values, scale = quantize_fp8(x, block='tensor', group=group)
    assert scale.shape == (2, 4 // group) and scale.untyped_storage().nbytes() == 4
    assert (scale == x.float().abs().max() / 448).all()
    assert values.float().abs().max() == 448


LENGTHS = st.lists(st.integers(0, 90), min_size=0, max_size=5)


@examples(40)
@given(lengths=LENGTHS, behind=st.integers(0, 40), block=st.sampled_from([32, 64, 'head']),
       is_rotated=st.booleans(), data=st.data())
def test_every_sequence_begins_anew(lengths, behind, block, is_rotated, data):
    """Values and scales are those of a call of its own; nothing else is read."""
    used = [data.draw(st.integers(0, length)) for length in lengths]
    cu = starts(lengths)
    x = torch.randn(sum(lengths) + behind, 4, 16).bfloat16()
    counts = torch.zeros(len(x), dtype=torch.bool)
    for first, count in zip(cu.tolist(), used):
        counts[first:first + count] = True
    x[~counts] = torch.nan
    values, scale = quantize_fp8(x, block=block, rotate=is_rotated, group=2, cu_seqlens=cu,
                                 seqused=ints(used))
    if block == 'head':
        assert scale.shape == (len(lengths), 2)
    else:
        assert scale.shape == (1, 4, len(x) // block + len(lengths))
    assert (values.float()[~counts] == 0).all()
    for b, (first, count) in enumerate(zip(cu.tolist(), used)):
        alone = quantize_fp8(x[None, first:first + count], block=block, rotate=is_rotated, group=2)
        assert bits(values[first:first + count]) == bits(alone[0][0])
        place = 0 if block == 'head' else first // block + b
        own = scale[b] if block == 'head' else scale[0, :, place:place + alone[1].size(2)]
        assert torch.equal(own, alone[1][0])


@examples(40)
@given(lengths=LENGTHS, block=st.sampled_from([32, 64]))
def test_places_of_blocks_never_overlap(lengths, block):
    firsts = quantize.first_blocks(starts(lengths).long(), block).tolist()
    ends = [first - (-length // block) for first, length in zip(firsts, lengths)]
    assert all(end <= first for end, first in zip(ends, firsts[1:]))
    assert max(ends, default=0) <= sum(lengths) // block + len(lengths)


def test_one_scale_for_all_sequences():
    x = torch.randn(20, 2, 16)
    x[7:9] = 1e6
    values, scale = quantize_fp8(x, block='tensor', cu_seqlens=starts([5, 4, 3]),
                                 seqused=ints([5, 2, 3]))
    used = [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert scale.shape == (3, 2) and (scale == x[used].abs().max() / 448).all()
    assert (values.float()[7:9] == 0).all() and values.float().abs().max() == 448


# -------------------------------------------------------------------------------- casts and corners
def test_cast_rounds_to_nearest_even():
    """Against a search among all values of e4m3, also where they are subnormal; ties included."""
    table = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    ties = (table[1:] + table[:-1]) / 2
    x = torch.cat([table, ties, torch.rand(2000).double() * 2 ** (torch.rand(2000) * 20 - 11),
                   torch.tensor([448.0, 448.1, 500.0, 1e30])]).float()
    x = torch.cat([x, -x])
    got = quantize.Columns(x).cast(torch.ones(()))
    distance = (x.abs().double()[:, None] - table).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    is_even = torch.arange(127) % 2 == 0
    code = (nearest & (is_even | (nearest.sum(1, keepdim=True) == 1))).int().argmax(1)
    code = code.where(x.abs() < 448, 126)
    assert bits(got) == (code + 128 * x.signbit()).tolist()


def test_blocks_longer_than_the_tensor():
    """They take no memory for rows that are not there."""
    x = torch.randn(2, 5, 3, 16)
    for values, wanted in zip(quantize_fp8(x, block=1 << 40), quantize_fp8(x, block=32)):
        assert torch.equal(values.float(), wanted.float())


def test_no_columns():
    for block in ('head', 'tensor', 32):
        values, scale = quantize_fp8(torch.zeros(2, 5, 4, 0), rotate=True, block=block)
        assert values.shape == (2, 5, 4, 0) and scale.isfinite().all()


@pytest.mark.parametrize('block', [32, 'head', 'tensor'])
@pytest.mark.parametrize('is_rotated', [False, True])
def test_zero_blocks(block, is_rotated):
    x = torch.zeros(1, 64, 2, 16)
    values, scale = quantize_fp8(x, block=block, rotate=is_rotated)
    assert (values.float() == 0).all()
    assert (scale == 2.0 ** -64 / 448).all() and (1 / scale).isfinite().all()


def test_tiny_and_huge_values():
    x = torch.full((1, 32, 1, 16), 1e-44)
    assert (quantize_fp8(x)[0].float() == 0).all()
    x = torch.full((1, 32, 1, 16), 3e38)
    values, scale = quantize_fp8(x)
    assert (values.float() == 448).all() and scale.isfinite().all()
    values, scale = quantize_fp8(x, rotate=True)    # some sums are too large for float32
    assert values.float().isfinite().all() and values.float().abs().amax() == 448
    assert scale.isfinite().all()


@pytest.mark.parametrize('bad', [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_infinities_become_nan_and_count_for_no_scale(bad):
    x = torch.randn(1, 64, 2, 16)
    x[0, 40, 0, 3] = 0
    expected, scale = quantize_fp8(x, block=32)
    x[0, 40, 0, 3] = bad
    got, same_scale = quantize_fp8(x, block=32)
    assert torch.equal(scale, same_scale)
    differs = (got.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
    assert differs.tolist() == [[0, 40, 0, 3]]
    assert got.view(torch.uint8)[0, 40, 0, 3] == 0x7F
    rotated, _ = quantize_fp8(x, block=32, rotate=True)
    is_nan = rotated.float().isnan()
    assert is_nan[0, 40, 0].all() and is_nan.sum() == 16


def test_strides_do_not_matter():
    x = torch.randn(3, 2, 40, 48).transpose(1, 2)
    for options in ({'block': 32}, {'rotate': True}, {'block': 'tensor'}):
        got, expected = quantize_fp8(x, **options), quantize_fp8(x.contiguous(), **options)
        assert bits(got[0]) == bits(expected[0]) and torch.equal(got[1], expected[1])
        assert got[0].is_contiguous()
    row = torch.randn(1, 1, 1, 48)
    got, expected = (quantize_fp8(one, block=32) for one in (
        row.expand(2, 40, 2, 48), row.expand(2, 40, 2, 48).contiguous()))
    assert bits(got[0]) == bits(expected[0]) and torch.equal(got[1], expected[1])


def test_the_result_is_not_differentiable():
    values, scale = quantize_fp8(torch.randn(1, 3, 1, 16, requires_grad=True))
    assert not values.requires_grad and not scale.requires_grad


ERRORS = [
    ({'x': torch.zeros(3, 4, 16)}, 'x to have the shape (batch, seqlen, heads, head_dim)'),
    ({'cu_seqlens': starts([5])}, 'x to have the shape (total, heads, head_dim) with'),
    ({'x': torch.zeros(1, 5, 4, 16, dtype=torch.float64)}, 'x.dtype to be float16, bfloat16 or'),
    ({'x': torch.zeros(1, 5, 4, 16).to(E4M3)}, 'x.dtype to be float16, bfloat16 or float32, got '
     'float8_e4m3fn'),
    ({'block': 16}, 'block to be a multiple of 32'),
    ({'block': 'row'}, "block to be a number of rows, 'head' or 'tensor', got 'row'"),
    ({'block': 0}, "block to be a number of rows, 'head' or 'tensor', got 0"),
    ({'block': -1}, "block to be a number of rows, 'head' or 'tensor', got -1"),
    ({'seed': None, 'rotate': True}, 'seed to be from 0 to 2**32 - 1, got None'),
    ({'group': 3}, 'the heads of x to be a multiple of 3, the group, got 4'),
    ({'group': 0}, 'group to be 1 or more, got 0'),
    ({'seed': -1, 'rotate': True}, 'seed to be from 0 to 4294967295, got -1'),
    ({'seed': 1 << 32, 'rotate': True}, 'seed to be from 0 to 4294967295, got 4294967296'),
    ({'x': torch.zeros(5, 4, 16), 'cu_seqlens': torch.tensor([0, 5])}, 'cu_seqlens.dtype to be'),
    ({'x': torch.zeros(5, 4, 16), 'cu_seqlens': starts([6])}, 'cu_seqlens[1], the end of seq'),
    ({'x': torch.zeros(5, 4, 16), 'cu_seqlens': starts([5]), 'seqused': ints([6])}, 'seqused[0]'),
    ({'x': torch.zeros(5, 4, 16), 'cu_seqlens': starts([5]), 'seqused': ints([6, 7])},
     'seqused to have the shape (1,), got (2,)'),
    ({'seqused': ints([6])}, 'cu_seqlens with seqused, got no cu_seqlens'),
]


@pytest.mark.parametrize('changes, text', ERRORS, ids=str)
def test_errors(changes, text):
    with pytest.raises(RuntimeError) as raised:
        quantize_fp8(**{'x': torch.zeros(1, 5, 4, 16)} | changes)
    assert str(raised.value).startswith(f'flash_attn3.quantize_fp8: expected {text}')
