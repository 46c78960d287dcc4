"""The FA3 hook of PyTorch: what enable() registers, that disable() restores it, and the values, for
which PyTorch's overrides are registered for CPU tensors (tests/support/sdpa_hook.py).
"""
import inspect
import subprocess
import sys
import warnings

import pytest
import torch

from flash_attn3.cpu import reference
from flash_attn3.integrations import _base, sdpa
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare, fp8_data, sdpa_hook
from tests.support.paged_batches import Batch
from tests.support.sdpa_hook import check

hook = pytest.importorskip('torch.nn.attention._fa3', reason='PyTorch has the hook from 2.11 on')
from torch.nn.attention import (  # noqa: E402
    activate_flash_attention_impl, current_flash_attention_impl, list_flash_attention_impls,
    restore_flash_attention_impl)
from torch.nn.attention import varlen  # noqa: E402
from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: E402

OVERRIDDEN = ('_flash_attention_forward', '_flash_attention_backward',
              '_scaled_dot_product_flash_attention',
              '_scaled_dot_product_flash_attention_backward',
              '_flash_attention_forward.quantized', '_scaled_dot_product_flash_attention.quantized')
SCALE = 64 ** -0.5


def state() -> tuple:
    """All that enable() touches: dispatch tables, names, the caches of the hook, cuDNN."""
    tables = [torch._C._dispatch_dump(f'aten::{name}') for name in OVERRIDDEN]
    return (tables, dict(hook._registry._FLASH_ATTENTION_IMPLS), current_flash_attention_impl(),
            hook._FA3_CUDA_FWD, hook._FA3_CUDA_BWD, torch.backends.cuda.cudnn_sdp_enabled(),
            sys.modules['torch.nn.attention.varlen']._should_use_cudnn)


@pytest.fixture(autouse=True)
def before():
    """The state before each test, which is there again after disable()."""
    before = state()
    yield before
    sdpa.disable()
    assert state() == before


@pytest.fixture
def on_cpu(monkeypatch):
    sdpa_hook.serve_cpu(monkeypatch)
    with sdpa_hook.enabled():
        yield


@pytest.fixture
def calls(monkeypatch):
    return sdpa_hook.count_calls(monkeypatch)


def tensors(*shapes, dtype=torch.bfloat16):
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


# ----------------------------------------------------------------------------- on, off
def test_activation_overrides_the_kernels_and_both_names_are_registered(before):
    sdpa.enable()
    assert sdpa.is_enabled() and current_flash_attention_impl() == 'FA3'
    assert set(sdpa.NAMES) <= set(list_flash_attention_impls())
    tables, *_ = state()
    for name, table, old in zip(OVERRIDDEN, tables, before[0]):
        assert '_fa3.py' in table and '_fa3.py' not in old, name
    assert hook._FA3_CUDA_FWD == torch.ops.flash_attn_3.fwd
    sdpa.disable()
    assert not sdpa.is_enabled() and state() == before
    sdpa.disable()


@pytest.mark.parametrize('name', sdpa.NAMES)
def test_clients_may_activate_the_names_themselves(name):
    """torchtitan calls activate_flash_attention_impl('FA3') itself."""
    sdpa.enable()
    restore_flash_attention_impl()
    assert not sdpa.is_enabled()
    activate_flash_attention_impl(name)
    assert sdpa.is_enabled() and current_flash_attention_impl() == name


def test_what_was_active_before_is_active_again(monkeypatch):
    class Handle:
        def remove(self):
            pass
    monkeypatch.setitem(hook._registry._FLASH_ATTENTION_IMPLS, 'other', Handle)
    activate_flash_attention_impl('other')
    sdpa.enable()
    sdpa.disable()
    assert current_flash_attention_impl() == 'other'
    restore_flash_attention_impl()


@pytest.mark.parametrize('setting', [True, False])
def test_cudnn_is_disabled_and_comes_back(setting):
    old = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(setting)
    try:
        sdpa.enable()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        sdpa.disable()
        assert torch.backends.cuda.cudnn_sdp_enabled() == setting
    finally:
        torch.backends.cuda.enable_cudnn_sdp(old)


def test_leaving_cudnn_alone_warns_once(monkeypatch):
    monkeypatch.setattr(_base, '_warned', set())
    with pytest.warns(UserWarning, match='expected disable_cudnn=True, got False; hint: on Hopper'):
        sdpa.enable(disable_cudnn=False)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sdpa.enable(disable_cudnn=False)


def test_nothing_is_left_after_an_error(before, monkeypatch):
    def fail():
        raise ValueError('no kernels')
    monkeypatch.setattr(hook, '_fa3_register_kernels', fail)
    with pytest.raises(ValueError, match='no kernels'):
        sdpa.enable()
    assert not sdpa.is_enabled() and state() == before


# ----------------------------------------------------------------------------------------- refusals
def test_foreign_ops_are_refused():
    """In a process of its own: ops cannot be taken back."""
    code = ('import torch\n'
            'library = torch.library.Library("flash_attn_3", "DEF")\n'
            'library.define("fwd(Tensor q) -> Tensor")\n'
            'from flash_attn3.integrations import sdpa\n'
            'print(sdpa.problem())\n'
            'try:\n    sdpa.enable()\nexcept RuntimeError as error:\n'
            '    print(error)\n'
            'print(sdpa.is_enabled(), torch.nn.attention.current_flash_attention_impl())')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    problem, error, state = done.stdout.splitlines()
    assert problem == error and problem.startswith(
        'flash_attn3.integrations.sdpa: expected no other torch.ops.flash_attn_3, got ')
    assert state == 'False None'


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    """PyTorch's hook raises an error on every other GPU, where its own kernels would serve."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda _: 'A100')
    monkeypatch.setattr('flash_attn3.ops.library.kernels_serve', lambda _: False)
    assert sdpa.problem().startswith('flash_attn3.integrations.sdpa: expected Hopper GPUs and the '
                                     'kernels for them, got A100 as device 0; hint: ')


def test_importing_changes_nothing():
    code = ('import sys, torch\npath = list(sys.path)\n'
            'import flash_attn3.integrations\n'
            'assert not [x for x in sys.modules if x.startswith("flash_attn3.integrations.")]\n'
            'import importlib\n'
            'for name in flash_attn3.integrations.CLIENTS:\n'
            '    module = importlib.import_module("flash_attn3.integrations." + name)\n'
            '    assert not module.is_enabled() and isinstance(module.problem(), str)\n'
            'assert sys.path == path and not hasattr(torch.ops.flash_attn_3, "fwd")\n'
            'assert "flash_attn3" not in torch.nn.attention.list_flash_attention_impls()\n')
    subprocess.run([sys.executable, '-c', code], check=True)


# ------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize('heads_k', [4, 2])
@pytest.mark.parametrize('causal', [False, True])
def test_values_and_gradients_of_sdpa(on_cpu, calls, causal, heads_k):
    """The aten op that SDPA takes, with autograd, against the reference in float32."""
    q, k, v = tensors((2, 4, 37, 64), (2, heads_k, 37, 64), (2, heads_k, 37, 64))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    score = reference.Score(SCALE, mask=reference.Mask(causal))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    check([x.transpose(1, 2) for x in (out, *gradients)], turned, dout.transpose(1, 2), score)
    expected = reference.attend(reference.Inputs(*(x.detach().double() for x in turned)), score)
    compare.check_lse(lse, expected.lse)
    assert calls == ['fwd', 'bwd']


@pytest.mark.parametrize('window', [(-1, -1), (-1, 0), (8, 0), (5, 3)], ids=str)
def test_values_and_gradients_of_varlen_attn(on_cpu, calls, window):
    """torch.nn.attention.varlen.varlen_attn itself, against the reference of each sequence."""
    lengths, starts = (17, 1, 40), torch.tensor([0, 17, 18, 58], dtype=torch.int32)
    q, k, v = tensors((58, 4, 64), (58, 4, 64), (58, 4, 64))
    out, lse = varlen_attn(q, k, v, starts, starts, 40, 40, window_size=window,
                           return_aux=AuxRequest(lse=True))
    dout = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (q, k, v), dout))
    score = reference.Score(SCALE, mask=reference.Mask(False, window))
    for rows in (slice(s, s + n) for s, n in zip(starts.tolist(), lengths)):
        inputs = [x[None, rows].detach() for x in (q, k, v)]
        check([x[None, rows] for x in got], inputs, dout[None, rows], score)
        expected = reference.attend(reference.Inputs(*inputs).to(torch.float64), score)
        compare.check_lse(lse[None, :, rows], expected.lse)
    assert calls == ['fwd', 'bwd']


@pytest.mark.parametrize('splits', [None, 1, 3])
def test_values_of_varlen_attn_on_pages(on_cpu, calls, splits, monkeypatch):
    """Each sequence's keys on pages, fewer heads of k and v; also into a given tensor. The hook's
    question whether seqused_k is on a GPU is patched away.
    """
    monkeypatch.setattr(hook, '_fa3_forward_support_error', lambda *_: None)
    if 'block_table' not in inspect.signature(varlen_attn).parameters:
        pytest.skip('varlen_attn of this PyTorch has no pages')
    cache = Batch('cpu', 16)
    call = (cache.q, cache.k, cache.v, cache.starts, None, max(cache.queries), max(cache.lengths))
    options = dict(window_size=(-1, 0), enable_gqa=True, seqused_k=cache.used, scale=cache.scale,
                   block_table=cache.table, num_splits=splits, return_aux=AuxRequest(lse=True))
    out, lse = varlen_attn(*call, **options)
    cache.check(out, lse)
    given = torch.empty_like(out)
    written, lse = varlen.varlen_attn_out(given, *call, **options)
    assert torch.equal(given, out) and torch.equal(written, out)
    cache.check(written, lse)
    assert calls == ['fwd', 'fwd']


def test_cudnn_may_be_asked_for(monkeypatch):
    """Where varlen_attn obeys sdpa_kernel, enable() leaves its question for cuDNN alone."""
    question = varlen._should_use_cudnn
    monkeypatch.setattr(varlen, '_select_backend', print, raising=False)
    sdpa.enable()
    assert varlen._should_use_cudnn is question and not torch.backends.cuda.cudnn_sdp_enabled()
    sdpa.disable()
    monkeypatch.delattr(varlen, '_select_backend')
    sdpa.enable()
    assert not varlen._should_use_cudnn(0)


def test_values_of_float8(on_cpu, calls):
    """The overload that takes e4m3 and scales, of which PyTorch has no gradient."""
    values = [torch.randn(2, 4, 33, 64).to(torch.float8_e4m3fn) for _ in range(3)]
    scales = Scales(*(torch.rand(2, 4) + 0.5 for _ in range(3)))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.quantized(
        *values, *scales, 0.0, True)
    inputs = reference.Inputs(*(x.transpose(1, 2) for x in values))
    score = reference.Score(SCALE, mask=reference.Mask(True))
    assert out.dtype == torch.bfloat16 and calls == ['fwd']
    fp8_data.check_fp8(out.transpose(1, 2), inputs, scales, score)
    fp8_data.check_fp8_lse(lse, inputs, scales, score)
