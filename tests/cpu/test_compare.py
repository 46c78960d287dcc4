"""The bar itself: it passes plain PyTorch and fails results with a small fault in them."""
import math

import pytest
import torch

from tests.support import cases, compare, plain
from tests.support.cases import Case


def outputs(case: Case):
    """(inputs, PyTorch's output in the case's dtype, LSE)."""
    tensors = case.tensors('cpu')
    _, lse, pt = compare.expected_forward(*tensors, case.causal)
    return tensors, pt, lse.float()


@pytest.mark.parametrize('data', cases.DATA)
@pytest.mark.parametrize('dtype', ['fp16', 'bf16'])
def test_plain_pytorch_passes(dtype, data):
    tensors, out, lse = outputs(Case(130, 257, dtype=dtype, data=data, causal=True))
    compare.check_forward(out, lse, tensors, causal=True)


@pytest.mark.parametrize('data', ['normal', 'onehot', 'uniform'])
def test_a_dropped_tile_fails(data):
    """80 of 1024 keys dropped: an error like that of a wrong loop bound."""
    case = Case(64, 1024, data=data, logit_std=3.0)
    tensors, _, _ = outputs(case)
    q, k, v = tensors
    out, lse = plain.forward(q, k[:, 80:], v[:, 80:], case.softmax_scale, False)
    with pytest.raises(AssertionError, match='out: m'):
        compare.check_forward(out, None, tensors, causal=False)
    with pytest.raises(AssertionError, match='lse: '):
        compare.check_lse(lse, compare.expected_forward(*tensors, False)[1])


def test_a_mask_that_is_one_off_fails():
    case = Case(128, 256, causal=True)
    tensors, _, _ = outputs(case)
    q, k, v = tensors
    shifted = torch.cat([v[:, 1:], v[:, :1]], dim=1)
    out, _ = plain.forward(q, torch.cat([k[:, 1:], k[:, :1]], dim=1), shifted,
                           case.softmax_scale, True)
    with pytest.raises(AssertionError):
        compare.check_forward(out, None, tensors, causal=True)


def test_a_single_bad_element_is_named():
    tensors, out, _ = outputs(Case(64, 64))
    out[1, 17, 2, 99] += 0.5
    with pytest.raises(AssertionError, match=r'out: max error .* 1 of 65536 elements, '
                                             r'first at \(1, 17, 2, 99\): got '):
        compare.check_forward(out, None, tensors, causal=False)


def test_a_bias_below_the_largest_error_fails():
    tensors, _, _ = outputs(Case(256, 256))
    ref, _, pt = compare.expected_forward(*tensors, causal=False)
    with pytest.raises(AssertionError, match='out: mean error'):
        compare.check_close((ref * 1.012).to(pt.dtype), ref, pt, 'out')


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_fail(value):
    tensors, out, lse = outputs(Case(64, 64))
    out[0, 0, 0, 0] = value
    with pytest.raises(AssertionError, match='at other places'):
        compare.check_forward(out, None, tensors, causal=False)
    wrong = lse.clone()
    wrong[0, 0, 0] = value
    with pytest.raises(AssertionError, match='at other places'):
        compare.check_lse(wrong, lse.double())


def test_check_equal_sees_bits():
    x = torch.tensor([0.0, math.nan, 1.0])
    compare.check_equal(x, x.clone(), 'x')
    with pytest.raises(AssertionError, match='x: bits differ; 1 of 3 elements, first at '):
        compare.check_equal(torch.tensor([-0.0, math.nan, 1.0]), x, 'x')


def test_cases_repeat_themselves():
    case = Case(5, 7, data='outliers')
    for a, b in zip(case.tensors('cpu'), case.tensors('cpu')):
        assert torch.equal(a, b)
    assert not torch.equal(case.tensors('cpu')[0], Case(5, 8, data='outliers').tensors('cpu')[0])
    assert str(Case(5, 7, data='onehot', logit_std=30, pack_gqa=True, causal=True)) == \
        'b2-h4x4-s5x7-d128-bf16-causal-onehot-std30-packTrue'


def test_cases_have_distinct_names():
    for listed in (cases.SHAPES, cases.SMOKE, cases.CORNERS):
        assert len({str(case) for case in listed}) == len(listed)
