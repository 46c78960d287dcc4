"""Tensors that do not fit, into the ops `bwd` and `bwd_out`: clear errors; nothing is broadcast,
nothing is written.

q is (2, 5, 4, 16), k and v are (2, 7, 2, 16), bfloat16.
"""
import pytest
import torch

from tests.support.cases import Case

OPS = torch.ops.flash_attn3
AS_OUT, AS_LSE = '(2, 5, 4, 16)', '(2, 4, 5)'
BAD = [    # name, change, error
    ('dout', lambda x: x[:, :1], f'to have the shape {AS_OUT}, got (2, 1, 4, 16)'),
    ('dout', lambda x: x[:, :, :1], f'to have the shape {AS_OUT}, got (2, 5, 1, 16)'),
    ('dout', lambda x: x[0], f'to have the shape {AS_OUT}, got (5, 4, 16)'),
    ('dout', torch.Tensor.half, '.dtype to be that of q, bfloat16, got float16'),
    ('out', lambda x: x[:1], f'to have the shape {AS_OUT}, got (1, 5, 4, 16)'),
    ('out', torch.Tensor.float, '.dtype to be that of q, bfloat16, got float32'),
    ('lse', lambda x: x[:, :, :1], f'to have the shape {AS_LSE}, got (2, 4, 1)'),
    ('lse', lambda x: x.mT, f'to have the shape {AS_LSE}, got (2, 5, 4)'),
    ('lse', torch.Tensor.bfloat16, '.dtype to be float32, got bfloat16'),
    ('dlse', lambda x: x[:, :1], f'to have the shape {AS_LSE}, got (2, 1, 5)'),
    ('dlse', lambda x: x[..., None], f'to have the shape {AS_LSE}, got (2, 4, 5, 1)'),
    ('dlse', torch.Tensor.double, '.dtype to be float32, got float64'),
]


def ids(rows):
    return [f'{name}-{number}' for number, (name, *_) in enumerate(rows)]


def good_arguments() -> dict:
    """Arguments of `bwd`."""
    q, k, v = Case(5, 7, head_dim=16, heads_k=2).tensors('cpu')
    out, lse = OPS.fwd(q, k, v)
    return {'dout': torch.randn_like(out), 'dlse': torch.randn_like(lse), 'q': q, 'k': k,
            'v': v, 'out': out, 'lse': lse, 'softmax_scale': 0.25, 'causal': False}


def full_of_nan(arguments: dict) -> dict:
    """dq, dk and dv for `bwd_out`."""
    return {f'd{name}': torch.full_like(arguments[name], torch.nan) for name in 'qkv'}


def check_error(op, arguments: dict, name: str, text: str) -> None:
    separator = '' if text.startswith('.') else ' '
    with pytest.raises(RuntimeError) as error:
        op(**arguments)
    assert str(error.value) == f'flash_attn3.flash_attn_func: expected ' \
                               f'{name}{separator}{text}'


@pytest.mark.parametrize('name, change, text', BAD, ids=ids(BAD))
def test_bad_arguments(name, change, text):
    arguments = good_arguments()
    gradients = full_of_nan(arguments)
    OPS.bwd(**arguments)
    arguments[name] = change(arguments[name])
    check_error(OPS.bwd, arguments, name, text)
    check_error(OPS.bwd_out, arguments | gradients, name, text)
    assert all(x.isnan().all() for x in gradients.values())


AS_K = '(2, 7, 2, 16)'
BAD_GIVEN = [    # name, change, error
    ('dq', lambda x: x[:, 1:], f'to have the shape {AS_OUT}, got (2, 4, 4, 16)'),
    ('dq', torch.Tensor.float, '.dtype to be that of q, bfloat16, got float32'),
    ('dk', lambda x: x[:, :, :1], f'to have the shape {AS_K}, got (2, 7, 1, 16)'),
    ('dk', lambda x: x[:1].expand(2, -1, -1, -1),
     '.stride(0) not to be 0, got 0; hint: do not pass an expanded tensor'),
    ('dv', lambda x: x[0], f'to have the shape {AS_K}, got (7, 2, 16)'),
    ('dv', torch.Tensor.half, '.dtype to be that of q, bfloat16, got float16'),
]


@pytest.mark.parametrize('name, change, text', BAD_GIVEN, ids=ids(BAD_GIVEN))
def test_bad_given_gradients(name, change, text):
    arguments = good_arguments()
    gradients = full_of_nan(arguments)
    given = gradients | {name: change(gradients[name])}
    check_error(OPS.bwd_out, arguments | given, name, text)
    assert all(x.isnan().all() for x in gradients.values())


@pytest.mark.parametrize('name, other', [
    ('dq', 'q'), ('dq', 'dout'), ('dq', 'out'), ('dk', 'k'), ('dk', 'v'), ('dv', 'v'),
    ('dk', 'dv')])
def test_gradients_in_the_memory_of_other_tensors(name, other):
    arguments = good_arguments()
    arguments |= full_of_nan(arguments)
    before = arguments[other].clone()
    arguments[name] = arguments[other]
    check_error(OPS.bwd_out, arguments, name, f'with memory of its own, got the memory of {other}')
    assert torch.equal(arguments[other].nan_to_num(7.0), before.nan_to_num(7.0))
