"""Attention on float8_e4m3fn and flash_attn_fp8_func on the CPU: results, gradients, errors."""
import contextlib
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks.fp8_accuracy import BLOCKS, outliers
from flash_attn3 import (_plan, can_use, flash_attn_fp8_func, flash_attn_func,
                         flash_attn_qkvpacked_func, flash_attn_varlen_fp8_func,
                         flash_attn_varlen_func)
from flash_attn3.cpu import reference_fp8
from flash_attn3.ops import checks, fp8, library
from flash_attn3.ops.dense_and_varlen import General
from flash_attn3.cpu.quantize import KV_BLOCK, Q_BLOCK
from flash_attn3.cpu.reference import Inputs, Lengths, Mask, Score
from flash_attn3.cpu.reference_fp8 import Scales

from tests.cpu.drawn import examples
from tests.support import compare, derivative_calls
from tests.support.fp8_data import (E4M3, check_fp8, check_gradients, descales, given_gradients,
                                    quantize_all)
from tests.support.fp8_rounding import emulate
from tests.support.lists import ints, lengths_of, starts

OPTIONS = {
    'full': {}, 'causal': {'causal': True}, 'window': {'window_size': (9, 3)},
    'chunks': {'attention_chunk': 40, 'causal': True}, 'softcap': {'softcap': 3.0},
    'sinks': {'s_aux': True, 'window_size': (30, 0)},
    'all': {'causal': True, 'window_size': (50, -1), 'attention_chunk': 64, 'softcap': 5.0,
            's_aux': True, 'softmax_scale': 0.2}}
EVERY_OPTION = pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
EVERY_GRANULARITY = pytest.mark.parametrize('granularity', BLOCKS)
LENGTHS = ([70, 0, 33, 5, 129], [100, 40, 33, 0, 64])
USED = ([66, 0, 33, 2, 100], [100, 17, 1, 0, 64])
LENGTH_NAMES = 'cu_seqlens_q', 'cu_seqlens_k', 'seqused_q', 'seqused_k'
BOTH = {'return_attn_probs': True, 'return_max_logits': True}


def score_of(options: dict, head_dim: int) -> Score:
    mask = Mask(options.get('causal', False), options.get('window_size', (-1, -1)),
                options.get('attention_chunk', 0))
    return Score(options.get('softmax_scale', head_dim ** -0.5), options.get('softcap', 0.0), mask)


def with_sinks(options: dict, heads: int) -> dict:
    return options | ({'s_aux': torch.linspace(-2, 3, heads)} if 's_aux' in options else {})


def tensors(rows_q: tuple, rows_k: tuple, heads=(4, 2), head_dims=(32, 32),
            dtype=torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(rows_q) + 7 * sum(rows_k) + sum(head_dims))
    shapes = ((*rows_q, heads[0], head_dims[0]), (*rows_k, heads[1], head_dims[0]),
              (*rows_k, heads[1], head_dims[1]))
    return tuple(outliers(shape, generator).to(dtype) for shape in shapes)


def packed() -> tuple[tuple[Tensor, Tensor, Tensor], dict, tuple]:
    """q, k and v, with NaN in all rows that do not count; the lists by name and as pairs."""
    q, k, v = tensors((sum(LENGTHS[0]) + 3,), (sum(LENGTHS[1]) + 5,))
    pairs = tuple((starts(lengths), ints(used)) for lengths, used in zip(LENGTHS, USED))
    for x, (cu, used) in ((q, pairs[0]), (k, pairs[1]), (v, pairs[1])):
        counts = torch.zeros(len(x), dtype=torch.bool)
        for first, count in zip(cu.tolist(), used.tolist()):
            counts[first:first + count] = True
        x[~counts] = torch.nan
    lists = {'cu_seqlens_q': pairs[0][0], 'cu_seqlens_k': pairs[1][0], 'max_seqlen_q': 129,
             'max_seqlen_k': 100, 'seqused_q': pairs[0][1], 'seqused_k': pairs[1][1]}
    return (q, k, v), lists, pairs


def check_results(results: tuple, inputs: Inputs, scales: Scales, score: Score,
                  lengths: Lengths | None = None) -> None:
    """The bar, and what the CPU path gives beyond it: float32, rounded once."""
    out, lse, max_logits = results
    ref = reference_fp8.attend(inputs, scales, score, lengths, with_row_max=True)
    check_fp8(out, inputs, scales, score, lengths)
    roundoff = 2.0 ** -11 if out.dtype == torch.float16 else 2.0 ** -8
    torch.testing.assert_close(out.double(), ref.out, rtol=roundoff, atol=1e-5)
    assert lse.dtype == max_logits.dtype == torch.float32
    compare.check_lse(lse, ref.lse)
    compare.check_lse(max_logits, ref.row_max, 'max_logits')


# ----------------------------------------------------------------------------------------- results
@EVERY_OPTION
@EVERY_GRANULARITY
@pytest.mark.parametrize('is_rotated', [False, True])
def test_dense(is_rotated, granularity, options):
    values, scales = quantize_all(*tensors((2, 70), (2, 101)), granularity, is_rotated)
    options = with_sinks(options, 4)
    results = flash_attn_func(*values, **descales(scales), **options, **BOTH)
    assert results[0].dtype == torch.bfloat16
    check_results(results, Inputs(*values, options.get('s_aux')), scales, score_of(options, 32))


@EVERY_OPTION
@EVERY_GRANULARITY
def test_packed(granularity, options):
    inputs, lists, pairs = packed()
    values, scales = quantize_all(*inputs, granularity, True, lists=pairs)
    for x, (cu, _) in zip(values, (pairs[0], pairs[1], pairs[1])):
        x[cu[-1]:] = torch.nan
    options = with_sinks(options, 4)
    results = flash_attn_varlen_func(*values, **lists, **descales(scales), **options, **BOTH)
    lengths = lengths_of(*(lists[name] for name in LENGTH_NAMES))
    check_results(results, Inputs(*values, options.get('s_aux')), scales, score_of(options, 32),
                  lengths)


def test_scales_of_no_block_are_not_read():
    inputs, lists, pairs = packed()
    values, scales = quantize_all(*inputs, 'block', True, lists=pairs)
    poisoned = Scales(*(torch.full_like(x, torch.nan) for x in scales))
    for x, poison, lengths, block in zip(scales, poisoned, (LENGTHS[0], *[LENGTHS[1]] * 2),
                                         (Q_BLOCK, KV_BLOCK, KV_BLOCK)):
        first = 0
        for b, length in enumerate(lengths):
            place = first // block + b
            own = slice(place, place - (-length // block))
            poison[..., own], first = x[..., own], first + length
    assert poisoned.k.isnan().any()
    results = [flash_attn_varlen_func(*values, **lists, **descales(x), **BOTH)
               for x in (scales, poisoned)]
    assert all(torch.equal(*pair) for pair in zip(*results))


@EVERY_GRANULARITY
def test_each_sequence_alone(granularity):
    """Packed, the result is that of dense calls, with their scales."""
    granularity = 'head' if granularity == 'tensor' else granularity    # that one counts them all
    inputs, lists, pairs = packed()
    values, scales = quantize_all(*inputs, granularity, True, lists=pairs)
    out, lse = flash_attn_varlen_func(*values, **lists, **descales(scales), causal=True,
                                      return_attn_probs=True)
    firsts = zip(*(cu[:-1].tolist() for cu, _ in pairs), *(used.tolist() for _, used in pairs))
    for first_q, first_k, rows, keys in firsts:
        own = inputs[0][None, first_q:first_q + rows], *(
            x[None, first_k:first_k + keys] for x in inputs[1:])
        own_values, own_scales = quantize_all(*own, granularity, True)
        expected = flash_attn_func(*own_values, **descales(own_scales), causal=True,
                                   return_attn_probs=True)
        torch.testing.assert_close(out[None, first_q:first_q + rows], expected[0])
        torch.testing.assert_close(lse[None, :, first_q:first_q + rows], expected[1])


@pytest.mark.parametrize('heads, head_dims', [
    ((6, 2), (16, 16)), ((4, 1), (80, 80)), ((3, 3), (96, 96)), ((2, 1), (192, 128)),
    ((2, 2), (256, 256))], ids=str)
def test_heads_and_head_dims(heads, head_dims):
    values, scales = quantize_all(*tensors((1, 65), (1, 97), heads, head_dims), 'block', True)
    results = flash_attn_func(*values, **descales(scales), causal=True, **BOTH)
    assert results[0].shape == (1, 65, heads[0], head_dims[1])
    check_results(results, Inputs(*values), scales, score_of({'causal': True}, head_dims[0]))


@pytest.mark.parametrize('sizes', [(0, 5), (5, 0), (1, 1), (90, 20)], ids=str)
def test_sizes(sizes):
    values, scales = quantize_all(*tensors((2, sizes[0]), (2, sizes[1])), 'block', True)
    results = flash_attn_func(*values, **descales(scales), causal=True, **BOTH)
    check_results(results, Inputs(*values), scales, score_of({'causal': True}, 32))
    blind = max(0, sizes[0] - sizes[1])
    assert (results[0][:, :blind] == 0).all() and (results[1][..., :blind] == -math.inf).all()


@pytest.mark.parametrize('missing', ['q', 'k', 'v', 'qkv'])
def test_scales_are_optional(missing):
    """None is 1."""
    values, scales = quantize_all(*tensors((2, 70), (2, 101)), 'head', False)
    given = scales._replace(**dict.fromkeys(missing))
    ones = scales._replace(**{name: torch.ones(2, 2) for name in missing})
    results = [flash_attn_func(*values, **descales(one), softmax_scale=1e-3) for one in
               (given, ones)]
    assert torch.equal(*results)


def test_scales_of_any_strides():
    values, scales = quantize_all(*tensors((2, 70), (2, 501)), 'block', True)
    changed = Scales(*(x.mT.contiguous().mT for x in scales))
    assert changed.k.stride() != scales.k.stride()
    assert torch.equal(*(flash_attn_func(*values, **descales(one)) for one in (scales, changed)))
    one = torch.full((), 0.25)
    expanded = Scales(*(one.expand(2, 2) for _ in range(3)))
    filled = Scales(*(torch.full((2, 2), 0.25) for _ in range(3)))
    blocks = Scales(*(torch.full_like(x, 0.25) for x in scales))
    results = [flash_attn_func(*values, **descales(x)) for x in (expanded, filled, blocks)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize('form', [(3, 4), (8,)], ids=str)
def test_qkvpacked(form):
    qkv = torch.randn(2, 40, *form, 16).to(E4M3)
    scales = Scales(*(torch.rand(2, 4 if form == (3, 4) else 2) for _ in range(3)))
    q, k, v = (qkv.unbind(2) if form == (3, 4) else qkv.split((4, 2, 2), 2))
    got = flash_attn_qkvpacked_func(
        qkv, causal=True, num_heads_q=4, out_dtype=torch.float16, **descales(scales), **BOTH)
    expected = flash_attn_func(q, k, v, causal=True, out_dtype=torch.float16, **descales(scales),
                               **BOTH)
    assert all(torch.equal(*pair) for pair in zip(got, expected)) and len(got) == 3


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_dtype_of_the_output(dtype):
    values, scales = quantize_all(*tensors((2, 70), (2, 101)), 'block', True)
    options = descales(scales) | {'out_dtype': dtype}
    results = flash_attn_func(*values, **options, **BOTH)
    assert results[0].dtype == dtype
    check_results(results, Inputs(*values), scales, score_of({}, 32))
    out = torch.full((4, 70, 2, 32), torch.nan, dtype=dtype).transpose(0, 2)
    assert flash_attn_func(*values, **descales(scales), out=out) is out
    assert torch.equal(out, results[0])


def test_accumulation_does_not_matter_here():
    values, scales = quantize_all(*tensors((2, 70), (2, 101)), 'block', True)
    assert torch.equal(*(flash_attn_func(*values, **descales(scales), fp8_accum=accumulation)
                         for accumulation in ('fast', 'promote')))


@pytest.mark.parametrize('name, place', [('q', (0, 3, 1)), ('k', (0, 60, 0)), ('v', (0, 60, 1))])
def test_nan_reaches_the_output(name, place):
    """The output of those who see it."""
    q, k, v = tensors((1, 64), (1, 64))
    {'q': q, 'k': k, 'v': v}[name][place] = torch.nan
    out = flash_attn_fp8_func(q, k, v, causal=True)
    is_nan = out.isnan().any(-1)[0]
    expected = torch.zeros(64, 4, dtype=torch.bool)
    if name == 'q':
        expected[3, 1] = True
    else:
        expected[60:, 2 * place[2]:2 * place[2] + 2] = True
    if name == 'v':    # 0 times NaN, as in every other dtype
        assert (is_nan[60:] == expected[60:]).all()
    else:
        assert (is_nan == expected).all()


# ------------------------------------------------------------------------------------ the emulation
def test_emulation_rounds_p_and_nothing_else():
    """|emulation - ref| <= 2^-4 sum p |v|, and 2^-10 of 2^8 for each p that is subnormal."""
    values, scales = quantize_all(*tensors((2, 70), (2, 101)), 'head', True)
    scales = scales._replace(v=None)
    got = emulate(Inputs(*values), scales, score_of({}, 32))
    v = values[2].double()
    ref, weighted = (reference_fp8.attend(Inputs(*values[:2], x), scales, score_of({}, 32)).out
                     for x in (v, v.abs()))
    error = (got - ref).abs()
    subnormal = 2.0 ** -18 * v.abs().sum(1).repeat_interleave(2, 1)[:, None]
    assert (error <= 2.0 ** -4 * weighted + subnormal + 1e-5).all()
    assert error.max() > 2.0 ** -8 * weighted.mean()


def test_emulation_of_equal_blocks_is_that_of_one_scale():
    values, scales = quantize_all(*tensors((1, 70), (1, 101)), 'block', True)
    blocks = scales._replace(v=torch.full_like(scales.v, 0.25))
    one = scales._replace(v=torch.full((1, 2), 0.25))
    torch.testing.assert_close(*(emulate(Inputs(*values), x, score_of({}, 32))
                                 for x in (blocks, one)))


def test_emulation_with_scales_of_v_far_apart():
    """A block of zeros, and one of large values that nobody looks at, cost no accuracy."""
    q, k, v = tensors((1, 512), (1, 3 * KV_BLOCK))
    v[:, :KV_BLOCK], v[:, 2 * KV_BLOCK:] = 0, v[:, 2 * KV_BLOCK:] * 1e4
    values, scales = quantize_all(q, k, v, 'block', True)
    inputs, score = Inputs(*values), score_of({'window_size': (-1, 0)}, 32)
    got = emulate(inputs, scales, score)
    ref = reference_fp8.attend(inputs, scales, score)
    weighted = reference_fp8.attend(inputs._replace(v=values[2].double().abs()), scales, score)
    assert ((got - ref.out).abs() <= 2.0 ** -4 * weighted.out + 1e-3).all()


def test_the_bar_finds_what_is_wrong():
    """A block without its scale, a tile that is dropped, P that is cut off at 448 / 2^8."""
    values, scales = quantize_all(*tensors((1, 128), (1, 2 * KV_BLOCK)), 'block', True)
    inputs, score = Inputs(*values), score_of({}, 32)
    right = emulate(inputs, scales, score).bfloat16()
    check_fp8(right, inputs, scales, score)
    without_scale = scales.v.clone()
    without_scale[..., 1] = 1
    cut = inputs._replace(k=values[1][:, :-96], v=values[2][:, :-96])
    wrong = [emulate(inputs, scales._replace(v=without_scale), score),
             emulate(cut, scales, score), right * 0.9]
    for out in wrong:
        with pytest.raises(AssertionError, match='^out: m(ax|ean) error .* x .*emulation'):
            check_fp8(out.bfloat16(), inputs, scales, score)


@examples(30)
@given(sizes=st.tuples(st.integers(1, 80), st.integers(1, 140)), group=st.integers(1, 3),
       causal=st.booleans(), window=st.tuples(st.integers(-1, 60), st.integers(-1, 60)),
       softcap=st.sampled_from([0.0, 2.0]), granularity=st.sampled_from(list(BLOCKS)),
       exponents=st.tuples(*[st.integers(-30, 4)] * 3))
def test_emulation_is_within_the_rounding_of_p(sizes, group, causal, window, softcap, granularity,
                                               exponents):
    """Any shape, mask, and magnitude of q, k and v. Subnormal P is lost by 2^-18 of the largest
    contribution p v_s of a row; no value is above 448 v_s."""
    q, k, v = tensors((1, sizes[0]), (1, sizes[1]), (group, 1))
    q, k, v = (x.float() * 2.0 ** e for x, e in zip((q, k, v), exponents))
    values, scales = quantize_all(q, k, v, granularity, True)
    options = {'causal': causal, 'window_size': window, 'softcap': softcap}
    inputs, score = Inputs(*values), score_of(options, 32)
    got = emulate(inputs, scales, score)
    ref = reference_fp8.attend(inputs, scales, score).out
    weighted = reference_fp8.attend(inputs._replace(v=values[2].double().abs()), scales, score).out
    largest = 448 * scales.v.max() * sizes[1]
    limit = 2.0 ** -4 * weighted + 2.0 ** -18 * largest + 1e-4 * weighted
    assert got.isfinite().all() and ((got - ref).abs() <= limit).all()


# ---------------------------------------------------------------------------- in one call, and back
@EVERY_OPTION
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('block_scales', [False, True])
def test_in_one_call(block_scales, dtype, options):
    """What quantize_fp8 and flash_attn_func give; and gradients from that, of q, k and v as given.
    """
    leaves = [x.requires_grad_() for x in tensors((2, 70), (2, 101), dtype=dtype)]
    options = with_sinks(options, 4)
    if 's_aux' in options:
        leaves.append(options['s_aux'].requires_grad_())
    out, lse = flash_attn_fp8_func(*leaves[:3], **options, return_attn_probs=True, seed=3,
                                   block_scales=block_scales)
    values, scales = quantize_all(*leaves[:3], 'block' if block_scales else 'head', True, seed=3)
    with torch.no_grad():
        expected = flash_attn_func(*values, **descales(scales), **options, out_dtype=dtype,
                                   return_attn_probs=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and out.dtype == dtype
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), leaves, weights)
    check_gradients(gradients, given_gradients(Inputs(*leaves), score_of(options, 32), expected,
                                               weights))


def test_packed_in_one_call():
    inputs, lists, pairs = packed()
    leaves = [x.requires_grad_() for x in inputs]
    out, max_logits = flash_attn_varlen_fp8_func(*leaves, **lists, causal=True, rotate=False,
                                                 return_max_logits=True)
    assert not max_logits.requires_grad
    values, scales = quantize_all(*leaves, 'block', False, lists=pairs)
    expected = flash_attn_varlen_func(*values, **lists, **descales(scales), causal=True, **BOTH)
    assert torch.equal(out, expected[0]) and torch.equal(max_logits, expected[2])
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, weights)
    lengths = lengths_of(*(lists[name] for name in LENGTH_NAMES))
    wanted = [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    for rows, keys in lengths.slices():
        one = Inputs(leaves[0][None, rows], *(x[None, keys] for x in leaves[1:]))
        part = given_gradients(one, score_of({'causal': True}, 32), (
            out[None, rows], expected[1][None, :, rows]), (weights[None, rows], 0.0))
        for total, own, x in zip(wanted, (rows, keys, keys), part):
            total[own] = x[0]
    check_gradients(gradients, wanted)


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('place', ['meta', 'fake'])
@pytest.mark.parametrize('name', ['flash_attn_fp8_func', 'flash_attn_varlen_fp8_func'])
def test_tensors_without_data(name, place, requires_grad):
    """Shapes, dtypes and, with gradients, those of the gradients."""
    with FakeTensorMode() if place == 'fake' else contextlib.nullcontext():
        x = torch.empty(derivative_calls.SHAPE, dtype=torch.bfloat16,
                        device='cpu' if place == 'fake' else 'meta', requires_grad=requires_grad)
        out, lse = derivative_calls.FUNCTIONS[name](x, return_attn_probs=True)
        batch, seqlen, heads, head_dim = x.shape
        is_packed = 'varlen' in name
        assert out.shape == ((batch * seqlen, heads, head_dim) if is_packed else x.shape)
        assert lse.shape == ((heads, batch * seqlen) if is_packed else (batch, heads, seqlen))
        assert out.dtype == x.dtype and lse.dtype == torch.float32 and out.device == x.device
        if requires_grad:
            assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_seeds_matter_and_repeat():
    inputs = tensors((1, 64), (1, 64))
    results = [flash_attn_fp8_func(*inputs, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(*results[:2]) and not torch.equal(*results[1:])


# ------------------------------------------------------------------------------------------- errors
def e4m3() -> dict[str, Tensor]:
    return dict(zip('qkv', (x.to(E4M3) for x in tensors((2, 70), (2, 101)))))


BAD = {
    'k': ({'k': torch.zeros(2, 101, 2, 32).half()},
          'flash_attn_func: expected k.dtype to be that of q, float8_e4m3fn, got float16'),
    'v of e5m2': ({'v': torch.zeros(2, 101, 2, 32).to(torch.float8_e5m2)},
                  'flash_attn_func: expected v.dtype to be that of q, float8_e4m3fn, got '
                  'float8_e5m2'),
    'q of e5m2': ({'q': torch.zeros(2, 70, 4, 32).to(torch.float8_e5m2)},
                  'flash_attn_func: expected q.dtype to be float16, bfloat16 or float8_e4m3fn, got '
                  'float8_e5m2; hint: '),
    'q of e5m2 and scales': ({'q': torch.zeros(2, 70, 4, 32).to(torch.float8_e5m2),
                              'q_descale': torch.ones(2, 2), 'out_dtype': torch.float16},
                             'flash_attn_func: expected q.dtype to be float16, bfloat16 or '
                             'float8_e4m3fn, got float8_e5m2; hint: '),
    'q of bf16': ({'q': torch.zeros(2, 70, 4, 32).bfloat16()},
                  'flash_attn_func: expected k.dtype to be that of q, bfloat16, got float8_e4m3fn'),
    'bf16 and scales': ({'q': torch.zeros(2, 70, 4, 32).bfloat16(), 'k_descale': torch.ones(2, 2)},
                        'flash_attn_func: expected k_descale to be None, got a tensor; hint: '),
    'bf16 and out_dtype': (
        {'q': torch.zeros(2, 70, 4, 32).bfloat16(), 'out_dtype': torch.float16},
        'flash_attn_func: expected out_dtype to be None with a q of bfloat16, got torch.float16'),
    'bf16 and promote': (
        {'q': torch.zeros(2, 70, 4, 32).bfloat16(), 'fp8_accum': 'promote'},
        "flash_attn_func: expected fp8_accum to be 'fast' with a q of bfloat16, got 'promote'"),
    'accum': ({'fp8_accum': 'slow'},
              "flash_attn_func: expected fp8_accum to be 'fast' or 'promote', got 'slow'"),
    'out_dtype': ({'out_dtype': torch.float32},
                  'flash_attn_func: expected out_dtype to be bfloat16 or float16, got float32'),
    'out.dtype': ({'out': torch.zeros(2, 70, 4, 32)},
                  'flash_attn_func: expected out.dtype to be bfloat16 or float16'),
    'out and out_dtype': (
        {'out': torch.zeros(2, 70, 4, 32).half(), 'out_dtype': torch.bfloat16},
        'flash_attn_func: expected out.dtype to be bfloat16 or float16, and that of out_dtype, '
        'got float16'),
    'out.shape': ({'out': torch.zeros(2, 71, 4, 32).bfloat16()},
                  'flash_attn_func: expected out to have the shape (2, 70, 4, 32)'),
    'q_descale': ({'q_descale': torch.ones(2, 4)},
                  'flash_attn_func: expected q_descale to have the shape (2, 2) or '
                  '(2, 4, 2), got (2, 4)'),
    'k_descale': ({'k_descale': torch.ones(())},
                  'flash_attn_func: expected k_descale to have the shape (2, 2) or '
                  '(2, 2, 1), got ()'),
    'v_descale': ({'v_descale': torch.ones(2, 2).double()},
                  'flash_attn_func: expected v_descale.dtype to be float32, got float64'),
    'heads': ({'q': torch.zeros(2, 70, 3, 32).to(E4M3)},
              'flash_attn_func: expected the heads of q to be'),
    'qv': ({'qv': torch.ones(())}, 'flash_attn_func: expected qv to be None, got a tensor'),
    'gradient': ({'s_aux': torch.ones(4, requires_grad=True),
                  'out': torch.zeros(2, 70, 4, 32).bfloat16()},
                 'flash_attn_func: expected requires_grad=False together with out=, got '
                 'requires_grad=True of s_aux; hint: '),
}


@pytest.mark.parametrize('changes, text', BAD.values(), ids=BAD)
def test_errors(changes, text):
    with pytest.raises(RuntimeError) as raised:
        flash_attn_func(**e4m3() | changes)
    assert str(raised.value).startswith(f'flash_attn3.{text}')


def test_scales_on_another_device():
    eight_bit = fp8.EightBit(v_descale=torch.ones(2, 2, device='meta'))
    with pytest.raises(RuntimeError, match='flash_attn_func: expected v_descale on the device of '
                                           'q, cpu, got meta$'):
        checks.check_forward(e4m3(), eight_bit, General(), check=_plan.check_fp8)


@pytest.mark.parametrize('dtype', [E4M3, torch.float32, torch.float64], ids=str)
def test_what_is_quantised_is_of_16_bits(dtype):
    inputs = (x.to(dtype) for x in tensors((2, 70), (2, 101)))
    with pytest.raises(RuntimeError, match='flash_attn_fp8_func: expected q.dtype to be float16 or '
                                           'bfloat16, got '):
        flash_attn_fp8_func(*inputs)


def test_no_heads_to_quantise():
    q, k = torch.zeros(2, 3, 0, 16).bfloat16(), torch.zeros(2, 3, 2, 16).bfloat16()
    for device in ('cpu', 'meta'):
        with pytest.raises(RuntimeError, match='_func: expected at least one head of q'):
            flash_attn_fp8_func(q.to(device), k.to(device), k.to(device))


def test_can_use():
    """By the rules of the kernels: what the CPU path alone has, and scales; of other tensors, each
    argument of FP8.
    """
    options = {'out_dtype': torch.float16, 'k_descale': torch.ones(2, 2)}
    on_cpu = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'
    assert can_use(*e4m3().values(), **options) == (False, [on_cpu])
    for changes, text in (
            ({'v_descale': torch.ones(3)}, 'flash_attn3.flash_attn_func: expected '
                                           'v_descale to have the shape (2, 2) or (2, 2, 1)'),):
        is_fine, reasons = can_use(*e4m3().values(), **options | changes)
        assert not is_fine and [reason.split(', got')[0] for reason in reasons] == [
            text, on_cpu.split(', got')[0]]
    _, reasons = can_use(*(x.bfloat16() for x in e4m3().values()), fp8_accum='promote', **options)
    assert [reason.split(' to be')[0] for reason in reasons[:2]] == [
        'flash_attn3.flash_attn_func: expected out_dtype',
        'flash_attn3.flash_attn_func: expected k_descale']


def calls_on_cuda():
    """On fake tensors: every function that computes in FP8, but for those of qkv in one tensor."""
    x, rows = (torch.empty(*shape, 2, 64, dtype=torch.bfloat16, device='cuda')
               for shape in ((1, 5), (5,)))
    cu = torch.empty(2, dtype=torch.int32, device='cuda')
    lengths = (cu, cu, 5, 5)
    x8, rows8 = x.to(E4M3), rows.to(E4M3)
    return [functools.partial(flash_attn_fp8_func, x, x, x),
            functools.partial(flash_attn_varlen_fp8_func, rows, rows, rows, *lengths),
            functools.partial(flash_attn_func, x8, x8, x8),
            functools.partial(flash_attn_varlen_func, rows8, rows8, rows8, *lengths)]


def test_max_logits_of_kernels_are_shaped_as_the_lse(monkeypatch):
    """On CUDA tensors, whether or not there is a GPU."""
    monkeypatch.setattr(library, 'kernels_serve', lambda device: True)
    with FakeTensorMode():
        for call in calls_on_cuda():
            _, lse, max_logits = call(return_attn_probs=True, return_max_logits=True)
            assert max_logits.shape == lse.shape and max_logits.dtype == torch.float32


def test_gpus_without_kernels(monkeypatch):
    monkeypatch.setattr(library, 'KERNELS_MISSING', 'there is no library')
    with FakeTensorMode():
        for call in calls_on_cuda():
            with pytest.raises(NotImplementedError, match='a CPU tensor, or a Hopper GPU and its '
                                                          'kernels, got cuda:0; hint: there is no'):
                call()
