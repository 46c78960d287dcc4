"""forward/fp8/compact_ring.h: where a role stands, against counting."""
import pytest

from tests.host import _host


@pytest.mark.parametrize('stages', [1, 2, 3])
def test_stages_in_turn_and_the_phase_of_each_round(stages):
    seen = getattr(_host, f'compact_ring_{stages}')(5 * stages + 1)
    assert seen == [(step % stages, step // stages % 2) for step in range(5 * stages + 1)]
