"""The support matrix: every cell on the CPU."""
import pytest
import torch

import flash_attn3

from tests.cpu.test_kvcache import check
from tests.support import support_cells, support_matrix as support
from tests.support.cache_cases import small
from tests.support.support_cells import (EVERY_CELL, REFUSED_EVERYWHERE, Cell, every_refused,
                                         every_supported)

CPU = torch.device('cpu')
ON_CPU = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'


@every_supported
def test_supported(cell: Cell):
    """Right on the CPU path; and but for the device, Hopper kernels would run."""
    support_cells.check(cell, CPU)
    assert flash_attn3.can_use(**support_cells.arguments_of(cell, CPU)) == (False, [ON_CPU])


@every_refused
def test_refused(cell: Cell):
    """can_use() gives the error, by the rules of the kernels."""
    is_fine, reasons = flash_attn3.can_use(**support_cells.arguments_of(cell, CPU))
    assert not is_fine and reasons[0].startswith(cell.error)


@pytest.mark.parametrize('cell', REFUSED_EVERYWHERE, ids=str)
def test_refused_by_the_public_functions(cell: Cell):
    """On the CPU too."""
    support_cells.check_refused(cell, support_cells.arguments_of(cell, CPU))


@pytest.mark.parametrize('cell', [cell for cell in EVERY_CELL if cell.error == ''], ids=str)
def test_no_such_argument(cell: Cell):
    for name in cell.feature.tensors:
        arguments = support_cells.arguments_of(cell, CPU) | {name: torch.ones(3)}
        with pytest.raises(TypeError, match=f'unexpected keyword argument {name!r}'):
            cell.function(**arguments)


@pytest.mark.parametrize('feature', support.CACHE_FEATURES, ids=lambda feature: feature.name)
def test_on_a_cache(feature: support.CacheFeature):
    """As the above: the CPU path, and what can_use() says of the kernels."""
    case = small(**{'dtype': 'bf16', 'head_dim': 64, **feature.case})
    is_fine, reasons = flash_attn3.can_use(**case.arguments(CPU))
    assert not is_fine
    if feature.error:
        assert reasons[0].startswith(feature.error)
        return
    assert reasons == [ON_CPU]
    check(case)


def test_rows_have_names_of_their_own():
    names = [feature.name for feature in support.FEATURES]
    assert len(set(names)) == len(names)
    assert {column for feature in support.FEATURES for column in feature.errors} == set(
        support.COLUMNS)
