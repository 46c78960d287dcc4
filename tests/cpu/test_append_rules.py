"""What a call that appends does beside the values: tensors without data, memory that is shared or
that PyTorch protects, rows of a page table; and `can_use` says of them what the call says.
"""
from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn3 import can_use, explain, flash_attn_with_kvcache
from flash_attn3.compat import ops as compat_ops

from tests.support.lists import ints


def appending(**changes) -> dict:
    torch.manual_seed(0)
    shapes = dict(q=(2, 3, 4, 64), k_cache=(2, 64, 2, 64), v_cache=(2, 64, 2, 64), k=(2, 3, 2, 64),
                  v=(2, 3, 2, 64))
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()} | dict(
        cache_seqlens=ints([5, 7])) | changes


def paged(**changes) -> dict:
    given = appending(k=None, v=None, page_table=ints(range(12)).view(3, 4))
    return given | {name: torch.randn(12, 16, 2, 64).bfloat16()
                    for name in ('k_cache', 'v_cache')} | changes


def reasons(**given) -> list[str]:
    """All but that there is no GPU."""
    return [text for text in can_use(**given)[1] if 'on a CUDA device' not in text]


# --------------------------------------------------------------------------------------- no data
@pytest.mark.parametrize('given', [appending(), paged(cache_batch_idx=ints([2, 0]))],
                         ids=['append', 'rows of the table'])
def test_without_data(given):
    """Fake and meta tensors: no list is read."""
    shape = given['q'].shape
    with FakeTensorMode() as mode:
        fakes = {name: x if x is None else mode.from_tensor(x) for name, x in given.items()}
        assert flash_attn_with_kvcache(**fakes).shape == shape
    metas = {name: x if x is None else x.to('meta') for name, x in given.items()}
    assert flash_attn_with_kvcache(**metas).shape == shape


def test_tracing_ends_with_the_last_thread():
    first, second = compat_ops._traced(), compat_ops._traced()
    with first:
        second.__enter__()
    assert torch.compiler.is_compiling()
    second.__exit__(None, None, None)
    assert not torch.compiler.is_compiling()


# ---------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize('name', ['k_cache', 'v_cache', 'out'])
def test_inference_tensors(name):
    """Outside of inference mode nothing is written for them."""
    given = appending()
    with torch.inference_mode():
        given[name] = torch.zeros(given.get(name, given['q']).shape, dtype=torch.bfloat16)
    before = [given[cache].clone() for cache in ('k_cache', 'v_cache')]
    with pytest.raises(RuntimeError, match=f'expected {name} not to be an inference tensor'):
        flash_attn_with_kvcache(**given)
    for cache, x in zip(('k_cache', 'v_cache'), before):
        assert torch.equal(given[cache], x)
    with torch.inference_mode():
        flash_attn_with_kvcache(**given)


def test_rows_of_the_cache_in_another_storage():
    """As DLPack and NumPy give them."""
    memory = torch.randn(2 * 64 * 2 * 64 + 64).numpy()
    cache = torch.from_numpy(memory[64:]).view(2, 64, 2, 64)
    k = torch.from_numpy(memory).as_strided((2, 3, 2, 64), (8192, 128, 64, 1), 64 + 512)
    given = {name: x.float() if x.is_floating_point() else x for name, x in appending().items()}
    apart = given | dict(k_cache=cache.clone(), k=k.clone(), v_cache=given['v_cache'].clone())
    wanted = flash_attn_with_kvcache(**apart)
    got = flash_attn_with_kvcache(**given | dict(k_cache=cache, k=k))
    assert torch.equal(got, wanted) and torch.equal(cache, apart['k_cache'])


def test_the_op_counts_new_keys_itself():
    given = appending(k_cache=torch.zeros(2, 64, 2, 64).bfloat16())
    torch.ops.flash_attn3.append_and_attend(
        *(given[name] for name in ('q', 'k_cache', 'v_cache', 'k', 'v')), None, None, None,
        cache_seqlens=given['cache_seqlens'], appended=1)
    assert torch.equal(given['k_cache'][0, 5:8], given['k'][0])


# -------------------------------------------------------------------------- as can_use and explain
TABLES = dict.fromkeys(('rotary_cos', 'rotary_sin'), torch.rand(6, 16).bfloat16())
E4M3 = {name: torch.zeros(2, 64, 2, 64).to(torch.float8_e4m3fn) for name in ('k_cache', 'v_cache')}
FINE = {
    'rows of the table': paged(cache_batch_idx=ints([2, 0])),
    'rows of the table that are none': paged(cache_batch_idx=ints([3, -1])),    # contents
    'q alone is rotated, at one position': appending(k=None, v=None, cache_seqlens=5, **TABLES),
    'positions without tables': appending(rotary_seqlens=torch.tensor([1, 2, 3])),
    'numbers as descales': appending(k_descale=0.5, v_descale=2, **E4M3),
    'starts without new keys': appending(k=None, v=None, cu_seqlens_k_new=ints([0, 1, 2])),
}
BAD = {
    'rows of another batch': (paged(cache_batch_idx=ints([0, 1, 2])),
                              'cache_batch_idx to have the shape (2,)'),
    'rows of a table of int64': (
        paged(page_table=torch.arange(12).view(3, 4), cache_batch_idx=ints([0, 1])),
        'page_table.dtype to be int32'),
    'a number for 16 bits': (appending(k_descale=0.5), 'k_cache of float8_e4m3fn with k_descale'),
    'a word as descale': (appending(k_descale='x'), 'k_descale to be a tensor or a number'),
    'negative length': (appending(k=None, v=None, cache_seqlens=-1), 'cache_seqlens to be a'),
    'q of no dimension': (appending(k=None, v=None, q=torch.tensor(1.0), k_descale=0.5),
                          'q to have the shape'),
}


@pytest.mark.parametrize('name', FINE)
def test_what_is_fine(name):
    assert not reasons(**FINE[name])
    if 'none' not in name:
        flash_attn_with_kvcache(**FINE[name])


@pytest.mark.parametrize('name', BAD)
def test_what_is_not(name):
    given, text = BAD[name]
    assert any(text in reason for reason in reasons(**given)), reasons(**given)
    with pytest.raises(RuntimeError) as raised:
        flash_attn_with_kvcache(**given)
    assert text in str(raised.value)


def test_no_query_head(capsys):
    q, cache = torch.zeros(2, 3, 0, 64).bfloat16(), E4M3['k_cache'].bfloat16()
    assert not reasons(q=q, k_cache=cache, v_cache=cache.clone(), cache_seqlens=ints([5, 7]))
    explain(q, cache, cache, cache=True)
    assert capsys.readouterr().out
