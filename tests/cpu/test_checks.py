"""checks/attention.cpp through flash_attn3._plan: every rule, with its whole text, on tensors that
are described by numbers.
"""
import math

import pytest

from flash_attn3 import _plan

LAYOUT = '(batch, seqlen, heads, head_dim)'
HINT_LAYOUT = f'tensors are {LAYOUT}'
HINT_MARGIN = 'it is the number of SMs to leave to other kernels'
HINT_PAD = 'pad q, k and v with zeros, and pass softmax_scale'
HEAD_DIM = 'the head_dim of q to be a multiple of 8 from 8 to 512'


def tensor(*sizes, dtype='bfloat16', device='cuda', index=0, strides=None, address=0):
    if strides is None:
        strides = tuple(math.prod(sizes[i + 1:]) for i in range(len(sizes)))
    return dtype, device, index, sizes, strides, address


Q_SIZES, K_SIZES = (2, 128, 8, 64), (2, 256, 4, 64)
Q, K = tensor(*Q_SIZES), tensor(*K_SIZES)


def check(q=Q, k=K, v=None, sm_count=132, **others):
    v = k if v is None else v
    return _plan.check_forward(q=q, k=k, v=v, sm_count=sm_count, **others)


def all_inputs(head_dim=64, **common):
    """q, k and v of one dtype, device and head dim."""
    return {'q': tensor(*Q_SIZES[:3], head_dim, **common),
            'k': tensor(*K_SIZES[:3], head_dim, **common)}


@pytest.mark.parametrize('call', [
    {},
    all_inputs(dtype='float16'),
    all_inputs(head_dim=256),
    {'out': tensor(*Q_SIZES, address=1024)},
    {'q': tensor(0, 128, 8, 64), 'k': tensor(0, 256, 4, 64)},
    {'q': tensor(2, 0, 8, 64)},
    {'q': tensor(2, 128, 0, 64)},
    {'k': tensor(2, 0, 4, 64)},
    {'q': tensor(*Q_SIZES, strides=(64, 4096, 131072, 1))},
    {'q': tensor(*Q_SIZES, strides=(3, 5, 7, 1), address=2)},
    {'q': tensor(1, 2**30, 32, 64, strides=(0, 0, 0, 1)), 'k': tensor(1, 2**30, 4, 64)},
    {'sm_margin': 131},
    {'sm_margin': 500, 'sm_count': 0},
    all_inputs(device='cpu', dtype='float32'),
    all_inputs(device='cpu', dtype='float64'),
    all_inputs(device='cpu', head_dim=100),
    {**all_inputs(device='cpu'), 'v': tensor(2, 256, 4, 24, device='cpu')},
    {**all_inputs(device='cpu'), 'q': tensor(*Q_SIZES, device='cpu', strides=(65536, 512, 1, 8))}])
def test_good_calls(call):
    assert check(**call) == ''


# (what is wrong, the call, expected, got, hint)
BAD_CALLS = [
    ('rank of q', {'q': tensor(128, 8, 64)}, f'q to have the shape {LAYOUT}', '(128, 8, 64)', ''),
    ('rank of v', {'v': tensor(1, *K_SIZES)}, 'v to have the shape (2, 256, 4, head_dim)',
     '(1, 2, 256, 4, 64)', ''),
    ('rank 7', {'k': tensor(*range(7))}, 'k to have the shape (2, seqlen, heads, 64)',
     '(0, 1, 2, 3, 4)', ''),
    ('device', all_inputs(device='mps'), 'q on a CPU or CUDA device', 'mps', ''),
    ('k on the CPU', {'k': tensor(*K_SIZES, device='cpu')},
     'k on the device of q, cuda:0', 'cpu', ''),
    ('v on another GPU', {'v': tensor(*K_SIZES, index=1)},
     'v on the device of q, cuda:0', 'cuda:1', ''),
    ('float32', all_inputs(dtype='float32'), 'q.dtype to be float16 or bfloat16', 'float32',
     'convert q, k and v to bfloat16 or float16'),
    ('int32', all_inputs(dtype='int32'), 'q.dtype to be float16 or bfloat16', 'int32', ''),
    ('int32 on the CPU', all_inputs(dtype='int32', device='cpu'),
     'q.dtype to be float16, bfloat16, float32 or float64', 'int32', ''),
    ('dtype of k', {'k': tensor(*K_SIZES, dtype='float16')},
     'k.dtype to be that of q, bfloat16', 'float16', ''),
    ('batch of k', {'k': tensor(3, 256, 4, 64)},
     'k to have the shape (2, seqlen, heads, 64)', '(3, 256, 4, 64)', ''),
    ('batch of v', {'v': tensor(3, 256, 4, 64)},
     'v to have the shape (2, 256, 4, head_dim)', '(3, 256, 4, 64)', ''),
    ('seqlen of v', {'v': tensor(2, 255, 4, 64)},
     'v to have the shape (2, 256, 4, head_dim)', '(2, 255, 4, 64)', ''),
    ('heads of v', {'v': tensor(2, 256, 2, 64)},
     'v to have the shape (2, 256, 4, head_dim)', '(2, 256, 2, 64)', ''),
    ('head dim of k', {'k': tensor(2, 256, 4, 128)},
     'k to have the shape (2, seqlen, heads, 64)', '(2, 256, 4, 128)', ''),
    ('no KV heads', {'k': tensor(2, 256, 0, 64)},
     'the heads of k to be 1 or more', '0', ''),
    ('heads that do not divide', {'q': tensor(2, 128, 6, 64)},
     'the heads of q to be a multiple of 4, the KV heads', '6', HINT_LAYOUT),
    ('head dim 100', all_inputs(head_dim=100), HEAD_DIM, '100', HINT_PAD),
    ('head dim 4', all_inputs(head_dim=4), HEAD_DIM, '4', HINT_PAD),
    ('head dim 520', all_inputs(head_dim=520), HEAD_DIM, '520', ''),
    ('head dim 0', all_inputs(head_dim=0), HEAD_DIM, '0', ''),
    ('head dim 0 on the CPU', all_inputs(head_dim=0, device='cpu'),
     'the head_dim of q to be 1 or more', '0', ''),
    ('head dim of v', {'v': tensor(2, 256, 4, 520)},
     'the head_dim of v to be a multiple of 8 from 8 to 512', '520', ''),
    ('head dim of v 0', {'v': tensor(2, 256, 4, 0)},
     'the head_dim of v to be a multiple of 8 from 8 to 512', '0', ''),
    ('last stride', {'k': tensor(*K_SIZES, strides=(65536, 256, 1, 4))},
     'k.stride(3) to be 1', '4', 'call k.contiguous()'),
    ('scale 0', {'softmax_scale': 0.0}, 'softmax_scale to be a positive finite float32', '0', ''),
    ('scale that float32 rounds to 0', {'softmax_scale': 1e-60},
     'softmax_scale to be a positive finite float32', '1e-60', ''),
    ('scale that float32 rounds to inf', {'softmax_scale': 1e60},
     'softmax_scale to be a positive finite float32', '1e+60', ''),
    ('scale nan', {'softmax_scale': math.nan},
     'softmax_scale to be a positive finite float32', 'nan', ''),
    ('margin below 0', {'sm_margin': -1}, 'sm_margin to be from 0 to 131', '-1', HINT_MARGIN),
    ('margin of all SMs', {'sm_margin': 132},
     'sm_margin to be from 0 to 131', '132', HINT_MARGIN),
    ('length', {'q': tensor(2, 2**30 + 1, 8, 64, strides=(0, 0, 0, 1))},
     'sizes of q of at most 1073741824', '1073741825', ''),
    ('tiles', {'q': tensor(2, 2**30, 32, 64, strides=(0, 0, 0, 1))},
     'twice the tiles of q, 64 rows each, to be at most 1073741824', '2147483648',
     'split the batch'),
]

# (what is wrong, the output, expected, got, hint)
BAD_OUTPUTS = [
    ('rank', tensor(128, 8, 64), 'out to have the shape (2, 128, 8, 64)', '(128, 8, 64)', ''),
    ('shape', tensor(2, 8, 128, 64),
     'out to have the shape (2, 128, 8, 64)', '(2, 8, 128, 64)', ''),
    ('dtype', tensor(*Q_SIZES, dtype='float32'),
     'out.dtype to be that of q, bfloat16', 'float32', ''),
    ('device', tensor(*Q_SIZES, index=3), 'out on the device of q, cuda:0', 'cuda:3', ''),
    ('last stride', tensor(*Q_SIZES, strides=(65536, 512, 1, 8)),
     'out.stride(3) to be 1', '8', 'call out.contiguous()'),
    ('expanded', tensor(*Q_SIZES, strides=(0, 512, 64, 1)),
     'out.stride(0) not to be 0', '0', 'do not pass an expanded tensor'),
]


def error_text(op, expected, got, hint):
    return f'flash_attn3.{op}: expected {expected}, got {got}' + (f'; hint: {hint}' if hint else '')


@pytest.mark.parametrize('call, expected, got, hint', [row[1:] for row in BAD_CALLS],
                         ids=[row[0] for row in BAD_CALLS])
def test_bad_call(call, expected, got, hint):
    assert check(**call) == error_text('flash_attn_func', expected, got, hint)


@pytest.mark.parametrize('out, expected, got, hint', [row[1:] for row in BAD_OUTPUTS],
                         ids=[row[0] for row in BAD_OUTPUTS])
def test_bad_output(out, expected, got, hint):
    assert check(out=out) == error_text('flash_attn_func', expected, got, hint)


@pytest.mark.parametrize('name', ['q', 'k', 'v'])
def test_output_in_the_memory_of_an_input(name):
    sizes = {'q': Q_SIZES, 'k': K_SIZES, 'v': K_SIZES}
    call = {other: tensor(*sizes[other], address=i << 20) for i, other in enumerate('qkv')}
    call[name] = tensor(*sizes[name], address=1 << 24)
    expected = error_text('flash_attn_func', 'out with memory of its own', f'the memory of {name}',
                          '')
    assert check(**call, out=tensor(*Q_SIZES, address=1 << 24)) == expected


def test_output_over_the_end_of_an_input():
    """Known of tensors without gaps, in any order of their dimensions; elements of others may lie
    between one another, such as heads of q and of out in one tensor.
    """
    end = (1 << 20) + 2 * math.prod(Q_SIZES)
    swapped = (8 * 128 * 64, 64, 128 * 64, 1)
    q, expected = tensor(*Q_SIZES, address=1 << 20), error_text(
        'flash_attn_func', 'out with memory of its own', 'the memory of q', '')
    for strides in (None, swapped):
        assert check(q, out=tensor(*Q_SIZES, address=end - 64, strides=strides)) == expected
        assert check(q, out=tensor(*Q_SIZES, address=end, strides=strides)) == ''
    apart = (2 * 8 * 128 * 64, 2 * 8 * 64, 64, 1)
    assert check(tensor(*Q_SIZES, address=1 << 20, strides=apart),
                 out=tensor(*Q_SIZES, address=(1 << 20) + 2 * 8 * 64, strides=apart)) == ''


@pytest.mark.parametrize('bad', [
    None,
    (1, 2),
    ('bfloat16', 'cuda', 0, [2, 128, 8, 64], (1, 1, 1, 1), 0),
    ('bfloat16', 'cuda', 0, ('2', 128, 8, 64), (1, 1, 1, 1), 0)])
def test_a_tensor_described_wrongly_is_a_type_error(bad):
    with pytest.raises(TypeError):
        check(q=bad)
