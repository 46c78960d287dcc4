"""checks/attention.cpp for packed sequences, through flash_attn3._plan: every rule, with its
text, on tensors that are described by numbers.
"""
import pytest

from flash_attn3 import _plan

from tests.cpu.test_checks import BAD_CALLS, BAD_OUTPUTS, K_SIZES, Q_SIZES, error_text, tensor

LAYOUT = '(total, heads, head_dim)'
HINT_LAYOUT = f'tensors are {LAYOUT}'
LISTS = ('cu_seqlens_q', 'cu_seqlens_k', 'seqused_q', 'seqused_k', 'sinks')
SCORES = {'softmax_scale': 0.125, 'causal': False, 'window_left': -1, 'window_right': -1,
          'attention_chunk': 0, 'softcap': 0.0}
PACKED_Q, PACKED_K = (300, 8, 64), (500, 4, 64)


def ints(*sizes, **options):
    return tensor(*sizes, dtype='int32', **options)


def dense(**common):
    return {'q': tensor(*Q_SIZES, **common), 'k': tensor(*K_SIZES, **common),
            'v': tensor(*K_SIZES, **common), 'out': None, **dict.fromkeys(LISTS), **SCORES}


def packed(batch=3, **common):
    """Every list given."""
    of_lists = {name: value for name, value in common.items() if name != 'dtype'}
    return dense() | {
        'q': tensor(*PACKED_Q, **common), 'k': tensor(*PACKED_K, **common),
        'v': tensor(*PACKED_K, **common),
        'cu_seqlens_q': ints(batch + 1, **of_lists), 'cu_seqlens_k': ints(batch + 1, **of_lists),
        'seqused_q': ints(batch, **of_lists), 'seqused_k': ints(batch, **of_lists),
        'sinks': tensor(8, dtype='float32', **of_lists)}


def check(call, sm_margin=0, sm_count=132):
    return _plan.check_forward(**call, sm_margin=sm_margin, sm_count=sm_count)


def backward(call, **changes):
    """The same call of the gradients, and its whole list of arguments."""
    is_packed = call['cu_seqlens_q'] is not None
    sizes = call['q'][3]
    of_lse = sizes[1::-1] if is_packed else (sizes[0], sizes[2], sizes[1])
    device, index = call['q'][1:3]
    out = tensor(*sizes[:-1], call['v'][3][-1], dtype=call['q'][0], device=device, index=index)
    lse = tensor(*of_lse, dtype='float64' if call['q'][0] == 'float64' else 'float32',
                 device=device, index=index)
    tensors = call | {'dout': out, 'dlse': lse, 'out': out, 'lse': lse} | changes
    return _plan.check_backward(**tensors)


GOOD = {
    'dense': dense(),
    'dense, sinks': dense() | {'sinks': tensor(8, dtype='float32')},
    'scores': dense() | {'window_left': 0, 'window_right': 2**40, 'attention_chunk': 7,
                         'softcap': 50.0, 'causal': True},
    'packed': packed(),
    'packed, no used lengths': packed() | {'seqused_q': None, 'seqused_k': None, 'sinks': None},
    'batch 0': packed(0),
    'no rows': packed() | {'q': tensor(0, 8, 64), 'k': tensor(0, 4, 64), 'v': tensor(0, 4, 64)},
    'strides': packed() | {'q': tensor(*PACKED_Q, strides=(3, 5, 1), address=2)},
    'GPU 3': packed(index=3),
    'CPU': packed(device='cpu'),
    'CPU, float64': packed(device='cpu', dtype='float64') | {
        'sinks': tensor(8, dtype='float64', device='cpu')},
    'CPU, head dim of v': packed(device='cpu') | {'v': tensor(500, 4, 24, device='cpu')},
    'one sequence': packed(1) | {'seqused_q': ints(1, strides=(7,))},
}


@pytest.mark.parametrize('call', GOOD.values(), ids=GOOD)
def test_good_calls(call):
    assert check(call) == ''
    assert backward(call) == ''
    assert backward(call, dlse=None) == ''


def test_good_outputs():
    assert check(dense() | {'out': tensor(*Q_SIZES, address=1024)}) == ''
    assert check(packed() | {'out': tensor(*PACKED_Q, address=1024)}) == ''


@pytest.mark.parametrize('call, expected, got, hint', [row[1:] for row in BAD_CALLS],
                         ids=[row[0] for row in BAD_CALLS])
def test_dense_tensors_are_checked_as_without_features(call, expected, got, hint):
    changes = {'v': call['k'], **call} if 'k' in call else dict(call)
    margin = {name: changes.pop(name) for name in ('sm_margin', 'sm_count') if name in changes}
    assert check(dense() | {'softcap': 1.0} | changes, **margin) == error_text(
        'flash_attn_func', expected, got, hint)


@pytest.mark.parametrize('out, expected, got, hint', [row[1:] for row in BAD_OUTPUTS],
                         ids=[row[0] for row in BAD_OUTPUTS])
def test_bad_dense_output(out, expected, got, hint):
    assert check(dense() | {'out': out}) == error_text('flash_attn_func', expected, got, hint)


def all_of(**common):
    """q, k and v of a packed call, changed together."""
    return {'q': tensor(*PACKED_Q, **common), 'k': tensor(*PACKED_K, **common),
            'v': tensor(*PACKED_K, **common)}


# (what is wrong, changes to a packed call, expected, got, hint)
BAD_PACKED = [
    ('no cu_seqlens_k', {'cu_seqlens_k': None}, 'cu_seqlens_k with cu_seqlens_q',
     'no cu_seqlens_k', ''),
    ('no cu_seqlens_q', {'cu_seqlens_q': None}, 'cu_seqlens_q with cu_seqlens_k',
     'no cu_seqlens_q', ''),
    ('rank of q', {'q': tensor(*Q_SIZES)}, f'q to have the shape {LAYOUT} with cu_seqlens_q',
     str(Q_SIZES), ''),
    ('rank of v', {'v': tensor(4, 64)}, 'v to have the shape (500, 4, head_dim) with cu_seqlens_k',
     '(4, 64)', ''),
    ('total of v', {'v': tensor(501, 4, 64)}, 'v to have the shape (500, 4, head_dim) with '
     'cu_seqlens_k', '(501, 4, 64)', ''),
    ('heads of v', {'v': tensor(500, 2, 64)}, 'v to have the shape (500, 4, head_dim) with '
     'cu_seqlens_k', '(500, 2, 64)', ''),
    ('head dim of k', {'k': tensor(500, 4, 32)}, 'k to have the shape (total, heads, 64) with '
     'cu_seqlens_k', '(500, 4, 32)', ''),
    ('no KV heads', {'k': tensor(500, 0, 64), 'v': tensor(500, 0, 64)},
     'the heads of k to be 1 or more', '0', ''),
    ('heads that do not divide', {'q': tensor(300, 6, 64), 'sinks': None},
     'the heads of q to be a multiple of 4, the KV heads', '6', HINT_LAYOUT),
    ('device of k', {'k': tensor(*PACKED_K, device='cpu')}, 'k on the device of q, cuda:0', 'cpu',
     ''),
    ('dtype', all_of(dtype='float32'), 'q.dtype to be float16 or bfloat16', 'float32',
     'convert q, k and v to bfloat16 or float16'),
    ('dtype of v', {'v': tensor(*PACKED_K, dtype='float16')},
     'v.dtype to be that of q, bfloat16', 'float16', ''),
    ('last stride', {'k': tensor(*PACKED_K, strides=(256, 1, 4))},
     'k.stride(2) to be 1', '4', 'call k.contiguous()'),
    ('scale', {'softmax_scale': 0.0}, 'softmax_scale to be a positive finite float32', '0', ''),
    *[row for name, wanted in (('cu_seqlens_q', '(batch + 1,)'), ('cu_seqlens_k', '(4,)'))
      for row in (
        (f'rank of {name}', {name: ints(2, 2)}, f'{name} to have the shape {wanted}', '(2, 2)', ''),
        (f'scalar {name}', {name: ints()}, f'{name} to have the shape {wanted}', '()', ''),
        (f'dtype of {name}', {name: tensor(4, dtype='int64')}, f'{name}.dtype to be int32', 'int64',
         f'call {name}.int()'),
        (f'device of {name}', {name: ints(4, device='cpu')},
         f'{name} on the device of q, cuda:0', 'cpu', ''),
        (f'stride of {name}', {name: ints(4, strides=(2,))}, f'{name}.stride(0) to be 1',
         '2', f'call {name}.contiguous()'))],
    ('no starts', {'cu_seqlens_q': ints(0), 'cu_seqlens_k': ints(0)},
     'cu_seqlens_q to have the shape (batch + 1,)', '(0,)', ''),
    ('other batches', {'cu_seqlens_k': ints(5)},
     'cu_seqlens_k to have the shape (4,)', '(5,)', ''),
    *[row for name in ('seqused_q', 'seqused_k') for row in (
        (f'rank of {name}', {name: ints(3, 1)}, f'{name} to have the shape (3,)', '(3, 1)', ''),
        (f'size of {name}', {name: ints(4)},
         f'{name} to have the shape (3,)', '(4,)', ''),
        (f'dtype of {name}', {name: tensor(3, dtype='float32')}, f'{name}.dtype to be int32',
         'float32', f'call {name}.int()'),
        (f'device of {name}', {name: ints(3, index=1)}, f'{name} on the device of q, cuda:0',
         'cuda:1', ''),
        (f'stride of {name}', {name: ints(3, strides=(0,))}, f'{name}.stride(0) to be 1',
         '0', f'call {name}.contiguous()'))],
]

# Bad scores, which dense and packed calls refuse alike.
BAD_SCORES = [
    ('rank of s_aux', {'sinks': tensor(1, 8, dtype='float32')},
     's_aux to have the shape (8,)', '(1, 8)', ''),
    ('heads of s_aux', {'sinks': tensor(4, dtype='float32')},
     's_aux to have the shape (8,)', '(4,)', ''),
    ('dtype of s_aux', {'sinks': tensor(8)}, 's_aux.dtype to be float32', 'bfloat16', ''),
    ('device of s_aux', {'sinks': tensor(8, dtype='float32', device='cpu')},
     's_aux on the device of q, cuda:0', 'cpu', ''),
    ('stride of s_aux', {'sinks': tensor(8, dtype='float32', strides=(2,))},
     's_aux.stride(0) to be 1', '2', 'call s_aux.contiguous()'),
    ('left', {'window_left': -2}, 'window_size[0] to be -1 or more', '-2', ''),
    ('right', {'window_left': 3, 'window_right': -5},
     'window_size[1] to be -1 or more', '-5', ''),
    ('chunk', {'attention_chunk': -1}, 'attention_chunk to be 0 or more', '-1', ''),
    *[(f'softcap {text}', {'softcap': float(text)},
       'softcap to be 0 (none) or a positive finite float32', text, '')
      for text in ('-1', 'inf', '-inf', 'nan', '1e+60', '1e-60')],
]


@pytest.mark.parametrize('changes, expected, got, hint', [row[1:] for row in BAD_PACKED],
                         ids=[row[0] for row in BAD_PACKED])
def test_bad_packed(changes, expected, got, hint):
    wanted = error_text('flash_attn_varlen_func', expected, got, hint)
    assert check(packed() | changes) == wanted
    if 'q' not in changes:
        assert backward(packed() | changes) == wanted


@pytest.mark.parametrize('make', [dense, packed])
@pytest.mark.parametrize('changes, expected, got, hint', [row[1:] for row in BAD_SCORES],
                         ids=[row[0] for row in BAD_SCORES])
def test_bad_scores(changes, expected, got, hint, make):
    op = 'flash_attn_varlen_func' if make is packed else 'flash_attn_func'
    wanted = error_text(op, expected, got, hint)
    assert check(make() | changes) == wanted
    assert backward(make() | changes) == wanted


@pytest.mark.parametrize('name', ['seqused_q', 'seqused_k'])
def test_used_lengths_without_sequences(name):
    assert check(dense() | {name: ints(2)}) == error_text(
        'flash_attn_func', f'cu_seqlens_{name[-1]} with {name}', f'no cu_seqlens_{name[-1]}', '')


def test_margin():
    assert check(packed(), sm_margin=132) == error_text(
        'flash_attn_varlen_func', 'sm_margin to be from 0 to 131', '132',
        'it is the number of SMs to leave to other kernels')


SHAPE = 'out to have the shape (300, 8, 64) with cu_seqlens_q'
BAD_PACKED_OUTPUTS = [
    ('shape', tensor(300, 8, 32), SHAPE, '(300, 8, 32)', ''),
    ('rank', tensor(1, 300, 8, 64), SHAPE, '(1, 300, 8, 64)', ''),
    ('dtype', tensor(*PACKED_Q, dtype='float32'), 'out.dtype to be that of q, bfloat16', 'float32',
     ''),
    ('device', tensor(*PACKED_Q, index=3), 'out on the device of q, cuda:0', 'cuda:3', ''),
    ('last stride', tensor(*PACKED_Q, strides=(512, 1, 8)),
     'out.stride(2) to be 1', '8', 'call out.contiguous()'),
    ('expanded', tensor(*PACKED_Q, strides=(0, 64, 1)), 'out.stride(0) not to be 0',
     '0', 'do not pass an expanded tensor'),
]


@pytest.mark.parametrize('out, expected, got, hint', [row[1:] for row in BAD_PACKED_OUTPUTS],
                         ids=[row[0] for row in BAD_PACKED_OUTPUTS])
def test_bad_packed_output(out, expected, got, hint):
    assert check(packed() | {'out': out}) == error_text(
        'flash_attn_varlen_func', expected, got, hint)


@pytest.mark.parametrize('name', ['q', 'k', 'v'])
def test_output_in_the_memory_of_an_input(name):
    sizes = {'q': PACKED_Q, 'k': PACKED_K, 'v': PACKED_K}
    call = packed() | {name: tensor(*sizes[name], address=4096),
                       'out': tensor(*PACKED_Q, address=4096)}
    assert check(call) == error_text('flash_attn_varlen_func', 'out with memory of its own',
                                     f'the memory of {name}', '')


# (of which tensor, wrong sizes, right sizes): dense, then packed.
@pytest.mark.parametrize('make, name, wrong, right', [
    (dense, 'dout', (2, 128, 8, 32), '(2, 128, 8, 64)'),
    (dense, 'out', (2, 8, 64), '(2, 128, 8, 64)'),
    (dense, 'lse', (2, 128, 8), '(2, 8, 128)'),
    (dense, 'dlse', (8, 128), '(2, 8, 128)'),
    (packed, 'dout', (300, 4, 64), '(300, 8, 64)'),
    (packed, 'out', (1, 300, 8, 64), '(300, 8, 64)'),
    (packed, 'lse', (300, 8), '(8, 300)'),
    (packed, 'dlse', (1, 8, 300), '(8, 300)')],
    ids=lambda x: getattr(x, '__name__', str(x)))
def test_bad_gradients(make, name, wrong, right):
    dtype = 'float32' if 'lse' in name else 'bfloat16'
    wanted = dtype if 'lse' in name else 'that of q, bfloat16'
    op = 'flash_attn_varlen_func' if make is packed else 'flash_attn_func'
    assert backward(make(), **{name: tensor(*wrong, dtype=dtype)}) == error_text(
        op, f'{name} to have the shape {right}' + ' with cu_seqlens_q' * (make is packed),
        str(wrong), '')
    sizes = tuple(map(int, right[1:-1].split(', ')))
    assert backward(make(), **{name: tensor(*sizes, dtype='float16')}) == error_text(
        op, f'{name}.dtype to be {wanted}', 'float16', '')
    assert backward(make(), **{name: tensor(*sizes, dtype=dtype, device='cpu')}) == error_text(
        op, f'{name} on the device of q, cuda:0', 'cpu', '')


@pytest.mark.parametrize('name', ['q', 'cu_seqlens_k', 'seqused_q', 'sinks'])
def test_a_tensor_described_wrongly_is_a_type_error(name):
    with pytest.raises(TypeError):
        check(packed() | {name: (1, 2)})
    if name != 'q':
        with pytest.raises(TypeError):
            backward(packed() | {name: (1, 2)})
