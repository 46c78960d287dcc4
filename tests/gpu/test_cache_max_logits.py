"""return_max_logits on a cache: dense and paged, parts, several queries, e4m3, MLA; and of
num_splits without a cache. Chosen keys: test_chosen_keys.py. Held to float64 like the LSE
(tests/support/cache_oracle.py).
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_attn3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

from tests.gpu.fp8_calls import call_of
from tests.support import compare
from tests.support.cache_cases import CacheCase, mixed
from tests.support.cache_oracle import check_case, check_result, check_same, run
from tests.support.general_cases import GeneralCase
from tests.support.general_oracle import check as check_general
from tests.support.general_oracle import run as run_general
from tests.support.lists import ints

PARTS = 2    # tests.record runs so many processes

DECODE = CacheCase(mixed(5, 1500), heads=(8, 2), max_logits=True)
STEPS = dataclasses.replace(DECODE, lengths=mixed(5, 700, queries=4), causal=True)
PREFILL = CacheCase(((1, 900), (130, 400), (1, 3), (40, 64), (0, 70)), heads=(4, 2), is_packed=True,
                    causal=True, max_logits=True)
LATENT = dict(head_dim=64, head_dim_v=512, latent=True)
SHAPES = {'decode': DECODE, 'steps': STEPS, 'prefill': PREFILL}
KINDS = {
    **{f'{dtype}-{head_dim}': dict(dtype=dtype, head_dim=head_dim)
       for dtype in ('bf16', 'fp16', 'e4m3') for head_dim in (64, 128, 256)},
    '192x128': dict(head_dim=192, head_dim_v=128), '512': dict(head_dim=512),
    'kv8': dict(kv8=True), 'kv8-256': dict(kv8=True, head_dim=256, dtype='fp16'),
    'by_page': dict(kv8=True, by_page=True, page_size=64),
    **{f'mla-{heads}{name}': dict(heads=(heads, 1), **LATENT, **cache) for heads in (16, 128)
       for name, cache in (('', {}), ('-kv8', dict(kv8=True, blocks=4)))}}
FEATURES = {
    'window': dict(window=(100, 0)), 'chunk': dict(chunk=130), 'softcap': dict(softcap=3.0),
    'sinks': dict(sinks='fp32'), 'leftpad': dict(leftpad=(0, 0, 1, 200, 7)),
    'append': dict(new=(1,) * 5, page_size=7, rotary=1.0), 'no LSE': dict(lse=False),
    'spiky': dict(logit_std=30.0), 'unpacked heads': dict(pack_gqa=False), 'out': dict(out=True)}
every_shape = pytest.mark.parametrize('shape', SHAPES)


@pytest.mark.smoke
@every_shape
@pytest.mark.parametrize('page_size', [0, 64, 7])
@pytest.mark.parametrize('kind', KINDS)
def test_kinds(kind, page_size, shape, device):
    for num_splits in (0, 1, 3):
        options = dict(page_size=page_size, num_splits=num_splits) | KINDS[kind]
        check_case(dataclasses.replace(SHAPES[shape], **options), device)


@pytest.mark.parametrize('feature', FEATURES)
@pytest.mark.parametrize('kind', ['bf16-128', 'e4m3-128', 'kv8', '512', '192x128'])
def test_features(kind, feature, device):
    """After the softcap, without the sink, by the keys that a row sees."""
    for shape, num_splits in ((DECODE, 0), (STEPS, 4)):
        options = KINDS[kind] | FEATURES[feature] | dict(num_splits=num_splits)
        check_case(dataclasses.replace(shape, **options), device)


@pytest.mark.parametrize('kind', ['bf16-128', 'e4m3-128', 'mla-16', 'mla-128'])
def test_trees(kind, device):
    case = dataclasses.replace(STEPS, lengths=((6, 200), (6, 700)), causal=False, tree=True)
    check_case(dataclasses.replace(case, **KINDS[kind]), device)


@pytest.mark.smoke
@pytest.mark.parametrize('kind', ['bf16-64', 'e4m3-128', 'kv8', 'mla-16', 'mla-128-kv8'])
def test_the_same_bits_each_time_and_in_parts(kind, device):
    """The order in which CTAs raise a maximum is not seen; the number of parts changes no bit. One
    part of an e4m3 cache under 16-bit queries is for another kernel, which multiplies in another
    order.
    """
    case = dataclasses.replace(DECODE, **KINDS[kind], num_splits=7)
    arguments = case.arguments(device)
    wanted, _ = run(case, arguments)
    for _ in range(3 if device.type == 'cuda' else 1):
        check_same(run(case, arguments)[0], wanted)
    for num_splits in (3,) if kind == 'kv8' else (3, 1):
        got, _ = run(case, arguments, num_splits=num_splits)
        compare.check_equal(got.max_logits, wanted.max_logits, 'max_logits')


@every_shape
@pytest.mark.parametrize('kind', ['bf16-64', 'fp16-128', '192x128', '512', 'kv8', 'mla-16',
                                  'mla-128'])
def test_split_size(kind, shape, device):
    """Other launches give them, so that out and the LSE keep their bits."""
    case = dataclasses.replace(SHAPES[shape], **KINDS[kind], split_size=256)
    arguments = case.arguments(device)
    got, after = run(case, arguments)
    check_result(case, after, got)
    plain, _ = run(dataclasses.replace(case, max_logits=False),
                   {**arguments, 'return_max_logits': False})
    check_same(got._replace(max_logits=None), plain)


def test_scores_of_any_sign(device):
    """One key each: the score is that of the key, also if it is negative, 0 or -0."""
    scores = torch.tensor([-3.0, -0.0, 0.0, 2.0, -math.inf], device=device).view(-1, 1, 1, 1)
    q = torch.ones(5, 1, 1, 64, device=device, dtype=torch.bfloat16)
    k = (scores[:4] / 8).expand(-1, 1, 1, 64).bfloat16()
    k = torch.cat([k, k[:1]]).contiguous()
    lengths = ints([1, 1, 1, 1, 0], device)
    for num_splits in (1, 2):
        _, got = flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, num_splits=num_splits,
                                         return_max_logits=True)
        assert torch.equal(got.flatten(), scores.flatten())


def test_a_graph_with_other_lengths(cuda):
    case = dataclasses.replace(DECODE, num_splits=5)
    arguments = case.arguments(cuda)
    names = 'q', 'k_cache', 'v_cache', 'cache_seqlens'
    own = {name: arguments[name].clone() for name in names}

    def attend():
        return flash_attn_with_kvcache(**own, num_splits=5, return_max_logits=True)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for lengths in (own['cache_seqlens'].clone(), own['cache_seqlens'] // 3):
        own['cache_seqlens'].copy_(lengths)
        graph.replay()
        for got, wanted in zip(captured, attend(), strict=True):
            compare.check_equal(got, wanted, 'after a replay')


# --------------------------------------------------------------------------------- without a cache
@pytest.mark.smoke
@pytest.mark.parametrize('num_splits', [0, 3])
@pytest.mark.parametrize('features', [
    dict(), dict(causal=True), dict(window=(300, 20), softcap=9.0), dict(sinks='large')], ids=str)
@pytest.mark.parametrize('is_packed', [False, True])
def test_num_splits(is_packed, features, num_splits, device):
    """With gradients too."""
    lengths = ((5, 3000), (70, 2500)) if is_packed else ((70, 2500),) * 2
    case = GeneralCase(lengths, head_dim=128, heads=(4, 2), is_packed=is_packed, max_logits=True,
                       deterministic=True, **features)
    tensors = case.tensors(device)
    check_general(case, tensors, run_general(case, tensors, num_splits=num_splits))


def test_num_splits_of_e4m3(device):
    for is_packed in (False, True):
        case = GeneralCase(((70, 2500),) * 2, head_dim=128, heads=(4, 2), is_packed=is_packed,
                           max_logits=True, data='outliers')
        call = call_of(case, device, 'head')
        call.check(call.run(num_splits=3))


@pytest.mark.parametrize('function', [flash_attn_func, flash_attn_varlen_func])
def test_rows_of_no_sequence(function, device):
    q, k = (torch.randn(rows, 2, 64, device=device).bfloat16() for rows in (40, 900))
    if function is flash_attn_func:
        arguments = q[None], k[None, :0], k[None, :0]
    else:
        starts = ints([0, 30], device), ints([0, 800], device)
        arguments = q, k, k, *starts, 30, 800
    out, got = function(*arguments, num_splits=2, return_max_logits=True)
    blind = got[..., 30 if out.dim() == 3 else 0:]
    assert (blind == -math.inf).all() and got.shape[-1] == 40


# ----------------------------------------------------------------------------------------- refused
def test_shared_prefix(device):
    arguments = dataclasses.replace(DECODE, lengths=((1, 200),) * 2).arguments(device)
    with pytest.raises(RuntimeError, match='expected no shared_prefix with return_max_logits'):
        flash_attn_with_kvcache(**arguments, shared_prefix=64)
