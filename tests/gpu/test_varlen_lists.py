"""The lists of sequences on the GPU: nothing waits for them, a graph reads their contents at each
replay, and nonsense in them does no harm.
"""
from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_varlen_func
from flash_attn3.cpu.reference import Inputs

from tests.gpu.test_varlen import CASE, LENGTHS, PLAIN_OR_GENERAL, every_kind, two_kinds
from tests.support import compare, layouts
from tests.support.general_cases import GeneralCase, Results, Tensors, forward, run
from tests.support.general_oracle import check, check_same

ROOT = Path(__file__).resolve().parents[2]
DELAY_CYCLES = 50_000_000    # about 30 ms


# ------------------------------------------------------------------------------------------ waiting
@pytest.fixture
def waiting_is_an_error(cuda: torch.device) -> Iterator[torch.device]:
    """What PyTorch knows to wait for the GPU raises an error, once this is entered."""
    yield cuda
    torch.cuda.set_sync_debug_mode('default')


@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
def test_nothing_waits_for_the_gpu(features, kind, waiting_is_an_error):
    """Forward and backward return while the stream is busy before them; max_seqlen on the GPU."""
    case = dataclasses.replace(CASE, used=LENGTHS).of(kind, **features)
    tensors = case.tensors(waiting_is_an_error)
    longest = torch.tensor(300, device=waiting_is_an_error)
    wanted = run(case, tensors, max_seqlen_q=longest, max_seqlen_k=longest)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    for factor in (1, 4, 16, 64):    # a host with more to do takes longer
        torch.cuda._sleep(DELAY_CYCLES * factor)
        got = run(case, tensors, max_seqlen_q=longest, max_seqlen_k=longest)
        if is_busy := not torch.cuda.current_stream().query():
            break
    torch.cuda.set_sync_debug_mode('default')
    assert is_busy
    check_same(got, wanted)


@pytest.mark.smoke
@every_kind
def test_lists_that_arrive_late(kind, cuda):
    """On a side stream, after a slow kernel: before they arrive, the lists hold nonsense."""
    case = dataclasses.replace(CASE, used=LENGTHS).of(kind)
    tensors = case.tensors(cuda)
    wanted = run(case, tensors)
    late = {name: torch.full_like(x, -7) if isinstance(x, Tensor) else x
            for name, x in tensors.lists.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for name, x in late.items():
            if isinstance(x, Tensor):
                x.copy_(tensors.lists[name])
        got = run(case, tensors._replace(lists=late))
    stream.synchronize()
    check_same(got, wanted)


@two_kinds
@PLAIN_OR_GENERAL
def test_launches_one_after_another(features, kind, cuda):
    """Calls with alternating lengths, whose tables are in the same memory."""
    cases = [CASE.of(kind, **features),
             GeneralCase(((300, 20), (17, 500)), heads=(6, 2), deterministic=True).of(
                 kind, **features)]
    calls = [(case, case.tensors(cuda)) for case in cases]
    wanted = [run(*call) for call in calls]
    torch.cuda.synchronize()
    got = [run(*calls[i % 2]) for i in range(20)]
    for i, results in enumerate(got):
        check_same(results, wanted[i % 2])


# ------------------------------------------------------------------------------------------- graphs
# All in tensors of the same size; with other rows after the last sequence.
REPLAYED = (((113, 203), (1, 1), (260, 131), (64, 300)), ((0, 0), (438, 635), (0, 0), (0, 0)),
            ((100, 1), (0, 400), (130, 0), (77, 77)), ((0, 0),) * 4,
            ((1, 1), (2, 2), (3, 3), (4, 4)))
ROWS = tuple(sum(one[i] for one in REPLAYED[0]) for i in (0, 1))


@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('with_used', [False, True], ids=['all', 'used'])
def test_a_graph_replays_with_other_lengths(with_used, features, kind, cuda):
    cases = []
    for lengths in REPLAYED:
        behind = tuple(rows - sum(one[i] for one in lengths) for i, rows in enumerate(ROWS))
        used = tuple((q // 2, k - k // 3) for q, k in lengths) if with_used else None
        cases.append(GeneralCase(lengths, heads=(6, 2), used=used, behind=behind,
                                 deterministic=True).of(kind, **features))
    tensors = cases[0].tensors(cuda)
    longest = {'max_seqlen_q': ROWS[0], 'max_seqlen_k': ROWS[1]}
    run(cases[0], tensors, **longest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(cases[0], tensors, **longest)
    for case in (*cases, cases[0]):
        lists = case.lists(cuda)
        wanted = run(case, tensors._replace(lists=lists), **longest)
        check(case, tensors, wanted)
        for name, x in tensors.lists.items():
            if isinstance(x, Tensor):
                x.copy_(lists[name])
        for x in got:
            if x is not None:
                x.fill_(math.nan)
        graph.replay()
        check_same(got, wanted)


# ----------------------------------------------------------------------------------------- nonsense
NONSENSE = {    # instead of 0, 113, 114, 114, 374, 381, 445, 445, 574 and of those of k
    'falling': [0, 300, 100, 400, 20, 574, 300, 1, 0],
    'negative': [-5, -100, 50, -1, 300, -2 ** 31, 300, 400, 574],
    'beyond': [0, 100, 10_000, 2 ** 31 - 1, 575, 2 ** 30, 600, 10 ** 9, 2 ** 31 - 1],
    'all_beyond': [10 ** 6] * 9,
    'all_negative': [-1] * 9,
    'overlapping': [0, 574, 0, 574, 0, 574, 0, 574, 0],
    'everything': [-2 ** 31, 2 ** 31 - 1] * 4 + [0],
}
NONSENSE_USED = {'beyond': [10 ** 6] * 8, 'negative': [-1] * 8,
                 'everything': [2 ** 31 - 1, -2 ** 31] * 4}
PATTERN = 0x5A


class Guards:
    """Blocks of memory with holes between them, where results of these sizes are allocated."""

    def __init__(self, like: Results):
        self.blocks: list[Tensor] = []
        self.holes: set[int] = set()
        for size in {x.nbytes for x in like if x is not None}:
            blocks = [torch.full((size,), PATTERN, dtype=torch.uint8, device=like.out.device)
                      for _ in range(24)]
            self.blocks += blocks[::2]
            self.holes |= {x.data_ptr() for x in blocks[1::2]}

    def check(self, results: Results) -> None:
        for name, x in results._asdict().items():
            assert x is None or x.data_ptr() in self.holes, f'{name} is not between guards'
        for block in self.blocks:
            assert (block == PATTERN).all()


def check_harmless(case: GeneralCase, tensors: Tensors, lists: dict) -> None:
    """A call with these lists writes nothing around its results, and the next call of the others
    is right.
    """
    wanted = run(case, tensors)
    bad = tensors._replace(lists=tensors.lists | lists)
    guards = Guards(wanted)
    guards.check(run(case, bad))

    out = layouts.DIRECT[0].place(torch.full_like(wanted.out, math.nan)[None])[0]
    out.zero_()
    around = layouts.nan_count(out)
    guards.check(Results(None, forward(case, bad, out=out)[1], *[None] * 5))
    assert layouts.nan_count(out) == around
    check_same(run(case, tensors), wanted)


@pytest.mark.smoke
@two_kinds
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('name', NONSENSE)
@pytest.mark.parametrize('which', ['q', 'k', 'qk'])
def test_nonsense_in_cu_seqlens(which, name, features, kind, cuda):
    case = CASE.of(kind, **features)
    bad = torch.tensor(NONSENSE[name], dtype=torch.int32, device=cuda)
    check_harmless(case, case.tensors(cuda), {f'cu_seqlens_{x}': bad for x in which})


@pytest.mark.smoke
@two_kinds
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('name', NONSENSE_USED)
@pytest.mark.parametrize('which', ['q', 'k', 'qk'])
def test_nonsense_in_seqused(which, name, features, kind, cuda):
    case = CASE.of(kind, **features)
    bad = torch.tensor(NONSENSE_USED[name], dtype=torch.int32, device=cuda)
    check_harmless(case, case.tensors(cuda), {f'seqused_{x}': bad for x in which})


@two_kinds
def test_nonsense_reads_nothing_outside(kind, cuda):
    """Inputs inside NaN: sequences that would leave them give finite results. (Rows of no sequence
    may not be written: the memory of the results holds zeros.)
    """
    case = CASE.of(kind)
    tensors = case.tensors(cuda)
    like = run(case, tensors)
    q, k, v, dout = (layouts.DIRECT[0].place(x[None])[0]
                     for x in (*tensors.inputs[:3], tensors.dout))
    for numbers in NONSENSE.values():
        bad = torch.tensor(numbers, dtype=torch.int32, device=cuda)
        lists = tensors.lists | {'cu_seqlens_q': bad, 'cu_seqlens_k': bad}
        zeros = [torch.zeros_like(x) for x in like if x is not None for _ in range(8)]
        del zeros
        got = run(case, Tensors(Inputs(q, k, v), dout, tensors.dlse, lists))
        for name in ('out', 'dq', 'dk', 'dv'):
            assert getattr(got, name).isfinite().all(), name


def test_more_tiles_than_the_rows_can_have(cuda):
    """A thousand sequences, of which every second one has all rows."""
    case = GeneralCase(((1, 1),) * 1000, heads=(2, 1), deterministic=True)
    tensors = case.tensors(cuda)
    bad = torch.tensor([0, 1000] * 500 + [0], dtype=torch.int32, device=cuda)
    check_harmless(case, tensors, {'cu_seqlens_q': bad, 'cu_seqlens_k': bad})


# ------------------------------------------------------------------------------- FLASH_ATTN3_CHECKS
BAD_LISTS = [    # for sequences of 3, 0 and 5 queries and 4, 3 and 1 keys; the error
    ({'cu_seqlens_q': [0, 3, 2, 8]},
     'cu_seqlens_q[2], the end of sequence 1, to be from 3, its start, to 8, the rows of q, got 2'),
    ({'cu_seqlens_k': [0, 9, 9, 9]},
     'cu_seqlens_k[1], the end of sequence 0, to be from 0, its start, to 8, the rows of k, got 9'),
    ({'cu_seqlens_q': [1, 3, 3, 8]}, 'cu_seqlens_q[0] to be 0, got 1'),
    ({'cu_seqlens_k': [0, 4, 7, -8]},
     'cu_seqlens_k[3], the end of sequence 2, to be from 7, its start, to 8, the rows of k, '
     'got -8'),
    ({'seqused_q': [3, 0, 6]},
     'seqused_q[2] to be from 0 to 5, the rows of sequence 2, got 6'),
    ({'seqused_k': [4, -1, 9]},
     'seqused_k[1] to be from 0 to 3, the rows of sequence 1, got -1'),
]
CHECKED = '''
import sys, torch
from flash_attn3 import flash_attn_varlen_func
from tests.gpu.test_varlen_lists import BAD_LISTS
def ints(values): return torch.tensor(values, dtype=torch.int32, device=sys.argv[1])
q, k = (torch.ones(8, 2, 64, dtype=torch.bfloat16, device=sys.argv[1]) for _ in range(2))
good = {'cu_seqlens_q': [0, 3, 3, 8], 'cu_seqlens_k': [0, 4, 7, 8]}
def call(lists):
    lists = {name: ints(x) for name, x in (good | lists).items()}
    return flash_attn_varlen_func(q, k, k, max_seqlen_q=5, max_seqlen_k=4, **lists)
call({})
for lists, _ in BAD_LISTS:
    try:
        call(lists)
        print('no error')
    except RuntimeError as error:
        print(error)
'''


@pytest.mark.smoke
def test_checks_name_the_first_bad_sequence(device):
    """In another process: the variable is read at import."""
    done = subprocess.run([sys.executable, '-c', CHECKED, str(device)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {'FLASH_ATTN3_CHECKS': '1'})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f'flash_attn3.flash_attn_varlen_func: expected {text}'
                                        for _, text in BAD_LISTS]


@pytest.mark.smoke
def test_a_list_that_changes_before_the_backward_is_refused(device):
    """By PyTorch, as a changed input: the gradients would be those of other sequences."""
    tensors = CASE.tensors(device)
    leaf = tensors.inputs.q.requires_grad_()
    out = flash_attn_varlen_func(leaf, *tensors.inputs[1:3], **tensors.lists)
    tensors.lists['cu_seqlens_q'][1] -= 1
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        torch.autograd.grad(out, leaf, tensors.dout)


@pytest.mark.smoke
@every_kind
def test_lists_and_hints_of_other_kinds(kind, device):
    """One list for both sides; seqused that covers all rows changes no bit."""
    lengths = tuple((q, q) for q, _ in LENGTHS)
    case = GeneralCase(lengths, heads=(6, 2), deterministic=True).of(kind)
    tensors = case.tensors(device)
    wanted = run(case, tensors)
    lists = tensors.lists
    shared = lists | {'cu_seqlens_k': lists['cu_seqlens_q']}
    check_same(run(case, tensors._replace(lists=shared)), wanted)
    everything = dataclasses.replace(case, used=lengths)
    check_same(run(everything, tensors._replace(lists=everything.lists(device))), wanted)
    used = everything.lists(device)['seqused_k']
    compare.check_equal(forward(everything, tensors, seqused_k=used)[0], wanted.out, 'out')
