"""flash_attn3.invariant(): which split_size calls get, on CPU tensors, and what is refused."""
from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash_attn3
from flash_attn3 import (AttentionMask, can_use, explain, flash_attn_fp8_func, flash_attn_func,
                         flash_attn_qkvpacked_func, flash_attn_varlen_func,
                         flash_attn_with_kvcache, invariant)
from flash_attn3.api import interface, kvcache
from flash_attn3.compat import functions
from flash_attn3.integrations import sglang, vllm
from flash_attn3.ops import attend_cache, autograd, invariance
from flash_attn3.ops.attend_cache import Attend
from flash_attn3.ops.dense_and_varlen import Execution, General

from tests.support import private_ops
from tests.support.called_ops import compilations

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = invariance.DEFAULT_SPLIT_SIZE
E4M3 = torch.float8_e4m3fn
STARTS = torch.tensor([0, 9, 18], dtype=torch.int32)


def tensors(count=3, requires_grad=False, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, 9, 4, 16).to(dtype).requires_grad_(requires_grad) for _ in range(count)]


def packed():
    return [x.flatten(0, 1) for x in tensors()], (STARTS, STARTS, 9, 9)


@pytest.fixture
def sizes(monkeypatch):
    """(split_size, num_splits) of each call of an op; num_splits is None in ops without it."""
    found = []
    of_dense = len(General._fields) + Execution._fields.index('split_size')

    def dense(op, first):
        def called(*arguments):
            others = arguments[first:]
            found.append((others[of_dense] if len(others) > of_dense else 0, None))
            return op(*arguments)
        return called

    def of_cache(op):
        def called(*arguments):
            own = Attend(*arguments[4:])
            found.append((own.split_size, own.num_splits))
            return op(*arguments)
        return called

    def plain(op):
        return lambda *arguments, **named: (found.append((0, None)), op(*arguments, **named))[1]

    ways = (interface, '_attend'), (interface, '_attend_eager'), (autograd, '_attend')
    for module, name in ways:
        monkeypatch.setattr(module, name, dense(getattr(module, name), 4))
    for name in ('_fwd', '_fwd_no_lse'):
        monkeypatch.setattr(interface, name, plain(getattr(interface, name)))
    monkeypatch.setattr(kvcache, '_EAGER', (of_cache(kvcache._EAGER[0]), kvcache._EAGER[1]))
    return found


CALLS = {
    'dense': lambda: flash_attn_func(*tensors(), causal=True),
    'dense, splits': lambda: flash_attn_func(*tensors(), num_splits=3),
    'packed': lambda: (lambda x, lists: flash_attn_varlen_func(*x, *lists))(*packed()),
    'packed, splits': lambda: (lambda x, lists: flash_attn_varlen_func(
        *x, *lists, num_splits=3))(*packed()),
    'qkv': lambda: flash_attn_qkvpacked_func(torch.stack(tensors(), 2)),
    'cache': lambda: flash_attn_with_kvcache(*tensors()),
    'cache, splits': lambda: flash_attn_with_kvcache(*tensors(), num_splits=7),
    'compat': lambda: functions._flash_attn_forward(*tensors(), num_splits=5),
    'compat, cache': lambda: functions._flash_attn_forward(
        *tensors(), seqused_k=torch.tensor([9, 3], dtype=torch.int32), num_splits=1),
}


@pytest.mark.parametrize('name', CALLS)
def test_every_call_has_the_split_size(name, sizes):
    before = CALLS[name]()
    assert not sizes or sizes[-1][0] == 0
    sizes.clear()
    with invariant():
        got = CALLS[name]()
    splits = 0 if 'cache' in name else None
    assert sizes == [(DEFAULT, splits)]
    with invariant(128):
        CALLS[name]()
    assert sizes[-1] == (128, splits) and invariance.OPEN == []
    if isinstance(got, tuple):
        got, before = got[0], before[0]
    torch.testing.assert_close(got, before)


def test_an_explicit_split_size_comes_first(sizes):
    with invariant():
        flash_attn_func(*tensors(), split_size=256)
        flash_attn_with_kvcache(*tensors(), split_size=256)
        assert sizes == [(256, None), (256, 0)]
        for call in (flash_attn_func, flash_attn_with_kvcache):
            with pytest.raises(RuntimeError, match='num_splits'):
                call(*tensors(), split_size=256, num_splits=2)


def test_contexts_nest_overlap_and_decorate():
    def size():
        return invariance.split_size_of(0)
    with invariant():
        with invariant(64):
            assert size() == 64
        assert size() == DEFAULT
    first, second = invariant(64), invariant(128)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert size() == 128
    second.__exit__(None, None, None)
    assert invariant(32)(size)() == 32 and size() == 0
    with pytest.raises(ZeroDivisionError), invariant():
        raise ZeroDivisionError
    assert size() == 0
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(RuntimeError, match='invariant: expected split_size to be None or'):
            with invariant(wrong):
                pass


def test_it_counts_in_other_threads():
    found = []
    with invariant(96):
        thread = threading.Thread(target=lambda: found.append(invariance.split_size_of(0)))
        thread.start()
        thread.join()
    assert found == [96]


def test_gradients_and_checkpoints(sizes):
    """The gradients are those without; a forward that is computed again has the split size too."""
    q, k, v = tensors(requires_grad=True)
    wanted = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).square().sum(), (q, k, v))
    qkv = torch.stack(tensors(), 2).requires_grad_()
    sizes.clear()
    with invariant():
        out = checkpoint(lambda *x: flash_attn_func(*x, causal=True), q, k, v, use_reentrant=False)
        got = torch.autograd.grad(out.square().sum(), (q, k, v))
        of_qkv, = torch.autograd.grad(
            flash_attn_qkvpacked_func(qkv, causal=True).square().sum(), qkv)
    assert sizes == [(DEFAULT, None)] * 3    # the forward, again in the backward, and packed
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(of_qkv, torch.stack(wanted, 2))


@pytest.mark.parametrize('call,text', [
    (lambda: flash_attn_func(*tensors(dtype=E4M3)), 'split_size of 0 with float8_e4m3fn'),
    (lambda: flash_attn_fp8_func(*tensors(dtype=torch.bfloat16)), 'flash_attn_fp8_func: .*no quan'),
    (lambda: flash_attn_func(*tensors(), mask=AttentionMask.documents(STARTS[:2], 9)),
     'no split_size with mask'),
])
def test_what_cannot_be_promised_is_refused(call, text):
    call()
    with invariant(), pytest.raises(RuntimeError, match=f'{text}.*flash_attn3.invariant'):
        call()


def test_max_logits(sizes):
    """Out and LSE have the split size of other calls."""
    given = tensors()
    wanted = flash_attn_func(*given, return_max_logits=True)
    sizes.clear()
    with invariant():
        got = flash_attn_func(*given, return_max_logits=True)
    assert [size for size, _ in sizes] == [DEFAULT, 0]
    torch.testing.assert_close(got, wanted)


def test_a_cache_on_other_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(kvcache, 'is_compiling', lambda: False)
    q = type('Q', (), dict(get_device=lambda _: 99, is_cuda=True, device='cuda:99'))()
    monkeypatch.setattr(kvcache.library, 'kernels_serve', lambda device: False)
    monkeypatch.setattr(kvcache.fallback, 'warn_once', lambda *_, **__: None)
    assert kvcache.functions_for(q, 'op')[0] is attend_cache.attend_plainly
    text = 'op: expected split_size of 0 with a GPU without our kernels, got 64'
    with pytest.raises(RuntimeError, match=text):
        kvcache.functions_for(q, 'op', 64)
    with invariant(), pytest.raises(RuntimeError, match=f'{text}; hint: flash_attn3.invariant'):
        kvcache.functions_for(q, 'op', 64)


def test_explain_says_that_num_splits_is_ignored(capsys):
    shapes = (1, 64, 16, 128), (1, 4096, 4, 128)
    text = 'parts of 1024 keys'
    with invariant(1024):
        explain(*shapes)
        explain(*shapes, cache=True, num_splits=7)
        assert can_use(*tensors(dtype=torch.bfloat16), num_splits=300)[1][0].startswith(
            'flash_attn3.can_use: expected q on a CUDA device')
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith('splits ')]
    assert len(rows) == 2
    assert all(text in row and 'num_splits is ignored under' in row for row in rows)
    explain(*shapes, split_size=1024)
    row, = [x for x in capsys.readouterr().out.splitlines() if x.startswith('splits ')]
    assert text in row and 'ignored' not in row


@pytest.mark.slow
@pytest.mark.usefixtures('fresh_compiler')
def test_compiled():
    """Constant in a graph, with a guard; also where the context is opened inside."""
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(lambda *x: flash_attn_func(*x, causal=True), backend=counter,
                             fullgraph=True)

    def sizes():
        return [node.args[-2] if node.target is torch.ops.flash_attn3.fwd_general.default else 0
                for graph in counter.graphs for node in graph.graph.nodes
                if str(node.target).startswith('flash_attn3')]
    compiled(*tensors())
    for _ in range(2):
        with invariant():
            compiled(*tensors())
    compiled(*tensors())
    assert sizes() == [0, DEFAULT] and compilations(counter) == 2

    def inside(*x):
        with invariant():
            one = flash_attn_func(*x)
        return one + flash_attn_func(*x)
    counter.graphs.clear()
    torch.compile(inside, backend=counter, fullgraph=True)(*tensors())
    assert sizes() == [DEFAULT, 0] and invariance.OPEN == []


def run_with(name, value, code):
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, text=True, capture_output=True,
                          env={'PYTHONPATH': str(ROOT), name: value})


@pytest.mark.parametrize('value,size', [('1', DEFAULT), ('0', 0), ('', 0)])
def test_environment_variable(value, size):
    code = 'from flash_attn3.ops.invariance import split_size_of; print(split_size_of(0))'
    done = run_with('FLASH_ATTN3_INVARIANT', value, code)
    assert done.stdout.split() == [str(size)], done.stderr


@pytest.mark.parametrize('name', ['INVARIANT', 'CHECKS', 'DISABLE_KERNELS', 'COPY_ENGINES'])
def test_values_that_say_nothing(name):
    for value in ('true', '2048'):
        done = run_with(f'FLASH_ATTN3_{name}', value, 'import flash_attn3.env')
        text = f"RuntimeError: flash_attn3: expected FLASH_ATTN3_{name} to be 0 or 1, got '{value}'"
        assert done.stderr.splitlines()[-1] == text


@pytest.mark.parametrize('client,variable,namespace', [
    (vllm, 'VLLM_BATCH_INVARIANT', '_vllm_fa3_C'),
    (sglang, 'SGLANG_ENABLE_DETERMINISTIC_INFERENCE', 'sgl_kernel')])
def test_clients_that_are_told_to_be_deterministic(client, variable, namespace, monkeypatch):
    private_ops.define(namespace)
    try:
        for value, size in (('', 0), ('0', 0), ('1', DEFAULT), ('true', DEFAULT)):
            monkeypatch.setenv(variable, value)
            client.enable()
            assert invariance.split_size_of(0) == size
            client.disable()
            assert invariance.OPEN == []
    finally:
        private_ops.undefine()


def test_the_name_is_public():
    assert flash_attn3.invariant is invariance.invariant
