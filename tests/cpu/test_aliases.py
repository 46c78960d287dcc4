"""flash_attn3/ops/aliases.py: ops under the names of 0.1.0 do what the ops that replace them do."""
from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from flash_attn3.ops.dense_and_varlen import Execution, for_backward

from tests.cpu.test_general_op import inputs

OPS = torch.ops.flash_attn3


def equal(got, wanted) -> bool:
    return all(map(torch.equal, got, wanted))


@pytest.mark.parametrize('kind', ['dense', 'packed'])
def test_forward(kind):
    tensors, general = inputs(kind)
    execution = Execution(return_max_logits=True)[:-1]
    wanted = OPS.attend(*tensors, None, *general, *execution)
    assert equal(OPS._fwd_general(*tensors, *general, *execution), wanted)
    opcheck(OPS._fwd_general.default, (*tensors, *general, *execution))


def test_e4m3():
    q, k, v = (torch.randn(2, rows, 2, 16).to(torch.float8_e4m3fn) for rows in (5, 7, 7))
    scales = [torch.rand(2, 2) for _ in range(3)]
    got = OPS.fwd_fp8(q, k, v, *scales, True, causal=True)
    wanted = OPS.attend(q, k, v, causal=True, q_descale=scales[0], k_descale=scales[1],
                        v_descale=scales[2], float16_out=True)
    assert got[0].dtype == torch.float16 and equal(got, wanted)


@pytest.mark.parametrize('kind', ['dense', 'packed'])
def test_backward(kind):
    tensors, general = inputs(kind)
    out, lse, _ = OPS.attend(*tensors, None, *general)
    given = torch.randn_like(out), torch.randn_like(lse), *tensors, out, lse
    wanted = OPS.bwd(*given, *for_backward(general, True))
    assert equal(OPS.bwd_general(*given, *general, True), wanted)
    gradients = [torch.full_like(x, torch.nan) for x in tensors]
    dsinks = OPS.bwd_general_out(*given, *gradients, *general, True)
    assert equal((*gradients, dsinks), wanted)


def test_traced():
    """A graph holds the op, not its alias."""
    def attention(q, k, v):
        return OPS._fwd_general(q, k, v, softcap=2.0)[0]

    tensors, _ = inputs('dense')
    compiled = torch.compile(attention, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), attention(*tensors))
