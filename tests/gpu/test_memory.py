"""Peak memory of a forward and its backward: what the plan says, to the byte."""
from dataclasses import replace

import pytest

from benchmarks import memory
from flash_attn3 import bench
from flash_attn3.bench import Shape


@pytest.mark.parametrize('shape', [
    Shape(2, 1024, 1024, 4, 4, 64, causal=True), Shape(1, 1000, 1500, 8, 2, 128),
    Shape(2, 333, 444, 2, 2, 96, causal=True, dtype='fp16'), Shape(1, 2048, 2048, 2, 1, 256)],
    ids=Shape.label)
def test_peak_is_that_of_the_plan(shape, cuda):
    inputs = bench.make_inputs(replace(shape, backward=True), cuda)[0]
    step = memory.STEPS[memory.OURS](shape, inputs)
    assert memory.peak_bytes(step)['requested'] == sum(memory.expected_bytes(shape).values())
