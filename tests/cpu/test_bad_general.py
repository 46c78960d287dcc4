"""Wrong calls with windows, chunks, softcap, sinks and packed sequences: the whole text of each
error, and what cu_seqlens and seqused contain.
"""
import contextlib
import math

import pytest
import torch

from flash_attn3 import (can_use, env, flash_attn_func, flash_attn_qkvpacked_func,
                         flash_attn_varlen_func)
from flash_attn3.ops import dense_and_varlen
from flash_attn3.ops.dense_and_varlen import General

from tests.support import bad_inputs
from tests.support.lists import ints, starts

FWD = 'flash_attn3.flash_attn_varlen_func: expected '
DENSE = bad_inputs.FWD
TWO_INTS = 'window_size to be two ints (left, right)'
NO_LIMIT = '; hint: -1 means no limit'
SOFTCAP = 'softcap to be 0 (none) or a positive finite float32'
CHUNK = 'attention_chunk to be 0 or more'
SINK_DTYPE = 's_aux.dtype to be float32, bfloat16 or float16'
BAD_SCORES = {    # name: (arguments, error after the name of the function)
    'left': ({'window_size': (-2, 0)}, 'window_size[0] to be -1 or more, got -2'),
    'right': ({'window_size': [4, -9]}, 'window_size[1] to be -1 or more, got -9'),
    'None': ({'window_size': (None, 0)}, f'{TWO_INTS}, got (None, 0){NO_LIMIT}'),
    'no_window': ({'window_size': None}, f'{TWO_INTS}, got None{NO_LIMIT}'),
    'one_number': ({'window_size': 4}, f'{TWO_INTS}, got 4{NO_LIMIT}'),
    'float': ({'window_size': (4.0, 0)}, f'{TWO_INTS}, got (4.0, 0){NO_LIMIT}'),
    'float_tensor': ({'window_size': torch.tensor([4.0, 0.0])},
                     f'{TWO_INTS}, got [4.0, 0.0]{NO_LIMIT}'),
    'one_number_tensor': ({'window_size': torch.tensor(4)}, f'{TWO_INTS}, got 4{NO_LIMIT}'),
    'device': ({'window_size': torch.empty(2, dtype=torch.int64, device='meta')},
               f'{TWO_INTS}, or a CPU tensor of them, got a tensor on meta; hint: '
               'pass window_size.tolist(), which waits for the device'),
    'three': ({'window_size': (1, 2, 3)}, f'{TWO_INTS}, got (1, 2, 3){NO_LIMIT}'),
    'chunk': ({'attention_chunk': -4}, f'{CHUNK}, got -4'),
    'softcap': ({'softcap': -30.0}, f'{SOFTCAP}, got -30'),
    'softcap_nan': ({'softcap': math.nan}, f'{SOFTCAP}, got nan'),
    'softcap_inf': ({'softcap': math.inf}, f'{SOFTCAP}, got inf'),
    'sinks': ({'s_aux': torch.zeros(3)},
              's_aux to have the shape (4,), got (3,)'),
    'sinks_rank': ({'s_aux': torch.zeros(1, 4)},
                   's_aux to have the shape (4,), got (1, 4)'),
    'sinks_int': ({'s_aux': torch.zeros(4, dtype=torch.int64)}, f'{SINK_DTYPE}, got int64'),
}
EVERY_SCORE = pytest.mark.parametrize('changes, text', BAD_SCORES.values(), ids=BAD_SCORES)


def packed(**changes) -> dict:
    """Good arguments, where bfloat16 q is (16, 4, 64), k and v are (24, 2, 64)."""
    q, k, v = (torch.randn(*shape, dtype=torch.bfloat16)
               for shape in ((16, 4, 64), (24, 2, 64), (24, 2, 64)))
    return {'q': q, 'k': k, 'v': v, 'cu_seqlens_q': starts([5, 0, 11]),
            'cu_seqlens_k': starts([8, 9, 7]), 'max_seqlen_q': 11, 'max_seqlen_k': 9} | changes


@contextlib.contextmanager
def raises(text: str):
    with pytest.raises(RuntimeError) as error:
        yield
    assert str(error.value) == text


@EVERY_SCORE
@pytest.mark.parametrize('requires_grad', [False, True])
def test_bad_scores(requires_grad, changes, text):
    dense, lists = bad_inputs.good_arguments('cpu'), packed()
    for tensors in (dense, lists):
        tensors['q'].requires_grad_(requires_grad)
    with raises(f'{DENSE}{text}'):
        flash_attn_func(**dense, **changes)
    with raises(f'{FWD}{text}'):
        flash_attn_varlen_func(**lists, **changes)
    with pytest.raises(RuntimeError) as error:    # the op names the dense function
        flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 64, requires_grad=requires_grad),
                                  **changes)
    assert str(error.value).replace('qkvpacked_', '') == f'{DENSE}{text}'


@EVERY_SCORE
def test_can_use_says_the_same(changes, text):
    assert can_use(**bad_inputs.good_arguments('cpu'), **changes)[1][0] == f'{DENSE}{text}'
    assert can_use(**packed(), **changes)[1][0] == f'{FWD}{text}'


@pytest.mark.parametrize('bad', bad_inputs.EVERYWHERE, ids=str)
def test_dense_tensors_are_checked_as_without_features(bad):
    with pytest.raises(RuntimeError) as error:
        flash_attn_func(**bad.arguments('cpu'), softcap=30.0)
    assert str(error.value).startswith(bad.text)


# ----------------------------------------------------------------------------------------- packed
LAYOUT = '(total, heads, head_dim)'
HINT = f'; hint: tensors are {LAYOUT}'
BAD_PACKED = {    # name: (arguments, error)
    'dense_q': ({'q': torch.zeros(1, 16, 4, 64, dtype=torch.bfloat16)},
                f'{FWD}q to have the shape {LAYOUT} with cu_seqlens_q, got '
                '(1, 16, 4, 64)'),
    'v_total': ({'v': torch.zeros(23, 2, 64, dtype=torch.bfloat16)},
                f'{FWD}v to have the shape (24, 2, head_dim) with cu_seqlens_k, got (23, 2, 64)'),
    'k_head_dim': ({'k': torch.zeros(24, 2, 56, dtype=torch.bfloat16)},
                   f'{FWD}k to have the shape (total, heads, 64) with cu_seqlens_k, got '
                   '(24, 2, 56)'),
    'heads': ({'q': torch.zeros(16, 3, 64, dtype=torch.bfloat16)},
              f'{FWD}the heads of q to be a multiple of 2, the KV heads, got 3{HINT}'),
    'k_dtype': ({'k': torch.zeros(24, 2, 64)},
                f'{FWD}k.dtype to be that of q, bfloat16, got float32'),
    'int64': ({'cu_seqlens_q': starts([5, 0, 11]).long()},
              f'{FWD}cu_seqlens_q.dtype to be int32, got int64; hint: call cu_seqlens_q.int()'),
    'batch': ({'cu_seqlens_k': starts([8, 16])},
              f'{FWD}cu_seqlens_k to have the shape (4,), got (3,)'),
    'none': ({'cu_seqlens_k': None},
             f'{FWD}cu_seqlens_k with cu_seqlens_q, got no cu_seqlens_k'),
    'no_starts': ({'cu_seqlens_q': ints([]), 'cu_seqlens_k': ints([])},
                  f'{FWD}cu_seqlens_q to have the shape (batch + 1,), got (0,)'),
    'rank': ({'cu_seqlens_q': starts([5, 0, 11])[None]},
             f'{FWD}cu_seqlens_q to have the shape (batch + 1,), got (1, 4)'),
    'used': ({'seqused_k': ints([1, 2])},
             f'{FWD}seqused_k to have the shape (3,), got (2,)'),
    'strided': ({'cu_seqlens_q': ints([0, 0, 5, 0, 5, 0, 16])[::2]},
                f'{FWD}cu_seqlens_q.stride(0) to be 1, got 2; hint: call '
                'cu_seqlens_q.contiguous()'),
    'max_seqlen': ({'max_seqlen_k': -1},
                   f'{FWD}max_seqlen_k to be an int of 0 or more, got -1'),
    'max_seqlen_float': ({'max_seqlen_q': 11.0},
                         f'{FWD}max_seqlen_q to be an int of 0 or more, got 11.0'),
    'max_seqlen_none': ({'max_seqlen_q': None},
                        f'{FWD}max_seqlen_q to be an int of 0 or more, got None'),
    'margin': ({'sm_margin': -1}, f'{FWD}sm_margin to be from 0 to 131, got -1; hint: '
               'it is the number of SMs to leave to other kernels'),
    'scale': ({'softmax_scale': -1.0},
              f'{FWD}softmax_scale to be a positive finite float32, got -1'),
    'out': ({'out': torch.zeros(1, 16, 4, 64, dtype=torch.bfloat16)},
            f'{FWD}out to have the shape (16, 4, 64) with cu_seqlens_q, got '
            '(1, 16, 4, 64)'),
}


@pytest.mark.parametrize('changes, text', BAD_PACKED.values(), ids=BAD_PACKED)
def test_bad_packed(changes, text):
    with raises(text):
        flash_attn_varlen_func(**packed(**changes))


@pytest.mark.parametrize('name', bad_inputs.UNSUPPORTED)
def test_unsupported_arguments(name):
    text = f'^flash_attn3.flash_attn_varlen_func: expected {name} to be .*; hint: '
    with pytest.raises(NotImplementedError, match=text):
        flash_attn_varlen_func(**packed(**{name: bad_inputs.UNSUPPORTED[name]}))


def test_used_lengths_need_sequences():
    q, k, v = bad_inputs.good_arguments('cpu').values()
    with raises(f'{DENSE}cu_seqlens_k with seqused_k, got no cu_seqlens_k'):
        torch.ops.flash_attn3.fwd_general(q, k, v, seqused_k=ints([1, 2]))


# --------------------------------------------------------------------------------------- contents
BAD_CONTENTS = {    # name: (arguments, error behind 'flash_attn3.<op>: expected ')
    'first': ({'cu_seqlens_q': ints([1, 5, 5, 16])}, 'cu_seqlens_q[0] to be 0, got 1'),
    'falls': ({'cu_seqlens_k': ints([0, 8, 7, 24])},
              'cu_seqlens_k[2], the end of sequence 1, to be from 8, its start, to 24, the rows of '
              'k, got 7'),
    'beyond': ({'cu_seqlens_q': ints([0, 5, 17, 18])},
               'cu_seqlens_q[2], the end of sequence 1, to be from 5, its start, to 16, the rows '
               'of q, got 17'),
    'negative': ({'cu_seqlens_k': ints([0, -1, 7, 24])},
                 'cu_seqlens_k[1], the end of sequence 0, to be from 0, its start, to 24, the rows '
                 'of k, got -1'),
    'used_q': ({'seqused_q': ints([5, 1, 11])},
               'seqused_q[1] to be from 0 to 0, the rows of sequence 1, got 1'),
    'used_k': ({'seqused_k': ints([8, 9, 8])},
               'seqused_k[2] to be from 0 to 7, the rows of sequence 2, got 8'),
    'used_negative': ({'seqused_k': ints([8, -1, 8])},
                      'seqused_k[1] to be from 0 to 9, the rows of sequence 1, got -1'),
}
EVERY_CONTENT = pytest.mark.parametrize('changes, text', BAD_CONTENTS.values(), ids=BAD_CONTENTS)


@EVERY_CONTENT
@pytest.mark.parametrize('requires_grad', [False, True])
def test_bad_contents(requires_grad, changes, text):
    arguments = packed(**changes)
    arguments['q'].requires_grad_(requires_grad)
    with raises(f'{FWD}{text}'):
        flash_attn_varlen_func(**arguments)


@EVERY_CONTENT
def test_bad_contents_of_the_gradients(changes, text):
    arguments = packed(**changes)
    q, k, v = (arguments[name] for name in 'qkv')
    lists = [arguments.get(name) for name in General._fields[:4]]
    with raises(f'{FWD}{text}'):
        torch.ops.flash_attn3.bwd(q, None, q, k, v, q, torch.zeros(4, 16), None, False, False,
                                  *lists)


def test_rows_behind_the_last_sequence_are_fine():
    arguments = packed(cu_seqlens_q=ints([0, 5, 5, 12]), cu_seqlens_k=ints([0, 0, 0, 0]))
    assert (flash_attn_varlen_func(**arguments) == 0).all()


class _OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize('is_on', [False, True])
def test_contents_on_a_gpu_are_read_on_request(is_on, monkeypatch):
    """Only with FLASH_ATTN3_CHECKS=1: it has to wait for the GPU."""
    monkeypatch.setattr(env, 'CHECK_CONTENTS', is_on)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    read = []
    monkeypatch.setattr(dense_and_varlen, 'check_contents', lambda *args: read.append(args))
    arguments = packed()
    q, k = arguments['q'].as_subclass(_OnGpu), arguments['k']
    general = General(arguments['cu_seqlens_q'], arguments['cu_seqlens_k'])
    dense_and_varlen.check_cuda_contents(q, k, general)
    assert len(read) == is_on
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    dense_and_varlen.check_cuda_contents(q, k, general)
    assert len(read) == is_on
