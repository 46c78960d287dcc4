"""Gradients and an LSE that do not fit, into the op `bwd`: clear errors, and nothing is broadcast.

q is (2, 5, 4, 16), k and v are (2, 7, 2, 16), bfloat16.
"""
import pytest
import torch

from tests.cases import Case

OPS = torch.ops.flash_attn3
AS_OUT, AS_LSE = '(2, 5, 4, 16)', '(2, 4, 5)'
BAD = [    # name, change, error
    ('dout', lambda x: x[:, :1], f'to have the shape {AS_OUT}, got (2, 1, 4, 16)'),
    ('dout', lambda x: x[:, :, :1], f'to have the shape {AS_OUT}, got (2, 5, 1, 16)'),
    ('dout', lambda x: x[0], f'to have the shape {AS_OUT}, got (5, 4, 16)'),
    ('dout', torch.Tensor.half, '.dtype to be bfloat16, got float16'),
    ('out', lambda x: x[:1], f'to have the shape {AS_OUT}, got (1, 5, 4, 16)'),
    ('out', torch.Tensor.float, '.dtype to be bfloat16, got float32'),
    ('lse', lambda x: x[:, :, :1], f'to have the shape {AS_LSE}, got (2, 4, 1)'),
    ('lse', lambda x: x.mT, f'to have the shape {AS_LSE}, got (2, 5, 4)'),
    ('lse', torch.Tensor.bfloat16, '.dtype to be float32, got bfloat16'),
    ('dlse', lambda x: x[:, :1], f'to have the shape {AS_LSE}, got (2, 1, 5)'),
    ('dlse', lambda x: x[..., None], f'to have the shape {AS_LSE}, got (2, 4, 5, 1)'),
    ('dlse', torch.Tensor.double, '.dtype to be float32, got float64'),
]


@pytest.mark.parametrize('name, change, text', BAD,
                         ids=[f'{name}-{number}' for number, (name, *_) in enumerate(BAD)])
def test_bad_arguments_of_bwd(name, change, text):
    q, k, v = Case(5, 7, head_dim=16, heads_k=2).tensors('cpu')
    out, lse = OPS.fwd(q, k, v)
    arguments = {'dout': torch.randn_like(out), 'dlse': torch.randn_like(lse), 'q': q, 'k': k,
                 'v': v, 'out': out, 'lse': lse, 'softmax_scale': 0.25, 'causal': False}
    OPS.bwd(**arguments)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError) as error:
        OPS.bwd(**arguments)
    separator = '' if text.startswith('.') else ' '
    assert str(error.value) == f'flash_attn3.bwd: expected {name}{separator}{text}'
