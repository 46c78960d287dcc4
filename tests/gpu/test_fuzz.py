"""Two thousand cases of tests/fuzz; `python -m tests.fuzz --cases 10000 --seed S` runs others."""
from __future__ import annotations

import pytest

from tests.fuzz.draw import case_of

PARTS = 2    # tests.record runs so many processes

CASES, SMOKE, SEED = 2000, 100, 0


@pytest.mark.parametrize('number', [pytest.param(number, marks=[pytest.mark.smoke] * (
    number < SMOKE)) for number in range(CASES)])
def test_fuzz(number, device):
    case = case_of(SEED, number)
    try:
        case.check(device)
    except Exception as error:
        raise AssertionError(f'--seed {SEED} --case {number}: {case}: {error}') from error
