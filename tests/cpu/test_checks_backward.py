"""dispatch/checks_backward.cpp through flash_attn3._plan: every rule, with its whole text, on
tensors that are described by numbers. Rules of q, k and v are those of the forward.
"""
import pytest

from flash_attn3 import _plan
from tests.cpu.test_checks import BAD_CALLS, K_SIZES, Q_SIZES, error_text, tensor

LARGEST = max(row['head_dim'] for row in _plan.backward_variants())


def good_call(q=Q_SIZES, k=K_SIZES, dtype='bfloat16', device='cuda', index=0):
    """Every argument, of these sizes of q and k."""
    common = {'device': device, 'index': index}
    of_lse = {'dtype': 'float64' if dtype == 'float64' else 'float32', **common}
    lse = tensor(q[0], q[2], q[1], **of_lse)
    inputs = {name: tensor(*sizes, dtype=dtype, **common)
              for name, sizes in (('q', q), ('k', k), ('v', k), ('out', q), ('dout', q))}
    return {**inputs, 'lse': lse, 'dlse': lse, 'softmax_scale': 0.125}


def check(changes=None, **sizes):
    return _plan.check_backward(**good_call(**sizes) | (changes or {}))


OUT, LSE = '(2, 128, 8, 64)', '(2, 8, 128)'


@pytest.mark.parametrize('sizes', [
    {}, {'dtype': 'float16'}, {'index': 3}, {'q': (0, 128, 8, 64), 'k': (0, 256, 4, 64)},
    {'q': (2, 0, 8, 64)}, {'k': (2, 0, 4, 64)}, {'q': (2, 128, 8, 8), 'k': (2, 256, 4, 8)},
    {'q': (2, 128, 8, LARGEST), 'k': (2, 256, 4, LARGEST)},
    {'device': 'cpu'}, {'device': 'cpu', 'dtype': 'float32'}, {'device': 'cpu', 'dtype': 'float64'},
    {'device': 'cpu', 'q': (2, 128, 8, 500), 'k': (2, 256, 4, 500)}], ids=str)
def test_good_calls(sizes):
    assert check(**sizes) == ''
    assert check({'dlse': None}, **sizes) == ''


@pytest.mark.parametrize('name', ['dout', 'out', 'lse'])
def test_strides_do_not_matter(name):
    sizes = good_call()[name][3]
    dtype = good_call()[name][0]
    strange = tensor(*sizes, dtype=dtype, strides=(0,) * len(sizes), address=2)
    assert check({name: strange}) == ''


def test_the_head_dim_of_v_may_differ_on_the_cpu():
    v, out = tensor(2, 256, 4, 24, device='cpu'), tensor(2, 128, 8, 24, device='cpu')
    assert check({'v': v, 'out': out, 'dout': out}, device='cpu') == ''
    assert check({'v': v}, device='cpu') == error_text(
        'bwd', 'dout to have the shape (2, 128, 8, 24)', OUT, '')


# (what is wrong, the change, expected, got)
BAD_GRADIENTS = [
    (f'{kind} of {name}', {name: tensor(*sizes, **options)}, f'{name}{expected}', got)
    for names, good, shape, dtype, other in (
        (('dout', 'out'), Q_SIZES, OUT, 'bfloat16', 'float32'),
        (('lse', 'dlse'), (2, 8, 128), LSE, 'float32', 'bfloat16'))
    for name in names
    for kind, sizes, options, expected, got in (
        ('length', (*good[:2], good[2] - 1, *good[3:]), {'dtype': dtype},
         f' to have the shape {shape}', str((*good[:2], good[2] - 1, *good[3:]))),
        ('last size', (*good[:-1], good[-1] + 1), {'dtype': dtype},
         f' to have the shape {shape}', str((*good[:-1], good[-1] + 1))),
        ('rank', good[:2], {'dtype': dtype}, f' to have the shape {shape}', str(good[:2])),
        ('rank beyond five', (1, 1, 1, *good), {'dtype': dtype}, f' to have the shape {shape}',
         str((1, 1, 1, *good)[:5])),
        ('dtype', good, {'dtype': other}, f'.dtype to be {dtype}', other),
        ('device', good, {'dtype': dtype, 'index': 1}, ' on the device of q, cuda:0', 'cuda:1'),
        ('kind of device', good, {'dtype': dtype, 'device': 'cpu'},
         ' on the device of q, cuda:0', 'cpu'))]


@pytest.mark.parametrize('change, expected, got', [row[1:] for row in BAD_GRADIENTS],
                         ids=[row[0] for row in BAD_GRADIENTS])
def test_bad_gradients(change, expected, got):
    assert check(change) == error_text('bwd', expected, got, '')


def test_the_lse_of_float64_is_float64():
    lse = tensor(2, 8, 128, dtype='float32', device='cpu')
    assert check({'lse': lse}, device='cpu', dtype='float64') == error_text(
        'bwd', 'lse.dtype to be float64', 'float32', '')


@pytest.mark.parametrize('call, expected, got, hint',
                         [row[1:] for row in BAD_CALLS if 'sm_margin' not in row[1]],
                         ids=[row[0] for row in BAD_CALLS if 'sm_margin' not in row[1]])
def test_rules_of_the_forward_name_the_backward(call, expected, got, hint):
    changes = {'v': call['k'], **call} if 'k' in call else call
    assert check(changes) == error_text('bwd', expected, got, hint)


def test_too_many_tiles_of_keys():
    most = {'q': (1, 64, 32, 64), 'k': (1, 1 << 30, 32, 64)}
    assert check(**most) == ''
    assert check(q=(1, 64, 64, 64), k=(1, 1 << 30, 64, 64)) == error_text(
        'bwd', 'batch * heads * ceil(seqlen / 64) of k to be at most 536870912', '1073741824',
        'split the batch')


@pytest.mark.parametrize('name', ['q', 'dout', 'lse'])
def test_a_tensor_described_wrongly_is_a_type_error(name):
    with pytest.raises(TypeError):
        check({name: (1, 2)})
