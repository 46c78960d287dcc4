"""Windows, chunks, softcap, sinks, max logits and value head dims, alone and together: results and
gradients, held to the bar of tests/support/compare.py.
"""
from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func
from flash_attn3.cpu.reference import Inputs

from tests.support import compare, layouts
from tests.support.cases import GradientKind
from tests.support.general_cases import SINKS, GeneralCase, Tensors, forward, run
from tests.support.general_oracle import check, check_case, check_same

PARTS = 3    # tests.record runs so many processes

DENSE = GeneralCase(((200, 333),) * 2, heads=(6, 2), is_packed=False)
SQUARE = dataclasses.replace(DENSE, lengths=((257, 257),) * 2)
TALL = dataclasses.replace(DENSE, lengths=((333, 140),) * 2)    # some rows are before key 0
PACKED = GeneralCase(((113, 203), (0, 7), (257, 130), (7, 0), (64, 64)), heads=(6, 2))
SHAPES = {'wide': DENSE, 'square': SQUARE, 'tall': TALL, 'packed': PACKED}
every_shape = pytest.mark.parametrize('case', SHAPES.values(), ids=SHAPES)
two_shapes = pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])
every_mask = pytest.mark.parametrize('causal', [False, True], ids=['full', 'causal'])

# Named as the tests of the CPU path name them.
FEATURES = {
    'window': {'window': (70, 40)},
    'left': {'window': (100, -1)},
    'right': {'window': (-1, 33)},
    'diagonal': {'window': (0, 0)},
    'causal_window': {'causal': True, 'window': (64, 50)},
    'chunk': {'chunk': 100},
    'causal_chunk': {'causal': True, 'chunk': 64},
    'softcap': {'softcap': 15.0},
    'sinks': {'sinks': 'fp32'},
    'causal_sinks': {'causal': True, 'sinks': 'bf16'},
    'max_logits': {'max_logits': True},
    'all': {'causal': True, 'window': (150, -1), 'chunk': 180, 'softcap': 15.0, 'sinks': 'fp32',
            'max_logits': True},
}
every_feature = pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)

HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (72, 72), (40, 40),
             (192, 128), (128, 64), (64, 128), (64, 256), (96, 64), (80, 40), (64, 512),
             (512, 512), (320, 264), (128, 512)]
every_head_dim = pytest.mark.parametrize('head_dims', HEAD_DIMS, ids=lambda x: f'{x[0]}x{x[1]}')
every_dtype = pytest.mark.parametrize('dtype', ['bf16', 'fp16'])

KINDS = [GradientKind('bf16', 64, True), GradientKind('bf16', 128, False),
         GradientKind('fp16', 96, False), GradientKind('bf16', 192, True),
         GradientKind('bf16', 256, False)]
every_kind = pytest.mark.parametrize('kind', KINDS, ids=str)
one_kind = pytest.mark.parametrize('kind', KINDS[:1], ids=str)


def with_features(case: GeneralCase, features: dict, **changes) -> GeneralCase:
    return dataclasses.replace(case, **features | changes)


# ------------------------------------------------------------------------- every feature and kernel
@pytest.mark.smoke
@every_feature
@every_head_dim
def test_smoke(head_dims, features, device):
    check_case(with_features(PACKED, features, head_dim=head_dims[0], head_dim_v=head_dims[1]),
               device)


@every_feature
@every_head_dim
def test_head_dims(head_dims, features, device):
    """The other dtype, with a batch."""
    check_case(with_features(DENSE, features, head_dim=head_dims[0], head_dim_v=head_dims[1],
                             dtype='fp16'), device)


@every_head_dim
@every_mask
@every_dtype
@two_shapes
def test_head_dims_without_features(case, dtype, causal, head_dims, device):
    """The kernels that have no general mask."""
    check_case(dataclasses.replace(case, head_dim=head_dims[0], head_dim_v=head_dims[1],
                                   dtype=dtype, causal=causal), device)


@two_shapes
@every_feature
@pytest.mark.parametrize('heads, pack_gqa', [
    ((4, 4), None), ((6, 2), True), ((6, 2), False), ((8, 1), True)], ids=str)
def test_heads_and_packing(heads, pack_gqa, features, case, device):
    check_case(with_features(case, features, heads=heads, pack_gqa=pack_gqa), device)


@pytest.mark.smoke
@every_feature
@every_kind
def test_packing_changes_no_bit_of_the_forward(kind, features, device):
    """Nor which of the query heads share the rows of a tile."""
    case = PACKED.of(kind, **features) if 'causal' not in features else dataclasses.replace(
        PACKED, dtype=kind.dtype, head_dim=kind.head_dim, **features)
    tensors = case.tensors(device)
    results = [forward(case, tensors, pack_gqa=pack_gqa) for pack_gqa in (True, False)]
    for got, wanted in zip(*results):
        compare.check_equal(got, wanted, 'result')


# ------------------------------------------------------------------------------- windows and chunks
SIDES = (-1, 0, 1, 64, 129, 1000)


@every_shape
@pytest.mark.parametrize('window', list(itertools.product(SIDES, SIDES)), ids=str)
def test_windows(window, case, device):
    """None, of the diagonal alone, at the edges of tiles, longer than the sequences."""
    check_case(dataclasses.replace(case, window=window), device)


@every_shape
@pytest.mark.parametrize('left', SIDES[1:])
def test_causal_windows(left, case, device):
    """The right side does not count then."""
    case = dataclasses.replace(case, causal=True, window=(left, -1), deterministic=True)
    check_case(case, device)
    tensors = case.tensors(device)
    for right in (0, 7):
        check_same(run(case, tensors, window_size=(left, right)), run(case, tensors))


@every_shape
@every_mask
@pytest.mark.parametrize('chunk', [1, 2, 63, 64, 100, 128, 333, 1000])
def test_chunks(chunk, causal, case, device):
    check_case(dataclasses.replace(case, chunk=chunk, causal=causal), device)


@every_shape
@every_mask
@pytest.mark.parametrize('window', [(20, -1), (-1, 20), (130, 30)], ids=str)
def test_chunks_and_windows(window, causal, case, device):
    check_case(dataclasses.replace(case, chunk=100, causal=causal, window=window), device)


@pytest.mark.parametrize('head_dim', [64, 128, 192, 256, 512])
@pytest.mark.parametrize('features', [
    {'window': (256, 0)}, {'window': (100, 100)}, {'chunk': 512, 'causal': True}], ids=str)
def test_long_sequences(features, head_dim, device):
    """Most tiles are wholly masked or wholly visible."""
    case = dataclasses.replace(DENSE, lengths=((2100, 2300),), heads=(2, 1), head_dim=head_dim)
    check_case(with_features(case, features), device)


SAME = [    # two spellings of the same
    ({'window': (-1, 0)}, {'causal': True}), ({'window': (2 ** 40, 2 ** 40)}, {}),
    ({'window': (332, 332)}, {}), ({'causal': True, 'chunk': 10 ** 6}, {'causal': True}),
    ({'causal': True, 'window': (5, 5)}, {'window': (5, 0)})]


@pytest.mark.smoke
@pytest.mark.parametrize('one, other', SAME, ids=str)
def test_limits_that_are_the_same(one, other, device):
    """The bits of the kernels without limits, where nothing is limited."""
    first = with_features(DENSE, one, deterministic=True)
    tensors = first.tensors(device)
    check_same(run(first, tensors), run(with_features(DENSE, other, deterministic=True), tensors))


# -------------------------------------------------------------------------------- rows without keys
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('features', [
    {'window': (0, 0)}, {'window': (10, 0)}, {'chunk': 50}, {'window': (5, 5), 'sinks': 'fp32'},
    {'window': (0, 0), 'sinks': '-inf', 'softcap': 15.0}, {'chunk': 50, 'max_logits': True}],
    ids=str)
def test_rows_without_a_key(features, kind, device):
    """Most of them, far before key 0: zeros, and the sink as the LSE. Kernels: whatever v holds.
    (The CPU path multiplies its probabilities of 0 by what v holds.)
    """
    case = dataclasses.replace(TALL, lengths=((500, 100),) * 2).of(kind, **features)
    tensors = case.tensors(device)
    check(case, tensors, run(case, tensors))
    if device.type == 'cpu':
        return
    q, k, v, s_aux = tensors.inputs
    v = v.clone()
    v[1, :, 0] = math.nan
    out = forward(case, tensors._replace(inputs=Inputs(q, k, v, s_aux)))[0]
    is_blind = case.score.mask.hidden(500, 100, v.device).all(1)
    assert (out[:, is_blind] == 0).all()
    assert out[1, ~is_blind, :3].isnan().any() and out[1, :, 3:].isfinite().all()


@pytest.mark.parametrize('lengths', [(0, 7), (7, 0), (0, 0)], ids=str)
@every_feature
def test_empty(features, lengths, device):
    check_case(with_features(DENSE, features, lengths=(lengths,) * 2), device)


# ----------------------------------------------------------------------- softcap, sinks, max logits
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('logit_std', [1, 10])
@pytest.mark.parametrize('softcap', [1.0, 15.0, 50.0])
def test_softcap(softcap, logit_std, kind, device):
    """Also of scores far beyond the cap, whose gradients vanish."""
    check_case(DENSE.of(kind, softcap=softcap, logit_std=logit_std, max_logits=True), device)


@every_shape
@pytest.mark.parametrize('softcap', [1.0, 15.0, 50.0])
@pytest.mark.parametrize('features', [
    {'causal': True}, {'window': (70, 40)}, {'chunk': 100}, {'sinks': 'fp32'}], ids=str)
def test_softcap_with_others(features, softcap, case, device):
    check_case(with_features(case, features, softcap=softcap), device)


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('sinks', SINKS)
@pytest.mark.parametrize('case', [DENSE, TALL, PACKED], ids=['wide', 'tall', 'packed'])
def test_sinks(case, sinks, kind, device):
    check_case(case.of(kind, sinks=sinks), device)


@every_dtype
@pytest.mark.parametrize('softcap', [0.0, 15.0])
def test_without_a_gradient_to_the_lse(softcap, dtype, device):
    """That of a sink then comes from the output alone."""
    for case, sinks in itertools.product(SHAPES.values(), ('fp32', 'large')):
        check_case(dataclasses.replace(case, dtype=dtype, sinks=sinks, softcap=softcap,
                                       dlse=False), device)


@pytest.mark.smoke
def test_sinks_that_count_for_nothing(device):
    """exp(-inf) = 0: the bits of a call without them."""
    for case in SHAPES.values():
        tensors = dataclasses.replace(case, window=(70, 40), deterministic=True).tensors(device)
        none = torch.full((6,), -math.inf, device=device)
        case = dataclasses.replace(case, window=(70, 40), deterministic=True)
        got = run(case, tensors._replace(inputs=tensors.inputs._replace(s_aux=none)))
        assert (got.ds_aux == 0).all()
        check_same(got._replace(ds_aux=None), run(case, tensors))


@pytest.mark.smoke
@every_kind
@two_shapes
@pytest.mark.parametrize('features', [
    {}, {'window': (70, 40)}, {'softcap': 15.0}, {'sinks': 'large'},
    {'chunk': 100, 'logit_std': 30.0}], ids=str)
def test_max_logits(features, case, kind, device):
    """After the softcap, without the sink."""
    case = case.of(kind, **features, max_logits=True, deterministic=True)
    tensors = case.tensors(device)
    check(case, tensors, run(case, tensors))


# --------------------------------------------------------------------------------------------- data
@every_kind
@pytest.mark.parametrize('features', [
    {'window': (70, 40)}, {'chunk': 100, 'sinks': 'fp32'}, {'sinks': 'large', 'softcap': 50.0}],
    ids=str)
@pytest.mark.parametrize('logit_std', [3, 30])
@pytest.mark.parametrize('data', ['normal', 'onehot'])
def test_spiky_logits(data, logit_std, features, kind, device):
    check_case(DENSE.of(kind, **features, logit_std=logit_std, data=data), device)


@every_shape
@pytest.mark.parametrize('features', [{'window': (70, 40)}, {'chunk': 100}, {'sinks': 'fp32'}],
                         ids=str)
def test_uniform_scores_count_the_keys(features, case, device):
    check_case(with_features(case, features, data='uniform', head_dim=128), device)


@every_kind
def test_a_bad_query_spoils_its_row_only(kind, device):
    case = DENSE.of(kind, window=(70, 40), softcap=15.0, sinks='fp32', max_logits=True)
    tensors = case.tensors(device)
    wanted = forward(case, tensors)
    q = tensors.inputs.q.clone()
    q[1, 150, 4, 7] = math.nan
    got = forward(case, tensors._replace(inputs=tensors.inputs._replace(q=q)))
    assert got[0][1, 150, 4].isnan().all() and not got[1][1, 4, 150].isfinite()
    got[0][1, 150, 4] = wanted[0][1, 150, 4]
    for rows, old in zip(got[1:], wanted[1:]):
        rows[1, 4, 150] = old[1, 4, 150]
    for value, old in zip(got, wanted):
        compare.check_equal(value, old, 'result')


# -------------------------------------------------------------------------- gradients, ways to call
@every_shape
@every_feature
def test_lse_gradient_alone(features, case, device):
    case = with_features(case, features)
    tensors = case.tensors(device)
    tensors = tensors._replace(dout=torch.zeros_like(tensors.dout))
    check(case, tensors, run(case, tensors))


@pytest.mark.smoke
@every_kind
@every_feature
@two_shapes
def test_deterministic_repeats_are_bitwise(case, features, kind, device):
    changes = {'dtype': kind.dtype, 'head_dim': kind.head_dim, 'deterministic': True}
    case = with_features(case, features, **changes)
    tensors = case.tensors(device)
    first = run(case, tensors)
    check(case, tensors, first)
    for _ in range(5 if device.type == 'cuda' else 1):
        check_same(run(case, tensors), first)


@one_kind
@pytest.mark.parametrize('layout', layouts.DIRECT + layouts.COPIED, ids=str)
def test_strides(layout, kind, device):
    """Inputs, dout and out inside NaN, with v of other columns."""
    case = DENSE.of(kind, window=(70, 40), sinks='fp32', head_dim_v=128, deterministic=True)
    tensors = case.tensors(device)
    wanted = run(case, tensors)
    q, k, v, dout = (layout.place(x) for x in (*tensors.inputs[:3], tensors.dout))
    placed = Tensors(Inputs(q, k, v, tensors.inputs.s_aux), dout, tensors.dlse, {})
    check_same(run(case, placed), wanted)
    out = layout.place(torch.full_like(wanted.out, math.nan))
    around = layouts.nan_count(out) - out.numel()
    assert forward(case, placed, out=out)[0] is out
    compare.check_equal(out, wanted.out, 'out')
    assert layouts.nan_count(out) == around


@every_kind
@every_feature
def test_one_tensor_of_q_k_and_v(features, kind, device):
    """flash_attn_qkvpacked_func, and its gradient in one tensor."""
    case = with_features(SQUARE, features, dtype=kind.dtype, head_dim=kind.head_dim,
                         deterministic=True)
    tensors = case.tensors(device)
    wanted = run(case, tensors)
    qkv = torch.cat(tensors.inputs[:3], dim=2).requires_grad_()
    s_aux = tensors.inputs.s_aux
    out, lse, *max_logits = flash_attn_qkvpacked_func(qkv, num_heads_q=6, s_aux=s_aux,
                                                      **case.options())
    dqkv, = torch.autograd.grad((out, lse), qkv, (tensors.dout, tensors.dlse))
    dq, dk, dv = dqkv.split((6, 2, 2), dim=2)
    check_same(wanted._replace(out=out.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv,
                               max_logits=max_logits[0] if max_logits else None), wanted)


@pytest.mark.smoke
@one_kind
def test_results_that_were_asked_for(kind, device):
    """Asking for the LSE changes no bit of out; max_logits may, but then the LSE changes none."""
    q, k, v, _ = DENSE.of(kind).tensors(device).inputs
    options = {'causal': True, 'window_size': (70, 0), 'softcap': 15.0}
    out, _, max_logits = flash_attn_func(q, k, v, **options, return_attn_probs=True,
                                         return_max_logits=True)
    pair = flash_attn_func(q, k, v, **options, return_max_logits=True)
    alone = flash_attn_func(q, k, v, **options)
    beside_lse = flash_attn_func(q, k, v, **options, return_attn_probs=True)[0]
    for got, wanted in ((pair[0], out), (pair[1], max_logits), (beside_lse, alone)):
        compare.check_equal(got, wanted, 'result')
