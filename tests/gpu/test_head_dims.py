"""Every head dim: those with a kernel of their own, and those that run on the next larger one."""
import math

import pytest
import torch

from tests.gpu.common import check_same, run
from tests.support import compare, layouts
from tests.support.cases import Case

every_head_dim = pytest.mark.parametrize('head_dim', [*range(8, 257, 8), 264, 320, 392, 512])
every_mask = pytest.mark.parametrize('causal', [False, True], ids=['full', 'causal'])
every_dtype = pytest.mark.parametrize('dtype', ['bf16', 'fp16'])


@pytest.mark.smoke
@every_head_dim
@every_mask
@every_dtype
def test_smoke(head_dim, causal, dtype, device):
    compare.check_case(Case(113, 203, head_dim, dtype, causal, heads_q=6, heads_k=2), device)


@every_head_dim
@every_mask
@every_dtype
@pytest.mark.parametrize('sizes', [
    {'seqlen_q': 1, 'seqlen_k': 517, 'heads_q': 8, 'heads_k': 2, 'pack_gqa': True},
    {'seqlen_q': 300, 'seqlen_k': 10},
    {'seqlen_q': 700, 'seqlen_k': 700, 'batch': 5, 'heads_q': 13, 'heads_k': 13},
    {'seqlen_q': 200, 'seqlen_k': 1500, 'data': 'uniform'},
    {'seqlen_q': 333, 'seqlen_k': 1025, 'data': 'outliers'}], ids=str)
def test_sizes_and_data(sizes, head_dim, causal, dtype, device):
    compare.check_case(Case(head_dim=head_dim, dtype=dtype, causal=causal, **sizes), device)


@pytest.mark.smoke
@every_head_dim
@every_mask
def test_what_lies_next_to_the_columns(head_dim, causal, device):
    """Inputs and an output inside NaN: the columns of padding are neither read nor written."""
    case = Case(150, 170, head_dim, causal=causal, heads_q=4, heads_k=2)
    tensors = case.tensors(device)
    expected = run(tensors, case)
    for layout in layouts.DIRECT + layouts.COPIED:
        placed = [layout.place(x) for x in tensors]
        out = layout.place(torch.full_like(tensors[0], math.nan))
        around = layouts.nan_count(out) - out.numel()
        result = run(placed, case, out=out)
        assert result[0] is out
        check_same(result, expected)
        assert layouts.nan_count(out) == around


@pytest.mark.smoke
@pytest.mark.parametrize('head_dim', [72, 80, 112, 176, 240, 264])
@every_mask
def test_the_same_as_padding_with_zeros(head_dim, causal, device):
    """Columns of zeros in q, k and v change no bit of the others."""
    case = Case(257, 300, head_dim, causal=causal)
    tensors = case.tensors(device)
    padded = [torch.nn.functional.pad(x, (0, -head_dim % 16)) for x in tensors]
    scale = case.head_dim ** -0.5
    out, lse = run(tensors, case, softmax_scale=scale)
    wide, wide_lse = run(padded, case, softmax_scale=scale)
    check_same((out, lse), (wide[..., :head_dim].contiguous(), wide_lse))
