"""Times attention calls: `python -m flash_attn3.bench`, and what benchmarks/ is made of.

`import flash_attn3` imports nothing of it. It imports flash_attn3 only when a contender is made, so
that benchmarks/ab.py can load this package by its path and time two other builds by the same code.
"""
from .contenders import (NAMES, OURS, PADDED, SDPA_BACKENDS, contender, measure, ours, padded,
                         reason, result, sdpa)
from .problem import (DTYPES, ROTATED_BYTES, WRONG, Rules, Shape, error_of, function_of,
                      make_inputs, relative_error, rules_of)
from .timing import (Contender, Figure, Timer, Turn, geometric_mean, interleaved, peak_share,
                     turn_order)

__all__ = ['DTYPES', 'NAMES', 'OURS', 'PADDED', 'ROTATED_BYTES', 'SDPA_BACKENDS', 'WRONG',
           'Contender', 'Figure', 'Rules', 'Shape', 'Timer', 'Turn', 'contender', 'error_of',
           'function_of', 'geometric_mean', 'interleaved', 'make_inputs', 'measure', 'ours',
           'padded', 'peak_share', 'reason', 'relative_error', 'result', 'rules_of', 'sdpa',
           'turn_order']
