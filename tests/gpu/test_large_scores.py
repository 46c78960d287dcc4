"""Scores up to the bound that `flash_attn_func` has; see tests/support/large_scores.py."""
import pytest

from tests.support import large_scores
from tests.support.large_scores import every_pattern

# Scaled to powers of two, a score near the bound is rounded by up to 64, in float16 by up to 8;
# these by 54 down, 57 up and 6.5 up with head dim 64.
SCORES = [('bf16', 1e6), ('bf16', 9.079e8), ('bf16', 8.648e8), ('bf16', 1e9),
          ('fp16', 1e6), ('fp16', 9.564e7), ('fp16', 1e8)]


@pytest.mark.smoke
@every_pattern
@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize('dtype, score', SCORES)
def test_up_to_the_bound(dtype, score, head_dim, pattern, device):
    large_scores.check(pattern, dtype, score, head_dim, device)
