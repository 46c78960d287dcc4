"""Small calls that run every built kernel, under NVIDIA's compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --kernel-name kernel_substring=forward_kernel \\
        --error-exitcode 9 python -m tests.sanitize
    compute-sanitizer --tool initcheck --kernel-name kernel_substring=forward_kernel \\
        --error-exitcode 9 python -m tests.sanitize

(`make sanitize` does both.) Lengths that fill no tile, GQA with packing, and a causal call with
rows that see no key. racecheck does not understand bulk copies; tests/gpu/test_repeat.py looks for
races.
"""
import torch

import flash_attn3
from tests.cases import KINDS, OTHER_TILES, Case

CASES = [Case(67, 150, batch=1, heads_q=2, heads_k=2),
         Case(5, 33, heads_q=6, heads_k=2, pack_gqa=True),
         Case(150, 67, batch=1, heads_q=2, heads_k=1, pack_gqa=False), *OTHER_TILES]


def main() -> None:
    kinds = [kind for kind in KINDS if not kind.missing_variants()]
    for case in CASES:
        for kind in kinds:
            tensors = case.of(kind).tensors('cuda')
            flash_attn3.flash_attn_func(*tensors, **case.of(kind).arguments())
            torch.cuda.synchronize()
    print(f'{len(CASES) * len(kinds)} calls on {torch.cuda.get_device_name()}')


if __name__ == '__main__':
    main()
