"""Attention on float8_e4m3fn on the GPU, held to the bar of tests/support/fp8_data.py: every kind
of scales, mask and layout; packed sequences; what is refused.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import flash_attn3
from benchmarks.fp8_accuracy import BLOCKS
from flash_attn3 import (flash_attn_fp8_func, flash_attn_func, flash_attn_qkvpacked_func,
                         flash_attn_varlen_fp8_func, flash_attn_varlen_func)
from flash_attn3.cpu import reference_fp8
from flash_attn3.ops import fp8_gradients
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import Execution, General
from flash_attn3.cpu.quantize import KV_BLOCK, Q_BLOCK
from flash_attn3.cpu.reference import Inputs
from flash_attn3.cpu.reference_fp8 import Scales

from tests.cpu.test_fp8 import BAD, e4m3
from tests.gpu.fp8_calls import Call, call_of, check_case, check_same, plain_call_of
from tests.support import compare, layouts
from tests.support.fp8_data import E4M3, check_fp8, descales, quantize_all
from tests.support.general_cases import GeneralCase
from tests.support.layouts import Layout

DENSE = GeneralCase(((200, 333),) * 2, heads=(6, 2), is_packed=False, data='outliers')
TALL = dataclasses.replace(DENSE, lengths=((333, 140),) * 2)    # some rows are before key 0
PACKED = dataclasses.replace(
    DENSE, lengths=((113, 203), (1, 1), (0, 7), (260, 931), (7, 0), (64, 500), (0, 0), (129, 128)),
    is_packed=True)
PARTLY_USED = dataclasses.replace(
    PACKED, behind=(37, 70),
    used=((100, 203), (1, 1), (0, 3), (131, 865), (5, 0), (0, 500), (0, 0), (129, 0)))
LONG = dataclasses.replace(DENSE, lengths=((200, 933),) * 2)    # three blocks of keys
SHAPES = {'wide': DENSE, 'tall': TALL, 'packed': PACKED, 'used': PARTLY_USED}
FEATURES = {
    'full': {}, 'causal': {'causal': True}, 'window': {'window': (70, 40)},
    'left': {'window': (100, -1)}, 'right': {'window': (-1, 33)}, 'diagonal': {'window': (0, 0)},
    'causal_window': {'causal': True, 'window': (64, 50)}, 'chunk': {'chunk': 100},
    'softcap': {'softcap': 3.0}, 'sinks': {'sinks': 'fp32'},
    'all': {'causal': True, 'window': (150, -1), 'chunk': 180, 'softcap': 5.0, 'sinks': 'bf16'}}
HEAD_DIMS = (64, 128, 256)    # the kernels have these
ROWS_OF_BLOCKS = (Q_BLOCK, KV_BLOCK, KV_BLOCK)    # q, k and v
every_shape = pytest.mark.parametrize('case', SHAPES.values(), ids=SHAPES)
every_feature = pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
every_head_dim = pytest.mark.parametrize('head_dim', HEAD_DIMS)
every_mask = pytest.mark.parametrize('causal', [False, True], ids=['full', 'causal'])
every_way = pytest.mark.parametrize('granularity', ['head', 'block'])
every_granularity = pytest.mark.parametrize('granularity', BLOCKS)


# ------------------------------------------------------------------------------------ right values
@pytest.mark.smoke
@every_way
@every_feature
@every_head_dim
@every_shape
def test_features(case, head_dim, features, granularity, device):
    check_case(dataclasses.replace(case, head_dim=head_dim, **features), device, granularity)


@pytest.mark.smoke
@every_way
@every_feature
@pytest.mark.parametrize('fp8_accum', ['fast', 'promote'])
@pytest.mark.parametrize('head_dims', [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_max_logits(head_dims, fp8_accum, features, granularity, device):
    """After the scales and the softcap, without the sink and the scales of v."""
    for case in (DENSE, PACKED, LONG):
        case = dataclasses.replace(case, head_dim=head_dims[0], head_dim_v=head_dims[1],
                                   **features, max_logits=True)
        check_case(case, device, granularity, fp8_accum=fp8_accum)


@pytest.mark.smoke
@every_head_dim
@pytest.mark.parametrize('features', [{'window': (70, 40)}, {'sinks': 'fp32'}, {'softcap': 3.0}],
                         ids=str)
def test_max_logits_change_no_bit(features, head_dim, device):
    """Of what the same kernel gives without them."""
    call = call_of(dataclasses.replace(PACKED, head_dim=head_dim, **features), device)
    check_same(call.run(return_max_logits=True)[:2], call.run())


@every_head_dim
def test_max_logits_of_values_with_any_scale(head_dim, device):
    """Blocks of v whose scales differ by 2^60 change no bit."""
    call = call_of(dataclasses.replace(LONG, head_dim=head_dim, max_logits=True), device)
    wanted = call.run()[2]
    powers = torch.arange(call.scales.v.size(-1), device=device) % 2 * 60
    call.scales = call.scales._replace(v=call.scales.v * 2.0 ** -powers)
    compare.check_equal(call.run()[2], wanted, 'max_logits')


@pytest.mark.smoke
@every_mask
@pytest.mark.parametrize('head_dim', range(16, 257, 16))
def test_head_dims(head_dim, causal, device):
    for case, granularity in ((DENSE, 'block'), (PACKED, 'block'), (DENSE, 'head')):
        check_case(dataclasses.replace(case, head_dim=head_dim, causal=causal), device,
                   granularity)


@every_mask
@pytest.mark.parametrize('head_dims', [(192, 128), (64, 16), (16, 64), (128, 256), (80, 48)],
                         ids=str)
def test_head_dims_of_v(head_dims, causal, device):
    for case in (DENSE, PACKED):
        check_case(dataclasses.replace(case, head_dim=head_dims[0], head_dim_v=head_dims[1],
                                       causal=causal), device)


@every_mask
@every_granularity
@pytest.mark.parametrize('is_rotated', [False, True])
@pytest.mark.parametrize('case', [DENSE, PARTLY_USED], ids=['dense', 'packed'])
def test_granularities(case, is_rotated, granularity, causal, device):
    for head_dim in HEAD_DIMS:
        check_case(dataclasses.replace(case, head_dim=head_dim, causal=causal), device,
                   granularity, is_rotated)


@pytest.mark.smoke
@every_feature
@every_head_dim
@pytest.mark.parametrize('heads', [(6, 2), (4, 4)], ids=str)
def test_blocks_of_keys(heads, head_dim, features, device):
    case = dataclasses.replace(LONG, head_dim=head_dim, heads=heads, **features)
    call = call_of(case, device)
    assert call.scales.k.shape == call.scales.v.shape == (2, heads[1], 3)
    call.check(call.run())


@every_mask
@every_head_dim
@pytest.mark.parametrize('lengths', [
    (1, 1), (1, 1000), (1000, 1), (64, 64), (65, 127), (128, 128), (129, 257), (191, 193),
    (192, 385), (77, 300), (300, 77), (0, 5), (5, 0), (1025, 1023)], ids=str)
def test_lengths(lengths, head_dim, causal, device):
    case = GeneralCase((lengths,) * 2, head_dim, causal=causal, is_packed=False)
    for granularity in ('head', 'block'):
        check_case(case, device, granularity)
        check_case(dataclasses.replace(case, is_packed=True), device, granularity)


@every_mask
@every_head_dim
@every_way
@pytest.mark.parametrize('data', ['normal', 'onehot', 'outliers'])
def test_long_sequences(data, granularity, head_dim, causal, device):
    case = GeneralCase(((1500, 3000),), head_dim, heads=(2, 1), causal=causal, is_packed=False,
                       data=data)
    check_case(case, device, granularity)


@pytest.mark.parametrize('features', ['full', 'causal', 'window', 'left', 'right', 'diagonal',
                                      'causal_window', 'chunk'])
@every_head_dim
@pytest.mark.parametrize('case', [DENSE, TALL, PACKED], ids=['dense', 'tall', 'packed'])
def test_every_key_counts_once(case, head_dim, features, device):
    """Equal scores on one-hot values: P is a power of two, and nothing is rounded but out.

    Rows see keys from and to every column of a tile.
    """
    case = dataclasses.replace(case, head_dim=head_dim, data='uniform', **FEATURES[features])
    call = call_of(case, device, 'head', False)
    call.scales = Scales()
    out, lse = call.run(out_dtype=torch.float16)
    ref = reference_fp8.attend(call.inputs, Scales(), call.case.score, call.lengths)
    torch.testing.assert_close(out.double(), ref.out, rtol=2.0 ** -10, atol=1e-7)
    compare.check_lse(lse, ref.lse)


@pytest.mark.parametrize('growth', [0.25, 0.5, 0.75])
@every_head_dim
def test_a_key_that_outweighs_the_rest_is_exact(head_dim, growth, device):
    """Its P is that of the maximum, which e4m3 has, though one almost as large came before it (K
    tiles are visited from the last one on), and a kernel might keep the maximum that it had.
    """
    first, second = 500, 40
    q, k, v = (torch.zeros(1, n, 1, head_dim, device=device) for n in (70, 600, 600))
    q[..., :2] = 1.0
    k[:, [first, second], :, 0] = 16.0
    k[:, second, :, 1] = growth
    v[:, first] = -1.0
    v[:, second] = 1.0
    out = flash_attn_func(*(x.to(E4M3) for x in (q, k, v)), softmax_scale=math.log(2.0),
                          out_dtype=torch.float16)
    weights = 2.0 ** growth, 1.0, (k.size(1) - 2) * 2.0 ** -16
    expected = (weights[0] - weights[1]) / sum(weights)
    assert (out.double() - expected).abs().max().item() <= 2.0 ** -11


@pytest.mark.parametrize('exponents', [(-20, -20, -20), (0, 0, 60), (10, -14, -60), (0, 3, 0)],
                         ids=str)
def test_magnitudes(exponents, device):
    """Magnitudes of q, k and v, which the scales carry."""
    for head_dim in HEAD_DIMS:
        case = dataclasses.replace(DENSE, head_dim=head_dim)
        q, k, v, _ = case.tensors(device).inputs
        tensors = [x.float() * 2.0 ** e for x, e in zip((q, k, v), exponents)]
        values, scales = quantize_all(*tensors, 'block', True)
        out, _ = Call(case, Inputs(*values), scales, {}).run()
        unit = scales._replace(v=scales.v * 2.0 ** -exponents[2])
        check_fp8((out.float() * 2.0 ** -exponents[2]).bfloat16(), Inputs(*values), unit,
                  case.score)


# ------------------------------------------------------------------------------------------ scales
@pytest.mark.parametrize('missing', ['q', 'k', 'v', 'qkv'])
@pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
def test_no_scale_is_one(case, missing, device):
    call = call_of(case, device, 'head')
    ones = {name: torch.ones_like(getattr(call.scales, name)) for name in missing}
    filled = dataclasses.replace(call, scales=call.scales._replace(**ones))
    call.scales = call.scales._replace(**dict.fromkeys(missing))
    results = call.run(softmax_scale=1e-3)
    check_same(results, filled.run(softmax_scale=1e-3))


@pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
@every_way
def test_scales_of_any_strides(granularity, case, device):
    case = LONG if case == DENSE and granularity == 'block' else case
    call = call_of(case, device, granularity)
    turned = Scales(*(x.mT.contiguous().mT for x in call.scales))
    apart = Scales(*(torch.stack([x, x * 5], -1)[..., 0] for x in call.scales))
    expected = call.run()
    call.check(expected)
    for scales in (turned, apart):
        check_same(dataclasses.replace(call, scales=scales).run(), expected)


@pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
def test_one_scale_in_every_form(case, device):
    """Expanded to heads or blocks, filled, mixed: the same bits."""
    by_head, by_block = call_of(case, device, 'head'), call_of(case, device, 'block')
    one = torch.full((), 2**-7, device=device)
    forms = [Scales(*(one.expand(x.shape) for x in by_head.scales)),
             Scales(*(torch.full_like(x, 2**-7) for x in by_head.scales)),
             Scales(*(one.expand(x.shape) for x in by_block.scales)),
             Scales(*(torch.full_like(x, 2**-7) for x in by_block.scales))]
    forms += [forms[0]._replace(k=forms[3].k), forms[3]._replace(q=forms[1].q, v=forms[0].v)]
    calls = [dataclasses.replace(by_head, scales=scales) for scales in forms]
    results = [call.run() for call in calls]
    calls[0].check(results[0])
    for other in results[1:]:
        check_same(other, results[0])


@pytest.mark.parametrize('which', range(3), ids='qkv')
@pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
def test_a_scale_of_nan_is_seen(case, which, device):
    """By the heads that have it, and by no other."""
    call = call_of(case, device, 'head')
    expected, _ = call.run()
    call.scales[which][:, 1] = math.nan
    out, _ = call.run()
    compare.check_equal(out[..., :3, :], expected[..., :3, :], 'out')
    sees_keys = torch.ones_like(out[..., 3:, :], dtype=torch.bool)
    if call.lists:
        for (first, _), (rows, keys) in case.sequences():
            sees_keys[first:first + rows] = keys > 0
    assert torch.equal(out[..., 3:, :].isnan(), sees_keys)


@pytest.mark.parametrize('poison_value', [1e30, math.nan])
def test_scales_of_no_block_are_not_read(poison_value, device):
    """Packed: scales between the blocks of sequences, and after the last one."""
    call = call_of(PARTLY_USED, device)
    poisoned = [torch.full_like(x, poison_value) for x in call.scales]
    for scale, poison, side, block in zip(call.scales, poisoned, (0, 1, 1), ROWS_OF_BLOCKS):
        first = 0
        for b, lengths in enumerate(PARTLY_USED.lengths):
            place = first // block + b
            own = slice(place, place - (-lengths[side] // block))
            poison[..., own] = scale[..., own]
            first += lengths[side]
    check_same(dataclasses.replace(call, scales=Scales(*poisoned)).run(), call.run())


def test_a_scale_of_zero_is_a_block_of_zeros(device):
    call = call_of(LONG, device)
    for name in 'kv':
        getattr(call.scales, name)[:, :, 1] = 0
    out, lse = call.run()
    keys = torch.zeros_like(call.inputs.k[:, KV_BLOCK:2 * KV_BLOCK])
    zeroed = call.inputs._replace(**{
        name: torch.cat([x[:, :KV_BLOCK], keys, x[:, 2 * KV_BLOCK:]], 1)
        for name, x in (('k', call.inputs.k), ('v', call.inputs.v))})
    ones = call.scales._replace(**{name: getattr(call.scales, name).clone() for name in 'kv'})
    for name in 'kv':
        getattr(ones, name)[:, :, 1] = 1e-3
    other = Call(LONG, zeroed, ones, {})
    other.check((out, lse))


@every_head_dim
@every_mask
@pytest.mark.parametrize('softmax_scale', [None, 1e-4])
def test_zeros_in_q_and_k(softmax_scale, causal, head_dim, device):
    """As where rows are padded: the product of the scales of two such blocks is no float32, and
    masked scores are -inf."""
    case = dataclasses.replace(LONG, head_dim=head_dim, causal=causal, softmax_scale=softmax_scale)
    q, k, v, _ = case.tensors(device).inputs
    q[:, 64:], k[:, KV_BLOCK:] = 0, 0
    values, scales = quantize_all(q, k, v, 'block', True)
    assert (scales.q.amin() * scales.k.amin()).item() < 1e-40
    call = Call(case, Inputs(*values), scales, {})
    call.check(call.run())


# ---------------------------------------------------------------------------------- heads, packing
@pytest.mark.smoke
@every_mask
@pytest.mark.parametrize('heads', [(1, 1), (4, 4), (6, 2), (5, 1), (16, 2), (64, 1)], ids=str)
@every_way
def test_query_heads_in_the_rows_of_a_tile(granularity, heads, causal, device):
    """pack_gqa changes no bit; nor do heads that are computed alone."""
    for head_dim, lengths in itertools.product(HEAD_DIMS, ((200, 333), (1, 300), (17, 40))):
        case = GeneralCase((lengths,) * 2, head_dim, heads=heads, causal=causal, is_packed=False,
                           data='outliers')
        call = call_of(case, device, granularity)
        results = [call.run(pack_gqa=pack) for pack in (False, True, None)]
        call.check(results[0])
        check_same(results[1], results[0])
        check_same(results[2], results[0])


@every_way
@every_head_dim
@every_mask
def test_a_sequence_knows_nothing_of_the_others(granularity, causal, head_dim, device):
    """NaN in all others, and in their scales by block: the same bits."""
    call = call_of(dataclasses.replace(PACKED, head_dim=head_dim, causal=causal), device,
                   granularity)
    out, lse = call.run()
    for b, (firsts, lengths) in enumerate(call.case.sequences()):
        inputs, scales = [], []
        for side, x, scale in zip((0, 1, 1), call.inputs, call.scales):
            first, length = firsts[side], lengths[side]
            inputs.append(torch.full_like(x.float(), math.nan).to(E4M3))
            inputs[-1][first:first + length] = x[first:first + length]
            own, block = slice(b, b + 1), ROWS_OF_BLOCKS[len(scales)]
            if granularity == 'block':
                own = slice(first // block + b, first // block + b - (-length // block))
            place = (own, ...) if granularity == 'head' else (..., own)
            scales.append(torch.full_like(scale, math.nan))
            scales[-1][place] = scale[place]
        alone = dataclasses.replace(call, inputs=Inputs(*inputs, call.inputs.s_aux),
                                    scales=Scales(*scales))
        rows = slice(firsts[0], firsts[0] + lengths[0])
        got = alone.run()
        check_same((got[0][rows], got[1][:, rows]), (out[rows], lse[:, rows]))


def test_many_short_sequences(device):
    lengths = tuple((1 + 7 * i % 40, 1 + 11 * i % 50) for i in range(500))
    for head_dim in HEAD_DIMS:
        check_case(GeneralCase(lengths, head_dim, heads=(2, 1), causal=True), device)


# ----------------------------------------------------------------------------------- memory, poison
FINE = [Layout('padded', padding=(1, 5, 1, 16)), Layout('bhsd', order=(0, 2, 1, 3)),
        Layout('hsbd', order=(2, 1, 0, 3), padding=(0, 3, 0, 0), offset=16)]


@pytest.mark.smoke
@pytest.mark.parametrize('layout', FINE + layouts.DIRECT + layouts.COPIED, ids=str)
def test_layouts(layout, device):
    """NaN is all around the tensors; those that TMA cannot take are copied."""
    for head_dim, causal in itertools.product((64, 80, 256), (False, True)):
        call = call_of(dataclasses.replace(DENSE, head_dim=head_dim, causal=causal), device)
        placed = dataclasses.replace(
            call, inputs=Inputs(*(layout.place(x) for x in call.inputs[:3])))
        check_same(placed.run(), call.run())


@pytest.mark.parametrize('layout', FINE + layouts.COPIED, ids=str)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_given_out(dtype, layout, device):
    call = call_of(DENSE, device)
    expected = call.run(out_dtype=dtype)
    assert expected[0].dtype == dtype
    call.check(expected)
    out = layout.place(torch.zeros_like(expected[0]))
    outside = layouts.nan_count(out)
    got = call.run(out=out)
    assert got[0] is out
    check_same(got, expected)
    assert layouts.nan_count(out) == outside


@pytest.mark.smoke
@every_feature
def test_rows_that_do_not_count_are_not_read(features, device):
    """NaN there, in q, k and v; out is 0 and lse -inf."""
    for head_dim, granularity in itertools.product(HEAD_DIMS, ('head', 'block')):
        case = dataclasses.replace(PARTLY_USED, head_dim=head_dim, **features)
        call = call_of(case, device, granularity)
        expected = call.run()
        counts = [torch.zeros(len(x), dtype=torch.bool, device=device) for x in call.inputs[:2]]
        for firsts, used in call.case.sequences():
            for count, first, rows in zip(counts, firsts, used):
                count[first:first + rows] = True
        spoiled = [torch.where(count[:, None, None], x.float(), math.nan).to(E4M3)
                   for x, count in zip(call.inputs, (counts[0], counts[1], counts[1]))]
        got = dataclasses.replace(call, inputs=Inputs(*spoiled, call.inputs.s_aux)).run()
        check_same(got, expected)
        assert (got[0][~counts[0]] == 0).all() and (got[1][:, ~counts[0]] == -math.inf).all()


@every_way
@every_head_dim
@every_mask
def test_nan_reaches_who_sees_it(granularity, causal, head_dim, device):
    case = GeneralCase(((200, 200),), head_dim, heads=(4, 2), causal=causal, is_packed=False)
    call = call_of(case, device, granularity)
    expected = call.run()
    spoiled = call.inputs.q.float()
    spoiled[0, 150, 1, 7] = math.nan
    out, lse = dataclasses.replace(
        call, inputs=call.inputs._replace(q=spoiled.to(E4M3))).run()
    assert out[0, 150, 1].isnan().all() and lse[0, 1, 150].isnan()
    out[0, 150, 1], lse[0, 1, 150] = expected[0][0, 150, 1], expected[1][0, 1, 150]
    check_same((out, lse), expected)
    spoiled = call.inputs.k.float()
    spoiled[0, 150, 1, 7] = math.nan
    out, lse = dataclasses.replace(
        call, inputs=call.inputs._replace(k=spoiled.to(E4M3))).run()
    first = 150 if causal else 0
    assert out[0, first:, 2:].isnan().all() and lse[0, 2:, first:].isnan().all()
    out[0, first:, 2:], lse[0, 2:, first:] = expected[0][0, first:, 2:], expected[1][0, 2:, first:]
    check_same((out, lse), expected)


# -------------------------------------------------------------------------------- how it is called
@every_head_dim
@every_feature
def test_the_same_bits_every_time(features, head_dim, device):
    for case, granularity in itertools.product((DENSE, PARTLY_USED), ('head', 'block')):
        call = call_of(dataclasses.replace(case, head_dim=head_dim, **features), device,
                       granularity)
        expected = call.run()
        for _ in range(3):
            check_same(call.run(), expected)


@pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
def test_graph(case, cuda):
    """Other values in the same memory."""
    call = call_of(case, cuda)
    other = call_of(dataclasses.replace(case, softmax_scale=None, data='normal'), cuda)
    expected = other.run()
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    for mine, theirs in zip((*call.inputs[:3], *call.scales), (*other.inputs[:3], *other.scales)):
        mine.copy_(theirs)
    graph.replay()
    check_same(got, expected)


def test_nothing_waits_for_the_gpu(cuda):
    call = call_of(PACKED, cuda)
    wide = PACKED.tensors(cuda)
    call.run()
    torch.cuda.set_sync_debug_mode('error')
    try:
        call.run()
        flash_attn_varlen_fp8_func(*wide.inputs[:3], **wide.lists)
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.parametrize('is_packed', [False, True])
def test_opcheck(is_packed, cuda):
    call = call_of(PACKED if is_packed else DENSE, cuda)
    lists = [call.lists.get(name) for name in ('cu_seqlens_q', 'cu_seqlens_k', 'seqused_q',
                                               'seqused_k')]
    opcheck(torch.ops.flash_attn3.attend.default,
            (*call.inputs[:3], None, *General(*lists), *Execution()[:-1], *call.scales, True),
            test_utils=('test_autograd_registration', 'test_faketensor',
                        'test_aot_dispatch_dynamic'))


def test_compiled(cuda):
    call = call_of(DENSE, cuda)
    wide = DENSE.tensors(cuda).inputs[:3]

    def attention(q, k, v, scales, wide):
        return (flash_attn_func(q, k, v, **descales(Scales(*scales)), return_attn_probs=True)
                + flash_attn_fp8_func(*wide, causal=True, return_attn_probs=True))

    arguments = *call.inputs[:3], tuple(call.scales), tuple(wide)
    got = torch.compile(attention, backend='aot_eager', fullgraph=True)(*arguments)
    expected = attention(*arguments)
    check_same(got[:2], expected[:2])
    check_same(got[2:], expected[2:])


@pytest.mark.parametrize('form', [(3, 4), (8,)], ids=str)
def test_qkvpacked(form, device):
    qkv = torch.randn(2, 150, *form, 64, device=device).to(E4M3)
    scales = Scales(*(torch.rand(2, 4 if form == (3, 4) else 2, device=device) for _ in range(3)))
    q, k, v = (qkv.unbind(2) if form == (3, 4) else qkv.split((4, 2, 2), 2))
    options = {'causal': True, 'out_dtype': torch.float16, 'return_attn_probs': True}
    got = flash_attn_qkvpacked_func(qkv, num_heads_q=4, **descales(scales), **options)
    check_same(got, flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(),
                                    **descales(scales), **options))
    case = GeneralCase(((150, 150),) * 2, causal=True, is_packed=False)
    Call(case, Inputs(q, k, v), scales, {}).check(got)


# ------------------------------------------------------------------- quantised and attended at once
@pytest.mark.parametrize('block_scales', [False, True])
@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
@pytest.mark.parametrize('case', [DENSE, PARTLY_USED], ids=['dense', 'packed'])
def test_in_one_call(case, dtype, block_scales, device):
    case = dataclasses.replace(case, dtype=dtype, causal=True, sinks='fp32')
    tensors = case.tensors(device)
    call = plain_call_of(case, device, 'block' if block_scales else 'head')
    function = flash_attn_varlen_fp8_func if case.is_packed else flash_attn_fp8_func
    got = function(*tensors.inputs[:3], **tensors.lists, causal=True, return_attn_probs=True,
                   block_scales=block_scales, s_aux=tensors.inputs.s_aux)
    check_same(got, call.run(out_dtype=tensors.inputs.q.dtype))


@pytest.mark.parametrize('fp8_backward', ['given', 'rounded'])
@pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
def test_gradients_are_those_of_bf16(case, fp8_backward, device):
    """Straight through: gradients of the given or rounded inputs, with the out and lse of FP8."""
    if device.type == 'cuda' and 'BwdBf16D64Causal' not in flash_attn3.built_variants():
        pytest.skip('BwdBf16D64Causal not in this build')
    tensors = dataclasses.replace(case, causal=True).tensors(device)
    leaves = [x.requires_grad_() for x in tensors.inputs[:3]]
    function, wide = ((flash_attn_varlen_fp8_func, flash_attn_varlen_func) if case.is_packed else
                      (flash_attn_fp8_func, flash_attn_func))
    function = functools.partial(function, fp8_backward=fp8_backward)
    results = [one(*leaves, **tensors.lists, causal=True) for one in (function, wide)]
    got, expected = (torch.autograd.grad(out, leaves, tensors.dout) for out in results)
    for one, other in zip(got, expected):
        distance = (one.float() - other.float()).norm() / other.float().norm()
        assert one.isfinite().all() and distance < 0.1


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('seed', [None, 3])
def test_rounded_inputs_are_those_of_the_cpu(seed, dtype, device):
    """Each rounded to 16 bits, at most twice."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 400, heads, dim, generator=generator).to(dtype)
              for heads, dim in ((4, 96), (2, 96), (2, 64))]
    results = [fp8_gradients.round_inputs(*(x.to(place) for x in inputs), General(),
                                          Quantization(seed)) for place in (device, 'cpu')]
    for one, other in zip(*results):
        torch.testing.assert_close(one.cpu(), other, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


# ------------------------------------------------------------------------------------------ refused
@pytest.mark.parametrize('changes, text', [error for name, error in BAD.items()], ids=BAD)
def test_errors_are_those_of_the_cpu(changes, text, device):
    def moved(x):
        is_leaf = isinstance(x, Tensor) and x.requires_grad
        x = x.detach().to(device) if isinstance(x, Tensor) else x
        return x.requires_grad_() if is_leaf else x

    with pytest.raises(RuntimeError) as raised:
        flash_attn_func(**{name: moved(x) for name, x in (e4m3() | changes).items()})
    assert str(raised.value).startswith(f'flash_attn3.{text}')


@pytest.mark.parametrize('head_dims', [(8, 8), (24, 24), (272, 272), (64, 24), (64, 272)], ids=str)
def test_head_dims_without_a_kernel(head_dims, cuda):
    q, k, v = (torch.zeros(1, 5, 2, dim, device=cuda).to(E4M3)
               for dim in (head_dims[0], *head_dims))
    name = 'q' if head_dims[0] != 64 else 'v'
    with pytest.raises(RuntimeError, match=f'expected the head_dim of {name} to be a multiple '
                                           'of 16 from 16 to 256 with float8_e4m3fn, got'):
        flash_attn_func(q, k, v)


@every_feature
def test_can_use(features, cuda):
    call = call_of(dataclasses.replace(DENSE, **features), cuda)
    options = call.case.options() | descales(call.scales)
    assert flash_attn3.can_use(*call.inputs[:3], **options, s_aux=call.inputs.s_aux,
                               out_dtype=torch.float16) == (True, [])
