"""checks/attention.cpp through flash_attn3._plan: every rule, with its whole text, on
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
        'flash_attn_func', 'dout to have the shape (2, 128, 8, 24)', OUT, '')


# (what is wrong, the change, expected, got)
BAD_GRADIENTS = [
    (f'{kind} of {name}', {name: tensor(*sizes, **options)}, f'{name}{expected}', got)
    for names, good, shape, wanted, other in (
        (('dout', 'out'), Q_SIZES, OUT, 'that of q, bfloat16', 'float32'),
        (('lse', 'dlse'), (2, 8, 128), LSE, 'float32', 'bfloat16'))
    for name in names for dtype in (wanted.split()[-1],)
    for kind, sizes, options, expected, got in (
        ('length', (*good[:2], good[2] - 1, *good[3:]), {'dtype': dtype},
         f' to have the shape {shape}', str((*good[:2], good[2] - 1, *good[3:]))),
        ('last size', (*good[:-1], good[-1] + 1), {'dtype': dtype},
         f' to have the shape {shape}', str((*good[:-1], good[-1] + 1))),
        ('rank', good[:2], {'dtype': dtype}, f' to have the shape {shape}', str(good[:2])),
        ('rank beyond five', (1, 1, 1, *good), {'dtype': dtype}, f' to have the shape {shape}',
         str((1, 1, 1, *good)[:5])),
        ('dtype', good, {'dtype': other}, f'.dtype to be {wanted}', other),
        ('device', good, {'dtype': dtype, 'index': 1}, ' on the device of q, cuda:0', 'cuda:1'),
        ('kind of device', good, {'dtype': dtype, 'device': 'cpu'},
         ' on the device of q, cuda:0', 'cpu'))]


@pytest.mark.parametrize('change, expected, got', [row[1:] for row in BAD_GRADIENTS],
                         ids=[row[0] for row in BAD_GRADIENTS])
def test_bad_gradients(change, expected, got):
    assert check(change) == error_text('flash_attn_func', expected, got, '')


# ---------------------------------------------------------------------------------- given gradients
GIVEN = {'dq': Q_SIZES, 'dk': K_SIZES, 'dv': K_SIZES}


def given(changes=None, **common):
    """A call of bwd_out; every tensor has an address of its own."""
    call = good_call(**common)
    call |= {f'd{name}': call[name] for name in 'qkv'}
    names = [name for name in call if name != 'softmax_scale']
    call |= {name: (*call[name][:5], (1 << 20) * (1 + i)) for i, name in enumerate(names)}
    return call | (changes or {})


@pytest.mark.parametrize('changes', [
    {}, {'dlse': None}, {name: tensor(*sizes, address=0) for name, sizes in GIVEN.items()},
    {'dq': tensor(*Q_SIZES, strides=(64, 1024, 128, 1), address=2)}], ids=str)
def test_good_given_gradients(changes):
    assert _plan.check_backward(**given(changes)) == ''


def test_only_kernels_need_a_last_stride_of_1():
    strides = (65536, 512, 1, 8)
    assert _plan.check_backward(**given(device='cpu') | {
        'dq': tensor(*Q_SIZES, device='cpu', strides=strides, address=1 << 30)}) == ''
    assert _plan.check_backward(**given(
        {'dq': tensor(*Q_SIZES, strides=strides, address=1 << 30)})) == error_text(
        'flash_attn_func', 'dq.stride(3) to be 1', '8', 'call dq.contiguous()')


def bad_given_gradients(name):
    """(what is wrong, the tensor, expected, got, hint)"""
    sizes = GIVEN[name]
    short, long = (sizes[0], sizes[1] - 1, *sizes[2:]), (1, 1, 1, *sizes)
    shape = f'{name} to have the shape {sizes}'
    hint = 'do not pass an expanded tensor'
    return [
        ('length', tensor(*short), shape, str(short), ''),
        ('rank', tensor(*sizes[:3]), shape, str(sizes[:3]), ''),
        ('rank beyond five', tensor(*long), shape, str(long[:5]), ''),
        ('dtype', tensor(*sizes, dtype='float32'), f'{name}.dtype to be that of q, bfloat16',
         'float32', ''),
        ('device', tensor(*sizes, index=3), f'{name} on the device of q, cuda:0', 'cuda:3', ''),
        ('kind of device', tensor(*sizes, device='cpu'), f'{name} on the device of q, cuda:0',
         'cpu', ''),
        ('last stride', tensor(*sizes, strides=(1 << 16, 512, 1, 8)),
         f'{name}.stride(3) to be 1', '8', f'call {name}.contiguous()'),
        ('expanded batch', tensor(*sizes, strides=(0, 512, 64, 1)),
         f'{name}.stride(0) not to be 0', '0', hint),
        ('expanded heads', tensor(*sizes, strides=(1 << 16, 512, 0, 1)),
         f'{name}.stride(2) not to be 0', '0', hint)]


BAD_GIVEN = [(f'{what} of {name}', name, *row) for name in GIVEN
             for what, *row in bad_given_gradients(name)]


@pytest.mark.parametrize('name, bad, expected, got, hint', [row[1:] for row in BAD_GIVEN],
                         ids=[row[0] for row in BAD_GIVEN])
def test_bad_given_gradient(name, bad, expected, got, hint):
    assert _plan.check_backward(**given({name: bad})) == error_text(
        'flash_attn_func', expected, got, hint)


@pytest.mark.parametrize('name, other', [
    (name, other) for name in GIVEN for other in ('dout', 'dlse', 'q', 'k', 'v', 'out', 'lse')]
    + [('dq', 'dk'), ('dq', 'dv'), ('dk', 'dv')])
def test_a_given_gradient_in_the_memory_of_another_tensor(name, other):
    call = given()
    call[name] = (*call[name][:5], call[other][5])
    assert _plan.check_backward(**call) == error_text(
        'flash_attn_func', f'{name} with memory of its own', f'the memory of {other}', '')


def test_empty_tensors_share_no_memory():
    """A slice of length 0 has an address, but nothing in it."""
    no_keys, no_queries = (2, 0, 4, 64), (2, 0, 8, 64)
    assert _plan.check_backward(**given(k=no_keys) | {
        'dq': tensor(*Q_SIZES, address=64), 'k': tensor(*no_keys, address=64),
        'dk': tensor(*no_keys, address=64), 'dv': tensor(*no_keys, address=64)}) == ''
    assert _plan.check_backward(**given(q=no_queries) | {
        'dq': tensor(*no_queries, address=64), 'dk': tensor(*K_SIZES, address=64),
        'lse': tensor(2, 8, 0, dtype='float32', address=64)}) == ''


def test_other_rules_name_the_op_with_given_gradients():
    lse = tensor(2, 8, 127, dtype='float32')
    assert _plan.check_backward(**given({'lse': lse})) == error_text(
        'flash_attn_func', f'lse to have the shape {LSE}', '(2, 8, 127)', '')
    assert _plan.check_backward(**given({'softmax_scale': -1.0})) == error_text(
        'flash_attn_func', 'softmax_scale to be a positive finite float32', '-1', '')


@pytest.mark.parametrize('missing', GIVEN)
def test_all_gradients_are_given_or_none(missing):
    with pytest.raises(TypeError):
        _plan.check_backward(**given({missing: None}))


# -------------------------------------------------------------------------------------------- sizes
def test_the_lse_of_float64_is_float64():
    lse = tensor(2, 8, 128, dtype='float32', device='cpu')
    assert check({'lse': lse}, device='cpu', dtype='float64') == error_text(
        'flash_attn_func', 'lse.dtype to be float64', 'float32', '')


# Without those of the forward alone.
OF_BOTH = [row for row in BAD_CALLS
           if 'sm_margin' not in row[1] and not row[2].startswith('the head_dim of v')]


@pytest.mark.parametrize('call, expected, got, hint', [row[1:] for row in OF_BOTH],
                         ids=[row[0] for row in OF_BOTH])
def test_rules_of_the_forward_name_the_backward(call, expected, got, hint):
    changes = {'v': call['k'], **call} if 'k' in call else dict(call)
    _, device, index, sizes, *_ = q = changes.get('q', tensor(*Q_SIZES))
    of_lse = {'dtype': 'float32', 'device': device, 'index': index}
    if len(sizes) == 4:
        changes |= {'out': q, 'dout': q, 'dlse': None,
                    'lse': tensor(sizes[0], sizes[2], sizes[1], **of_lse)}
    assert check(changes) == error_text('flash_attn_func', expected, got, hint)


def test_too_many_tiles_of_keys():
    most = {'q': (1, 64, 32, 64), 'k': (1, 1 << 30, 32, 64)}
    assert check(**most) == ''
    assert check(q=(1, 64, 64, 64), k=(1, 1 << 30, 64, 64)) == error_text(
        'flash_attn_func', 'twice the tiles of k, 64 rows each, to be at most 1073741824',
        '2147483648', 'split the batch')


@pytest.mark.parametrize('name', ['q', 'dout', 'lse'])
def test_a_tensor_described_wrongly_is_a_type_error(name):
    with pytest.raises(TypeError):
        check({name: (1, 2)})
