"""A seeded fuzzer of the public functions: `python -m tests.fuzz --cases N --seed S`.

A case is drawn from (seed, number) alone, and valid: both the CPU path and the kernels take it.
`draw.py` says what a case is made of; `call.py`, `fp8_call.py`, `cache_call.py`, `chosen_call.py`
and `mask_call.py` say how it is called and checked: against float64 by the bar of
tests/support/compare.py, with NaN in memory that must not be read. Another kind of call is a class
with `check(device)` and a function in `draw.KINDS` that draws one.
"""
