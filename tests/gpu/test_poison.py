"""NaN and infinity: inside the inputs they reach their rows and no other; around them, none.
"""
import math

import pytest
import torch

from tests.gpu.common import check_same, every_kind, run
from tests.support import compare, layouts
from tests.support.cases import Case

CASE = Case(200, 300, heads_q=6, heads_k=2)
ODD_CASE = Case(77, 205, heads_q=6, heads_k=2)    # no length is a multiple of a tile


def spoil_allocator(device, *shapes_and_dtypes):
    """Leaves NaN in the blocks that the next allocations of these sizes get."""
    blocks = [torch.full(shape, math.nan, dtype=dtype, device=device)
              for shape, dtype in shapes_and_dtypes]
    del blocks


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('pack_gqa', [False, True])
@pytest.mark.parametrize('value', [math.nan, math.inf], ids=str)
def test_a_bad_query_spoils_its_row_only(value, pack_gqa, kind, device):
    case = CASE.of(kind)
    q, k, v = case.tensors(device)
    expected, expected_lse = run((q, k, v), case, pack_gqa=pack_gqa)
    q[1, 150, 4, 7] = value
    out, lse = run((q, k, v), case, pack_gqa=pack_gqa)
    assert out[1, 150, 4].isnan().all() and not lse[1, 4, 150].isfinite()
    out[1, 150, 4], lse[1, 4, 150] = expected[1, 150, 4], expected_lse[1, 4, 150]
    check_same((out, lse), (expected, expected_lse))


@pytest.mark.smoke
@every_kind
def test_a_bad_key_spoils_the_rows_that_see_it(kind, device):
    case = CASE.of(kind)
    q, k, v = case.tensors(device)
    expected, expected_lse = run((q, k, v), case)
    k[1, 180, 0, 7] = math.nan
    out, lse = run((q, k, v), case)
    first = 180 - (case.seqlen_k - case.seqlen_q) if case.causal else 0
    assert out[1, first:, :3].isnan().all() and lse[1, :3, first:].isnan().all()
    out[1, first:, :3], lse[1, :3, first:] = expected[1, first:, :3], expected_lse[1, :3, first:]
    check_same((out, lse), (expected, expected_lse))


@pytest.mark.smoke
@every_kind
def test_rows_without_a_key_are_zero_whatever_v_holds(kind, device):
    """Causal with more queries than keys: whole tiles see nothing, one tile has rows of both."""
    case = Case(500, 100, heads_q=6, heads_k=2).of(kind)
    q, k, v = case.tensors(device)
    v[1, :, 0] = math.nan
    out, lse = run((q, k, v), case)
    blind = 400 if case.causal else 0
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()
    assert out[1, blind:, :3].isnan().all() and out[1, blind:, 3:].isfinite().all()


@pytest.mark.smoke
@every_kind
def test_a_bad_value_spoils_its_column(kind, device):
    """In the rows that see it. (P = 0 times NaN may spoil rows of the same tile that do not.)"""
    case = CASE.of(kind)
    q, k, v = case.tensors(device)
    expected, expected_lse = run((q, k, v), case)
    v[1, 180, 0, 7] = math.nan
    out, lse = run((q, k, v), case)
    first = 180 - (case.seqlen_k - case.seqlen_q) if case.causal else 0
    assert out[1, first:, :3, 7].isnan().all()
    out[1, :, :3, 7] = expected[1, :, :3, 7]
    check_same((out, lse), (expected, expected_lse))


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('pack_gqa', [False, True])
def test_nan_around_the_inputs_is_not_read(pack_gqa, kind, device):
    case = ODD_CASE.of(kind)
    tensors = case.tensors(device)
    placed = [layouts.DIRECT[0].place(x) for x in tensors]
    check_same(run(placed, case, pack_gqa=pack_gqa), run(tensors, case, pack_gqa=pack_gqa))


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('pack_gqa', [False, True])
def test_every_element_of_the_outputs_is_written(pack_gqa, kind, device):
    for seqlens in ((77, 205), (205, 77), (1, 205)):
        case = Case(*seqlens, heads_q=6, heads_k=2).of(kind)
        tensors = q, _, _ = case.tensors(device)
        lse_shape = (q.size(0), q.size(2), q.size(1))
        spoil_allocator(device, (q.shape, q.dtype), (lse_shape, torch.float32))
        out, lse = run(tensors, case, pack_gqa=pack_gqa)
        compare.check_forward(out, lse, tensors, case.causal)

        out = torch.full_like(q, math.nan)
        spoil_allocator(device, (lse_shape, torch.float32))
        _, lse = run(tensors, case, pack_gqa=pack_gqa, out=out)
        compare.check_forward(out, lse, tensors, case.causal)


@pytest.mark.smoke
@every_kind
def test_what_an_earlier_launch_left_in_shared_memory_does_not_matter(kind, device):
    case = ODD_CASE.of(kind)
    tensors = case.tensors(device)
    expected = run(tensors, case)
    spoiled = [torch.full((8, 512, 16, case.head_dim), math.nan, dtype=x.dtype, device=device)
               for x in tensors]
    assert run(spoiled, case)[0].isnan().all()
    check_same(run(tensors, case), expected)
