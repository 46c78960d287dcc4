"""Every cell of the support matrix: right, or the error that it says."""
from __future__ import annotations

import torch

import flash_attn3

from tests.support import support_cells
from tests.support.support_cells import Cell, every_refused, every_supported


@every_supported
def test_supported(cell: Cell, device: torch.device):
    support_cells.check(cell, device)


@every_supported
def test_can_use(cell: Cell, cuda: torch.device):
    assert flash_attn3.can_use(**support_cells.arguments_of(cell, cuda)) == (True, [])


@every_refused
def test_refused(cell: Cell, cuda: torch.device):
    arguments = support_cells.arguments_of(cell, cuda)
    assert flash_attn3.can_use(**arguments)[1][0].startswith(cell.error)
    support_cells.check_refused(cell, arguments)
