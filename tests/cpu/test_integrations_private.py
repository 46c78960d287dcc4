"""vLLM's and SGLang's private ops, replaced by ours: their calls, on ops of their schemas.

Emulated: the namespaces are defined here, with a kernel that says that it is the client's own.
"""
import pytest
import torch

from flash_attn3.integrations import sglang, vllm
from flash_attn3.integrations._private_ops import PrivateOps

from tests.cpu.client_pages import SCALE, Cache

FIRST = ('Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, '
         'Tensor!? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, '
         'Tensor? seqused_q, '
         'Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, '
         'Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, '
         'Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, '
         'float softmax_scale, bool is_causal, int window_size_left, int window_size_right, ')
LAST = ('float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, '
        'bool? pack_gqa, int sm_margin, ')
VLLM = f'fwd({FIRST}{LAST}Tensor? s_aux, int cp_world_size, int cp_rank, ' \
       'Tensor? cp_tot_seqused_k) -> Tensor[]'
METADATA = ('get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, '
            'int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, '
            'Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, '
            'Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, '
            'int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right, '
            'bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor')
SGLANG = f'fwd({FIRST}int attention_chunk, {LAST}Tensor? sinks=None) -> Tensor[]'


@pytest.fixture(scope='module', autouse=True)
def namespaces():
    libraries = []
    for name, schemas in (('_vllm_fa3_C', (VLLM, METADATA)), ('sgl_kernel', (SGLANG,))):
        library = torch.library.Library(name, 'DEF')
        for schema in schemas:
            library.define(schema)
            library.impl(schema.partition('(')[0], own, 'CPU')
        libraries.append(library)
    yield
    for library in libraries:
        library._destroy()


def own(*_, **__):
    raise ZeroDivisionError("the client's own kernel")


@pytest.fixture(autouse=True)
def _off():
    yield
    vllm.disable()
    sglang.disable()


def vllm_call(cache, **changes):
    """As vllm_flash_attn's flash_attn_varlen_func calls it: all by position."""
    call = dict(
        q=cache.q, k=cache.k, v=cache.v, k_new=None, v_new=None, q_v=None, out=None,
        cu_seqlens_q=cache.starts, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
        seqused_k=cache.used, max_seqlen_q=max(cache.queries), max_seqlen_k=max(cache.lengths),
        page_table=cache.table, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
        rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=SCALE, is_causal=True, window_size_left=-1, window_size_right=-1,
        softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
        pack_gqa=None, sm_margin=0, s_aux=None, cp_world_size=1, cp_rank=0,
        cp_tot_seqused_k=None) | changes
    return torch.ops._vllm_fa3_C.fwd(*call.values())


# --------------------------------------------------------------------------------------------- vLLM
def test_vllm_mixed_batch():
    """Prefill and decode on pages of 16: out is a slice given, with window, sinks and metadata."""
    vllm.enable()
    cache, sinks = Cache(16), torch.randn(4, dtype=torch.bfloat16)
    metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        3, 20, 64, 4, 2, 64, 64, torch.bfloat16, cache.used, cache.starts, None, None, None, None,
        16, 0, True, 15, 0, False, 0, None, 0)
    assert metadata.dtype == torch.int32 and metadata.numel() <= 1 + 4 * 4
    kept = torch.zeros(17, dtype=torch.int32)    # vLLM copies it into a buffer of its own
    kept[:metadata.numel()] = metadata
    buffer = torch.zeros(30, 4, 64, dtype=torch.bfloat16)
    out = buffer[:24]
    got, lse, *rest = vllm_call(cache, out=out, window_size_left=15, window_size_right=0,
                                s_aux=sinks, scheduler_metadata=kept[:metadata.numel()],
                                num_splits=3)
    assert got.data_ptr() == buffer.data_ptr() and len(rest) == 2 and not buffer[24:].any()
    cache.check(out, lse, (15, 0), sinks)


def test_vllm_softcap_and_a_changed_batch():
    vllm.enable()
    for lengths in ((37, 5, 64), (20, 21, 22)):
        cache = Cache(16, lengths)
        got, lse, *_ = vllm_call(cache, softcap=3.0)
        cache.check(got, lse, softcap=3.0)


def test_vllm_packed_keys():
    """Encoders and the prefill of MLA have cu_seqlens_k, and no pages."""
    vllm.enable()
    cache = Cache(16)
    k, v = torch.randn(2, 106, 2, 64, dtype=torch.bfloat16)
    starts = torch.tensor([0, 37, 42, 106], dtype=torch.int32)
    got, lse, *_ = vllm_call(cache, k=k, v=v, seqused_k=None, page_table=None,
                             cu_seqlens_k=starts, num_splits=1)
    cache.k, cache.v, cache.table = k[:, None], v[:, None], torch.full((3, 64), -1)
    for row, (start, end) in enumerate(zip(starts, starts[1:])):
        cache.table[row, :end - start] = torch.arange(start, end)
    cache.check(got, lse)


@pytest.mark.parametrize('changes,got', [
    (dict(q_v=torch.randn(24, 4, 64)), 'q_v to be None, got a tensor'),
    (dict(cp_world_size=2), 'cp_world_size to be 0 or 1, got 2'),
    (dict(cp_tot_seqused_k=torch.ones(3)), 'cp_tot_seqused_k to be None, got a tensor'),
    (dict(seqused_q=torch.ones(3)), 'seqused_q to be None, got a tensor')])
def test_vllm_refusals(changes, got):
    vllm.enable()
    with pytest.raises(NotImplementedError, match='^flash_attn3.integrations.vllm: expected '
                                                  f'{got}; hint: '):
        vllm_call(Cache(16), **changes)


def test_disable_brings_the_clients_kernel_back():
    with pytest.raises(ZeroDivisionError):
        vllm_call(Cache(16))
    vllm.enable()
    vllm.enable()
    assert vllm.is_enabled() and vllm_call(Cache(16))
    vllm.disable()
    assert not vllm.is_enabled()
    with pytest.raises(ZeroDivisionError):
        vllm_call(Cache(16))


def test_an_op_with_other_arguments_is_refused():
    library = torch.library.Library('other_fa3', 'DEF')
    library.define('fwd(Tensor q, Tensor k, Tensor v, Tensor? dropout_mask=None) -> Tensor[]')
    client = PrivateOps('vllm', 'other_fa3', 'vllm.x', 'vllm')
    with pytest.raises(RuntimeError, match='expected the arguments of other_fa3::fwd to be '
                                           "upstream's .*, got dropout_mask; hint: "):
        client.enable()
    assert not client.is_enabled()
    library._destroy()


def test_a_client_that_is_not_installed_is_refused():
    client = PrivateOps('vllm', 'no_such_namespace', 'no_such_package.x', 'vllm')
    assert client.problem() == ('flash_attn3.integrations.vllm: expected vllm, got none; '
                                'hint: pip install vllm')


# ------------------------------------------------------------------------------------------- SGLang
@pytest.mark.parametrize('page_size', [1, 64])
def test_sglang(page_size):
    """As its flash_attn_with_kvcache calls it: pages of one token, cu_seqlens_k_new without k."""
    sglang.enable()
    cache, sinks = Cache(page_size), torch.randn(4, dtype=torch.bfloat16)
    starts = torch.tensor([0, *cache.lengths]).cumsum(0).to(torch.int32)
    got, lse, *_ = torch.ops.sgl_kernel.fwd.default(
        cache.q, cache.k, cache.v, None, None, None, None, cache.starts, None, starts, None,
        cache.used, 20, None, cache.table, None, None, None, None, None, None, None, None, SCALE,
        True, 7, 0, 0, 0.0, is_rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
        pack_gqa=None, sm_margin=0, sinks=sinks)
    cache.check(got, lse, (7, 0), sinks)


def test_sglang_without_sinks_and_its_refusal():
    sglang.enable()
    cache = Cache(64)
    call = [cache.q, cache.k, cache.v, None, None, None, None, cache.starts, None, None, None,
            cache.used, 20, None, cache.table, *[None] * 8, SCALE, True, -1, -1, 0, 0.0, True,
            None, 1, None, 0]
    got, lse, *_ = torch.ops.sgl_kernel.fwd(*call)
    cache.check(got, lse)
    call[5] = cache.q
    with pytest.raises(NotImplementedError, match='integrations.sglang: expected q_v to be None'):
        torch.ops.sgl_kernel.fwd(*call)
