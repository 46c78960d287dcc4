"""Small calls that run every built kernel, under NVIDIA's compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --kernel-name kernel_substring=ward_ \\
        --error-exitcode 9 python -m tests.sanitize
    compute-sanitizer --tool initcheck --kernel-name kernel_substring=ward_ \\
        --error-exitcode 9 python -m tests.sanitize

(`make sanitize` does both; the filter takes forward_kernel and the three kernels of the backward.)
Lengths that fill no tile, GQA with packing, and a causal call with rows that see no key; gradients
of out and of the LSE where there is a backward kernel, in both of its modes. racecheck does not
understand bulk copies; tests/gpu/test_repeat.py and test_deterministic.py look for races.
"""
import torch

import flash_attn3
from tests.cases import GRADIENT_KINDS, KINDS, OTHER_TILES, Case, Kind

SMALL = [Case(67, 150, batch=1, heads_q=2, heads_k=2),
         Case(5, 33, heads_q=6, heads_k=2, pack_gqa=True),
         Case(150, 67, batch=1, heads_q=2, heads_k=1, pack_gqa=False)]
CASES = [*SMALL, *OTHER_TILES]


def calls() -> list[tuple[Case, Kind]]:
    """What is run. Gradients: of the small cases, which all reach the one backward of a kind."""
    return [(case.of(kind), kind) for kinds, cases in ((KINDS, CASES), (GRADIENT_KINDS, SMALL))
            for case in cases for kind in kinds]


def run(case: Case, with_gradients: bool) -> None:
    tensors = case.tensors('cuda')
    for deterministic in (False, True) if with_gradients else (False,):
        out, lse = flash_attn3.flash_attn_func(*tensors, return_attn_probs=True, **case.arguments())
        if with_gradients:
            out, lse, dout, dlse = map(from_host, (out, lse, out, lse))
            torch.ops.flash_attn3.bwd(dout, dlse, *tensors, out, lse, case.softmax_scale,
                                      case.causal, deterministic)
    torch.cuda.synchronize()


def from_host(like: torch.Tensor) -> torch.Tensor:
    """Random numbers that initcheck takes for initialised: it sees copies from the host, but
    neither what the copy engine writes nor what a kernel does that the filter leaves out.
    """
    return torch.randn(like.shape, dtype=like.dtype).cuda()


def main() -> None:
    built = [(case, kind) for case, kind in calls() if not kind.missing_variants()]
    for case, kind in built:
        run(case, with_gradients=kind in GRADIENT_KINDS)
    print(f'{len(built)} calls on {torch.cuda.get_device_name()}')


if __name__ == '__main__':
    main()
