"""core/int_math.h against Python's own integers."""
from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.host import _host

INT_MAX = 2**31 - 1
signed = st.integers(-2**30, 2**30)
positive = st.integers(1, 2**30)


@given(signed, positive)
def test_ceil_div_rounds_up(a, b):
    assert _host.ceil_div(a, b) == -(-a // b)


@given(st.integers(-2**20, 2**20), st.integers(1, 2**10))
def test_round_up_gives_the_next_multiple(a, b):
    result = _host.round_up(a, b)
    assert result % b == 0 and a <= result < a + b


@given(signed, signed, signed)
def test_clamp_stays_in_the_interval(x, a, b):
    low, high = min(a, b), max(a, b)
    assert _host.clamp(x, low, high) == sorted((low, x, high))[1]


@given(st.integers(0, INT_MAX), st.integers(1, INT_MAX))
def test_fast_div_is_exact(n, divisor):
    assert _host.fast_div(n, divisor) == n // divisor


@given(st.integers(1, INT_MAX), st.integers(0, INT_MAX))
def test_fast_div_is_exact_where_the_quotient_changes(divisor, start):
    multiple = start // divisor * divisor
    for n in (multiple - 1, multiple, multiple + 1):
        if 0 <= n <= INT_MAX:
            assert _host.fast_div(n, divisor) == n // divisor


@pytest.mark.parametrize('divisors', [
    pytest.param(range(1, 1025), id='small'),
    pytest.param([2**s + d for s in range(10, 31) for d in (-1, 0, 1)], id='around powers of two'),
    pytest.param([3 * 2**29, INT_MAX - 1, INT_MAX], id='large')])
def test_fast_div_at_both_ends_of_the_range(divisors):
    for divisor in divisors:
        assert _host.first_wrong_quotient(divisor, 0, 3000) == -1
        assert _host.first_wrong_quotient(divisor, 2**31 - 3000, 2**31) == -1


@pytest.mark.parametrize('divisor', [3, 7, 132, 641])
def test_fast_div_over_a_long_range(divisor):
    assert _host.first_wrong_quotient(divisor, 2**31 - 2**25, 2**31) == -1
