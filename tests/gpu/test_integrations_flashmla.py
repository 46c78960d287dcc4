"""`integrations.vllm_flashmla` and `integrations.sglang_flashmla` under the clients' own interface
files, taken from their wheels: calls of their backends for sparse MLA, values of each, and that our
ops computed them.

With `--device cpu` on CPU tensors. The files' imports get stubs; the ops that they call are defined
by their schemas.
"""
from __future__ import annotations

import importlib
import math

import pytest
import torch

from flash_attn3.integrations import sglang_flashmla, vllm_flashmla

from tests.support import private_ops
from tests.support.flashmla_cases import FlashMlaCase
from tests.support.private_ops import called

__all__ = ['called']
DEFINE = 'from tests.support import private_ops\nprivate_ops.define({!r})\n'
STUBS = {
    'vllm': {'vllm/__init__.py': '', 'vllm/_flashmla_C.py': DEFINE.format('_flashmla_C')},
    'sglang': {'flash_mla/_loader.py': DEFINE.format('flash_mla_legacy') + (
        'import torch\n'
        'def has_legacy():\n    return True\n'
        'def get_ops(use_legacy):\n    assert use_legacy\n'
        '    return torch.ops.flash_mla_legacy\n')},
}
FILES = {'vllm': ['vllm'], 'sglang': ['sglang', 'sgl-flash-mla']}
SERVED = {'vllm': vllm_flashmla, 'sglang': sglang_flashmla}
MODULE = {'vllm': 'vllm.third_party.flashmla.flash_mla_interface',
          'sglang': 'sglang.kernels.ops.attention.flash_mla_interface'}
PROMPTS = {
    'plain': {}, 'counts': dict(counts=True), 'sink': dict(sink=True), 'wild': dict(wild=True),
    'heads_64': dict(heads=64, counts=True, sink=True), 'heads_5': dict(heads=5),
    'rope_free': dict(rotary=0, counts=True), 'many': dict(tokens=(70,), count=384, rows=1024)}
STEPS = {
    'plain': {}, 'queries': dict(tokens=(2, 3)), 'counts': dict(counts=True, tokens=(3, 2)),
    'sink': dict(sink=True, tokens=(3, 2)), 'heads_64': dict(heads=64, counts=True, sink=True),
    'pages_of_one': dict(page_size=1), 'one_batch': dict(tokens=(1, 33))}
SUPPORTED = dict(rows=320, tokens=(4, 1))


@pytest.fixture(scope='module', params=FILES)
def client(request, tmp_path_factory):
    """(name, the client's module, ours)."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    with private_ops.packages(folder, STUBS[name], FILES[name]):
        SERVED[name].enable()
        yield name, importlib.import_module(MODULE[name]), SERVED[name]
        SERVED[name].disable()


@pytest.fixture(autouse=True)
def _on(client):
    if not client[2].is_enabled():
        client[2].enable()


def step_of(client, data, cache=None, **options):
    """As the backends call it for one step: (out, lse (queries, heads))."""
    _, interface, _ = client
    metadata, splits = interface.get_mla_metadata()
    out, lse = interface.flash_mla_with_kvcache(
        q=data.q, k_cache=data.cache() if cache is None else cache, block_table=None,
        cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=metadata, num_splits=splits,
        softmax_scale=data.softmax_scale, is_fp8_kvcache=True, indices=data.indices,
        topk_length=data.counts, attn_sink=data.sink, **options)
    assert lse.shape == (data.q.size(0), data.q.size(2), data.q.size(1))
    return out, lse.transpose(1, 2).flatten(0, 1)


@pytest.mark.smoke
@pytest.mark.parametrize('name', PROMPTS)
def test_prompt(name, client, device, called):
    """Rows of 16 bits, chosen by index. SGLang's LSE and largest scores are in base 2."""
    data = FlashMlaCase(**PROMPTS[name]).data(device)
    out, largest, lse = client[1].flash_mla_sparse_fwd(
        data.q, data.prompt_rows(), data.indices[:, None], data.softmax_scale, 512, data.sink,
        data.counts)
    assert called.names == ['attend_cache']
    unit = math.log(2) if client[0] == 'sglang' else 1
    data.check(out, lse * unit, largest * unit)


def test_prompt_into_a_part_of_a_buffer(client, device):
    """As vLLM gives a workspace with more heads than the model has."""
    if client[0] != 'vllm':
        pytest.skip('SGLang gives none')
    data = FlashMlaCase().data(device)
    room = torch.full((12, 24, 512), 7.0, dtype=torch.bfloat16, device=device)
    given = room[:9, :16]
    out, _, lse = client[1].flash_mla_sparse_fwd(
        data.q, data.prompt_rows(), data.indices[:, None], data.softmax_scale, out=given)
    assert out.data_ptr() == room.data_ptr() and (room[9:] == 7).all() and (room[:, 16:] == 7).all()
    data.check(given, lse)


@pytest.mark.smoke
@pytest.mark.parametrize('name', STEPS)
def test_step(name, client, device, called):
    """Rows of 656 bytes; one query each, several, or all tokens as one sequence."""
    data = FlashMlaCase(**SUPPORTED | STEPS[name]).data(device)
    out, lse = step_of(client, data)
    assert called.names == ['attend_cache']
    data.check(out, lse)


def test_step_without_rotary_columns(client, device):
    """Rows of 528 bytes, whose format only SGLang can name; else they are DeepSeek-V4.1's."""
    data = FlashMlaCase(tokens=(3, 2), rotary=0, counts=True).data(device)
    if client[0] == 'sglang':
        data.check(*step_of(client, data, kv_format='V32_NO_ROPE'))
    with pytest.raises(NotImplementedError, match='expected kv with rows of 656 bytes, got the '
                                                  r'shape \(5, 64, 1, 528\) of uint8; hint: '):
        step_of(client, data)


@pytest.mark.parametrize('dtype', [torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_other_bytes_with_padded_pages(dtype, client, device):
    """Pages that follow one another at the distance of their rows."""
    data = FlashMlaCase(**SUPPORTED).data(device)
    room = torch.zeros(320, 672, dtype=torch.uint8, device=device)
    room[:, :656] = data.cache().view(-1, 656)
    cache = room.view(dtype).view(5, 64, 1, 672)[..., :656]
    data.check(*step_of(client, data, cache))


@pytest.mark.parametrize('options,got', [
    (dict(extra_k_cache=True), 'extra_kv to be None, got a tensor'),
    (dict(extra_topk_length=True), 'extra_topk_length to be None, got a tensor'),
    (dict(cache=(5, 64, 1, 584)), r'kv with rows of 656 bytes, got the shape \(5, 64, 1, 584\)')])
def test_refusals(options, got, client, device):
    data = FlashMlaCase(**SUPPORTED).data(device)
    options = {name: data.cache() if x is True else
               torch.zeros(x, dtype=torch.uint8, device=device) for name, x in options.items()}
    with pytest.raises(NotImplementedError, match=rf'^flash_attn3.integrations.{client[0]}_flashmla'
                                                  f': expected {got}'):
        step_of(client, data, **options)


def test_disable_brings_its_kernels_back(client, device, called):
    data = FlashMlaCase(**SUPPORTED).data(device)
    client[2].disable()
    with pytest.raises(ZeroDivisionError):
        step_of(client, data)
    assert called.names == []


def test_a_graph(client, cuda):
    """A step is captured, and replayed with other indices, counts, queries and rows."""
    data, other = (FlashMlaCase(**SUPPORTED, counts=True, sink=True, seed=seed).data(cuda)
                   for seed in (0, 1))
    cache = data.cache()
    step_of(client, data, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step_of(client, data, cache)
    for name in ('q', 'indices', 'counts', 'sink'):
        getattr(data, name).copy_(getattr(other, name))
    cache.copy_(other.cache())
    graph.replay()
    other.check(out, lse)
