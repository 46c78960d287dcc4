"""Inputs and outputs that are not contiguous: the same bits as contiguous ones."""
import math

import pytest
import torch

from tests.gpu.common import check_same, every_kind, run
from tests.support import layouts
from tests.support.cases import Case

every_layout = pytest.mark.parametrize('layout', layouts.DIRECT + layouts.COPIED, ids=str)
CASE = Case(113, 203, heads_q=6, heads_k=2)


@pytest.mark.smoke
@every_kind
@every_layout
@pytest.mark.parametrize('pack_gqa', [False, True])
def test_inputs(layout, pack_gqa, kind, device):
    """Each input alone, then all three."""
    case = CASE.of(kind)
    tensors = case.tensors(device)
    expected = run(tensors, case, pack_gqa=pack_gqa)
    placed = [layout.place(x) for x in tensors]
    for which in range(3):
        mixed = [placed[i] if i == which else tensors[i] for i in range(3)]
        check_same(run(mixed, case, pack_gqa=pack_gqa), expected)
    check_same(run(placed, case, pack_gqa=pack_gqa), expected)


@pytest.mark.smoke
@every_kind
@every_layout
@pytest.mark.parametrize('pack_gqa', [False, True])
def test_out(layout, pack_gqa, kind, device):
    """Written in place and nowhere else; the tensor itself is returned."""
    case = CASE.of(kind)
    tensors = case.tensors(device)
    expected = run(tensors, case, pack_gqa=pack_gqa)
    out = layout.place(torch.full_like(tensors[0], math.nan))
    around = layouts.nan_count(out) - out.numel()
    result, lse = run(tensors, case, pack_gqa=pack_gqa, out=out)
    assert result is out
    check_same((out, lse), expected)
    assert layouts.nan_count(out) == around


@pytest.mark.smoke
@every_kind
def test_slices_of_one_projection(kind, device):
    """q, k and v out of one (batch, seqlen, 3, heads, head_dim) tensor; k and v out of one."""
    case = Case(130, 130).of(kind)
    tensors = case.tensors(device)
    expected = run(tensors, case)
    check_same(run(torch.stack(tensors, dim=2).unbind(2), case), expected)
    check_same(run((tensors[0], *torch.stack(tensors[1:], dim=3).unbind(3)), case), expected)
    check_same(run(torch.cat(tensors, dim=3).split(case.head_dim, dim=3), case), expected)


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('stride', [0, 1, 7, 2 ** 45 + 1])
def test_strides_of_size_1_dimensions_mean_nothing(stride, kind, device):
    for case in (Case(100, 90, batch=1, heads_q=1, heads_k=1), Case(1, 1, heads_q=3, heads_k=1),
                 Case(1, 90, batch=1, heads_q=8, heads_k=1, pack_gqa=True)):
        case = case.of(kind)
        tensors = case.tensors(device)
        expected = run(tensors, case, pack_gqa=case.pack_gqa)
        odd = [layouts.with_odd_size_1_strides(x, stride) for x in tensors]
        check_same(run(odd, case, pack_gqa=case.pack_gqa), expected)
        out = layouts.with_odd_size_1_strides(torch.full_like(tensors[0], math.nan), stride)
        check_same(run(tensors, case, pack_gqa=case.pack_gqa, out=out), expected)


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('dim', [0, 1, 2])
def test_expanded_inputs(dim, kind, device):
    """Stride 0: one entry read as many."""
    case = Case(65, 65, batch=3, heads_q=4, heads_k=4).of(kind)
    q, k, v = (x.narrow(dim, 0, 1).expand_as(x) for x in case.tensors(device))
    check_same(run((q, k, v), case), run([x.contiguous() for x in (q, k, v)], case))


@pytest.mark.smoke
@every_kind
def test_two_inputs_in_the_same_memory(kind, device):
    case = Case(150, 150).of(kind)
    x = case.tensors(device)[0]
    check_same(run((x, x, x), case), run((x, x.clone(), x.clone()), case))
