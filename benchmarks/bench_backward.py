"""The backward of flash_attn3 against the backends of PyTorch's SDPA: table, JSON, PNG.

    python -m benchmarks.bench_backward                       # on a Hopper GPU, about a minute
    python -m benchmarks.bench_backward --suite backward_grouped

bench_forward.py with the suite `backward`, and all of its options. The gradients alone are timed:
the forward of a cell runs once, before.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import bench_forward, shapes


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    return bench_forward.main(['--suite', shapes.BACKWARD, *given])


if __name__ == '__main__':
    sys.exit(main())
