"""`integrations.vllm` under vLLM's own interface file, taken from its wheel: the calls of its
attention backend, values of each, and that our ops computed them.

With `--device cpu` on CPU tensors. The file's imports get stubs; the ops that it calls are defined
by their schemas.
"""
from __future__ import annotations

import sys

import pytest
import torch

from flash_attn3 import merge_states
from flash_attn3.integrations import vllm
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import private_ops
from tests.support.fp8_data import E4M3
from tests.support.paged_batches import Batch, LatentBatch
from tests.support.private_ops import called

__all__ = ['called']
STUBS = {
    'vllm/__init__.py': '',
    'vllm/platforms.py': 'class current_platform:\n'
                         '    def is_device_capability_family(number):\n'
                         '        return number == 90\n',
    'vllm/vllm_flash_attn/_vllm_fa3_C.py': 'from tests.support import private_ops\n'
                                           "private_ops.define('_vllm_fa3_C')\n",
}
LAYERS = 3
FEATURES = {
    'plain': {},
    'window': dict(window=(15, 0)),
    'softcap': dict(softcap=3.0),
    'sinks': dict(sinks=True),
    'all': dict(window=(31, 0), softcap=5.0, sinks=True),
}
each_layout = pytest.mark.parametrize('layout', ['rows', 'pages'])
each_page_size = pytest.mark.parametrize('page_size', [16, 128])


@pytest.fixture(scope='module')
def interface(tmp_path_factory):
    """vLLM's module, which enable() imports and which loads the ops."""
    with private_ops.packages(tmp_path_factory.mktemp('vllm'), STUBS, ['vllm']):
        vllm.enable()
        yield sys.modules['vllm.vllm_flash_attn.flash_attn_interface']
        vllm.disable()


@pytest.fixture(autouse=True)
def _on(interface):
    if not vllm.is_enabled():
        vllm.enable()


def scale_of(batch, value, given=None):
    """As a layer of vLLM has one, or one per KV head: expanded to (batch, heads_k)."""
    scale = torch.tensor(value, device=batch.device) if given is None else given
    return scale.expand(len(batch.lengths), batch.heads[1])


def attend(interface, batch, out, window=(-1, -1), sinks=None, softcap=0.0, scales=None,
           causal=True, **options):
    """As FlashAttentionImpl.forward calls it, scales of 1 for a cache of 16 bits included."""
    scales = scales or Scales(*[scale_of(batch, 1.0)] * 3)
    return interface.flash_attn_varlen_func(
        q=batch.q, k=batch.k, v=batch.v, out=out, cu_seqlens_q=batch.starts,
        max_seqlen_q=max(batch.queries), seqused_k=batch.used, max_seqlen_k=max(batch.lengths),
        softmax_scale=batch.scale, causal=causal, alibi_slopes=None,
        window_size=None if window == (-1, -1) else list(window), block_table=batch.table,
        softcap=softcap, fa_version=3, q_descale=scales.q, k_descale=scales.k,
        v_descale=scales.v, s_aux=sinks, **options)


def metadata_of(interface, batch, num_splits=0, window=(-1, -1)):
    """As FlashAttentionMetadataBuilder asks for it."""
    return interface.get_scheduler_metadata(
        batch_size=len(batch.lengths), max_seqlen_q=max(batch.queries),
        max_seqlen_k=max(batch.lengths), num_heads_q=batch.heads[0],
        num_heads_kv=batch.heads[1], headdim=batch.q.size(-1), cache_seqlens=batch.used,
        qkv_dtype=batch.q.dtype, cu_seqlens_q=batch.starts, page_size=batch.page_size,
        causal=True, window_size=window, num_splits=num_splits)


def room_of(batch, dtype=torch.bfloat16):
    """A buffer with more rows than there are queries, as one for all batch sizes."""
    return torch.full((batch.q.size(0) + 5, *batch.q.shape[1:]), 7.0, dtype=dtype,
                      device=batch.device)


def sinks_of(batch, features):
    return torch.randn(batch.heads[0], device=batch.device).bfloat16() \
        if features.get('sinks') else None


def test_versions(interface):
    """3 is there, by the stub of its library; the others have none."""
    assert [interface.is_fa_version_supported(x) for x in (2, 3, 4)] == [False, True, False]
    assert interface.fa_version_unsupported_reason(3) is None
    assert sys.modules['vllm.vllm_flash_attn'].FA3_AVAILABLE


@pytest.mark.smoke
@each_layout
@each_page_size
@pytest.mark.parametrize('name', FEATURES)
def test_mixed_batch(name, page_size, layout, interface, device, called):
    """Prefill and decode; out is a slice given, of which nothing else is written."""
    batch, features = Batch(device, page_size, layout), FEATURES[name]
    options = features | dict(sinks=sinks_of(batch, features))
    room = room_of(batch)
    out = room[:batch.q.size(0)]
    got, lse = attend(interface, batch, out, return_softmax_lse=True, **options)
    assert called.names == ['attend_cache']
    assert got.data_ptr() == room.data_ptr() and (room[batch.q.size(0):] == 7).all()
    batch.check(got, lse, **options)


@each_page_size
def test_float16_of_another_head_dim(page_size, interface, device, called):
    batch = Batch(device, page_size, dtype=torch.float16, heads=(6, 1), head_dim=128)
    got = attend(interface, batch, None)
    assert called.names == ['attend_cache'] and got.dtype == torch.float16
    batch.check(got)


@each_layout
@each_page_size
@pytest.mark.parametrize('has_heads', [False, True], ids=['tensor', 'heads'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])
def test_fp8_cache(dtype, has_heads, page_size, layout, interface, device, called):
    """q is e4m3 too, out is not; a scale is of the tensor or of each KV head."""
    batch = Batch(device, page_size, layout, E4M3)
    scales = Scales(*(scale_of(batch, value, torch.rand(2, device=device) + 0.5
                               if has_heads else None) for value in (0.5, 1.5, 0.75)))
    assert has_heads or scales.k.stride() == (0, 0)
    out = room_of(batch, dtype)[:batch.q.size(0)]
    got, lse = attend(interface, batch, out, scales=scales, return_softmax_lse=True)
    assert called.names == ['attend_cache'] and got.dtype == dtype
    batch.check(got, lse, scales=scales)


@pytest.mark.parametrize('num_splits', [0, 1, 32])
def test_layers_share_metadata(num_splits, interface, device):
    """It is copied into a larger buffer whose tail is zero; no layer changes it."""
    layers = [Batch(device, 16) for _ in range(LAYERS)]
    buffer = torch.zeros(1 + 8 * 4, dtype=torch.int32, device=device)
    metadata = metadata_of(interface, layers[0], num_splits)
    count = metadata.shape[0]
    assert metadata.dtype == torch.int32 and metadata.dim() == 1 and count <= 1 + 8 * 4
    buffer[:count] = metadata
    before = buffer.clone()
    for layer in layers:
        layer.table, layer.used = layers[0].table, layers[0].used
        got = attend(interface, layer, torch.empty_like(layer.q), num_splits=num_splits,
                     scheduler_metadata=buffer[:count])
        layer.check(got)
        assert torch.equal(buffer, before)


def packed(device, head_dim, head_dim_v):
    """A batch of prefill, and its keys and values one behind the other."""
    batch = Batch(device, 16, lengths=(37, 5, 64), queries=(37, 5, 64), head_dim=head_dim)
    batch.v = batch.v[..., :head_dim_v]
    return batch, *(torch.cat(x, 1)[0] for x in zip(*(batch.keys(row) for row in range(3))))


@pytest.mark.parametrize('causal', [False, True])
def test_packed_keys(causal, interface, device, called):
    """Encoders have no cache; a part of a context-parallel prefill wants the LSE."""
    batch, k, v = packed(device, 64, 64)
    scale = scale_of(batch, 1.0)
    out = torch.empty_like(batch.q)
    got, lse = interface.flash_attn_varlen_func(
        q=batch.q, k=k, v=v, out=out, cu_seqlens_q=batch.starts, cu_seqlens_k=batch.key_starts,
        max_seqlen_q=64, max_seqlen_k=64, softmax_scale=batch.scale, causal=causal,
        window_size=[20, 20], fa_version=3, q_descale=scale, k_descale=scale, v_descale=scale,
        return_softmax_lse=True)
    assert len(called.names) == 1 and got.data_ptr() == out.data_ptr()
    batch.check(got, lse, causal=causal, window=(20, 20))


@pytest.mark.parametrize('causal', [False, True])
def test_prefill_of_mla(causal, interface, device, called):
    """Values have another head dim, and are a part of wider rows."""
    batch, k, v = packed(device, 192, 128)
    v = torch.cat((v, v), -1)[..., :128]
    got, lse = interface.flash_attn_varlen_func(
        q=batch.q, k=k, v=v, cu_seqlens_q=batch.starts, cu_seqlens_k=batch.key_starts,
        max_seqlen_q=64, max_seqlen_k=64, softmax_scale=batch.scale, causal=causal,
        fa_version=3, return_softmax_lse=True, out=None)
    assert len(called.names) == 1 and got.size(-1) == 128
    batch.check(got, lse, causal=causal)


@each_page_size
@pytest.mark.parametrize('heads', [16, 128])
def test_decode_of_mla(heads, page_size, interface, device, called):
    """As FlashAttnMLAImpl calls it: q_v, and keys that are columns of one tensor."""
    batch = LatentBatch(device, page_size, heads)
    got, lse = attend(interface, batch, None, q_v=batch.qv, return_softmax_lse=True)
    assert called.names == ['attend_cache'] and got.shape == batch.qv.shape
    batch.check(got, lse)


def test_a_rank_of_context_parallelism(interface, device):
    """The context that a rank holds, without a mask; sequences of which it holds none have -inf."""
    batch = Batch(device, 16, lengths=(37, 0, 16, 0, 5))
    got, lse = attend(interface, batch, torch.empty_like(batch.q), causal=False,
                      return_softmax_lse=True)
    batch.check(got, lse, causal=False)
    assert lse[:, 1:4].isneginf().all() and not got[1:4].any()


@pytest.mark.parametrize('queries', [(1, 3, 20, 1, 2), (1,) * 5], ids=['mixed', 'decode'])
@pytest.mark.parametrize('heads', [16, 128])
def test_ranks_of_decode_context_parallelism(heads, queries, interface, device, called):
    """The results of three ranks, each with every third key, merged."""
    batch = LatentBatch(device, 16, heads, lengths=(37, 5, 64, 300, 2), queries=queries)
    parts = []
    for rank in range(3):
        own = batch.of_rank(3, rank)
        own.q, own.qv, own.scale = batch.q, batch.qv, batch.scale
        parts.append(attend(
            interface, own, None, q_v=batch.qv, return_softmax_lse=True, cp_world_size=3,
            cp_rank=rank, cp_tot_seqused_k=batch.used))
    assert called.names == ['attend_cache'] * 3
    outs, lses = ([x[None] for x in one] for one in zip(*parts))
    out, lse = merge_states(outs, lses)
    batch.check(out[0], lse[0])


def test_refusal_of_a_window_on_a_rank(interface, device):
    batch = Batch(device, 16)
    with pytest.raises(NotImplementedError, match='^flash_attn3.integrations.vllm: expected '
                                                  'window_size_left to be -1, got 15; hint: '):
        attend(interface, batch, torch.empty_like(batch.q), window=(15, 0), cp_world_size=2,
               cp_rank=1, cp_tot_seqused_k=batch.used)


@pytest.mark.parametrize('has_rotary', [True, False], ids=['rotary', 'rope_free'])
@pytest.mark.parametrize('heads', [16, 128])
def test_chosen_keys_as_pages_of_one(heads, has_rotary, interface, device, called):
    """As FlashAttnMLASparseImpl calls it: the table lists the keys of each query, and without
    rotary columns q is zero and k a part of v.
    """
    batch = LatentBatch(device, 1, heads, lengths=(128, 7, 0, 100), queries=(1,) * 4)
    if not has_rotary:
        batch.q.zero_()
        batch.k = batch.v[..., :64]
    got, lse = attend(interface, batch, None, q_v=batch.qv, return_softmax_lse=True)
    assert called.names == ['attend_cache']
    batch.check(got, lse)


def test_disable_brings_its_kernels_back(interface, device, called):
    batch = Batch(device, 16)
    vllm.disable()
    for call in (lambda: attend(interface, batch, torch.empty_like(batch.q)),
                 lambda: metadata_of(interface, batch)):
        with pytest.raises(ZeroDivisionError):
            call()
    assert called.names == []


@pytest.mark.parametrize('dtype', [torch.bfloat16, E4M3], ids=['bf16', 'e4m3'])
@pytest.mark.parametrize('queries', [(1,) * 5, (1, 3, 20, 1, 2)], ids=['decode', 'mixed'])
def test_a_graph(queries, dtype, interface, cuda):
    """Three layers are captured with the longest lengths, and replayed with others, other pages
    and metadata of each batch; sequences that pad the batch have no keys.
    """
    lengths = (120, 64, 500, 33, 20)
    layers = [Batch(cuda, 16, dtype=dtype, lengths=lengths, queries=queries)
              for _ in range(LAYERS)]
    first = layers[0]
    buffer = torch.zeros(1 + 8 * 4, dtype=torch.int32, device=cuda)
    count = metadata_of(interface, first, 32).shape[0]
    scales = Scales(*(scale_of(first, value) for value in (0.5, 1.5, 0.75)))
    for layer in layers:
        layer.table, layer.used = first.table, first.used
    outs = [room_of(layer) for layer in layers]

    def step():
        for layer, out in zip(layers, outs):
            attend(interface, layer, out[:layer.q.size(0)], num_splits=32, scales=scales,
                   scheduler_metadata=buffer[:count])
    buffer[:count] = metadata_of(interface, first, 32)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in ((3, 60, 499, 20, 0), (120, 1, 77, 33, 0), lengths):
        other = (first.table + 7) % first.k.size(0)
        first.table.copy_(first.table.where(first.table < 0, other))
        for layer in layers:
            layer.set_lengths(changed)
            layer.q.copy_(torch.randn(layer.q.shape, device=cuda).to(dtype))
        buffer[:count] = metadata_of(interface, first, 32)
        for out in outs:
            out.fill_(7)
        graph.replay()
        for layer, out in zip(layers, outs):
            assert (out[layer.q.size(0):] == 7).all()
            layer.check(out[:layer.q.size(0)], scales=scales)
