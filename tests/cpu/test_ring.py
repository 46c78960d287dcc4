"""The ops of the gradients on the CPU, given the out and LSE of more keys than theirs."""
import dataclasses

import pytest

from tests.support import ring
from tests.support.ring import every_count, every_feature, every_layout


@every_feature
@every_count
@every_layout
def test_gradients_of_parts(case, count, features):
    ring.check(dataclasses.replace(case, dtype='fp64', head_dim=16, **features), count, 'cpu')


@every_feature
@pytest.mark.parametrize('case, dtype', [(ring.DENSE, 'fp16'), (ring.PACKED, 'bf16')],
                         ids=['dense', 'packed'])
def test_16_bits(case, dtype, features):
    ring.check(dataclasses.replace(case, dtype=dtype, **features), 3, 'cpu')


@pytest.mark.parametrize('dtype', ['fp64', 'bf16'])
@pytest.mark.parametrize('op', ['bwd', 'bwd_out'])
def test_ops_without_a_general_mask(op, dtype):
    ring.check(dataclasses.replace(ring.DENSE, dtype=dtype), 3, 'cpu', op)
