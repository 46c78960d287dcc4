"""The forward over kernels, shapes, heads and data, held to the bar of tests/compare.py."""
import dataclasses

import pytest
import torch

from flash_attn3 import flash_attn_func, reference

from tests import cases, compare
from tests.cases import CORNERS, SHAPES, SMOKE, VARIANTS, Case, Variant
from tests.gpu.common import check_same, every_variant, run


def a_variant(name: str) -> Variant:
    return next(variant for variant in VARIANTS if variant.name == name)


@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('case', SMOKE, ids=Case.sizes)
def test_smoke(case, variant, device):
    compare.check_case(case.of(variant), device)


@every_variant
@pytest.mark.parametrize('case', SHAPES, ids=Case.sizes)
def test_shapes(case, variant, device):
    compare.check_case(case.of(variant), device)


@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('case', CORNERS, ids=Case.sizes)
def test_corners(case, variant, device):
    compare.check_case(case.of(variant), device)


@every_variant
@pytest.mark.parametrize('seqlens', [(1, 16384), (16384, 64), (2000, 8192)], ids=str)
def test_long(seqlens, variant, device):
    compare.check_case(Case(*seqlens, batch=1, heads_q=2, heads_k=1).of(variant), device)


@every_variant
def test_many_tiles(variant, device):
    """More tiles than CTAs, unevenly: several rounds of the persistent loop."""
    compare.check_case(Case(700, 700, batch=5, heads_q=13, heads_k=13).of(variant), device)


# --------------------------------------------------------------------------------- heads, packing
@every_variant
@pytest.mark.parametrize('pack_gqa', [None, False, True])
@pytest.mark.parametrize('group', [1, 2, 3, 6, 7, 8, 64, 128])
def test_group_sizes(group, pack_gqa, variant, device):
    """Query heads per KV head; packing where the group divides 64 rows, and where it does not."""
    for seqlen_q in (1, 13, 130):
        case = Case(seqlen_q, 333, batch=1, heads_q=2 * group, heads_k=2, pack_gqa=pack_gqa)
        compare.check_case(case.of(variant), device)


@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('group', [4, 7])
def test_packing_with_more_queries_than_keys(group, variant, device):
    """Rows without a key next to rows with one, in the same packed tile."""
    case = Case(100, 30, heads_q=group, heads_k=1, pack_gqa=True)
    compare.check_case(case.of(variant), device)


@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('sm_margin', [1, 60, 131])
def test_sm_margin_changes_no_bit(sm_margin, variant, device):
    case = Case(500, 700, heads_q=6, heads_k=2).of(variant)
    tensors = case.tensors(device)
    check_same(run(tensors, case, sm_margin=sm_margin), run(tensors, case))


@every_variant
def test_batch_entries_do_not_see_each_other(variant, device):
    """The same entry alone and in any place of a batch: the same bits."""
    case = Case(300, 500, batch=7, heads_q=4, heads_k=2).of(variant)
    q, k, v = case.tensors(device)
    together = flash_attn_func(q, k, v, causal=case.causal)
    alone = torch.cat([flash_attn_func(*(x[i:i + 1] for x in (q, k, v)), causal=case.causal)
                       for i in range(7)])
    backwards = flash_attn_func(*(x.flip(0) for x in (q, k, v)), causal=case.causal).flip(0)
    compare.check_equal(alone, together, 'out')
    compare.check_equal(backwards, together, 'out')


@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('softmax_scale', [1e-3, 0.5, 2.0])
def test_softmax_scale(softmax_scale, variant, device):
    case = Case(129, 300).of(variant)
    tensors = case.tensors(device)
    out, lse = flash_attn_func(*tensors, softmax_scale, case.causal, return_attn_probs=True)
    compare.check_forward(out, lse, tensors, case.causal, softmax_scale)


# ------------------------------------------------------------------------------------------- data
@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('logit_std', [1, 3, 10, 30])
def test_spiky_logits(logit_std, variant, device):
    case = Case(333, 1500, heads_k=2, logit_std=logit_std, data='onehot').of(variant)
    compare.check_case(case, device)
    compare.check_rounding_bound(case, device)
    compare.check_rounding_bound(dataclasses.replace(case, data='normal'), device)


@pytest.mark.smoke
@every_variant
@pytest.mark.parametrize('seqlen_k', [63, 64, 177, 1500, 5000])
def test_every_key_counts_once(seqlen_k, variant, device):
    """Equal scores, one-hot values: the output counts the keys of each residue class."""
    case = Case(200, seqlen_k, data='uniform').of(variant)
    compare.check_case(case, device)
    compare.check_rounding_bound(case, device)


# RMSE against float64 of the unrounded inputs, as table 3 of the paper; the bar is the peers'.
OUTLIER_RMSE = {'fp16': 1.6e-4, 'bf16': 1.26e-3}


@pytest.mark.smoke
@pytest.mark.parametrize('variant', [a_variant('FwdFp16D128Full'), a_variant('FwdBf16D128Full')],
                         ids=str)
def test_outliers(variant, device):
    seqlen = 4096 if device.type == 'cuda' else 256
    exact = Case(seqlen, seqlen, batch=1, heads_q=8, heads_k=8, dtype='fp64', data='outliers')
    tensors = exact.tensors(device)
    ref, _ = reference.forward(*tensors, exact.softmax_scale, causal=False)
    out = flash_attn_func(*(x.to(cases.DTYPES[variant.dtype]) for x in tensors))
    rmse = (out.double() - ref).square().mean().sqrt().item()
    assert rmse <= OUTLIER_RMSE[variant.dtype], f'RMSE {rmse:.3e}'


@every_variant
def test_outliers_in_every_kernel(variant, device):
    compare.check_case(Case(513, 1025, data='outliers').of(variant), device)
