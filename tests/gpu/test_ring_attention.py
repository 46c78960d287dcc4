"""flash_attn3.distributed on two to four GPUs with NCCL and copy engines, against float64 and plain
PyTorch of the whole sequence. tests/cpu/test_ring_attention.py has every case, on four gloo ranks.
"""
from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flash_attn3 import distributed

from tests.cpu.two_processes import own_device, pair_on
from tests.support import compare
from tests.support.distributed_cases import (CASES, Case, Drawn, attention_of, drawn, on_ranks,
                                             plain, whole)

DIM, FACTOR, REPEATS = 64, 16, 20
DONE = 'a call has ended'


@pytest.fixture(scope='module')
def ranks(request):
    yield from pair_on(request.config.getoption('--device'), most=4)


def on_gpus(case: Case) -> Case:
    """The same, larger; on two ranks, of a ring or of ulysses, where there are too few."""
    if case.ring * case.ulysses > dist.get_world_size():
        ulysses = 2 if case.ring == 1 else 1
        case = case._replace(ring=2 // ulysses, ulysses=ulysses)
    return case.larger(FACTOR)


def moved(tensors: Drawn, device: torch.device, dtype: torch.dtype) -> Drawn:
    sinks = None if tensors.s_aux is None else tensors.s_aux.to(device)
    return Drawn(*(x.to(device, dtype) for x in tensors[:4]), sinks)


def check_repeats(rank: int) -> None:
    """Bits of out, LSE and gradients, while other work delays a rank now and then."""
    device, case = own_device(rank), Case(dist.get_world_size(), 1, 4096, dict(causal=True))
    tensors = moved(drawn(case, torch.bfloat16, DIM, DIM), device, torch.bfloat16)
    attention = attention_of(case, device.type)
    first = on_ranks(case, tensors, attention, deterministic=True)
    for repeat in range(REPEATS):
        if device.type == 'cuda' and repeat % dist.get_world_size() == rank:
            torch.cuda._sleep(20_000_000)
        again = on_ranks(case, tensors, attention, deterministic=True)
        for x, y in zip(first, again):
            compare.check_equal(x, y, f'run {repeat}')


def test_repeats(ranks):
    ranks.run(check_repeats)


def check_compiled(rank: int) -> None:
    device = own_device(rank)
    q, k, v = (torch.randn(1, 512, 4, DIM, device=device, dtype=torch.bfloat16,
                           requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return distributed.ring_attention(q * 2, k, v, causal=True, deterministic=True) + q

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    torch.testing.assert_close(*results)


def test_compile(ranks):
    ranks.run(check_compiled)


def check_case(rank: int, name: str) -> None:
    device, case = own_device(rank), on_gpus(CASES[name])
    attention = attention_of(case, device.type)
    if attention[-1] is None:
        return
    tensors = drawn(case, torch.bfloat16, DIM, DIM)
    wide = moved(tensors, 'cpu', torch.float64)
    if wide.s_aux is not None:
        wide = wide._replace(s_aux=wide.s_aux.double())
    got = [x.cpu() for x in on_ranks(case, moved(tensors, device, torch.bfloat16),
                                     attention)]
    ref = whole(case, wide)
    pt = plain(case, tensors, ref[1])
    scale = case.options.get('softmax_scale', DIM ** -0.5)
    inputs = [x if x.dim() == 4 else x[None] for x in tensors[:3]]
    floors = compare.cancellation_floors(tuple(inputs), tensors.dout, scale)
    compare.check_lse(got[1], ref[1])
    if 'return_max_logits' in case.options:
        compare.check_lse(got.pop(), ref.pop(), 'max_logits')
    for number, (x, *others) in enumerate(zip(got, ref, pt)):
        what = ('out', 'lse', 'dq', 'dk', 'dv', 's_aux')[number]
        if what == 's_aux':
            flat = [y.reshape(-1, *y.shape[-2:]) for y in (ref[0], wide.dout)]
            lse = ref[1].transpose(-1, -2).reshape(-1, 4).T
            floors[what] = compare.sink_floor(flat[0], lse, flat[1], wide.s_aux, torch.bfloat16)
        if what != 'lse':
            compare.check_close(x, *others, what, floors.get(what, 0.0))


# Large groups first: after a smaller one they have no copy engines (copies.py).
@pytest.mark.parametrize('name', sorted(CASES, key=lambda name: -CASES[name].ring))
def test_cases(name, ranks):
    ranks.run(check_case, name)


def lose_peer(rank: int, meeting: str) -> None:
    """Rank 1 ends after one call, rank 0 calls again."""
    device = torch.device('cuda', rank)
    torch.cuda.set_device(device)
    dist.init_process_group('nccl', init_method=f'file://{meeting}', rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=5))
    x = torch.randn(1, 512, 4, DIM, device=device, dtype=torch.bfloat16)
    for _ in range(2 - rank):
        distributed.ring_attention(x, x, x, causal=True)
        torch.cuda.synchronize()
        print(DONE, file=sys.stderr, flush=True)
    os._exit(0)


@pytest.mark.parametrize('copies', ['0', '1'])
def test_lost_peer(copies, request, tmp_path):
    """NCCL's watchdog says so after the time limit of the group, and the call before went well."""
    if request.config.getoption('--device') != 'cuda' or torch.cuda.device_count() < 2:
        pytest.skip('needs a second GPU')
    command = 'from tests.gpu.test_ring_attention import lose_peer; lose_peer({}, {!r})'
    ranks = [subprocess.Popen([sys.executable, '-c', command.format(rank, str(tmp_path / 'meet'))],
                              env=os.environ | {'FLASH_ATTN3_COPY_ENGINES': copies},
                              cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
             for rank in range(2)]
    limit, lines = threading.Timer(60, ranks[0].kill), []
    limit.start()
    try:
        for line in ranks[0].stderr:
            lines.append(line)
            if 'Watchdog caught collective operation timeout' in line:
                break
        else:
            pytest.fail(''.join(lines))
        assert sum(DONE in line for line in lines) == 1
    finally:
        limit.cancel()
        for rank in ranks:
            rank.kill()
            rank.wait()
