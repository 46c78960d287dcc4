"""Small calls that run every built kernel, under NVIDIA's compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --kernel-name kernel_substring=N3fa3 \\
        --error-exitcode 9 python -m tests.sanitize
    compute-sanitizer --tool initcheck --kernel-name kernel_substring=N3fa3 \\
        --error-exitcode 9 python -m tests.sanitize

(`make sanitize` does both; the filter goes by mangled names and takes the namespace fa3: both
directions, and what makes their tables.) Lengths that fill no tile, GQA with packing, and a causal
call with rows that see no key; gradients of out and of the LSE where there is a backward kernel, in
both of its modes. Then the same of the general ops: with and without limits, for a batch and for
packed sequences, some of them empty, with rows that do not count.

racecheck does not understand bulk copies; tests/gpu/test_repeat.py and test_deterministic.py look
for races.
"""
import dataclasses
from collections.abc import Callable

import torch

import flash_attn3
from flash_attn3.general import General
from tests.cases import GRADIENT_KINDS, KINDS, OTHER_TILES, Case, GradientKind, Kind
from tests.general_cases import GeneralCase, forward

SMALL = [Case(67, 150, batch=1, heads_q=2, heads_k=2),
         Case(5, 33, heads_q=6, heads_k=2, pack_gqa=True),
         Case(150, 67, batch=1, heads_q=2, heads_k=1, pack_gqa=False)]
CASES = [*SMALL, *OTHER_TILES]

# More sequences than a warp has threads; lengths of no rows, and a list that its rows do not fill.
LENGTHS = ((67, 150), (0, 33), (1, 1), (150, 67), (5, 0), (0, 0)) * 6
USED = ((60, 150), (0, 20), (1, 1), (150, 3), (5, 0), (0, 0)) * 6
BATCH = GeneralCase(((67, 150),) * 2, heads=(2, 1), is_packed=False)
PACKED = GeneralCase(LENGTHS, heads=(2, 1), behind=(3, 5), pack_gqa=True)
GENERAL = [dataclasses.replace(BATCH, window=(20, 30), softcap=15.0, sinks='fp32', max_logits=True),
           dataclasses.replace(BATCH, lengths=((150, 67),) * 2, chunk=50, sinks='bf16'),
           dataclasses.replace(PACKED, chunk=40, window=(30, -1), softcap=15.0, max_logits=True),
           dataclasses.replace(PACKED, used=USED, window=(-1, 20), sinks='fp32')]
# For the planner's other tiles.
WINDOW = dataclasses.replace(BATCH, heads=(24, 8), window=(100, 100))
GENERAL += [dataclasses.replace(WINDOW, lengths=((60, 150),) * 2),
            dataclasses.replace(WINDOW, lengths=((150, 150),) * 8),
            dataclasses.replace(WINDOW, lengths=((700, 700),)),
            dataclasses.replace(WINDOW, lengths=((2100, 2100),))]
# With the masks of the other kernels, which unequal head dims have too.
PLAIN = [BATCH, PACKED, dataclasses.replace(PACKED, lengths=((60, 150), (0, 33), (1, 1)) * 4),
         dataclasses.replace(PACKED, used=USED, sinks='fp32', pack_gqa=False)]
# (head dim, that of v): a kernel each.
HEAD_DIMS = [*((x, x) for x in (64, 96, 128, 192, 256)), (64, 128), (64, 256), (96, 64), (128, 64),
             (192, 128), (64, 512)]


def calls() -> list[tuple[Case, Kind]]:
    """What is run. Gradients: of the small cases, which all reach the one backward of a kind."""
    return [(case.of(kind), kind) for kinds, cases in ((KINDS, CASES), (GRADIENT_KINDS, SMALL))
            for case in cases for kind in kinds]


def general_calls() -> list[tuple[GeneralCase, Kind]]:
    return [(case.of(kind, head_dim_v=columns_v), kind)
            for head_dim, columns_v in HEAD_DIMS for dtype in ('bf16', 'fp16')
            for cases, masks in ((GENERAL, (False,)), (PLAIN, (False, True)))
            for case in cases for causal in masks
            for kind in [GradientKind(dtype, head_dim, causal)]]


def run(case: Case, with_gradients: bool) -> None:
    tensors = case.tensors('cuda')
    for deterministic in (False, True) if with_gradients else (False,):
        out, lse = flash_attn3.flash_attn_func(*tensors, return_attn_probs=True, **case.arguments())
        if with_gradients:
            out, lse, dout, dlse = map(from_host, (out, lse, out, lse))
            torch.ops.flash_attn3.bwd(dout, dlse, *tensors, out, lse, case.softmax_scale,
                                      case.causal, deterministic)
    torch.cuda.synchronize()


def run_general(case: GeneralCase) -> None:
    tensors = case.tensors('cpu')
    q, k, v, s_aux = tensors.inputs
    inputs = type(tensors.inputs)(*(None if x is None else x.cuda() for x in (
        q, k, v, None if s_aux is None else s_aux.float())))
    tensors = tensors._replace(inputs=inputs, lists=case.lists('cuda'))
    out, lse, *_ = forward(case, tensors)
    if case.has_gradients:
        lists = {f'{name}_{x}': tensors.lists.get(f'{name}_{x}', default) for x in 'qk'
                 for name, default in (('cu_seqlens', None), ('seqused', None), ('max_seqlen', 0))}
        general = General(**lists, sinks=inputs.s_aux, causal=case.causal,
                          window_left=case.window[0], window_right=case.window[1],
                          attention_chunk=case.chunk, softcap=case.softcap)
        out, lse, dout, dlse = map(from_host, (out, lse, out, lse))
        for deterministic in (False, True):
            torch.ops.flash_attn3.bwd_general(dout, dlse, *inputs[:3], out, lse, *general,
                                              deterministic)
    torch.cuda.synchronize()


def from_host(like: torch.Tensor) -> torch.Tensor:
    """Random numbers that initcheck takes for initialised: it sees copies from the host, but
    neither what the copy engine writes nor what a kernel does that the filter leaves out.
    """
    return torch.randn(like.shape, dtype=like.dtype).cuda()


def run_all(what: list[tuple], run_one: Callable) -> int:
    """How many of these calls there are kernels for."""
    built = [(case, kind) for case, kind in what if not kind.missing_variants()]
    for case, kind in built:
        run_one(case, kind)
    return len(built)


def main() -> None:
    count = run_all(calls(), lambda case, kind: run(case, kind in GRADIENT_KINDS))
    count += run_all(general_calls(), lambda case, kind: run_general(case))
    print(f'{count} calls on {torch.cuda.get_device_name()}')


if __name__ == '__main__':
    main()
