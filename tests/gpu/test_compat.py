"""`flash_attn3.compat` on CUDA tensors: upstream's forward, backward and ops in the kernels, with
given outputs and gradients in any strides, caches, and PyTorch's own hook for FA3.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_attn3 import compat, flash_attn_func
from flash_attn3.compat import functions

from tests.support import cache_cases, cache_oracle, compare, plain, sdpa_hook, upstream_calls
from tests.support.cases import Case
from tests.support.general_oracle import check
from tests.support.upstream_calls import CACHES, FEATURES, GENERAL, LAYERS, run, with_features

each_layer = pytest.mark.parametrize('layer', LAYERS)
LENGTHS = {    # longer than those of the CPU tests, at the same places
    'dense': dict(lengths=((200, 333),) * 2),
    'packed': dict(lengths=((113, 203), (0, 7), (257, 130), (7, 0))),
    'used': dict(lengths=((113, 203), (0, 7), (257, 130)), used=((99, 200), (0, 3), (250, 111)),
                 behind=(3, 5)),
}


def long_case(name: str, features: str):
    return dataclasses.replace(with_features(GENERAL[name], features), heads=(6, 2),
                               **LENGTHS[name])


@pytest.mark.smoke
@each_layer
@pytest.mark.parametrize('features', FEATURES)
@pytest.mark.parametrize('name', GENERAL)
def test_results_and_gradients(name, features, layer, device):
    case = long_case(name, features)
    tensors = case.tensors(device)
    check(case, tensors, run(case, tensors, layer))


@each_layer
@pytest.mark.parametrize('layout', ['rows', 'apart'])
@pytest.mark.parametrize('features', ['causal', 'softcap'])
@pytest.mark.parametrize('name', ['dense', 'packed'])
def test_strided_gradients(name, features, layout, layer, device):
    """Every element is written: what was there is NaN."""
    case = long_case(name, features)
    tensors = case.tensors(device)
    check(case, tensors, run(case, tensors, layer, layout=layout))


@pytest.mark.smoke
@each_layer
@pytest.mark.parametrize('name', CACHES)
def test_caches(name, layer, device, monkeypatch):
    forward, _ = LAYERS[layer]
    monkeypatch.setattr(cache_cases, 'flash_attn_with_kvcache', upstream_calls.as_kvcache(forward))
    cache_oracle.check_case(CACHES[name], device)


@each_layer
@pytest.mark.parametrize('num_splits', [0, 1, 3])
def test_num_splits(num_splits, layer, device):
    """By plan, the keys of these few queries are split."""
    case = dataclasses.replace(with_features(GENERAL['dense'], 'causal'), lengths=((3, 4000),) * 2,
                               gradients=False)
    tensors = case.tensors(device)
    check(case, tensors, run(case, tensors, layer, num_splits=num_splits))


def test_a_given_output_is_returned(device):
    """A view of BHSD memory, as SDPA has it; with a window to the right of causal."""
    compat.register_ops()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2)
               for x in Case(113, 203, head_dim=128).tensors(device))
    out = torch.full_like(q, math.nan)
    returned, lse, *parts = torch.ops.flash_attn_3.fwd(
        q, k, v, out=out, is_causal=True, window_size_right=0, num_splits=1)
    assert returned is out and parts == [None, None]
    compare.check_forward(out, lse, (q, k, v), causal=True)


def test_a_window_on_the_gpu(device):
    """A tensor of two on the CPU is taken; on a GPU reading it would wait, which is an error."""
    q, k, v = Case(64, 96).tensors(device)
    window = torch.tensor([16, 8])
    got = functions.flash_attn_func(q, k, v, window_size=window)
    compare.check_equal(got, flash_attn_func(q, k, v, window_size=(16, 8)), 'out')


def test_a_graph(cuda):
    """The ops are captured in a CUDA graph, gradients included, and replayed on other values."""
    compat.register_ops()
    ops = torch.ops.flash_attn_3
    q, k, v = Case(130, 130, head_dim=128).tensors(cuda)
    gradients = [torch.empty_like(x) for x in (q, k, v)]

    def step():
        out, lse, *_ = ops.fwd(q, k, v, is_causal=True)
        ops.bwd(out, q, k, v, out, lse, *gradients, is_causal=True, deterministic=True)
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    q.copy_(torch.randn_like(q))
    graph.replay()
    got = [x.clone() for x in (out, *gradients)]
    wanted = [step(), *gradients]
    for name, *values in zip(('out', 'dq', 'dk', 'dv'), got, wanted):
        compare.check_equal(*values, name)


@pytest.mark.parametrize('is_appended', [False, True])
def test_the_op_compiles_to_one_graph(is_appended, device):
    """Into a given output; new keys are in the caches afterwards."""
    compat.register_ops()
    rows, _, _ = Case(4, 300, head_dim=128, batch=2).tensors(device)
    _, *caches = Case(4, 300, head_dim=128, batch=2).tensors(device)
    new = [x[:, :4].flip(0).contiguous() for x in caches] if is_appended else [None, None]
    lengths = torch.tensor([290, 17], dtype=torch.int32, device=device)

    def step(q, k, v, out):
        result, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, *new, None, out, seqused_k=lengths,
                                                     is_causal=True)
        return result * 1, lse, k.float().sum()

    def results(function):
        given = [rows, *(x.clone() for x in caches), torch.empty_like(rows)]
        return *function(*given), *given[1:]

    wanted = results(step)
    got = results(torch.compile(step, fullgraph=True, backend='aot_eager'))
    for name, *values in zip(('out', 'lse', 'sum', 'k', 'v', 'given out'), got, wanted):
        compare.check_equal(*values, name)
    assert torch.equal(got[3], caches[0]) is not is_appended


def test_the_hook_of_pytorch(cuda, monkeypatch):
    """SDPA's flash backend by `flash_attn_interface`, in SDPA's layout."""
    from torch.nn import attention
    calls = sdpa_hook.count_calls(monkeypatch)
    q, k, v = Case(130, 130, head_dim=128).tensors(cuda)
    dout = torch.randn_like(q)
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    compat.install()
    try:
        attention.activate_flash_attention_impl('FA3')
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        gradients = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    finally:
        attention.restore_flash_attention_impl()
        compat.uninstall()
    assert calls == ['fwd', 'bwd']
    compare.check_forward(out.detach().transpose(1, 2), None, (q, k, v), causal=True)
    scale = 128 ** -0.5
    ref = plain.backward(dout.double(), None, *(x.double() for x in (q, k, v)), scale,
                         True)
    pt = plain.backward(dout, None, q, k, v, scale, True)
    floors = compare.cancellation_floors((q, k, v), dout, scale)
    for name, got, *wanted in zip(('dq', 'dk', 'dv'), gradients, ref, pt):
        compare.check_close(got.transpose(1, 2), *wanted, name, floors[name])
