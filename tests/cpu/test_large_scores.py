"""Scores up to 1e9 on the CPU; see tests/support/large_scores.py."""
import pytest

from tests.support import large_scores
from tests.support.large_scores import every_pattern


@every_pattern
@pytest.mark.parametrize('dtype', ['bf16', 'fp16', 'fp32', 'fp64'])
@pytest.mark.parametrize('score', [1e6, 7e8, 1e9])
def test_up_to_the_bound(score, dtype, pattern):
    large_scores.check(pattern, dtype, score, 64, 'cpu')
