"""flash_attn3.distributed on up to four gloo ranks: outputs, LSEs and gradients, against attention
of the whole sequence in one process, in float64 and by the bar of tests/compare.py.
"""
from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flash_attn3 import distributed, flash_attn_func, flash_attn_varlen_func, reference
from flash_attn3.reference import Inputs, Lengths, Mask, Score

from tests import compare
from tests.cpu.two_processes import Pair

pytestmark = pytest.mark.slow

RANKS = 4
DOCUMENTS = (0, 3, 3, 17, 20, 41)
CASES = {    # ranks, rows of the whole, arguments
    'causal': (4, 48, dict(causal=True)),
    'causal, three ranks, padded': (3, 29, dict(causal=True)),
    'causal, few rows': (4, 5, dict(causal=True)),
    'full, two ranks, padded': (2, 13, {}),
    'full, contiguous': (3, 30, dict(zigzag=False)),
    'causal, contiguous': (4, 30, dict(causal=True, zigzag=False)),
    'one rank': (1, 11, dict(causal=True)),
    'window': (4, 61, dict(window_size=(9, 3))),
    'causal window': (4, 64, dict(causal=True, window_size=(17, -1))),
    'window, contiguous': (4, 64, dict(causal=True, window_size=(10, 0), zigzag=False)),
    'sinks, softcap': (4, 45, dict(causal=True, s_aux=True, softcap=3.0, softmax_scale=0.3)),
    'sinks, window': (3, 45, dict(causal=True, s_aux=True, window_size=(5, -1))),
    'packed': (4, 41, dict(causal=True, cu_seqlens=DOCUMENTS)),
    'packed, padded behind': (3, 47, dict(causal=True, cu_seqlens=DOCUMENTS, s_aux=True)),
    'packed, full': (2, 41, dict(cu_seqlens=DOCUMENTS)),
    'packed, window': (4, 41, dict(cu_seqlens=DOCUMENTS, window_size=(4, 2))),
}


@pytest.fixture(scope='module')
def ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('GLOO_SOCKET_IFNAME', 'lo')
        ranks = Pair(count=RANKS)
        yield ranks
        ranks.close()


def drawn(rows: int, is_packed: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of out, the same on all ranks; 4 query heads, 2 KV heads."""
    batch = () if is_packed else (2,)
    return [torch.randn(*batch, rows, heads, dim).to(dtype)
            for heads, dim in ((4, 16), (2, 16), (2, 8), (4, 8))]


def whole(tensors: list[Tensor], options: dict) -> tuple[list[Tensor], list[Tensor]]:
    """(out, lse) and the gradients of q, k, v and sinks in one process."""
    options = {name: x for name, x in options.items() if name != 'zigzag'}
    starts = options.pop('cu_seqlens', None)
    *inputs, dout = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    if 's_aux' in options:
        options['s_aux'] = options['s_aux'].clone().requires_grad_()
        leaves.append(options['s_aux'])
    if starts is None:
        out, lse = flash_attn_func(*leaves[:3], return_attn_probs=True, **options)
    else:
        starts = torch.tensor(starts, dtype=torch.int32)
        out, lse = flash_attn_varlen_func(*leaves[:3], starts, starts, 0, 0,
                                          return_attn_probs=True, **options)
    return [out, lse], list(torch.autograd.grad(loss_of(out, lse, dout), leaves))


def loss_of(out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Uses both; rows without a key have an LSE of -inf."""
    return (out * dout).sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()


def on_ranks(attend, tensors: list[Tensor], options: dict, where: dict, dim: int):
    """The same from the parts of this rank, whole again; where: the groups and zigzag."""
    *inputs, dout = [distributed.shard(x, dim=dim, pad=float('nan'), **where) for x in tensors]
    leaves = [x.clone().requires_grad_() for x in inputs]
    if 's_aux' in options:
        options['s_aux'] = options['s_aux'].clone().requires_grad_()
        leaves.append(options['s_aux'])
    seqlen = tensors[0].size(dim)
    out, lse = attend(*leaves[:3], return_attn_probs=True, seqlen=seqlen, **options)
    dout = dout.nan_to_num()
    gradients = list(torch.autograd.grad(loss_of(out, lse, dout), leaves))
    if 's_aux' in options:
        dist.all_reduce(gradients[3], group=where.get('group'))
    rows = [distributed.unshard(x, seqlen, dim=dim, **where) for x in (out, *gradients[:3])]
    lse = distributed.unshard(lse.transpose(-1, -2), seqlen, dim=dim, **where).transpose(-1, -2)
    return [rows[0], lse], rows[1:] + gradients[3:]


def check_ring(rank: int, name: str) -> None:
    count, rows, options = CASES[name]
    group = dist.new_group(list(range(count)))
    if rank >= count:
        return
    options = dict(options)
    is_packed = 'cu_seqlens' in options
    tensors = drawn(rows, is_packed)
    if 's_aux' in options:
        options['s_aux'] = torch.randn(4, dtype=torch.float64)
    where = dict(group=group, zigzag=options.get('zigzag', True))
    ring = lambda *args, **others: distributed.ring_attention(*args, group=group, **others)
    got, expected = on_ranks(ring, tensors, dict(options), where, int(not is_packed)), \
        whole(tensors, options)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', CASES)
def test_ring(name, ranks):
    """NaN in the padding reaches nothing."""
    ranks.run(check_ring, name)


# ------------------------------------------------------------------------------ ulysses, and both
MESHES = {    # ring, ulysses, rows of the whole, heads of k and v, arguments
    'ulysses': (1, 4, 21, 4, dict(causal=True)),
    'ulysses, GQA repeated': (1, 4, 20, 2, dict(causal=True, s_aux=True)),
    'both': (2, 2, 27, 2, dict(causal=True, window_size=(11, -1))),
    'both, contiguous': (2, 2, 26, 2, dict(zigzag=False)),
    'both, packed': (2, 2, 41, 2, dict(causal=True, cu_seqlens=DOCUMENTS))}


def check_mesh(rank: int, name: str) -> None:
    rings, parts, rows, heads_k, options = MESHES[name]
    mesh = init_device_mesh('cpu', (rings, parts), mesh_dim_names=('ring', 'ulysses'))
    options, is_packed = dict(options), 'cu_seqlens' in options
    tensors = drawn(rows, is_packed)
    tensors[1:3] = [x.repeat_interleave(heads_k // 2, -2) for x in tensors[1:3]]
    if 's_aux' in options:
        options['s_aux'] = torch.randn(4, dtype=torch.float64)
    ring = mesh['ring'] if rings > 1 else None
    where = dict(group=ring, ulysses_group=mesh['ulysses'], zigzag=options.get('zigzag', True))
    attend = lambda *args, **others: distributed.ulysses_attention(
        *args, group=mesh['ulysses'], ring_group=ring, **others)
    got, expected = on_ranks(attend, tensors, dict(options), where, int(not is_packed)), \
        whole(tensors, options)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', MESHES)
def test_ulysses(name, ranks):
    ranks.run(check_mesh, name)


# ---------------------------------------------------------------------------------- 16-bit numbers
def check_bar(rank: int, name: str) -> None:
    """Errors at most twice those of plain PyTorch; the same bits again."""
    dtype = getattr(torch, name)
    tensors = drawn(120, False, dtype)
    where = dict(zigzag=True)
    ring = lambda *args, **others: distributed.ring_attention(*args, causal=True, **others)
    (out, lse), gradients = on_ranks(ring, tensors, dict(deterministic=True), where, 1)
    again = on_ranks(ring, tensors, dict(deterministic=True), where, 1)
    for x, y in zip((out, lse, *gradients), (*again[0], *again[1])):
        compare.check_equal(x, y, 'again')
    (ref, ref_lse), ref_gradients = whole([x.double() for x in tensors], dict(causal=True))
    inputs, score = Inputs(*tensors[:3]), Score(16 ** -0.5, mask=Mask(True))
    pt = reference.attend(inputs, score)
    dlse = ref_lse.cos().to(dtype)
    pt_gradients = reference.attend_backward(tensors[3], dlse, inputs, score)
    compare.check_close(out, ref, pt.out, 'out')
    compare.check_lse(lse, ref_lse)
    floors = compare.cancellation_floors(tuple(tensors[:3]), tensors[3], 16 ** -0.5)
    for letter, *three in zip('qkv', gradients, ref_gradients, pt_gradients):
        compare.check_close(*three, f'd{letter}', floors[f'd{letter}'])


@pytest.mark.parametrize('name', ['bfloat16', 'float16'])
def test_bar(name, ranks):
    ranks.run(check_bar, name)


def test_many_parts_are_rounded_few_times():
    """64 parts of one cell: three rounds of four, then what is left; never more than nine wait."""
    from flash_attn3.distributed.ring import _Parts
    from flash_attn3.distributed.tiles import Plan
    outs, lses = torch.randn(64, 1, 6, 2, 8), torch.randn(64, 1, 2, 6)
    parts = _Parts(Plan((), ((0, 6),)))
    for out, lse in zip(outs.bfloat16(), lses):
        parts.add((0, 6), out, lse)
        assert len(parts._of_cell[0, 6]) <= 9
    out, lse = torch.empty(1, 6, 2, 8).bfloat16(), torch.empty(1, 2, 6)
    parts.write(out, lse)
    weights = (lses.double() - lses.double().logsumexp(0)).exp().transpose(-1, -2).unsqueeze(-1)
    exact = (weights * outs.bfloat16().double()).sum(0)
    assert (out - exact).abs().max() <= 2 ** -8 * outs.abs().max()
    torch.testing.assert_close(lse, lses.logsumexp(0))


# ------------------------------------------------------------------------------- torch.compile
def check_compiled(rank: int, backend: str) -> None:
    """One graph, forward and backward, for a group and a mesh."""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('ring', 'ulysses'))
    ring, tensors = mesh['ring'].get_group(), drawn(32, False, torch.float32)

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.ulysses_attention(q * 2, k, v, causal=True, group=mesh['ulysses'],
                                             ring_group=ring)

    results = []
    for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
        leaves = [distributed.shard(x).clone().requires_grad_() for x in tensors[:3]]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_compile(ranks):
    ranks.run(check_compiled, 'aot_eager')


# ------------------------------------------------------------------------------------ bad input
def call_with(group, change: str, **options) -> None:
    q, k, v = (torch.randn(1, 8, 4, 16) for _ in range(3))
    if change == 'rows':
        q, k, v = (x[:, :6] for x in (q, k, v))
    elif change == 'heads':
        k, v = k[:, :, :2], v[:, :, :2]
    elif change == 'dtype':
        q, k, v = (x.half() for x in (q, k, v))
    elif change == 'odd':
        q, k, v = (x[:, :7] for x in (q, k, v))
    elif change == 'keys':
        k, v = k[:, :4], v[:, :4]
    elif change == 'sinks':
        options['s_aux'] = torch.zeros(3)
    elif change:
        options |= {'causal': dict(causal=True), 'scale': dict(softmax_scale=0.5),
                    'seqlen': dict(seqlen=20), 'long': dict(seqlen=200)}[change]
    distributed.ring_attention(q, k, v, group=group, **options)


DIFFERENT = {    # what rank 2 does, and what all ranks then say
    'rows': r'same q.shape on all ranks.*\(1, 6, 4, 16\) on rank 2 and \(1, 8, 4, 16\) on rank 0',
    'heads': 'same k.shape on all ranks', 'dtype': 'same q.dtype .*float16 on rank 2',
    'causal': r'same causal or window_size .*\(-1, 0\) on rank 2 and \(-1, -1\)', 'scale': 'same softmax_scale',
    'seqlen': 'same seqlen .*20 on rank 2', 'odd': r'an even number of rows.*\(on rank 2 of the',
    'keys': 'as many rows as q, 8, got 4.*rank 2', 'sinks': 's_aux.*on rank 2',
    'long': 'seqlen of up to 32, .*got 200.*rank 2'}


def check_different(rank: int, change: str) -> None:
    from flash_attn3 import env
    env.CHECK_CONTENTS = True
    with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected .*' + DIFFERENT[change]):
        call_with(None, change if rank == 2 else '')
    env.CHECK_CONTENTS = False


@pytest.mark.parametrize('change', DIFFERENT)
def test_ranks_that_differ(change, ranks):
    """Under FLASH_ATTN3_CHECKS=1 all ranks raise, and none waits."""
    ranks.run(check_different, change)


def check_own_errors(rank: int) -> None:
    """What is wrong everywhere, without FLASH_ATTN3_CHECKS."""
    q = torch.randn(1, 8, 6, 16)
    packed = torch.randn(8, 2, 16)
    for call, text in (
            (lambda: call_with(None, 'keys'), 'k and v of as many rows as q'),
            (lambda: distributed.ring_attention(q[0], q, q), 'q, k and v of 4 dimensions'),
            (lambda: distributed.ring_attention(q, q, q, cu_seqlens=(0, 32)), 'of 3 without batch'),
            (lambda: distributed.ring_attention(packed, packed, packed, cu_seqlens=(0, 9, 4)),
             r'cu_seqlens\[2\].*the rows of all ranks'),
            (lambda: distributed.ring_attention(q, q, q, window_size=(-3, 0)), 'window'),
            (lambda: distributed.ulysses_attention(q, q, q), 'heads of q divisible by 12, .*got 6'),
            (lambda: distributed.ulysses_attention(q[0, 0], q, q), '3 or 4 dimensions')):
        with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected .*' + text):
            call()


def test_own_errors(ranks):
    ranks.run(check_own_errors)


def check_missing_peer(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        text = r'ring_attention: expected an answer of ranks \[1\] .*FLASH_ATTN3_CHECKS=1'
        with pytest.raises(RuntimeError, match=f'(?s){text}'):
            call_with(group, '')


def test_missing_peer(ranks):
    """One that never comes: the time limit of the group, with the name of the peer."""
    ranks.run(check_missing_peer)


def test_no_process_group():
    q = torch.randn(1, 8, 4, 16)
    with pytest.raises(RuntimeError, match='a process group, got none .*init_process_group'):
        distributed.ring_attention(q, q, q)
