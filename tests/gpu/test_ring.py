"""The backward kernels, given the out and LSE over more keys than their own: ring attention."""
import dataclasses

import pytest

from tests.support import ring
from tests.support.ring import every_count, every_feature, every_layout


@pytest.mark.smoke
@every_feature
@every_count
@every_layout
def test_gradients_of_parts(case, count, features, device):
    ring.check(dataclasses.replace(case, **features), count, device)


@every_count
@pytest.mark.parametrize('op', ['bwd', 'bwd_out'])
def test_ops_without_a_general_mask(op, count, device):
    ring.check(ring.DENSE, count, device, op)
