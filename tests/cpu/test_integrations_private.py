"""vLLM's and SGLang's private ops, replaced by ours: their calls, on ops of their schemas. Their
own files make the calls in tests/gpu/test_integrations_vllm.py and test_integrations_sglang.py.
"""
import pytest
import torch

from flash_attn3 import merge_states
from flash_attn3.integrations import sglang, vllm
from flash_attn3.integrations._private_ops import PrivateOps

from tests.support import private_ops
from tests.support.paged_batches import Batch, LatentBatch

SCALE = 0.125    # head_dim ** -0.5, of Batch
RANKS = dict(cp_world_size=2, cp_rank=1, cp_tot_seqused_k=torch.tensor([74, 9, 128]).int())


@pytest.fixture(scope='module', autouse=True)
def namespaces():
    for name in private_ops.SCHEMAS:
        private_ops.define(name)
    yield
    private_ops.undefine()


@pytest.fixture(autouse=True)
def _off():
    yield
    vllm.disable()
    sglang.disable()


def vllm_call(batch, **changes):
    """As vllm_flash_attn's flash_attn_varlen_func calls it: all by position."""
    call = dict(
        q=batch.q, k=batch.k, v=batch.v, k_new=None, v_new=None, q_v=None, out=None,
        cu_seqlens_q=batch.starts, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
        seqused_k=batch.used, max_seqlen_q=max(batch.queries), max_seqlen_k=max(batch.lengths),
        page_table=batch.table, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
        rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=SCALE, is_causal=True, window_size_left=-1, window_size_right=-1,
        softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
        pack_gqa=None, sm_margin=0, s_aux=None, cp_world_size=1, cp_rank=0,
        cp_tot_seqused_k=None) | changes
    return torch.ops._vllm_fa3_C.fwd(*call.values())


def batch_of(page_size, layout='rows'):
    return Batch('cpu', page_size, layout, lengths=(37, 5, 64), queries=(1, 3, 20))


# --------------------------------------------------------------------------------------------- vLLM
def test_vllm_mixed_batch():
    """Prefill and decode on pages of 16, with all that changes values; scales of 1, as always."""
    vllm.enable()
    batch, sinks = batch_of(16), torch.randn(4, dtype=torch.bfloat16)
    metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        3, 20, 64, 4, 2, 64, 64, torch.bfloat16, batch.used, batch.starts, None, None, None, None,
        16, 0, True, 15, 0, True, 0, None, 0)
    scale = torch.ones(()).expand(3, 2)
    out = torch.zeros_like(batch.q)
    got, lse, *rest = vllm_call(
        batch, out=out, window_size_left=15, window_size_right=0, s_aux=sinks, softcap=3.0,
        scheduler_metadata=metadata, num_splits=3, q_descale=scale, k_descale=scale,
        v_descale=scale)
    assert got.data_ptr() == out.data_ptr() and len(rest) == 2
    batch.check(out, lse, (15, 0), sinks=sinks, softcap=3.0)


def test_vllm_packed_keys():
    """Encoders and the prefill of MLA have cu_seqlens_k, and no pages."""
    vllm.enable()
    batch = batch_of(16)
    k, v = (torch.cat(x, 1)[0] for x in zip(*(batch.keys(row) for row in range(3))))
    got, lse, *_ = vllm_call(batch, k=k, v=v, seqused_k=None, page_table=None,
                             cu_seqlens_k=batch.key_starts, num_splits=1)
    batch.check(got, lse)


def test_vllm_decode_of_mla():
    """q_v on pages, as its backend calls it; prompts in the same call."""
    vllm.enable()
    batch = LatentBatch('cpu', 16, heads=5, lengths=(37, 5, 64), queries=(1, 3, 20))
    out = torch.zeros(24, 5, 512, dtype=torch.bfloat16)
    got, lse, *_ = vllm_call(batch, q_v=batch.qv, softmax_scale=batch.scale, out=out)
    assert got.data_ptr() == out.data_ptr()
    batch.check(got, lse)


@pytest.mark.parametrize('queries', [(1, 3, 20, 1), (1, 1, 1, 1), (0, 2, 0, 5)], ids=str)
@pytest.mark.parametrize('latent', [False, True], ids=['kv', 'latent'])
@pytest.mark.parametrize('world', [2, 3])
def test_vllm_ranks_of_context_parallelism(world, latent, queries):
    """The results of all ranks, merged, are those of the whole cache; a rank may hold no key that a
    query sees.
    """
    vllm.enable()
    lengths = [max(length, count) for length, count in zip((37, 5, 64, 2), queries)]
    batch = (LatentBatch if latent else Batch)('cpu', 16, lengths=lengths, queries=queries)
    total, parts = batch.used.clone(), []
    for rank in range(world):
        own = batch.of_rank(world, rank)
        out = None if rank == 0 else torch.zeros(sum(queries), batch.heads[0],
                                                 512 if latent else 64, dtype=torch.bfloat16)
        got, lse, *_ = vllm_call(
            batch, k=own.k, v=own.v, page_table=own.table, seqused_k=own.used, out=out,
            softmax_scale=batch.scale, q_v=batch.qv if latent else None, cp_world_size=world,
            cp_rank=rank, cp_tot_seqused_k=total, max_seqlen_k=max(own.lengths))
        assert out is None or got.data_ptr() == out.data_ptr()
        assert lse.is_contiguous() and lse.shape == (batch.heads[0], sum(queries))
        parts.append((got, lse))
    outs, lses = zip(*parts)
    merged, lse = merge_states([x[None] for x in outs], [x[None] for x in lses])
    batch.check(merged[0], lse[0])


def test_vllm_a_rank_without_a_mask():
    """Without a causal mask, cp_rank and cp_tot_seqused_k change nothing."""
    vllm.enable()
    batch = batch_of(16)
    got, lse, *_ = vllm_call(batch, is_causal=False, **RANKS)
    batch.check(got, lse, causal=False)


@pytest.mark.parametrize('changes,got', [
    (dict(q_v=torch.randn(24, 4, 64), cu_seqlens_k=torch.ones(4), seqused_k=None),
     'q_v to be None, got a tensor'),
    (RANKS | dict(window_size_left=15), 'window_size_left to be -1, got 15'),
    (RANKS | dict(k_new=torch.ones(1)), 'k_new to be None, got a tensor'),
    (dict(seqused_q=torch.ones(3)), 'seqused_q to be None, got a tensor')])
def test_vllm_refusals(changes, got):
    vllm.enable()
    with pytest.raises(NotImplementedError, match='^flash_attn3.integrations.vllm: expected '
                                                  f'{got}; hint: '):
        vllm_call(batch_of(16), **changes)


@pytest.mark.parametrize('changes,got', [
    (dict(cp_world_size=2), 'cp_tot_seqused_k with cp_world_size above 1, got None'),
    (RANKS | dict(cu_seqlens_q=None), 'cu_seqlens_q with cp_world_size above 1, got None'),
    (RANKS | dict(cp_rank=2), 'cp_rank to be from 0 to 1, got 2'),
    (RANKS | dict(cp_rank=-1), 'cp_rank to be from 0 to 1, got -1')])
def test_wrong_ranks(changes, got):
    vllm.enable()
    with pytest.raises(RuntimeError, match=f'^flash_attn3.integrations.vllm: expected {got}$') as (
            raised):
        vllm_call(batch_of(16), **changes)
    assert raised.type is RuntimeError


def test_disable_brings_the_clients_kernel_back():
    with pytest.raises(ZeroDivisionError):
        vllm_call(batch_of(16))
    vllm.enable()
    vllm.enable()
    assert vllm.is_enabled() and vllm_call(batch_of(16))
    vllm.disable()
    assert not vllm.is_enabled()
    with pytest.raises(ZeroDivisionError):
        vllm_call(batch_of(16))


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
def sglang_call(op, batch, *last, q_v=None, scale=SCALE):
    """last: what follows sm_margin."""
    return op(batch.q, batch.k, batch.v, None, None, q_v, None, batch.starts, None,
              batch.key_starts, None, batch.used, 20, None, batch.table, *[None] * 8, scale, True,
              7, 0, 0, 0.0, True, None, 0, None, 0, *last)


@pytest.mark.parametrize('page_size', [1, 64])
def test_sglang(page_size):
    """As its flash_attn_with_kvcache calls it: pages of one token, cu_seqlens_k_new without k."""
    sglang.enable()
    batch, sinks = batch_of(page_size, 'apart'), torch.randn(4, dtype=torch.bfloat16)
    got, lse, *_ = sglang_call(torch.ops.sgl_kernel.fwd, batch, sinks, None, False)
    batch.check(got, lse, (7, 0), sinks=sinks)


@pytest.mark.parametrize('scale', [192 ** -0.5, None])
def test_sglang_decode_of_mla(scale):
    """Without a scale the op counts the columns of q alone, as upstream's does."""
    sglang.enable()
    batch = LatentBatch('cpu', 1, heads=5, lengths=(37, 5, 64), queries=(1, 3, 20))
    batch.scale = scale or 64 ** -0.5
    got, lse, *_ = sglang_call(torch.ops.sgl_kernel.fwd, batch, None, None, False, q_v=batch.qv,
                               scale=scale)
    batch.check(got, lse, (7, 0))


def test_sglang_only_qv():
    """q and k, for which it passes memory that nobody has written, are not read."""
    sglang.enable()
    batch = LatentBatch('cpu', 1, heads=5, lengths=(37, 5, 64), queries=(1, 3, 20))
    batch.q, batch.k = (torch.full_like(x, torch.nan) for x in (batch.q, batch.k))
    got, lse, *_ = sglang_call(torch.ops.sgl_kernel.fwd, batch, None, None, True, q_v=batch.qv,
                               scale=batch.scale)
    batch.q, batch.k = (torch.zeros_like(x) for x in (batch.q, batch.k))
    batch.check(got, lse, (7, 0))


@pytest.mark.parametrize('changes,got', [
    (dict(mask=torch.ones(3)), 'sparse_mask_fine to be None, got a tensor')])
def test_sglang_refusals(changes, got):
    sglang.enable()
    call = dict(q_v=None, mask=None, only_qv=False) | changes
    with pytest.raises(NotImplementedError, match=f'integrations.sglang: expected {got}; hint: '):
        sglang_call(torch.ops.sgl_kernel.fwd, batch_of(64), None, call['mask'], call['only_qv'],
                    q_v=call['q_v'])


def test_sglang_of_before():
    """sglang-kernel 0.4.1: without the last two arguments, and without the op of the metadata."""
    schema = private_ops.SCHEMAS['sgl_kernel'][0].replace(
        'Tensor? sinks, Tensor? sparse_mask_fine, bool only_qv', 'Tensor? sinks=None')
    library = torch.library.Library('earlier_sgl_kernel', 'DEF')
    library.define(schema)
    client = PrivateOps('sglang', 'earlier_sgl_kernel', 'sgl_kernel.x', 'sglang-kernel')
    client.enable()
    batch = batch_of(64)
    got, lse, *_ = sglang_call(torch.ops.earlier_sgl_kernel.fwd, batch)
    batch.check(got, lse, (7, 0))
    client.disable()
    library._destroy()
