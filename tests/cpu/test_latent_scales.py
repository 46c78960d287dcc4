"""Latents of e4m3 with scales by key on CPU tensors: values against float64 of the dequantised
cache, what an append sets, errors before anything is written, tracing, plans.
"""
from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch.library import opcheck

from flash_attn3 import _plan, flash_attn_with_kvcache
from flash_attn3.ops.attend_cache import Rotary

from tests.cpu.test_latent import E4M3, LATENT, OPS, described, on_cuda, random
from tests.support.cache_cases import CacheCase, mixed
from tests.support.cache_oracle import check_case

KV8 = CacheCase(((2, 40), (2, 0), (2, 17), (2, 3)), page_size=4, head_dim=64, head_dim_v=LATENT,
                heads=(4, 1), latent=True, kv8=True, blocks=4, causal=True)


@pytest.mark.parametrize('changes', [
    {}, dict(blocks=1), dict(page_size=0), dict(descales=False), dict(new=(2,) * 4, rotary=1.0),
    dict(new=(2,) * 4, page_size=7, blocks=1), dict(leftpad=(3, 0, 17, 1)), dict(batch_idx=True,
                                                                                 page_size=0),
    dict(is_packed=True, new=(2, 1, 0, 3), new_packed=True), dict(lengths=mixed(5, 90)),
    dict(lengths=((2, 30), (2, 11), (2, 10)), shared=8), dict(layout='rows_of_both', new=(2,) * 4),
    dict(lengths=((2, 30), (2, 11), (2, 10)), shared=8, page_size=0)], ids=str)
@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
def test_values(dtype, changes):
    check_case(dataclasses.replace(KV8, dtype=dtype, **changes), 'cpu')


def latents(slots: int = 6) -> dict:
    """Two sequences of dims 16 and 256, two scales a key, room for three more keys."""
    torch.manual_seed(0)
    return dict(q=random(2, 1, 4, 16), qv=random(2, 1, 4, 256), k_cache=random(2, slots, 1, 16),
                v_cache=random(2, slots, 1, 256).to(E4M3), v_descale=torch.rand(2, slots, 2) + 0.5,
                cache_seqlens=torch.tensor([3, 1], dtype=torch.int32))


def new_rows(count: int = 2) -> dict:
    return dict(k=random(2, count, 1, 16), v=random(2, count, 1, 256))


def test_of_any_columns():
    """In float64, exactly the dequantised cache."""
    own = latents()
    wide = own['v_cache'].double().unflatten(-1, (2, 128)) * own['v_descale'][:, :, None, :, None]
    plain = {name: x for name, x in own.items() if name != 'v_descale'}
    torch.testing.assert_close(flash_attn_with_kvcache(**own),
                               flash_attn_with_kvcache(**plain | dict(v_cache=wide.flatten(-2))))


BAD = {
    'none': (dict(v_descale=None), 'v_descale with 16-bit v for latents of float8_e4m3fn'),
    'expanded': (dict(v_descale=torch.ones(1, 1, 1).expand(2, 6, 2)),
                 'v_descale with memory for every element, to write to it'),
    'v of another dtype': (dict(v=new_rows()['v'].half()),
                           'v.dtype to be float64'),
    'k of another dtype': (dict(k=new_rows()['k'].half()), 'k.dtype to be float64'),
    'by page': (dict(descale_by_page=True, page_table=torch.tensor([[0], [1]]).int()),
                'no descale_by_page with qv'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_appends_write_nothing(name):
    changes, text = BAD[name]
    own = latents() | new_rows() | changes
    before = own['k_cache'].clone()
    with pytest.raises(RuntimeError, match=r'flash_attn3\.\w+: expected ' + re.escape(text)):
        flash_attn_with_kvcache(**own)
    assert torch.equal(own['k_cache'], before)


def test_the_ops():
    """But for test_schema, which compares e4m3 by what it lacks."""
    utils = 'test_autograd_registration', 'test_faketensor', 'test_aot_dispatch_dynamic'
    own, new = latents(), new_rows()
    opcheck(OPS.append_and_attend.default, (
        own['q'], own['k_cache'], own['v_cache'], new['k'], new['v'], None, None, own['v_descale'],
        *Rotary(), own['cache_seqlens'], None, 2), dict(qv=own['qv'], causal=True),
        test_utils=utils)
    opcheck(OPS.attend_cache.default, (own['q'], own['k_cache'], own['v_cache'], None,
                                       own['cache_seqlens']),
            dict(v_descale=own['v_descale'], qv=own['qv'], causal=True), test_utils=utils)


def test_compiled():
    """The append sets scales under torch.compile too."""
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend='aot_eager')
    one, other, new = latents(), latents(), new_rows()
    torch.testing.assert_close(compiled(**one, **new), flash_attn_with_kvcache(**other, **new))
    assert torch.equal(one['v_descale'], other['v_descale'])
    assert torch.equal(one['v_descale'][1, 3:], latents()['v_descale'][1, 3:])


def test_rules_of_cuda():
    """Rows of 656 bytes: 512 latents, 4 scales, 64 rotary columns."""
    own = dict(v=described((4, 4096, 1, LATENT), 'float8_e4m3fn', (4096 * 656, 656, 656, 1),
                           1 << 20),
               v_descale=described((4, 4096, 4), 'float32', (4096 * 164, 164, 1), (1 << 20) + 512),
               k=described((4, 4096, 1, 64), 'bfloat16', (4096 * 328, 328, 328, 1),
                           (1 << 20) + 528))
    assert _plan.check_cache(**on_cuda(**own)) == ''
    assert 'v_cache with an address and strides of multiples' in _plan.check_cache(**on_cuda(
        **own | dict(v=described((4, 4096, 1, LATENT), 'float8_e4m3fn',
                                 (4096 * 660, 660, 660, 1)))))
    given = {name: x for name, x in on_cuda(**own).items() if name != 'v_descale'}
    assert _plan.plan_cache(**given)['name'] == 'FwdBf16D64x512LatentKv8'
