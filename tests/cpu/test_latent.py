"""qv of flash_attn_with_kvcache, absorbed MLA, on CPU tensors: values against loops in float64, all
that a cache has together with it, errors by name, plans.
"""
from __future__ import annotations

import dataclasses
import re
import runpy
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn3
from flash_attn3 import (PrefixLevel, _plan, flash_attn_func, flash_attn_varlen_func,
                         flash_attn_with_kvcache, pack_tree_mask, shared_prefix_attn)

from tests.cpu.drawn import examples
from tests.cpu.test_kvcache import check, drawn
from tests.host import _host
from tests.support.cache_cases import CacheCase, small
from tests.support.called_ops import compilations
from tests.support.described import describe_sizes
from tests.support.lists import ints

ROTARY, LATENT = 64, 512
SCALE = (ROTARY + LATENT) ** -0.5
OPS = torch.ops.flash_attn3
E4M3 = torch.float8_e4m3fn
DECODE = dict(lengths=(40, 0, 17, 1), heads=(16, 1), head_dim=ROTARY, head_dim_v=LATENT,
              capacity=48, latent=True)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def tensors(batch: int = 2, queries: int = 3, slots: int = 24, heads: int = 4,
            dims: tuple[int, int] = (16, 24), dtype: torch.dtype = torch.float64) -> dict:
    """A call on a full dense cache."""
    dim, dim_v = dims
    return dict(q=random(batch, queries, heads, dim, dtype=dtype),
                k_cache=random(batch, slots, 1, dim, dtype=dtype),
                v_cache=random(batch, slots, 1, dim_v, dtype=dtype),
                qv=random(batch, queries, heads, dim_v, dtype=dtype))


def attended(one: dict, b: int, keys: slice, visible: Tensor | None = None,
             scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out (queries, heads, dim_v) and LSE (heads, queries) of sequence b, head by head.

    visible: (queries, keys) bool.
    """
    q, qv, k, v = (one[name][b].double() for name in ('q', 'qv', 'k_cache', 'v_cache'))
    k, v = k[keys, 0], v[keys, 0]
    scale = (q.size(-1) + qv.size(-1)) ** -0.5 if scale is None else scale
    outs, lses = [], []
    for head in range(q.size(1)):
        scores = scale * (q[:, head] @ k.T + qv[:, head] @ v.T)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(lses)


# ------------------------------------------------------------------------------------------- values
def latent_of(case: CacheCase) -> CacheCase:
    """The same cell of upstream's grid with qv, which has no FP8 and no softcap."""
    return dataclasses.replace(case, latent=True, heads=(case.heads[0], 1), softcap=0.0,
                               dtype='bf16' if case.dtype == 'e4m3' else case.dtype)


@pytest.mark.parametrize('number', range(120))
def test_grid(number):
    """Pages, rows, packed queries, append, rotary of k and q but not of qv, masks, sinks, leftpads,
    splits; every slot of the caches after it.
    """
    check(latent_of(drawn(number)))


@pytest.mark.parametrize('dtype', ['fp64', 'bf16', 'fp16'])
@pytest.mark.parametrize('changes', [
    {}, {'page_size': 16}, {'heads': (5, 1)}, {'sinks': 'fp32'}, {'leftpad': (3, 0, 17, 0)},
    {'queries': 3, 'causal': True}, {'window': (9, 0)},
    {'queries': (4, 0, 1, 2), 'is_packed': True, 'causal': True, 'page_size': 16},
    {'new': (2,) * 4, 'rotary': 0.5, 'page_size': 16}], ids=str)
def test_the_head_dims_of_the_kernel(changes, dtype):
    check(small(**DECODE | changes, dtype=dtype))


@pytest.mark.parametrize('scale', [None, 0.2])
def test_values_by_hand(scale):
    """Without any code of the other tests; the default scale counts all columns."""
    one = tensors()
    out, lse, *_ = flash_attn_with_kvcache(**one, cache_seqlens=ints([24, 7]), softmax_scale=scale,
                                           return_softmax_lse=True)
    for b, keys in enumerate((slice(24), slice(7))):
        wanted, wanted_lse = attended(one, b, keys, scale=scale)
        torch.testing.assert_close(out[b], wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[b], wanted_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('length', [20, 5])
@pytest.mark.parametrize('causal', [False, True])
def test_trees(causal, length):
    one = tensors(queries=5)
    tree = (torch.rand(2, 5, 5) < 0.5) | torch.eye(5, dtype=torch.bool)
    out = flash_attn_with_kvcache(**one, cache_seqlens=length, causal=causal,
                                  tree_mask=pack_tree_mask(tree))
    for b in range(2):
        visible = torch.ones(5, length, dtype=torch.bool)
        visible[:, length - 5:] = tree[b] & (torch.ones(5, 5).tril() > 0 if causal else True)
        torch.testing.assert_close(out[b], attended(one, b, slice(length), visible)[0])


def test_without_qv_of_more_than_zeros():
    """qv of zeros is a call without it, but for the default scale."""
    one = tensors()
    zeros = flash_attn_with_kvcache(**one | {'qv': torch.zeros_like(one['qv'])}, softmax_scale=0.3)
    del one['qv']
    torch.testing.assert_close(zeros, flash_attn_with_kvcache(**one, softmax_scale=0.3))


def finite_e4m3() -> Tensor:
    numbers = torch.arange(256, dtype=torch.uint8)
    return numbers[numbers.view(E4M3).float().isfinite()]


def test_two_finite_e4m3_are_a_finite_bfloat16():
    """As which the first latents are read without rotary columns; they may be no finite float16."""
    pairs = torch.cartesian_prod(finite_e4m3(), finite_e4m3())
    assert pairs.view(torch.bfloat16).float().isfinite().all()
    assert not pairs.view(torch.float16).float().isfinite().all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64, E4M3], ids=str)
@pytest.mark.parametrize('heads', [1, 5])
def test_without_rotary_columns(heads, dtype):
    """Every finite e4m3 is a latent. Slots past the length hold NaN."""
    wide = torch.bfloat16 if dtype == E4M3 else dtype
    qv = torch.randn(2, 3, heads, 256).to(wide)
    v = finite_e4m3().view(E4M3).float().repeat(2, 24, 1, 2)[..., :256].to(dtype)
    v = torch.where(torch.arange(24)[:, None, None] < 20, v.float() / 448, torch.nan).to(dtype)
    scale = torch.rand(2, 24, 2) if dtype == E4M3 else None
    out, lse, *_ = flash_attn_with_kvcache(None, None, v, qv=qv, cache_seqlens=20, causal=True,
                                           v_descale=scale, return_softmax_lse=True)
    keys = v.double()[:, :20, 0]
    if scale is not None:
        keys = keys * scale[:, :20].double().repeat_interleave(128, -1)
    logits = torch.einsum('bshd,bkd->bhsk', qv.double(), keys) * 256 ** -0.5
    logits = logits.masked_fill(torch.arange(20) > torch.arange(17, 20)[:, None], -torch.inf)
    wanted = torch.einsum('bhsk,bkd->bshd', logits.softmax(-1), keys)
    assert (out.double() - wanted).abs().max() <= 2 ** -8 * wanted.abs().max()
    assert (lse - logits.logsumexp(-1)).abs().max() < 1e-4


def test_a_joint_cache():
    """K and V are columns of one tensor, in either order; the append writes into it."""
    case = small(**DECODE, new=(2,) * 4, page_size=8, dtype='bf16', lse=False)
    wanted = flash_attn_with_kvcache(**case.arguments('cpu'))
    for first, second in (('v_cache', 'k_cache'), ('k_cache', 'v_cache')):
        own = case.arguments('cpu')
        both = torch.cat([own[first], own[second]], -1)
        views = dict(zip((first, second), both.split(
            [own[first].size(-1), own[second].size(-1)], -1)))
        assert torch.equal(flash_attn_with_kvcache(**own | views), wanted)
        flash_attn_with_kvcache(**own)
        for name, view in views.items():
            assert torch.equal(view.nan_to_num(7), own[name].nan_to_num(7))


def test_queries_of_any_strides_and_a_given_output():
    one = tensors(dtype=torch.bfloat16)
    wanted = flash_attn_with_kvcache(**one)
    views = {name: one[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ('q', 'qv')}
    out = torch.full_like(wanted, torch.nan)
    assert flash_attn_with_kvcache(**one | views, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('page_size', [0, 4])
def test_a_shared_prefix(page_size, packed):
    """qv goes to both parts."""
    check(small((9, 12, 20), 2, new=(2, 2, 2), heads=(4, 1), latent=True, shared=8, dtype='fp64',
                page_size=page_size, is_packed=packed, new_packed=packed, causal=True))


@pytest.mark.parametrize('packed', [False, True])
def test_levels_of_shared_keys(packed):
    """shared_prefix_attn: keys of all, then those of each."""
    one = tensors(2, 2, slots=4, dims=(16, 24))
    one |= {name: random(6, 4, 1, dim) for name, dim in (('k_cache', 16), ('v_cache', 24))}
    tables, lengths = ints([[1, 0]]), (7, 3)
    levels = [PrefixLevel(tables, 8, ints([0, 4])),
              PrefixLevel(ints([[2, 3], [4, 5]]), ints(lengths), ints([0, 2, 4]))]
    own = one | {name: one[name].flatten(0, 1) for name in ('q', 'qv')} if packed else one
    out, lse = shared_prefix_attn(**own, levels=levels, causal=True, return_softmax_lse=True)
    for b, length in enumerate(lengths):
        pages = [1, 0, 2 + 2 * b, 3 + 2 * b]
        flat = one | {name: one[name][pages].flatten(0, 1)[None].expand(2, -1, -1, -1)
                      for name in ('k_cache', 'v_cache')}
        total = 8 + length
        visible = torch.ones(2, total, dtype=torch.bool).tril(total - 2)
        wanted, wanted_lse = attended(flat, b, slice(total), visible)
        rows = slice(2 * b, 2 * b + 2)
        torch.testing.assert_close(out[rows] if packed else out[b], wanted)
        torch.testing.assert_close(lse[:, rows] if packed else lse[b], wanted_lse)


# ------------------------------------------------------------------------------------------ tracing
def test_fakes_on_cuda():
    with FakeTensorMode():
        q, k, v, qv = (torch.empty(2, rows, heads, dim, dtype=torch.bfloat16, device='cuda')
                       for rows, heads, dim in ((1, 16, ROTARY), (128, 1, ROTARY),
                                                (128, 1, LATENT), (1, 16, LATENT)))
        out, lse = OPS.attend_cache(q, k, v, return_lse=True, qv=qv)
        assert out.shape == qv.shape and lse.shape == (2, 16, 1) and out.dtype == torch.bfloat16


def test_compiled_once_for_all_lengths():
    def step(one: dict, length: int) -> Tensor:
        return flash_attn_with_kvcache(**one, cache_seqlens=length)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    one = tensors(dtype=torch.float32)
    for length in (3, 4, 20):
        assert torch.equal(compiled(one, length), step(one, length))
    assert compilations(counter) == 1


# ------------------------------------------------------------------------------------------- errors
ONE = tensors(dtype=torch.bfloat16)
OF_E4M3 = {name: ONE[name].to(E4M3) for name in ('k_cache', 'v_cache')}
LATENTS = {'v_cache': ONE['v_cache'].to(E4M3)}
ROPE_FREE = dict(q=None, k_cache=None)
WIDE = torch.ones(2, 24, 1, 128, dtype=torch.bfloat16)
BY_PAGE = dict(page_table=ints([[0], [1]]), descale_by_page=True, k_descale=torch.ones(2, 1),
               v_descale=torch.ones(2, 1))
BAD = {
    'columns of q': (dict(qv=ONE['q']), 'qv to have the shape (2, 3, 4, 24)'),
    'rank': (dict(qv=ONE['qv'][0]), 'qv to have the shape (2, 3, 4, 24)'),
    'heads of qv': (dict(qv=ONE['qv'][:, :, :2]), 'qv to have the shape (2, 3, 4, 24)'),
    'no number': (dict(qv=torch.ones((), dtype=torch.bfloat16)), 'qv to have the shape'),
    'dtype': (dict(qv=ONE['qv'].half()), 'qv.dtype to be that of q, bfloat16, got float16'),
    'KV heads': (dict(k_cache=ONE['k_cache'].expand(-1, -1, 2, -1),
                      v_cache=ONE['v_cache'].expand(-1, -1, 2, -1)),
                 'the heads of k_cache to be 1 with qv, got 2'),
    'softcap': (dict(softcap=5.0), 'no softcap with qv, got both'),
    'e4m3 cache': (OF_E4M3, 'k_cache.dtype to be that of q, bfloat16, got float8_e4m3fn'),
    'scales by page': (OF_E4M3 | BY_PAGE,
                       'k_cache.dtype to be that of q, bfloat16, got float8_e4m3fn'),
    'scales by page of 16 bits': (BY_PAGE, 'no descale_by_page with qv, got both'),
    'scales by page of latents': (LATENTS | BY_PAGE, 'no descale_by_page with qv, got both'),
    'scales of k': (LATENTS | dict(k_descale=torch.ones(2, 1)),
                    'k_cache of float8_e4m3fn with k_descale'),
    'scales of 16 bits': (dict(v_descale=torch.ones(2, 24, 1)),
                          'v_cache of float8_e4m3fn with v_descale'),
    'scales by head': (LATENTS | dict(v_descale=torch.ones(2, 1)),
                       'v_descale to have the shape (2, 24, 1), got (2, 1)'),
    'scales of pages': (LATENTS | dict(v_descale=torch.ones(2, 23, 1)),
                        'v_descale to have the shape (2, 24, 1), got (2, 23, 1)'),
    'blocks': (LATENTS | dict(v_descale=torch.ones(2, 24, 4)),
               'v_descale to have the shape (2, 24, 1), got (2, 24, 4)'),
    'scales of 64 bits': (LATENTS | dict(v_descale=torch.ones(2, 24, 1).double()),
                          'v_descale.dtype to be float32, got float64'),
    'e4m3': ({name: x.to(E4M3) for name, x in ONE.items()},
             'qv.dtype to be float16 or bfloat16, got float8_e4m3fn'),
    'scale': (dict(softmax_scale=-1.0), 'softmax_scale to be a positive finite'),
    'q alone': (dict(k_cache=None), 'q and k_cache, or qv without both, got q and qv'),
    'k_cache alone': (dict(q=None, qv=None), 'q and k_cache, or qv without both, got k_cache'),
    'neither, appended': (ROPE_FREE | dict(v=ONE['v_cache'][:, :1]),
                          'v to be None without q and k_cache, got a value'),
    'neither, float16 and e4m3': (ROPE_FREE | dict(v_cache=WIDE.to(E4M3), qv=WIDE[:, :3].half()),
                                  'qv of bfloat16 with v_cache of float8_e4m3fn and no q, got fl'),
    'neither, few columns': (ROPE_FREE | dict(v_cache=WIDE[..., :63]),
                             'v_cache of 64 columns or more without q, got the shape (2, 24, 1, '),
    'neither, few columns of e4m3': (
        ROPE_FREE | dict(v_cache=WIDE[..., :127].to(E4M3)),
        'v_cache of 128 columns or more without q, got the shape (2, 24, 1, 127)'),
    'neither, no number': (ROPE_FREE | dict(qv=torch.ones(())), 'qv of 1 columns or more without '),
    'gradients of qv': (dict(qv=ONE['qv'].clone().requires_grad_()),
                        'requires_grad=False with a cache, got requires_grad=True of qv'),
}


@pytest.mark.parametrize('name', BAD)
@pytest.mark.parametrize('into', [False, True])
def test_bad_input(into, name):
    """Before anything is written."""
    changes, text = BAD[name]
    own = {x: y.clone() if x == 'v_cache' else y for x, y in ONE.items()} | changes
    before = own['v_cache'].clone()
    if into:
        own['out'] = torch.zeros_like(ONE['qv'])
    with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected ' + re.escape(text)):
        flash_attn_with_kvcache(**own)
    assert torch.equal(own['v_cache'].float(), before.float())
    assert not into or not own['out'].any()


def test_a_bad_qv_appends_nothing():
    own = ONE | dict(k_cache=torch.zeros_like(ONE['k_cache']), qv=ONE['q'], cache_seqlens=3,
                     k=ONE['k_cache'][:, :1], v=ONE['v_cache'][:, :1])
    with pytest.raises(RuntimeError, match='expected qv to have the shape'):
        flash_attn_with_kvcache(**own)
    assert not own['k_cache'].any()


def test_gradients_do_not_matter_without_grad_mode():
    with torch.no_grad():
        out = flash_attn_with_kvcache(**ONE | dict(qv=ONE['qv'].clone().requires_grad_()))
    assert torch.equal(out, flash_attn_with_kvcache(**ONE))


def test_functions_without_a_cache_say_where_qv_is():
    q, k, v, qv = (ONE[name] for name in ('q', 'k_cache', 'v_cache', 'qv'))
    starts_q, starts_k = ints([0, 6]), ints([0, 48])
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    for call in (lambda: flash_attn_func(q, k, v, qv=qv),
                 lambda: flash_attn_varlen_func(*packed, starts_q, starts_k, 6, 48, qv=qv)):
        with pytest.raises(NotImplementedError, match='expected qv to be None, got a tensor; hint: '
                                                      'only flash_attn_with_kvcache supports it'):
            call()


# ------------------------------------------------------------------------------- rules of the GPU
def described(shape: tuple[int, ...], dtype: str = 'bfloat16',
              strides: tuple[int, ...] | None = None, address: int = 0) -> tuple:
    name, kind, index, sizes, own, _ = describe_sizes(shape, dtype)
    return name, kind, index, sizes, strides or own, address


def on_cuda(queries: int = 1, heads: int = 128, batch: int = 4, capacity: int = 4096,
            **changes) -> dict:
    rows = batch, queries, heads
    return dict(q=described((*rows, ROTARY)), qv=described((*rows, LATENT)),
                k=described((batch, capacity, 1, ROTARY)),
                v=described((batch, capacity, 1, LATENT)), sm_count=132) | changes


def test_rules_of_cuda():
    """What is fine, a joint cache and rows that no copy engine reads too; and what is not."""
    strides = (4096 * 576, 576, 576, 1)
    joint = dict(v=described((4, 4096, 1, LATENT), strides=strides, address=1 << 20),
                 k=described((4, 4096, 1, ROTARY), strides=strides, address=(1 << 20) + 1024))
    packed = dict(q=described((9, 16, ROTARY)), qv=described((9, 16, LATENT)),
                  cu_seqlens_q=described((5,), 'int32'))
    odd = dict(qv=described((4, 1, 128, LATENT), strides=(128 * 514, 128 * 514, 514, 1)))
    for fine in ({}, joint, packed, odd, dict(causal=True, window_left=9, attention_chunk=3)):
        assert _plan.check_cache(**on_cuda(**fine)) == ''
    for bad, text in (
            (dict(v=described((4, 4096, 1, 256)), qv=described((4, 1, 128, 256))),
             'the head_dim of v_cache to be 512 with qv, got 256'),
            (dict(k=described((4, 4096, 1, 128)), q=described((4, 1, 128, 128))),
             'the head_dim of q to be 64 with qv, got 128'),
            (dict(qv=('bfloat16', 'cpu', *described((4, 1, 128, LATENT))[2:])),
             'qv on the device of q, cuda:0, got cpu'),
            (dict(k=described((4, 4096, 1, 32))),
             'k_cache to have the shape'),
            (dict(qv=described((4, 1, 128, LATENT), strides=(65536, 65536, 1, 128))),
             'qv.stride(3) to be 1, got 128; hint: call qv.contiguous()'),
            (dict(v=described((4, 4096, 1, LATENT), strides=(4096 * 516, 516, 516, 1))),
             'v_cache with an address and strides of multiples of 16 bytes'),
            ({name: (described(shape, 'float32')) for name, shape in (
                ('q', (4, 1, 128, ROTARY)), ('qv', (4, 1, 128, LATENT)))},
             'q.dtype to be float16 or bfloat16'),
            (dict(cu_seqlens_k=described((5,), 'int32'), cu_seqlens_q=described((5,), 'int32')),
             'no qv with cu_seqlens_k, got both')):
        assert text in _plan.check_cache(**on_cuda(**bad))


# -------------------------------------------------------------------------------------------- plans
PLANNED = st.tuples(st.integers(1, 160), st.integers(1, 200), st.integers(1, 9),
                    st.integers(1, 20_000))
SPLITS = st.sampled_from([{}, {'num_splits': 1}, {'num_splits': 3}, {'split_size': 500}])


@given(PLANNED, SPLITS, st.sampled_from(['bfloat16', 'float16']), st.integers(0, 100))
@examples(200)
def test_plan(sizes, splits, dtype, sm_margin):
    """One tile of 64 rows, one launch for all columns, a part for each CTA or as many as asked."""
    heads, queries, batch, capacity = sizes
    call = on_cuda(queries, heads, batch, capacity, sm_margin=sm_margin, **splits)
    call |= {name: (dtype, *call[name][1:]) for name in ('q', 'qv', 'k', 'v')}
    facts = _plan.plan_cache(**call)
    short = {'bfloat16': 'Bf16', 'float16': 'Fp16'}[dtype]
    assert facts['name'] == f'Fwd{short}D64x512Latent' and facts['mask'] == 'latent'
    assert (facts['tile_m'], facts['launches']) == (64, 1)
    pack = max(d for d in range(1, 65) if heads % d == 0)
    positions = 64 // pack
    tiles = heads // pack * batch * -(-queries // positions)
    assert facts['pack'] == pack and facts['m_tiles'] == -(-queries // positions)
    lanes, ctas = facts['lanes'], 132 - sm_margin
    assert heads // pack % lanes == 0 and facts['grid'] == ctas // lanes * lanes > 0
    k_tiles = -(-capacity // facts['tile_n'])
    parts = {'num_splits': lambda n: min(n, k_tiles),
             'split_size': lambda n: -(-k_tiles // -(-n // facts['tile_n']))}
    counts = [parts[name](n) for name, n in splits.items()]
    slots = 2 * facts['grid'] if not splits else 1 if counts == [1] else tiles * counts[0]
    assert facts['slots'] == slots
    rows = -(-queries * pack // 16) * 16 if queries < positions else 64   # those of whole warps
    assert facts['parts_bytes'] == slots * rows * (LATENT + 2) * 4


def test_the_ops_plan():
    """The same as of a cache of these head dims, but for the kernel; qv alone decides."""
    shapes = dict(q=(4, 1, 16, ROTARY), k=(64, 64, 1, ROTARY), v=(64, 64, 1, LATENT),
                  page_table=(4, 16), cache_seqlens=(4,))
    numbers = {'num_splits': 1}
    (plain,) = _host.plan_cache(1, shapes, numbers)
    (latent,) = _host.plan_cache(1, shapes | {'qv': (4, 1, 16, LATENT)}, numbers)
    assert (plain['name'], latent['name']) == ('FwdBf16D256Cache', 'FwdBf16D64x512Latent')
    assert all(latent[name] == plain[name] for name in ('pack', 'm_tiles', 'rows', 'capacity'))


def test_explain(capsys):
    shapes = (4, 1, 128, ROTARY), (256, 64, 1, ROTARY), (256, 64, 1, LATENT)
    flash_attn3.explain(*shapes, page_table=(4, 64), qv=True, causal=True)
    rows = {line[:14].strip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    assert rows['variant'].startswith('FwdBf16D64x512Latent')
    assert rows['mask'] == 'cache whose values are also keys: absorbed MLA'
    assert rows['head dims'].startswith('64 of q and k, 512 of v') and 'launches' not in str(rows)
    assert rows['warpgroups'].startswith('1 producer, 1 consumers, 2 of O; ')
    assert rows['bytes'] == f'{4 * 4096 * 576 * 2 / 1e6:.4g} MB: K and V of full caches'
    flash_attn3.explain(*shapes[:2], (256, 64, 1, 256), page_table=(4, 64), qv=True)
    assert capsys.readouterr().out.startswith(
        'no kernel: flash_attn3.flash_attn_with_kvcache: expected the head_dim of v_')


def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [
        'explain', '--cache', '--qv', '--batch', '4', '--seqlen-q', '1', '--seqlen-k', '4096',
        '--heads', '128', '--heads-k', '1', '--head-dim', '64', '--head-dim-v', '512'])
    runpy.run_module('flash_attn3.explain', run_name='__main__')
    assert capsys.readouterr().out.startswith('variant        FwdBf16D64x512Latent')


@pytest.mark.parametrize('changes, text', [
    ({}, ''), ({'causal': True, 'num_splits': 3, 'return_softmax_lse': True}, ''),
    ({'softcap': 1.0}, 'flash_attn_with_kvcache: expected no softcap with qv'),
    ({'qv': ONE['qv']}, 'flash_attn_with_kvcache: expected qv to have the shape'),
    ({'qv': 'requires_grad'}, 'flash_attn_with_kvcache: expected requires_grad=False'),
    ({'q': None, 'k_cache': None}, ''),
    ({'q': None}, 'flash_attn_with_kvcache: expected q and k_cache, or qv without both, got k_')],
    ids=['default', 'options', 'softcap', 'shape', 'gradients', 'rope_free', 'q'])
def test_can_use(changes, text):
    own = tensors(dims=(ROTARY, LATENT), dtype=torch.bfloat16) | dict(cache_seqlens=3) | changes
    if changes.get('qv') == 'requires_grad':
        own['qv'] = torch.zeros(2, 3, 4, LATENT, dtype=torch.bfloat16, requires_grad=True)
    is_fine, reasons = flash_attn3.can_use(**own)
    assert not is_fine
    assert reasons[-1] == 'flash_attn3.can_use: expected q on a CUDA device, got cpu'
    assert len(reasons) == 1 if not text else reasons[0].startswith(f'flash_attn3.{text}')
