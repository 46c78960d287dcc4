"""The same call gives the same bits, every time, also with other work on the GPU."""
import pytest
import torch

from flash_attn3 import flash_attn_func

from tests.gpu.common import every_kind
from tests.support.cases import Case

REPEATS = 100
CASES = [Case(1000, 1100, batch=4, heads_q=8, heads_k=2),
         Case(65, 2000, batch=8, heads_q=16, heads_k=2, pack_gqa=True),
         Case(1100, 1000, batch=2, heads_q=16, heads_k=16)]


def differing_repeats(tensors, case):
    """How many of REPEATS calls give other bits than the first; counted on the device."""
    def bits():
        out, lse = flash_attn_func(*tensors, return_attn_probs=True, **case.arguments())
        return out.view(torch.int16), lse.view(torch.int32)

    first = bits()
    differing = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for _ in range(REPEATS):
        differing += sum((a != b).any().long() for a, b in zip(bits(), first)).clamp(max=1)
    return int(differing)


@every_kind
@pytest.mark.parametrize('case', CASES, ids=Case.sizes)
def test_a_hundred_repeats(case, kind, device):
    case = case.of(kind)
    assert differing_repeats(case.tensors(device), case) == 0


@pytest.mark.smoke
@every_kind
def test_a_hundred_repeats_with_other_work(kind, cuda):
    """Another stream keeps L2, memory and some multiprocessors busy."""
    case = CASES[0].of(kind)
    tensors = case.tensors(cuda)
    busy = torch.randn(2048, 2048, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(200):
            busy = (busy @ busy).clamp(-1, 1)
    assert differing_repeats(tensors, case) == 0
    torch.cuda.synchronize()
