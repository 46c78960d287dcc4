"""`integrations.sdpa` on CUDA tensors: what PyTorch's own attention returns, that our kernels
computed it, and when; calls of all layers from several threads, streams and GPUs.

With `--device cpu` PyTorch's overrides are registered for CPU tensors (tests/support/sdpa_hook.py).
"""
from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_with_kvcache
from flash_attn3.cpu import reference
from flash_attn3.integrations import _base, sdpa
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare, fp8_data, sdpa_hook
from tests.support.sdpa_hook import attend, by_math, with_gradients

pytest.importorskip('torch.nn.attention._fa3', reason='PyTorch has the hook from 2.11 on')
from torch.nn.attention import (  # noqa: E402
    SDPBackend, current_flash_attention_impl, sdpa_kernel)
from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: E402

each_dtype = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])
FORWARDS = ('_flash_attention_forward', '_scaled_dot_product_flash_attention')
ROUNDS = 20    # that each thread makes


@pytest.fixture
def served(device, monkeypatch):
    """enable(), and what was there before afterwards."""
    if device.type == 'cpu':
        sdpa_hook.serve_cpu(monkeypatch)
    with sdpa_hook.enabled():
        yield


@pytest.fixture
def calls(monkeypatch):
    return sdpa_hook.count_calls(monkeypatch)


@pytest.fixture
def off():
    yield
    sdpa.disable()


# -------------------------------------------------------------------------------------------- SDPA
def inputs_of(device, dtype, layout='bhsd', head_dim=64, heads_k=4, rows=(150, 150)):
    """q, k and v, (2, heads, rows, head_dim), whose memory lies like that or as 'bshd'."""
    shapes = [(2, heads, count, head_dim) for heads, count in (
        (4, rows[0]), (heads_k, rows[1]), (heads_k, rows[1]))]
    if layout == 'bhsd':
        return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    return [torch.randn((b, s, h, d), dtype=dtype, device=device).transpose(1, 2)
            for b, h, s, d in shapes]


def choice(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> SDPBackend:
    """The backend that SDPA takes."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, causal,
                                              enable_gqa=q.size(1) != k.size(1)))


def check_by_math(got: tuple[Tensor, ...], inputs: list[Tensor], dout: Tensor,
                  causal: bool) -> None:
    ref = by_math(inputs, dout, causal, torch.float64)
    pt = by_math(inputs, dout, causal, dout.dtype)
    rows = [x.transpose(1, 2) for x in inputs]
    floors = compare.cancellation_floors(rows, dout.transpose(1, 2), inputs[0].size(-1) ** -0.5)
    for name, *values in zip(('out', 'dq', 'dk', 'dv'), got, ref, pt):
        compare.check_close(*values, name, floors.get(name, 0.0))


@pytest.mark.smoke
@each_dtype
@pytest.mark.parametrize('layout', ['bhsd', 'bshd'])
@pytest.mark.parametrize('heads_k', [4, 2])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('head_dim', [64, 80, 128, 256])
def test_values_and_gradients(head_dim, causal, heads_k, layout, dtype, device, served, calls):
    """Against the math backend, without a context manager; out lies in memory like q."""
    inputs = inputs_of(device, dtype, layout, head_dim, heads_k)
    dout = torch.randn_like(inputs[0])
    got = with_gradients(inputs, dout, lambda *x: attend(*x, causal))
    assert calls == ['fwd', 'bwd']
    assert got[0].stride() == inputs[0].stride()
    check_by_math(got, inputs, dout, causal)
    if device.type == 'cuda':
        assert choice(*inputs, causal) == SDPBackend.FLASH_ATTENTION


@each_dtype
def test_more_keys_than_queries(dtype, device, served, calls):
    inputs = inputs_of(device, dtype, rows=(70, 333))
    dout = torch.randn_like(inputs[0])
    got = with_gradients(inputs, dout, lambda *x: attend(*x, False))
    assert calls == ['fwd', 'bwd']
    check_by_math(got, inputs, dout, False)


def test_what_the_kernels_do_not_have_goes_elsewhere(cuda, served, calls):
    """A mask: PyTorch takes another backend, as without this package."""
    q, k, v = inputs_of(cuda, torch.bfloat16)
    mask = torch.rand(150, 150, device=cuda) > 0.2
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert calls == []
    with sdpa_kernel(SDPBackend.MATH):
        ref, pt = (F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), attn_mask=mask)
                   for dtype in (torch.float64, torch.bfloat16))
    compare.check_close(out, ref, pt, 'out', 2 ** -7)


def test_a_compiled_module(device, served, calls):
    """torch.compile keeps the aten ops, so that the compiled code calls the overrides too."""
    inputs = inputs_of(device, torch.bfloat16)
    dout = torch.randn_like(inputs[0])
    compiled = torch.compile(lambda *x: attend(*x, True), backend='aot_eager', fullgraph=True)
    got = with_gradients(inputs, dout, compiled)
    assert calls == ['fwd', 'bwd']
    check_by_math(got, inputs, dout, True)


# --------------------------------------------------------------------------------------- on and off
def test_before_and_after(cuda, calls, off):
    """No call without enable(), nor after disable(), though the flash backend is asked for."""
    tables = [torch._C._dispatch_dump(f'aten::{name}') for name in FORWARDS]
    q, k, v = inputs_of(cuda, torch.bfloat16)

    def out():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(q, k, v, True)
    before = out()
    assert calls == [] and not sdpa.is_enabled()
    sdpa.enable()
    ours = out()
    assert calls == ['fwd']
    sdpa.disable()
    after = out()
    assert calls == ['fwd'] and current_flash_attention_impl() is None
    assert tables == [torch._C._dispatch_dump(f'aten::{name}') for name in FORWARDS]
    compare.check_equal(after, before, 'out')
    compare.check_close(ours, *(by_math([q, k, v], torch.ones_like(q), True, dtype)[0]
                                for dtype in (torch.float64, torch.bfloat16)), 'out')


def test_cudnn_comes_first_unless_disabled(cuda, calls, off, monkeypatch):
    """On Hopper PyTorch prefers it: then enable() alone changes nothing, and says so."""
    q, k, v = inputs_of(cuda, torch.bfloat16)
    if choice(q, k, v, True) != SDPBackend.CUDNN_ATTENTION:
        pytest.skip('this PyTorch does not prefer cuDNN')
    monkeypatch.setattr(_base, '_warned', set())
    with pytest.warns(UserWarning, match='expected disable_cudnn=True, got False'):
        sdpa.enable(disable_cudnn=False)
    attend(q, k, v, True)
    assert calls == []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attend(q, k, v, True)
    assert calls == ['fwd']
    sdpa.disable()

    sdpa.enable()
    assert choice(q, k, v, True) == SDPBackend.FLASH_ATTENTION
    attend(q, k, v, True)
    assert calls == ['fwd', 'fwd']
    sdpa.disable()
    assert choice(q, k, v, True) == SDPBackend.CUDNN_ATTENTION
    attend(q, k, v, True)
    assert calls == ['fwd', 'fwd']


# ------------------------------------------------------------------------------------------ varlen
@pytest.mark.smoke
@each_dtype
@pytest.mark.parametrize('window', [(-1, -1), (-1, 0), (40, 0), (33, 17)], ids=str)
def test_varlen_attn(window, dtype, device, served, calls):
    """Each sequence against the reference, gradients too; more keys than queries in some."""
    lengths = ((130, 130), (1, 7), (257, 300), (64, 64))
    starts = [torch.tensor([0, *x], device=device).cumsum(0).to(torch.int32)
              for x in zip(*lengths)]
    totals = [int(x[-1]) for x in starts]
    q, k, v = (torch.randn(rows, 4, 64, dtype=dtype, device=device, requires_grad=True)
               for rows in (totals[0], *[totals[1]] * 2))
    out, lse = varlen_attn(q, k, v, *starts, *(max(x) for x in zip(*lengths)), window_size=window,
                           return_aux=AuxRequest(lse=True))
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert calls == ['fwd', 'bwd']
    score = reference.Score(64 ** -0.5, mask=reference.Mask(False, window))
    for rows in zip(*([slice(a, b) for a, b in zip(x.tolist(), x[1:].tolist())] for x in starts)):
        rows = *rows, rows[1]
        inputs = [x[None, where].detach() for x, where in zip((q, k, v), rows)]
        got = [x[None, where] for x, where in zip((out.detach(), *gradients), (rows[0], *rows))]
        sdpa_hook.check(got, inputs, dout[None, rows[0]], score)
        expected = reference.attend(reference.Inputs(*inputs).to(torch.float64), score)
        compare.check_lse(lse[None, :, rows[0]], expected.lse)


@pytest.mark.parametrize('causal', [False, True])
def test_float8(causal, device, served, calls, monkeypatch):
    """PyTorch's experimental function for e4m3 tensors with scales; it has no gradient."""
    quantized = importlib.import_module(
        'torch.nn.attention.experimental._scaled_dot_product_attention_quantized')
    if device.type == 'cpu':    # it asks for CUDA tensors
        monkeypatch.setattr(quantized, '_validate_descale', lambda *_: None)
    values = [torch.randn(2, 4, 150, 64, device=device).to(torch.float8_e4m3fn) for _ in range(3)]
    scales = Scales(*(torch.rand(2, 4, device=device) + 0.5 for _ in range(3)))
    out = quantized._scaled_dot_product_attention_quantized(
        *values, is_causal=causal, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert out.dtype == torch.bfloat16 and calls == ['fwd']
    score = reference.Score(64 ** -0.5, mask=reference.Mask(causal))
    fp8_data.check_fp8(out.transpose(1, 2), reference.Inputs(*(x.transpose(1, 2) for x in values)),
                       scales, score)


# --------------------------------------------------------------------- threads, streams, second GPU
def every_layer(seed: int, device: torch.device) -> Callable[[], list[Tensor]]:
    """A call of the functions, the cache, the ops of compat and SDPA on data of its own, gradients
    included; again the same results.
    """
    generator = torch.Generator().manual_seed(seed)
    count = 200 + 17 * seed

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    q, dout = randn(2, count, 4, 128), randn(2, count, 4, 128)
    k, v = randn(2, count, 2, 128), randn(2, count, 2, 128)
    cache, new = [randn(2, 400, 2, 128) for _ in range(2)], [randn(2, 1, 2, 128) for _ in range(2)]
    used = torch.tensor([300, 20 + seed], dtype=torch.int32, device=device)
    token = randn(2, 1, 4, 128)

    def call() -> list[Tensor]:
        results = list(with_gradients([q, k, v], dout, lambda *x: flash_attn_func(
            *x, causal=True, deterministic=True)))
        results.append(flash_attn_with_kvcache(token, *cache, *new, cache_seqlens=used,
                                               causal=True))
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True)
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *gradients, is_causal=True,
                                   deterministic=True)
        results += [out, *gradients]
        with torch.no_grad():
            results.append(attend(*(x.transpose(1, 2) for x in (q, k, v)), True))
        return results
    return call


def check_results(got: list[Tensor], wanted: list[Tensor]) -> None:
    for number, pair in enumerate(zip(got, wanted, strict=True)):
        compare.check_equal(*pair, f'result {number}')


def test_two_threads(device, served):
    """On streams of their own, at once: the bits of one thread on the default stream."""
    works = [every_layer(seed, device) for seed in range(2)]
    if device.type == 'cuda':
        torch.cuda.synchronize()
    got, errors = [[], []], []
    at_once = threading.Barrier(2)

    def work(index: int) -> None:
        stream = torch.cuda.Stream(device) if device.type == 'cuda' else None
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                at_once.wait()
                for _ in range(ROUNDS if stream else 2):
                    got[index].append(works[index]())
                if stream:
                    stream.synchronize()
        except Exception as error:    # the thread would end with it unseen
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for results, call in zip(got, works):
        wanted = call()
        for one in results:
            check_results(one, wanted)


def test_a_side_stream_with_a_slow_producer(cuda, served):
    """What is queued before on the side stream is waited for; the default stream has zeros."""
    inputs = inputs_of(cuda, torch.bfloat16, 'bshd', 128)
    wanted = attend(*inputs, True)
    late = [torch.zeros_like(x) for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)    # about 30 ms
        for x, source in zip(late, inputs):
            x.copy_(source)
        got = attend(*late, True)
        out, *_ = torch.ops.flash_attn_3.fwd(*(x.transpose(1, 2) for x in late), is_causal=True)
    stream.synchronize()
    compare.check_equal(got, wanted, 'out')
    compare.check_equal(out.transpose(1, 2), wanted, 'out of the op')


def test_another_gpu_than_the_current_one(second_cuda, served):
    """The same bits there, and the current device stays."""
    wanted = every_layer(0, torch.device('cuda', 0))()
    got = every_layer(0, second_cuda)()
    assert all(x.device == second_cuda for x in got) and torch.cuda.current_device() == 0
    check_results([x.to('cuda:0') for x in got], wanted)


def test_a_graph(cuda, served):
    """SDPA is captured, forward and backward, and replayed on other values."""
    leaves = [x.requires_grad_() for x in inputs_of(cuda, torch.bfloat16, head_dim=128)]
    dout = torch.randn_like(leaves[0])

    def step():
        out = attend(*leaves, True)
        return out, *torch.autograd.grad(out, leaves, dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    for x in captured:
        x.detach().fill_(torch.nan)
    graph.replay()
    check_by_math(tuple(x.detach() for x in captured), [x.detach() for x in leaves], dout, True)
