"""tests/record.py: the parts of a file of tests are all of it, each test once."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import stretch
from tests.record import parts_of
from tests.support.checkout import ROOT

FILES = sorted((ROOT / 'tests/gpu').glob('test_*.py'))


@given(st.integers(0, 5000), st.integers(1, 20))
def test_parts_are_the_whole(count, parts):
    bounds = [stretch(count, f'{index}/{parts}') for index in range(1, parts + 1)]
    assert [x for begin, end in bounds for x in range(begin, end)] == list(range(count))


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.name)
def test_files_that_run_alone_have_one_part(path):
    """tests.record runs them whole: another number would have no effect."""
    text = path.read_text()
    assert parts_of(text) == 1 or 'needs_memory' not in text


def test_a_line_says_the_number():
    assert parts_of('import x\n\nPARTS = 3    # why\n') == 3
    assert parts_of('    PARTS = 3\n') == 1
