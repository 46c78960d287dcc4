"""flash_attn3.distributed on up to four gloo ranks: outputs, LSEs and gradients, against attention
of the whole sequence in one process, in float64 and by the bar of tests/support/compare.py.
"""
from __future__ import annotations

import datetime
import gc
import math
import time
import weakref
from collections.abc import Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_attn3 import AttentionMask, distributed, env
from flash_attn3.ops import library
from flash_attn3.distributed import copies, exchange, masks, ring
from flash_attn3.distributed.tiles import order_of
from flash_attn3.cpu.reference import Mask, Score

from tests.cpu.two_processes import Pair
from tests.support import compare, sdpa_hook
from tests.support.distributed_cases import (CASES, Case, Drawn, attention_of, drawn, on_ranks,
                                             plain, whole)

pytestmark = pytest.mark.slow

RANKS = 4
_START = exchange.Link.start


@pytest.fixture(scope='module')
def ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('GLOO_SOCKET_IFNAME', 'lo')
        ranks = Pair(count=RANKS)
        yield ranks
        ranks.close()


def check_case(rank: int, name: str) -> None:
    case = CASES[name]
    attention = attention_of(case, 'cpu')
    if attention[-1] is None:
        return
    tensors = drawn(case, torch.float64)
    for got, expected in zip(on_ranks(case, tensors, attention), whole(case, tensors),
                             strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', CASES)
def test_cases(name, ranks):
    """NaN in the padding reaches nothing."""
    ranks.run(check_case, name)


# --------------------------------------------------------------------------------- copy engines
class SharedFiles:
    """In place of symmetric memory: a file of each rank, which all ranks map."""

    def __init__(self, folder: str, size: int, group: dist.ProcessGroup):
        self._bytes = [torch.from_file(f'{folder}/{rank}', shared=True, size=size,
                                       dtype=torch.uint8) for rank in range(group.size())]
        self._group = group

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype,
                   offset: int) -> Tensor:
        begin = offset * dtype.itemsize
        end = begin + math.prod(shape) * dtype.itemsize
        return self._bytes[rank][begin:end].view(dtype).view(shape)

    def barrier(self, *_) -> None:
        dist.barrier(self._group)


@contextmanager
def copies_in(folder: str, slow_rank: int = -1):
    """Keys travel by copies between files; that rank is late with each step."""
    links, attend = {}, ring._attend

    def link_of(op: str, group: str, tensors: tuple[Tensor, Tensor]):
        if not links:
            size = copies.buffer_bytes([x.shape for x in tensors], tensors[0].itemsize)
            ranks = exchange.group_of(group)
            memory = SharedFiles(folder, copies.buffers_of(ranks.size()) * size, ranks)
            links[0] = copies.CopyLink(op, group, memory, size, tensors[0].device)
        links[0].begin_call()
        return links[0]

    def late(*arguments):
        if dist.get_rank() == slow_rank:
            time.sleep(0.02)
        return attend(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, 'link_of', link_of)
        patch.setattr(ring, '_attend', late)
        yield


def check_copies(rank: int, name: str, folder: str) -> None:
    """The backward, and a second call of less rows, go on in the buffers of the first."""
    case = CASES[name]
    attention = attention_of(case, 'cpu')
    if attention[-1] is None:
        return
    with copies_in(folder):
        for rows in (case.rows, case.rows - 4):
            smaller = case._replace(rows=rows)
            tensors = drawn(smaller, torch.float64)
            got = on_ranks(smaller, tensors, attention)
            for x, expected in zip(got, whole(smaller, tensors)):
                torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', ['causal', 'sinks, softcap', 'causal window', 'window',
                                  'full, two ranks, padded'])
def test_copies(name, ranks, tmp_path):
    """The protocol of the buffers, with files in their place."""
    ranks.run(check_copies, name, str(tmp_path))


def check_calls_in_a_row(rank: int, count: int, folder: str) -> None:
    group = dist.new_group(list(range(count)))
    if rank >= count:
        return
    case = Case(count, 1, 8 * count, dict(causal=True))
    several = [drawn(case, torch.float64) for _ in range(3)]
    with copies_in(folder, slow_rank=1):
        outs = [distributed.ring_attention(*(distributed.shard(x, group=group)
                                             for x in tensors[:3]), causal=True, group=group)
                for tensors in several]
    for tensors, out in zip(several, outs):
        torch.testing.assert_close(out, distributed.shard(whole(case, tensors)[0], group=group),
                                   rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('count', [2, 4])
def test_calls_in_a_row(count, ranks, tmp_path):
    """Nothing but their messages keeps ranks in step: no buffer is written while it is read."""
    ranks.run(check_calls_in_a_row, count, str(tmp_path))


def check_opening(rank: int, problem: str) -> None:
    def fails(*_) -> None:
        raise RuntimeError('no peer access')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies.symmetric, 'empty', lambda size, **_: torch.empty(size))
        patch.setattr(copies.symmetric, 'rendezvous', lambda own, group: own)
        patch.setattr(copies, '_openings', 0)
        if rank == 1 and problem == 'another rendezvous':
            patch.setattr(copies, '_openings', 1)
        elif rank == 1 and problem == 'another host':
            patch.setattr(copies.socket, 'gethostname', lambda: 'other')
        elif rank == 1 and problem:
            patch.setattr(copies.symmetric, problem, fails)
        link = copies._opened('', dist.group.WORLD.group_name, 64, torch.device('cpu'))
        assert (link is None) == bool(problem)


@pytest.mark.parametrize('problem', ['', 'empty', 'rendezvous', 'another rendezvous',
                                     'another host'])
def test_opening(problem, ranks):
    """What fails on one rank, all do without."""
    ranks.run(check_opening, problem)


# ------------------------------------------------------------------------------------------ memory
class Alive(TorchDispatchMode):
    """Bytes of the tensors that ops made, without those of `known`: at the end of each call of
    attention, and the most at the end of any op.
    """

    def __init__(self, known: Sequence[Tensor]):
        super().__init__()
        self.in_calls, self.most, self._now = [], 0, 0
        self._storages = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.numel():
                self._count(x.untyped_storage())
        self.most = max(self.most, self._now)
        if op in (ring._attend, ring._bwd):
            self.in_calls.append(self._now)
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._storages:
            self._storages.add(address)
            self._now += size
            weakref.finalize(storage, self._freed, address, size)

    def _freed(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self._now -= size


def check_memory(rank: int, most: tuple[list[float], list[float]]) -> None:
    count = len(most[0])
    group = dist.new_group(list(range(count)))
    if rank >= count:
        return
    q, k, v, dout = (torch.randn(1, 64, 4, 64).bfloat16() for _ in range(4))
    own = ring.Ring(group.group_name, order_of(count), 0.125, (-1, 0))
    with pytest.MonkeyPatch.context() as patch:
        # The op that merges on a GPU, not plain PyTorch with its temporaries.
        patch.setattr(ring.merging, '_list_is_served', lambda *_: True)
        with Alive((q, k, v)) as forward:
            out, lse, _ = ring._forward(q, k, v, None, None, None, *own)
        with Alive((q, k, v, dout, out, lse)) as backward:
            ring._backward(dout, None, q, k, v, out, lse, None, None, None, *own)
    for alive, limits in zip((forward, backward), most):
        found = [x / q.nbytes for x in (*alive.in_calls, alive.most)]
        limits = [limit + 0.15 for limit in (*limits, max(limits))]    # LSEs
        assert all(x <= limit for x, limit in zip(found, limits)), found


@pytest.mark.parametrize('most', [([3, 3.5], [5, 7.5]), ([3, 6, 6.5, 5.5], [5, 12.5, 15.5, 13.5])],
                         ids=['two ranks', 'four ranks'])
def test_memory(most, ranks):
    """In each step of the forward and of the backward, on the rank that needs most; in sizes of q,
    16-bit. Causal, as zigzag: all rows of a rank see half of another's, or half see all.

    Forward: results; keys and values of the step, of the next. Four ranks: 1 + 2; 2 + 2 + 2;
    2.5 + 2 + 2; 3.5 + 2. Backward: sums, on four ranks in float32; keys; gradients sent and
    received; dq, dk and dv of the step. Four ranks: 2 + 3; 6 + 4 + 2.5; 6 + 4 + 3 + 2.5;
    6 + 2 + 3 + 2.5. Two: 2 + 3; 3 + 2 + 2.5.
    """
    ranks.run(check_memory, most)


# ---------------------------------------------------------------------------------- 16-bit numbers
def check_bar(rank: int, name: str) -> None:
    """Errors at most twice those of plain PyTorch; the same bits again."""
    case = Case(RANKS, 1, 120, dict(causal=True, return_max_logits=True))
    tensors = drawn(case, getattr(torch, name))
    attention = attention_of(case, 'cpu')
    got, again = (on_ranks(case, tensors, attention, deterministic=True) for _ in range(2))
    for x, y in zip(got, again):
        compare.check_equal(x, y, 'again')
    ref = whole(case, Drawn(*(x.double() for x in tensors[:4]), None))
    pt = plain(case, tensors, ref[1])
    floors = compare.cancellation_floors(tensors[:3], tensors.dout, 16 ** -0.5)
    compare.check_lse(got[1], ref[1])
    compare.check_lse(got[-1], ref[-1], 'max_logits')
    for letter, x, *others in zip('_lqkv', got, ref, pt):
        if letter != 'l':
            compare.check_close(x, *others, f'd{letter}', floors.get(f'd{letter}', 0.0))


@pytest.mark.parametrize('name', ['bfloat16', 'float16'])
def test_bar(name, ranks):
    ranks.run(check_bar, name)


def test_many_parts_are_rounded_few_times():
    """64 parts of one cell: three rounds of four, then what is left; never more than nine wait."""
    from flash_attn3.distributed.ring import _Parts
    from flash_attn3.distributed.tiles import Plan
    outs, lses = torch.randn(64, 1, 6, 2, 8), torch.randn(64, 1, 2, 6)
    parts = _Parts(Plan((), ((0, 6),)), 6)
    for out, lse in zip(outs.bfloat16(), lses):
        parts.add((0, 6), out, lse)
        assert len(parts._of_cell[0, 6]) <= 9
    out, lse = parts.result(None, None)
    weights = (lses.double() - lses.double().logsumexp(0)).exp().transpose(-1, -2).unsqueeze(-1)
    exact = (weights * outs.bfloat16().double()).sum(0)
    assert (out - exact).abs().max() <= 2 ** -8 * outs.abs().max()
    torch.testing.assert_close(lse, lses.logsumexp(0))


# ------------------------------------------------------------------------------- torch.compile
def check_compiled(rank: int, backend: str) -> None:
    """One graph, forward and backward, for a group and a mesh."""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('ring', 'ulysses'))
    ring, tensors = mesh['ring'].get_group(), drawn(Case(2, 2, 32, {}), torch.float32)

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return distributed.ulysses_attention(q * 2, k, v, causal=True, group=mesh['ulysses'],
                                             ring_group=ring, return_max_logits=True)

    results = []
    for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
        leaves = [distributed.shard(x).clone().requires_grad_() for x in tensors[:3]]
        out, largest = function(*leaves)
        assert not largest.requires_grad
        results.append([out, largest, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_compile(ranks):
    ranks.run(check_compiled, 'aot_eager')


# ------------------------------------------------------------------------------------------ masks
def check_mask_is_kept(rank: int) -> None:
    """What ranks compute with a mask is planned once, also for the gradients. Ranks that share no
    document exchange nothing, and the mask leaves with its tensors.
    """
    mask = AttentionMask.documents(torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32), 64)
    q = torch.randn(1, 16, 4, 16, requires_grad=True)
    sent, plans, plan = [], [], masks._plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, '_plan', lambda *given: plans.append(1) or plan(*given))
        patch.setattr(exchange.Link, 'start', lambda self, *given: sent.extend(
            x.numel() for x in given[0]) or _START(self, *given))
        for _ in range(2):
            distributed.ring_attention(q, q, q, mask=mask, zigzag=False).sum().backward()
    assert len(plans) == 1 and sum(sent) == 0
    count = len(masks._plans)
    del mask
    gc.collect()
    assert len(masks._plans) == count - 1


def test_masks_are_kept(ranks):
    ranks.run(check_mask_is_kept)


def check_compiled_mask(rank: int) -> None:
    mask = AttentionMask.prefix_lm(torch.tensor([9], dtype=torch.int32), 64)
    order = distributed.balanced_order(mask, RANKS, chunks=4)
    assert len(order) == 16

    def both(q: Tensor, mask: AttentionMask) -> Tensor:
        return (distributed.ring_attention(q * 2, q, q, mask=mask, order=order)
                + distributed.ulysses_attention(q * 2, q, q, mask=mask))

    results = []
    for function in (both, torch.compile(both, backend='aot_eager', fullgraph=True)):
        torch.manual_seed(rank)
        q = torch.randn(1, 16, 4, 16, requires_grad=True)
        out = function(q, mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), q)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_compiled_masks(ranks):
    ranks.run(check_compiled_mask)


def check_wrong_masks(rank: int) -> None:
    q = torch.randn(2, 16, 4, 16)
    prefix = torch.tensor([3, 4], dtype=torch.int32)
    mask = AttentionMask.prefix_lm(prefix, 64)
    starts = torch.tensor([0, 20, 64], dtype=torch.int32)
    blocks = AttentionMask.from_blocks(torch.ones(3, 1, 1, dtype=torch.bool), 64, 64)
    wrong = torch.zeros(64, 1, 2, dtype=torch.int32)
    wrong[5, 0, 1] = 65
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('ring', 'ulysses'))
    both = dict(group=mesh['ulysses'], ring_group=mesh['ring'])
    for options, text in (
            (dict(mask=mask, causal=True), 'no causal and no window_size with mask'),
            (dict(mask=wrong), 'mask to be an AttentionMask, got Tensor'),
            (dict(mask=AttentionMask.prefix_lm(prefix, 64), seqlen=60), 'a seqlen_q of 60, got on'),
            (dict(mask=AttentionMask.prefix_lm(prefix[:1].repeat(3), 64)), '2 sequences, the bat'),
            (dict(mask=AttentionMask.prefix_lm(prefix, 65)), 'seqlen to be at most 64'),
            (dict(mask=AttentionMask.prefix_lm(prefix, 64, starts)), 'dense sequences, made with'),
            (dict(mask=AttentionMask.from_intervals(wrong)), r'intervals\[0, 5, 0\] .* to 65')):
        for function in (distributed.ring_attention, distributed.ulysses_attention):
            with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected .*' + text):
                function(q, q, q, **options)
    with pytest.raises(NotImplementedError, match='ring_attention: expected a mask of intervals'):
        distributed.ring_attention(q, q, q, mask=blocks & mask)
    with pytest.raises(RuntimeError, match='ulysses_attention: expected mask for 4 heads of q'):
        distributed.ulysses_attention(q, q, q, mask=blocks)
    with pytest.raises(NotImplementedError, match='ulysses_attention: expected a mask of interv'):
        distributed.ulysses_attention(q, q, q, mask=AttentionMask.from_blocks(
            torch.ones(4, 1, 1, dtype=torch.bool), 64, 64), **both)
    packed = AttentionMask.prefix_lm(prefix, 64, starts)
    with pytest.raises(RuntimeError, match='mask with the cu_seqlens of the call'):
        distributed.ring_attention(q[0], q[0], q[0], mask=packed, cu_seqlens=(0, 30, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, 'CHECK_CONTENTS', True)
        own = AttentionMask.prefix_lm(prefix + (rank == 2), 64)
        with pytest.raises(RuntimeError, match='the same contents of mask on all ranks'):
            distributed.ring_attention(q, q, q, mask=own)


def test_wrong_masks(ranks):
    ranks.run(check_wrong_masks)


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
                    'largest': dict(return_max_logits=True), 'seqlen': dict(seqlen=20),
                    'long': dict(seqlen=200), 'order': dict(order=(1, 0, 2, 3)),
                    'wrong order': dict(order=(0, 1, 2, 4))}[change]
    distributed.ring_attention(q, k, v, group=group, **options)


DIFFERENT = {    # what rank 2 does, and what all ranks then say
    'rows': r'same q.shape on all ranks.*\(1, 6, 4, 16\) on rank 2 and \(1, 8, 4, 16\) on rank 0',
    'heads': 'same k.shape on all ranks', 'dtype': 'same q.dtype .*float16 on rank 2',
    'causal': r'same causal or window_size .*\(-1, 0\) on rank 2 and \(-1, -1\)',
    'scale': 'same softmax_scale', 'largest': 'same return_max_logits .*True on rank 2',
    'seqlen': 'same seqlen .*20 on rank 2', 'odd': r'divisible by 2, .*\(on rank 2 of the',
    'keys': 'as many rows as q, 8, got 4.*rank 2', 'sinks': 's_aux.*on rank 2',
    'long': 'seqlen to be at most 32, .*got 200.*rank 2',
    'order': r'same order .*\[1, 0, 2, 3\] on rank 2 and \[0, 7, 1, 6, 2, 5, ',
    'wrong order': 'order to hold each chunk from 0 to 3 once.*rank 2'}


def check_different(rank: int, change: str) -> None:
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
            (lambda: call_with(None, 'keys'), 'k and v to have as many rows as q'),
            (lambda: distributed.ring_attention(q[0], q, q), 'q, k and v of 4 dimensions'),
            (lambda: distributed.ring_attention(q, q, q, cu_seqlens=(0, 32)), 'or 3 without batch'),
            (lambda: distributed.ring_attention(packed, packed, packed, cu_seqlens=(0, 9, 4)),
             r'cu_seqlens\[2\].*the rows of all ranks'),
            (lambda: distributed.ring_attention(q, q, q, window_size=(-3, 0)), 'window'),
            (lambda: distributed.ulysses_attention(q, q, q),
             'the heads of q to be divisible by 12, .*got 6'),
            (lambda: distributed.ulysses_attention(q[0, 0], q, q), '3 or 4 dimensions'),
            (lambda: distributed.ulysses_attention(q[:, :, :4], q[:, :, :4], q[:, :, :4],
                                                   s_aux=torch.zeros(8)),
             r's_aux to have the shape \(4,\), got \(8,\)'),
            (lambda: distributed.ulysses_attention(*(q.to(torch.float8_e4m3fn),) * 3), 'q.dtype'),
            (lambda: distributed.ulysses_attention(q, q[:, :4], q[:, :4]), 'as many rows as q, 8'),
            (lambda: distributed.ring_attention(q, q, q, seqlen=-1), 'seqlen to be 0 or more'),
            (lambda: distributed.ring_attention(q, q, q, order=(0, 2)), 'as many of each of 4 ran'),
            (lambda: distributed.ring_attention(q, q, q, order=tuple(range(12))),
             'rows of q to be divisible by 3, the chunks of a rank, got 8'),
            (lambda: distributed.ulysses_attention(q, q, q, order=(1,)), 'order to hold each chu'),
            (lambda: distributed.positions(9, order=(0, 1, 3, 3)), 'order to hold each chunk'),
            (lambda: distributed.shard(q, order=(1, 0) * 4), 'rising within a rank, got .1, 0, 1'),
            (lambda: distributed.unshard(q, 9, order=(0,)), 'order to hold each chunk')):
        with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected .*' + text):
            call()


def test_own_errors(ranks):
    ranks.run(check_own_errors)


def check_refused(rank: int) -> None:
    """DTensors among q, k and v; derivatives of gradients; a scale that wants a gradient."""
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    shards = DTensor.from_local(q.detach(), init_device_mesh('cpu', (RANKS,)), [Replicate()])
    for function in (distributed.ring_attention, distributed.ulysses_attention):
        op = f'flash_attn3.{function.__name__}: expected '
        for tensors in ((shards, q, q), (q, q, shards)):
            with pytest.raises(NotImplementedError, match=f'{op}plain tensors, got a DTensor'):
                function(*tensors)
        with pytest.raises(NotImplementedError, match=f'{op}.*softmax_scale'):
            function(q, q, q, softmax_scale=torch.tensor(0.25, requires_grad=True))
        first, = torch.autograd.grad(function(q, q, q).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match='flash_attn3.* expected first derivatives'):
            torch.autograd.grad(first.sum(), q)


def test_refused(ranks):
    ranks.run(check_refused)


def check_missing_peer(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        text = r'ring_attention: expected an answer from ranks \[1\] .*FLASH_ATTN3_CHECKS=1'
        with pytest.raises(RuntimeError, match=f'(?s){text}'):
            call_with(group, '')


def test_missing_peer(ranks):
    """One that never comes: the time limit of the group, with the name of the peer."""
    ranks.run(check_missing_peer)


def test_gpus_without_kernels(monkeypatch):
    monkeypatch.setattr(library, 'KERNELS_MISSING', 'there is no library')
    with FakeTensorMode():
        x = torch.empty(1, 8, 4, 16, device='cuda')
        text = ring._problem(dict(q=x, k=x, v=x, s_aux=None), None, ring.Ring('', (0,), 1.0))
    assert text == ('flash_attn3.ring_attention: expected a Hopper GPU and its kernels, or CPU '
                    'tensors, got cuda:0; hint: there is no library')


def test_no_process_group():
    q = torch.randn(1, 8, 4, 16)
    with pytest.raises(RuntimeError, match='a process group, got none .*init_process_group'):
        distributed.ring_attention(q, q, q)


# --------------------------------------------------------------------- torch's context_parallel
def check_torchs(rank: int, dtype_name: str) -> None:
    """scaled_dot_product_attention under it, forward and backward, on our ops."""
    from torch.distributed.tensor.experimental import context_parallel
    mesh = init_device_mesh('cpu', (RANKS,))
    case = Case(RANKS, 1, 64, dict(causal=True))
    tensors = drawn(case, getattr(torch, dtype_name), 16, 16)
    inputs = [x.transpose(1, 2).contiguous() for x in tensors[:4]]    # heads before rows
    with pytest.MonkeyPatch.context() as patch:
        sdpa_hook.serve_cpu(patch)
        calls = sdpa_hook.count_calls(patch)
        patch.setattr(sdpa_hook.flash_sdpa, '__name__', 'scaled_dot_product_attention')
        patch.setattr(F, 'scaled_dot_product_attention', sdpa_hook.flash_sdpa)
        with sdpa_hook.enabled(), context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2] * 4):
            leaves = [x.clone().requires_grad_() for x in inputs[:3]]
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            gradients = torch.autograd.grad(out, leaves, inputs[3])
            got = [x.transpose(1, 2).contiguous() for x in (out.detach(), *gradients)]
    assert calls.count('fwd') == calls.count('bwd') == RANKS, calls
    got = [distributed.unshard(x, case.rows) for x in got]
    sdpa_hook.check(got, tensors[:3], tensors.dout, Score(16 ** -0.5, mask=Mask(True)))


def test_torchs_context_parallel(ranks):
    ranks.run(check_torchs, 'bfloat16')
