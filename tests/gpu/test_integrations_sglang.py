"""`integrations.sglang` under SGLang's own interface files, taken from its wheels: the calls of its
attention backend, values of each, and that our ops computed them.

With `--device cpu` on CPU tensors. The files' imports get stubs; the ops that they call are defined
by their schemas.
"""
from __future__ import annotations

import importlib

import pytest
import torch

from flash_attn3.integrations import sglang
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import private_ops
from tests.support.fp8_data import E4M3
from tests.support.paged_batches import Batch, LatentBatch
from tests.support.private_ops import called

__all__ = ['called']
STUBS = {
    'sgl_kernel/__init__.py': '',
    'sgl_kernel/flash_ops.py': 'from tests.support import private_ops\n'
                               "private_ops.define('sgl_kernel')\n",
    'sglang/kernels/jit/utils.py': 'from functools import cache as cache_once\n',
    'sglang/kernels/kernel_api_logging.py': 'def debug_kernel_api(function):\n'
                                            '    return function\n',
    'sglang/srt/environ.py': 'class envs:\n'
                             '    class SGLANG_USE_SGL_FA3_KERNEL:\n'
                             '        def get():\n'
                             '            return True\n',
    'sglang/srt/utils.py': 'def get_device_capability():\n    return 9, 0\n'
                           'def is_musa():\n    return False\n',
}
FEATURES = {
    'plain': {},
    'window': dict(window=(15, 0)),
    'softcap': dict(softcap=3.0),
    'sinks': dict(sinks=True, window=(31, 0)),
}
PACKAGE = 'sglang.kernels.ops.attention'
each_page_size = pytest.mark.parametrize('page_size', [1, 64])


@pytest.fixture(scope='module')
def interface(tmp_path_factory):
    """SGLang's module, in front of the one that enable() imports and that loads the ops."""
    folder = tmp_path_factory.mktemp('sglang')
    with private_ops.packages(folder, STUBS, ['sglang', 'sglang-kernel']):
        sglang.enable()
        yield importlib.import_module(f'{PACKAGE}.flash_attention')
        sglang.disable()


@pytest.fixture
def kernel(interface, device, monkeypatch):
    """The module of sgl_kernel. On CPU tensors the tests of the GPU are told that it is Hopper."""
    module = importlib.import_module('sgl_kernel.flash_attn')
    if device.type == 'cpu':
        monkeypatch.setattr(module, 'is_fa3_supported', lambda: True)
        other = importlib.import_module(f'{PACKAGE}.flash_attention_v3')
        monkeypatch.setattr(other, '_is_fa3_supported', lambda: True)
    return module


@pytest.fixture(autouse=True)
def _on(kernel):
    if not sglang.is_enabled():
        sglang.enable()


def attend(interface, batch, window=(-1, -1), sinks=None, causal=True, **options):
    """As FlashAttentionBackend.forward_extend and forward_decode call it."""
    if sinks is not None:
        options['sinks'] = sinks
    return interface.flash_attn_with_kvcache(
        q=batch.q, k_cache=batch.k, v_cache=batch.v, page_table=batch.table,
        cache_seqlens=batch.used, cu_seqlens_q=batch.starts, cu_seqlens_k_new=batch.key_starts,
        max_seqlen_q=max(batch.queries), softmax_scale=batch.scale, causal=causal,
        window_size=window, ver=3, **options)


def metadata_of(kernel, batch):
    """As FlashAttentionBackend asks for it."""
    return kernel.get_scheduler_metadata(
        batch_size=len(batch.lengths), max_seqlen_q=max(batch.queries),
        max_seqlen_k=max(batch.lengths), num_heads=batch.heads[0], num_heads_k=batch.heads[1],
        headdim=batch.q.size(-1), headdim_v=batch.v.size(-1), cache_seqlens=batch.used,
        qkv_dtype=batch.q.dtype, cu_seqlens_q=batch.starts, page_size=batch.page_size,
        causal=True, window_size=(-1, -1), num_splits=0)


@pytest.mark.smoke
@each_page_size
@pytest.mark.parametrize('has_out', [False, True], ids=['returned', 'out'])
@pytest.mark.parametrize('name', FEATURES)
def test_sglang_batch(name, has_out, page_size, interface, device, called):
    """Prefill and decode: lists of the keys' starts without new keys, and pages of one token."""
    batch, features = Batch(device, page_size, 'apart'), FEATURES[name]
    options = features | ({} if not features.get('sinks') else dict(
        sinks=torch.randn(4, device=device).bfloat16()))
    out = torch.empty_like(batch.q) if has_out else None
    got, lse, *rest = attend(interface, batch, return_softmax_lse=True, out=out, **options)
    assert called.names == ['attend_cache'] and len(rest) == 2
    assert not has_out or got.data_ptr() == out.data_ptr()
    batch.check(got, lse, **options)


@each_page_size
def test_fp8_cache(page_size, interface, device, called):
    """q is cast without a scale; those of k and v are expanded."""
    batch = Batch(device, page_size, 'apart', E4M3)
    scales = Scales(None, *(torch.tensor(x, device=device).expand(5, 2) for x in (1.5, 0.75)))
    out = torch.empty_like(batch.q, dtype=torch.bfloat16)
    got, lse, *_ = attend(interface, batch, out=out, return_softmax_lse=True,
                          k_descale=scales.k, v_descale=scales.v)
    assert called.names == ['attend_cache'] and got.dtype == torch.bfloat16
    batch.check(got, lse, scales=scales)


def test_metadata(interface, kernel, device):
    """One for the decode of all layers of a step."""
    layers = [Batch(device, 64, 'apart', queries=(1,) * 5) for _ in range(2)]
    metadata = metadata_of(kernel, layers[0])
    assert metadata.dtype == torch.int32 and metadata.dim() == 1
    for layer in layers:
        layer.check(attend(interface, layer, scheduler_metadata=metadata))


@pytest.mark.parametrize('head_dims', [(64, 64), (192, 128)], ids=['embedding', 'mla'])
@pytest.mark.parametrize('causal', [False, True])
def test_packed_keys(causal, head_dims, interface, device, called):
    """Embedding models have no cache; the prefill of MLA has values of another head dim."""
    batch = Batch(device, 16, 'apart', lengths=(37, 5, 64), queries=(37, 5, 64),
                  head_dim=head_dims[0])
    batch.v = batch.v[..., :head_dims[1]]
    k, v = (torch.cat(x, 1)[0] for x in zip(*(batch.keys(row) for row in range(3))))
    out = torch.empty_like(batch.q[..., :head_dims[1]])
    got, lse, *_ = interface.flash_attn_varlen_func(
        q=batch.q, k=k, v=v, cu_seqlens_q=batch.starts, cu_seqlens_k=batch.key_starts,
        max_seqlen_q=64, max_seqlen_k=64, softmax_scale=batch.scale, causal=causal,
        window_size=(-1, -1), num_splits=0, return_softmax_lse=True, out=out, ver=3)
    assert len(called.names) == 1 and got.data_ptr() == out.data_ptr()
    batch.check(got, lse, causal=causal)


@each_page_size
@pytest.mark.parametrize('heads', [16, 128])
def test_decode_of_mla(heads, page_size, interface, device, called):
    """qv, and keys that are columns of one tensor."""
    batch = LatentBatch(device, page_size, heads)
    got, lse, *_ = attend(interface, batch, qv=batch.qv, return_softmax_lse=True)
    assert called.names == ['attend_cache'] and got.shape == batch.qv.shape
    batch.check(got, lse)


@each_page_size
@pytest.mark.parametrize('heads', [16, 128])
def test_only_qv(heads, page_size, interface, device, called):
    """Without rotary columns there is no q and no k_cache."""
    batch = LatentBatch(device, page_size, heads)
    batch.q, cache = None, batch.k
    batch.k = None
    got, lse, *_ = attend(interface, batch, qv=batch.qv, only_qv=True, return_softmax_lse=True)
    assert called.names == ['attend_cache']
    batch.q, batch.k = batch.qv.new_zeros(*batch.qv.shape[:-1], 64), torch.zeros_like(cache)
    batch.check(got, lse)


def test_disable_brings_its_kernels_back(interface, kernel, device, called):
    batch = Batch(device, 64, 'apart')
    sglang.disable()
    for call in (lambda: attend(interface, batch), lambda: metadata_of(kernel, batch)):
        with pytest.raises(ZeroDivisionError):
            call()
    assert called.names == []


@pytest.mark.parametrize('page_size', [1, 64])
def test_a_graph(page_size, interface, kernel, cuda):
    """Decode is captured with the longest lengths and replayed with others, metadata in a buffer
    of the first.
    """
    batch = Batch(cuda, page_size, 'apart', lengths=(120, 64, 500), queries=(1, 1, 1))
    kept, out = metadata_of(kernel, batch), torch.empty_like(batch.q)
    given = batch.key_starts

    def step():
        interface.flash_attn_with_kvcache(
            q=batch.q, k_cache=batch.k, v_cache=batch.v, page_table=batch.table,
            cache_seqlens=batch.used, cu_seqlens_q=batch.starts, cu_seqlens_k_new=given,
            max_seqlen_q=1, softmax_scale=batch.scale, causal=True, window_size=(-1, -1),
            scheduler_metadata=kept, out=out, ver=3)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ((1, 64, 499), (120, 0, 3)):
        batch.set_lengths(lengths)
        given.copy_(batch.key_starts)
        kept.copy_(metadata_of(kernel, batch))
        batch.q.normal_()
        out.fill_(7)
        graph.replay()
        batch.check(out)
