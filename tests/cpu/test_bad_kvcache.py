"""Bad input of flash_attn_with_kvcache: each is an error with its name, before anything is written.
On the CPU, and by the rules of CUDA tensors.
"""
from __future__ import annotations

import re

import pytest
import torch

from flash_attn3 import _plan, env, flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn3.api import kvcache

from tests.support.described import describe_sizes
from tests.support.lists import ints

BATCH, CAPACITY, DIM = 2, 12, 16


def tensors(dtype: torch.dtype = torch.float32) -> dict:
    """A call that appends."""
    torch.manual_seed(0)
    shapes = dict(q=(BATCH, 1, 4, DIM), k_cache=(BATCH, CAPACITY, 2, DIM),
                  v_cache=(BATCH, CAPACITY, 2, DIM), k=(BATCH, 2, 2, DIM), v=(BATCH, 2, 2, DIM))
    given = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return given | dict(cache_seqlens=ints([3, 7]))


Q, K = torch.randn(BATCH, 1, 4, DIM), torch.randn(BATCH, 2, 2, DIM)
CACHE = torch.randn(BATCH, CAPACITY, 2, DIM)
TABLE = ints([[0], [1]])
COS = torch.rand(CAPACITY, 4)
E4M3 = {name: x.to(torch.float8_e4m3fn) for name, x in
        dict(q=Q, k_cache=CACHE, v_cache=CACHE.clone(), k=K, v=K).items()}
# Three pages with scales.
PAGES = dict(page_table=TABLE, k_descale=torch.ones(3, 2), v_descale=torch.ones(3, 2),
             descale_by_page=True, **{f'{name}_cache': torch.zeros(3, CAPACITY, 2, DIM).to(
                 torch.float8_e4m3fn) for name in 'kv'})
BAD = {
    # Tables and lists: dtype, shape, device, what they contain.
    'lengths of int64': (dict(cache_seqlens=ints([3, 7]).long()),
                         'cache_seqlens.dtype to be int32'),
    'too few lengths': (dict(cache_seqlens=ints([3])),
                        'cache_seqlens to have the shape (2,), got (1,)'),
    'lengths of rank 2': (dict(cache_seqlens=ints([[3, 7]])), 'cache_seqlens to have the shape'),
    'lengths elsewhere': (dict(cache_seqlens=ints([3, 7]).to('meta')),
                          'cache_seqlens on the device'),
    'length beyond': (dict(cache_seqlens=ints([3, 13])), 'cache_seqlens[1] to be from 0 to 12'),
    'negative length': (dict(cache_seqlens=ints([-1, 3])), 'cache_seqlens[0] to be from 0 to 12'),
    'number beyond': (dict(cache_seqlens=13, k=None, v=None), 'cache_seqlens to be from 0 to 12'),
    'negative number': (dict(cache_seqlens=-1), 'cache_seqlens to be a tensor, or a number of 0'),
    'length of a float': (dict(cache_seqlens=2.0), 'cache_seqlens to be a tensor, or a number'),
    'table of int64': (dict(page_table=TABLE.long()), 'page_table.dtype to be int32'),
    'table of rank 1': (dict(page_table=TABLE[:, 0]), 'page_table to have the shape'),
    'table of another batch': (dict(page_table=TABLE[:1]), 'page_table to have the shape'),
    'table elsewhere': (dict(page_table=TABLE.to('meta')), 'page_table on the device of q'),
    'table by columns': (dict(page_table=ints([[0, 1], [1, 0]]).T), 'page_table.stride(1) to be 1'),
    'page beyond': (dict(page_table=TABLE + 1), 'page_table[1, 0] to be from 0 to 1'),
    'page of -1': (dict(page_table=TABLE - 1), 'page_table[0, 0] to be from 0 to 1'),
    'row of the table beyond': (dict(page_table=TABLE, cache_batch_idx=ints([0, 2])),
                                'cache_batch_idx[1] to be from 0 to 1, the rows of page_table'),
    'rows of a table, of another batch': (dict(page_table=TABLE, cache_batch_idx=ints([0])),
                                          'cache_batch_idx to have the shape (2,), got (1,)'),
    'rows of a table of int64': (dict(page_table=TABLE, cache_batch_idx=TABLE[:, 0].long()),
                                 'cache_batch_idx.dtype to be int32'),
    'row beyond': (dict(cache_batch_idx=ints([0, 2])), 'cache_batch_idx[1] to be from 0 to 1'),
    'rows of int64': (dict(cache_batch_idx=TABLE[:, 0].long()),
                      'cache_batch_idx.dtype to be int32'),
    'leftpad beyond': (dict(cache_leftpad=ints([6, 0])), 'cache_leftpad[0] to be from 0 to 5'),
    'negative leftpad': (dict(cache_leftpad=ints([0, -1])), 'cache_leftpad[1] to be from 0 to 9'),
    'leftpad of another batch': (dict(cache_leftpad=ints([0])), 'cache_leftpad to have the shape'),
    # Shapes and dtypes.
    'another batch': (dict(k_cache=CACHE[:1], v_cache=CACHE[:1].clone()),
                      'k_cache to have the shape (2, slots, heads, 16)'),
    'cache of rank 0 with scales of pages': (PAGES | dict(k_cache=torch.zeros(())),
                                             'k_cache to have the shape'),
    'cache of rank 3': (dict(k_cache=CACHE[0]), 'k_cache to have the shape'),
    'slots of v': (dict(v_cache=CACHE[:, 1:]), 'v_cache to have the shape (2, 12, 2, head_dim)'),
    'heads': (dict(q=torch.randn(BATCH, 1, 3, DIM)), 'the heads of q to be a multiple'),
    'head dim': (dict(q=torch.randn(BATCH, 1, 4, 8)),
                 'k_cache to have the shape (2, slots, heads, 8)'),
    'q packed': (dict(q=Q[:, 0]), 'q to have the shape'),
    'q not packed': (dict(cu_seqlens_q=ints([0, 1, 2])), 'q to have the shape'),
    'starts of q': (dict(q=Q[:, 0], cu_seqlens_q=ints([0, 2, 1])), 'cu_seqlens_q[2]'),
    'e4m3 keys, 16-bit values': (dict(k_cache=E4M3['k_cache']), 'k_cache.dtype to be that of q'),
    'e4m3 q, 16-bit cache': (dict(q=E4M3['q'], k=None, v=None),
                             'k_cache.dtype to be that of q'),
    'new keys of e4m3 for q of 16 bits, rotated': (
        E4M3 | dict(q=Q.bfloat16(), rotary_cos=COS.bfloat16(), rotary_sin=COS.bfloat16()),
        'k.dtype to be bfloat16, got float8_e4m3fn'),
    'new values of another dtype': (E4M3 | dict(q=Q, k=K, v=K.half()), 'v.dtype to be float32'),
    'mixed dtypes': (dict(v_cache=CACHE.half()), 'v_cache.dtype to be that of q'),
    'e5m2 cache': (dict(k_cache=CACHE.to(torch.float8_e5m2), v_cache=CACHE.to(torch.float8_e5m2)),
                   'k_cache.dtype to be that of q'),
    'head dim of the cache': (dict(k_cache=CACHE[..., :8]), 'k_cache to have the shape'),
    'a word as descale': (E4M3 | dict(k_descale='1'), 'k_descale to be a tensor or a number'),
    'a flag as descale': (E4M3 | dict(v_descale=True), 'v_descale to be a tensor or a number'),
    'a number of a wide cache': (dict(k_descale=0.5), 'k_cache of float8_e4m3fn with k_descale'),
    'descale': (dict(q_descale=torch.ones(2, 2)), 'q of float8_e4m3fn with q_descale'),
    'descale of a wide cache': (dict(k_descale=torch.ones(2, 2)),
                                'k_cache of float8_e4m3fn with k_descale'),
    'descale of wide q': (E4M3 | dict(q=Q, q_descale=torch.ones(2, 2)),
                          'q of float8_e4m3fn with q_descale'),
    'shape of the descale of wide keys': (E4M3 | dict(q=Q, k=K, v=K, v_descale=torch.ones(2, 4)),
                                          'v_descale to have the shape'),
    'shape of a descale': (E4M3 | dict(k_descale=torch.ones(2, 4)), 'k_descale to have the shape'),
    'dtype of a descale': (E4M3 | dict(k_descale=torch.ones(2, 2).half()), 'k_descale.dtype to be'),
    'scales of pages, e4m3 queries': (PAGES | dict(q=E4M3['q'], k=E4M3['k'], v=E4M3['v']),
                                      'q of 16 bits and a cache of float8_e4m3fn with'),
    'scales of pages, 16-bit cache': (dict(page_table=TABLE, descale_by_page=True),
                                      'q of 16 bits and a cache of float8_e4m3fn with'),
    'scales of pages, no pages': (
        {name: x[:2] if name[2:] == 'cache' else x for name, x in PAGES.items()}
        | dict(page_table=None), 'page_table with descale_by_page'),
    'scales of pages, no v_descale': (PAGES | dict(v_descale=None),
                                      'k_descale and v_descale with descale_by_page'),
    'scales of pages, without any': (PAGES | dict(k_descale=None, v_descale=None, k=None, v=None),
                                     'k_descale with descale_by_page'),
    'scales of pages by batch': (PAGES | dict(k_descale=torch.ones(2, 2)),
                                 'k_descale to have the shape (3, 2)'),
    'heads of scales of pages': (PAGES | dict(v_descale=torch.ones(3, 4)),
                                 'v_descale to have the shape (3, 2)'),
    'dtype of scales of pages': (PAGES | dict(k_descale=torch.ones(3, 2).half()),
                                 'k_descale.dtype to be float32'),
    'expanded scales of pages': (PAGES | dict(k_descale=torch.ones(1, 2).expand(3, 2)),
                                 'k_descale with memory for every element'),
    'scales of pages for both': (PAGES | dict(v_descale=PAGES['k_descale']),
                                 'v_descale with memory of its own'),
    'sinks': (dict(s_aux=torch.zeros(3)), 's_aux to have the shape (4,), got (3,)'),
    'window': (dict(window_size=(-2, 0)), 'window_size[0] to be -1 or more'),
    'chunk': (dict(attention_chunk=-1), 'attention_chunk to be 0 or more'),
    'softcap': (dict(softcap=-1.0), 'softcap to be 0 (none)'),
    'scale': (dict(softmax_scale=0.0), 'softmax_scale to be a positive finite'),
    'margin': (dict(sm_margin=-1), 'sm_margin to be from 0 to '),
    'out': (dict(out=torch.zeros(BATCH, 1, 4, 8)), 'out to have the shape (2, 1, 4, 16)'),
    'dtype of out': (dict(out=Q.half()), 'out.dtype to be that of q'),
    'dtype of the result': (dict(out_dtype=torch.float16), 'out_dtype to be None'),
    # Appending.
    'k without v': (dict(v=None), 'v with k, got no v'),
    'v without k': (dict(k=None), 'k with v, got no k'),
    'no length': (dict(cache_seqlens=None), 'cache_seqlens with appended keys'),
    'no room': (dict(cache_seqlens=ints([3, 11])), 'room for 2 new keys after the 11'),
    'no room behind a number': (dict(cache_seqlens=11), 'the number of new keys to be from 0 to 1'),
    'more than the cache': (dict.fromkeys('kv', torch.randn(BATCH, 13, 2, DIM)),
                            'the number of new keys to be from 0 to '),
    'batch of k': (dict(k=K[:1], v=K[:1]), 'k to have the shape (2, tokens, 2, 16)'),
    'heads of k': (dict(k=K[:, :, :1]), 'k to have the shape (2, tokens, 2, 16)'),
    'rows of v': (dict(v=K[:, :1]), 'v to have the shape (2, 2, 2, 16)'),
    'dtype of k': (dict(k=K.half(), v=K.half()), 'k.dtype to be float32'),
    'k packed': (dict(k=K[0], v=K[0]), 'k to have the shape'),
    'k not packed': (dict(cu_seqlens_k_new=ints([0, 1, 2])), 'k to have the shape'),
    'starts of k': (dict(k=K[0], v=K[0], cu_seqlens_k_new=ints([0, 1, 3])), 'cu_seqlens_k_new[2]'),
    'expanded cache': (dict(k_cache=CACHE[:, :1].expand(-1, CAPACITY, -1, -1)),
                       'k_cache with memory for every element'),
    'one cache for both': (dict(k_cache=CACHE, v_cache=CACHE), 'v_cache with memory of its own'),
    'no sin': (dict(rotary_cos=COS), 'rotary_sin with rotary_cos'),
    'no cos': (dict(rotary_sin=COS), 'rotary_cos with rotary_sin'),
    'short tables': (dict(rotary_cos=COS[:8], rotary_sin=COS[:8]),
                     'rotary_cos to have a row for each position from 7 to 8 of sequence 1'),
    'tables of no position': (dict(rotary_cos=COS[:0], rotary_sin=COS[:0]),
                              'the positions of rotary_cos to be 1 or more, got 0'),
    'tables of no position for q alone': (
        dict(k=None, v=None, rotary_cos=COS[:0], rotary_sin=COS[:0]),
        'the positions of rotary_cos to be 1 or more, got 0'),
    'tables of no column': (dict(rotary_cos=COS[:, :0], rotary_sin=COS[:, :0]),
                            'a multiple of 2 from 2 to 16, the head_dim, got 0'),
    'tables of nothing for a batch of none': (
        {name: x[:0] for name, x in dict(q=Q, k_cache=CACHE, v_cache=CACHE.clone(), k=K, v=K,
                                         cache_seqlens=ints([3, 7])).items()}
        | dict(rotary_cos=COS[:0], rotary_sin=COS[:0]), 'positions of rotary_cos to be 1 or'),
    'short tables for q alone': (dict(k=None, v=None, rotary_cos=COS[:7], rotary_sin=COS[:7]),
                                 'rotary_cos to have a row for each position from 7 to 7'),
    'short tables for a full cache': (dict(k=None, v=None, cache_seqlens=None, rotary_cos=COS,
                                           rotary_sin=COS), 'rotary_cos to be 13 or more'),
    'short tables behind a number': (dict(rotary_cos=COS[:8], rotary_sin=COS[:8], cache_seqlens=7),
                                     'rotary_cos to be 9 or more'),
    'position beyond': (dict(rotary_cos=COS, rotary_sin=COS, rotary_seqlens=ints([0, 11])),
                        'rotary_cos to have a row for each position from 11 to 12'),
    'wide tables': (dict(rotary_cos=torch.rand(12, 9), rotary_sin=torch.rand(12, 9)),
                    'rotary_dim, twice rotary_cos.size(1), to be a multiple of 2 from 2 to 16'),
    'shape of sin': (dict(rotary_cos=COS, rotary_sin=COS[:, :3]), 'rotary_sin to have the shape'),
    'dtype of cos': (dict(rotary_cos=COS.half(), rotary_sin=COS), 'rotary_cos.dtype to be that'),
    'e4m3 keys': (E4M3 | dict(rotary_cos=COS.to(E4M3['q'].dtype), rotary_sin=COS),
                  'rotary_sin.dtype to be that of q'),
    'e4m3 keys, tables of two dtypes': (
        E4M3 | dict(rotary_cos=COS.half(), rotary_sin=COS.bfloat16()),
        'rotary_sin.dtype to be float16'),
    # Splits, and what no op sees.
    'negative splits': (dict(num_splits=-1), 'num_splits to be from 0'),
    'too many splits': (dict(num_splits=257), 'num_splits to be from 0'),
    'negative size': (dict(split_size=-1), 'split_size to be 0 or more'),
    'size and splits': (dict(split_size=64, num_splits=2), 'no num_splits above 1 with split_size'),
    'metadata': (dict(scheduler_metadata=torch.zeros(1)),
                 'scheduler_metadata to be one-dimensional'),
}


def check_refused(given: dict, text: str, kind: type = RuntimeError) -> None:
    before = {name: x.clone() for name, x in given.items()
              if name in ('k_cache', 'v_cache', 'out') and isinstance(x, torch.Tensor)}
    with pytest.raises(kind, match=r'flash_attn3\.\w+: expected ' + re.escape(text)):
        flash_attn_with_kvcache(**given)
    for name, x in before.items():
        assert torch.equal(given[name].double().nan_to_num(), x.double().nan_to_num()), name


@pytest.mark.parametrize('name', BAD)
def test_bad_input(name):
    changes, text = BAD[name]
    given = tensors() | changes
    before = {key: given[key].clone() for key in ('k_cache', 'v_cache')}
    with pytest.raises(RuntimeError) as raised:
        flash_attn_with_kvcache(**given)
    assert re.match(r'flash_attn3\.\w+: expected ', str(raised.value))
    assert text in str(raised.value)
    for key, x in before.items():
        assert torch.equal(given[key].float(), x.float()), f'{key} was written'


@pytest.mark.parametrize('name', ['q', 'k_cache', 'v_cache', 'k', 'v', 'rotary_cos', 'rotary_sin',
                                  's_aux', 'out'])
def test_gradients_are_refused(name):
    given = tensors() | dict(rotary_cos=COS, rotary_sin=COS, s_aux=torch.zeros(4), out=Q.clone())
    given[name] = given[name].clone().requires_grad_()
    check_refused(given, 'requires_grad=False with a cache, got requires_grad=True of ' + name)
    with torch.no_grad():
        flash_attn_with_kvcache(**given)


def test_gradients_of_scales_are_refused():
    for name in ('q_descale', 'k_descale', 'v_descale'):
        given = E4M3 | dict(cache_seqlens=3, k=None, v=None)
        given[name] = torch.ones(2, 2, requires_grad=True)
        check_refused(given, 'requires_grad=False')
    check_refused(tensors() | dict(softmax_scale=torch.ones((), requires_grad=True)),
                  'softmax_scale to be a number', NotImplementedError)


def test_tangents_are_refused():
    given = tensors()
    with pytest.raises(NotImplementedError, match='reverse-mode'):
        torch.func.jvp(lambda q: flash_attn_with_kvcache(**given | dict(q=q)), (Q,), (Q,))


@pytest.mark.parametrize('changes, text', [
    (dict(cache_seqlens=ints([3, 11])), 'room for 2 new keys after the 11 of sequence 1'),
    (dict(cache_seqlens=ints([3, 13])), 'cache_seqlens[1] to be from 0 to 12'),
    (dict(cache_leftpad=ints([6, 0])), 'cache_leftpad[0] to be from 0 to 5'),
    (dict(cache_batch_idx=ints([0, 2])), 'cache_batch_idx[1] to be from 0 to 1'),
    (dict(page_table=TABLE + 1), 'page_table[1, 0] to be from 0 to 1')])
def test_contents_on_a_gpu_where_asked_for(changes, text, monkeypatch):
    """As if these tensors were on one, with ops that read no contents."""
    given = tensors(torch.bfloat16) | changes
    monkeypatch.setattr(kvcache, '_EAGER', (None, lambda *_: (given['q'], None, None)))
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    assert flash_attn_with_kvcache(**given) is given['q']
    monkeypatch.setattr(env, 'CHECK_CONTENTS', True)
    check_refused(given, text)
    assert flash_attn_with_kvcache(**tensors(torch.bfloat16)).shape == given['q'].shape


def test_metadata_need_a_tensor():
    with pytest.raises(RuntimeError, match='expected cache_seqlens to be a tensor'):
        get_scheduler_metadata(1, 1, 8, 4, 2, 64, 8)


# -------------------------------------------------------------------------------- rules of the GPU
def described(shape: tuple, dtype: str = 'bfloat16', strides: tuple | None = None,
              address: int = 0) -> tuple:
    name, kind, index, sizes, own, _ = describe_sizes(shape, dtype)
    return name, kind, index, sizes, strides or own, address


def on_cuda(**changes) -> dict:
    call = dict(q=described((2, 1, 4, 64)), k=described((2, 128, 2, 64), address=1 << 20),
                v=described((2, 128, 2, 64), address=1 << 24),
                cache_seqlens=described((2,), 'int32'))
    return call | changes


def appending(**changes) -> dict:
    new = described((2, 1, 2, 64))
    return on_cuda(k_new=new, v_new=new) | changes


TABLES = {name: described((128, 16)) for name in ('rotary_cos', 'rotary_sin')}


def test_calls_on_cuda():
    """Also those of which the CPU would know more: contents are not read."""
    odd = described((2, 128, 2, 64), strides=(128 * 136, 136, 64, 1))
    assert _plan.check_cache(**on_cuda()) == ''
    assert _plan.check_cache(**on_cuda(k=odd, v=odd)) == ''
    assert _plan.check_cache(**on_cuda(q=described((5, 4, 64)),
                                       cu_seqlens_q=described((3,), 'int32'))) == ''
    assert _plan.check_append(**appending()) == ''
    assert _plan.check_append(**appending(**TABLES)) == ''
    assert _plan.check_append(**on_cuda(**TABLES)) == ''    # q alone is rotated
    short = {name: described((1, 16)) for name in TABLES}
    assert _plan.check_append(**appending(**short)) == ''    # positions are on the device
    assert 'rotary_cos to be 6 or more' in _plan.check_append(**appending(
        **short, cache_seqlens=None, cache_length=5))


@pytest.mark.parametrize('check, call, text', [
    ('check_cache', on_cuda(k=described((2, 128, 2, 64), address=8)), 'k_cache with an address'),
    ('check_cache', on_cuda(v=described((2, 128, 2, 64), strides=(128 * 132, 132, 64, 1))),
     'v_cache with an address and strides of'),
    ('check_cache', on_cuda(k=described((2, 128, 2, 64), strides=(16384, 128, 64, 2))),
     'k_cache.stride(3) to be 1'),
    ('check_cache', on_cuda(q=described((2, 1, 4, 68)), k=described((2, 128, 2, 68))),
     'the head_dim of q to be a multiple of 8'),
    ('check_cache', on_cuda(q=described((2, 1, 4, 64), 'float32')), 'q.dtype to be float16 or'),
    ('check_cache', on_cuda(cu_seqlens_k=described((3,), 'int32'),
                            page_table=described((2, 4), 'int32')), 'no page_table with cu_seq'),
    ('check_cache', on_cuda(shared_prefix=129), 'shared_prefix to be from 0 to 128'),
    ('check_cache', on_cuda(shared_prefix=-1), 'shared_prefix to be from 0 to 128'),
    ('check_cache', on_cuda(shared_prefix=64, cache_leftpad=described((2,), 'int32')),
     'no cache_leftpad with shared_prefix'),
    ('check_cache', on_cuda(shared_prefix=64, cu_seqlens_k=described((3,), 'int32'),
                            cache_seqlens=None), 'no shared_prefix with cu_seqlens_k'),
    ('check_cache', on_cuda(appended=2, cache_seqlens=None), 'cache_seqlens with appended keys'),
    ('check_cache', on_cuda(seqused_k=described((2,), 'int32')), 'cu_seqlens_k with seqused_k'),
    ('check_append', appending(**{name: described((128, 5)) for name in TABLES}),
     'rotary_dim, twice rotary_cos.size(1), to be a multiple of 16 from 16 to 64'),
    ('check_append', appending(k_new=described((2, 1, 2, 64), strides=(256, 256, 128, 2))),
     'k.stride(3) to be 1'),
    ('check_append', on_cuda(k_new=described((2, 1, 2, 64))), 'v with k, got no v'),
    ('check_cache', on_cuda(appended=1, cache_length=128, cache_seqlens=None),
     'the number of new keys to be 0, the free slots of a sequence, got 1'),
])
def test_rules_of_cuda(check, call, text):
    error = getattr(_plan, check)(**call)
    assert text in error and error.startswith('flash_attn3.')
