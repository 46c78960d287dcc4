"""`_flash_attn_forward`, `_flash_attn_backward` and the ops of `torch.ops.flash_attn_3` on CPU
tensors: results and gradients against float64, given outputs, bad input.
"""
from __future__ import annotations

import math

import pytest
import torch
from functorch.compile import aot_function, nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.optests.generate_tests import (safe_aot_autograd_check,
                                                            safe_fake_check, safe_schema_check)

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu import reference
from flash_attn3.ops import checks, library
from flash_attn3.compat import functions, register_ops
from flash_attn3.cpu.reference import Inputs, Mask, Outputs, Score

from tests.support import cache_cases, cache_oracle, compare, plain, upstream_calls
from tests.support.cases import Case
from tests.support.general_oracle import check
from tests.support.upstream_calls import CACHES, FEATURES, GENERAL, LAYERS, run, with_features

each_layer = pytest.mark.parametrize('layer', LAYERS)
register_ops()
OPS = torch.ops.flash_attn_3


def dense(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, rows, heads, 16, dtype=dtype)
            for rows, heads in ((5, 4), (9, 2), (9, 2))]


# ------------------------------------------------------------------------ results and gradients
@each_layer
@pytest.mark.parametrize('features', FEATURES)
@pytest.mark.parametrize('case', GENERAL.values(), ids=GENERAL)
def test_results_and_gradients(case, features, layer):
    """The bar of tests/support/compare.py, for everything that upstream's ops take."""
    case = with_features(case, features)
    tensors = case.tensors('cpu')
    check(case, tensors, run(case, tensors, layer))


@each_layer
@pytest.mark.parametrize('layout', ['rows', 'apart'])
@pytest.mark.parametrize('features', ['causal', 'softcap'])
@pytest.mark.parametrize('name', ['dense', 'packed'])
def test_strided_gradients(name, features, layout, layer):
    """Gradients into tensors with other strides: the bits of contiguous ones."""
    case = with_features(GENERAL[name], features)
    tensors = case.tensors('cpu')
    wanted, got = (run(case, tensors, layer, layout=each) for each in ('contiguous', layout))
    for name in ('dq', 'dk', 'dv'):
        compare.check_equal(getattr(got, name), getattr(wanted, name), name)


@each_layer
@pytest.mark.parametrize('case', CACHES.values(), ids=CACHES)
def test_caches(case, layer, monkeypatch):
    """Results and every slot of the cache: append, pages, rotation, packed queries."""
    forward, _ = LAYERS[layer]
    monkeypatch.setattr(cache_cases, 'flash_attn_with_kvcache', upstream_calls.as_kvcache(forward))
    cache_oracle.check_case(case, 'cpu')


@each_layer
@pytest.mark.parametrize('num_splits', [-1, 0, 1, 3])
def test_num_splits(num_splits, layer):
    """The CPU path computes the same for every number; 0 and less are by plan."""
    case = with_features(GENERAL['dense'], 'causal')
    tensors = case.tensors('cpu')
    check(case, tensors, run(case, tensors, layer, num_splits=num_splits))


@each_layer
def test_causal_with_a_window_to_the_right(layer):
    """causal means right = 0, whatever window_size_right says."""
    q, k, v = dense()
    forward, _ = LAYERS[layer]
    wanted = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for right in (-1, 0, 3):
        got = forward(q=q, k=k, v=v, causal=True, window_size_right=right)
        assert all(torch.equal(*pair) for pair in zip(got, wanted))


@each_layer
def test_a_batch_of_queries_on_packed_keys(layer):
    """What xFormers makes of decoding: the rows of q of equal number, keys by cu_seqlens_k."""
    torch.manual_seed(0)
    q = torch.randn(3, 2, 4, 16, dtype=torch.float64)
    k, v = (torch.randn(20, 2, 16, dtype=torch.float64) for _ in range(2))
    starts = torch.tensor([0, 5, 5, 20], dtype=torch.int32)
    forward, _ = LAYERS[layer]
    given = torch.full_like(q, math.nan)
    for changes in ({}, {'out_': given}):
        out, lse = forward(q=q, k=k, v=v, cu_seqlens_k=starts, causal=True, **changes)
        for b, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
            wanted = reference.attend(Inputs(q[b:b + 1], k[None, first:end], v[None, first:end]),
                                      Score(16 ** -0.5, mask=Mask(True)))
            torch.testing.assert_close(out[b], wanted.out[0])
            torch.testing.assert_close(lse[b], wanted.lse[0])
    assert out is given


def test_a_given_output_is_returned():
    """Strided, as PyTorch's SDPA has it, by identity through the dispatcher."""
    q, k, v = dense()
    out = torch.full((2, 4, 5, 16), math.nan, dtype=q.dtype).transpose(1, 2)
    assert OPS.fwd(q, k, v, out=out)[0] is out
    assert torch.equal(out, flash_attn_func(q, k, v))
    assert functions._flash_attn_forward(q, k, v, out_=out, causal=True)[0] is out
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))


def test_positions():
    """The calls of PyTorch's hook: 34 and 22 arguments by position."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense())
    scale, out = 0.3, torch.empty_like(q)
    results = OPS.fwd(q, k, v, None, None, None, out, None, None, None, None, None, 5, 9,
                      *[None] * 6, None, None, None, scale, True, -1, -1, 0, 0.0, True, None, 0,
                      None, 0)
    wanted = flash_attn_func(q, k, v, scale, True, return_attn_probs=True)
    assert results[0] is out and torch.equal(out, wanted[0]) and torch.equal(results[1], wanted[1])
    dout = torch.ones_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    OPS.bwd(dout, q, k, v, out, results[1], *gradients, None, None, None, None, 5, 9, scale, True,
            -1, -1, 0.0, True, 0)
    for got, want in zip(gradients, plain.backward(dout, None, q, k, v, scale, True)):
        torch.testing.assert_close(got, want)


def test_gradients_flow_through_the_forward():
    """Upstream's is differentiable too."""
    q, k, v = (x.requires_grad_() for x in dense())
    out, *_ = functions._flash_attn_forward(q, k, v, causal=True)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(got, wanted))
    assert not OPS.fwd(q, k, v)[0].requires_grad    # as upstream's op


@each_layer
def test_out_and_lse_of_more_keys(layer):
    """A step of ring attention: with the merged out and LSE, the gradients of two halves of the
    keys are those of all.
    """
    q, k, v = dense()
    _, backward = LAYERS[layer]
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    dout = torch.randn_like(out)
    wanted = reference.attend_backward(dout, None, Inputs(q, k, v), Score(16 ** -0.5))
    parts = []
    for keys in (slice(0, 4), slice(4, 9)):
        one = [x[:, keys] for x in (k, v)]
        gradients = tuple(torch.full_like(x, math.nan) for x in (q, *one))
        backward(dout, q, *one, out, lse, lists=(None,) * 6, gradients=gradients, scalars=())
        parts.append(gradients)
    torch.testing.assert_close(parts[0][0] + parts[1][0], wanted.dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 1), wanted.dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 1), wanted.dv)


def test_the_lse_of_xformers():
    """(1, heads, total) for packed sequences."""
    case = with_features(GENERAL['packed'], 'causal')
    tensors = case.tensors('cpu')
    wanted = run(case, tensors, 'ops')
    q, k, v, _ = tensors.inputs
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    lists = [tensors.lists[name] for name in ('cu_seqlens_q', 'cu_seqlens_k')]
    OPS.bwd(tensors.dout, q, k, v, wanted.out, wanted.lse[None], *gradients, *lists,
            is_causal=True)
    for name, got in zip(('dq', 'dk', 'dv'), gradients):
        compare.check_equal(got, getattr(wanted, name), name)


def test_a_gradient_that_nobody_asks_for():
    """None is not written; the others are."""
    q, k, v = dense()
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    dk = torch.empty_like(k)
    OPS.bwd(torch.ones_like(out), q, k, v, out, lse, None, dk)
    wanted = reference.attend_backward(torch.ones_like(out), None, Inputs(q, k, v),
                                       Score(16 ** -0.5), outputs=Outputs(out, lse))
    torch.testing.assert_close(dk, wanted.dk)


def test_windows_as_a_tensor():
    """Upstream's tests give window_size so."""
    q, k, v = dense()
    for window in ((2, 3), (-1, 0)):
        assert torch.equal(functions.flash_attn_func(q, k, v, window_size=torch.tensor(window)),
                           flash_attn_func(q, k, v, window_size=window))


def test_inputs_whose_last_stride_is_not_one():
    """Copied, as upstream's Python does."""
    q, k, v = dense()
    apart = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert all(x.stride(-1) == 1 for x in functions._rows_contiguous(*apart))
    torch.testing.assert_close(functions._flash_attn_forward(*apart)[0], flash_attn_func(q, k, v))


# --------------------------------------------------------------------------- combine and metadata
@pytest.mark.parametrize('out_dtype', [None, torch.bfloat16])
def test_combine(out_dtype):
    """Partial results over three parts of the keys give the result over all."""
    q, k, v = Case(17, 40).tensors('cpu')
    q, k, v = (x.float() for x in (q, k, v))
    parts = [flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)
             for keys in (slice(0, 10), slice(10, 30), slice(30, 40))]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = OPS.fwd_combine(outs, lses, None, out_dtype)
    ref, ref_lse, pt = compare.expected_forward(q, k, v, causal=False)
    assert out.dtype == (out_dtype or torch.float32)
    compare.check_close(out, ref, pt.to(out.dtype), 'out', floor=1e-6)
    compare.check_lse(lse.transpose(1, 2), ref_lse)
    given = torch.empty_like(out)
    assert OPS.fwd_combine(outs, lses, given, out_dtype)[0] is given and torch.equal(given, out)


def test_scheduler_metadata():
    """It fits flash_attn_with_kvcache and is not needed: the same result with and without."""
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    metadata = OPS.get_scheduler_metadata(2, 5, 9, 4, 2, 16, 16, torch.float64, lengths,
                                          is_causal=True)
    assert metadata.dtype == torch.int32 and metadata.dim() == 1
    q, k, v = dense()
    arguments = dict(seqused_k=lengths, is_causal=True)
    assert torch.equal(OPS.fwd(q, k, v, scheduler_metadata=metadata, **arguments)[0],
                       OPS.fwd(q, k, v, **arguments)[0])


# ------------------------------------------------------------------------------- fakes and compile
def test_fakes():
    """Shapes and dtypes of real results, for every op and a symbolic number of splits."""
    q, k, v = (x.bfloat16() for x in dense())
    real = OPS.fwd(q, k, v, num_splits=0)
    combined = OPS.fwd_combine(torch.zeros(3, *q.shape), torch.zeros(3, 2, 5, 4))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        out, lse, *parts = OPS.fwd(*fakes, num_splits=0)
        assert parts == [None, None]
        OPS.bwd(out, *fakes, out, lse, *fakes)
        given = [torch.zeros(3, *q.shape), torch.zeros(3, 2, 5, 4)]
        pairs = [*zip((out, lse), real), *zip(OPS.fwd_combine(*given), combined)]
        assert OPS.get_scheduler_metadata(2, 5, 9, 4, 2, 16, 16, q.dtype, lse.int()).shape == (1,)
    for fake, wanted in pairs:
        assert (fake.shape, fake.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.slow
def test_the_functions_compile_to_one_graph():
    q, k, v = (x.float() for x in dense())

    def step(q, k, v):
        out, lse, *_ = functions._flash_attn_forward(q, k, v, causal=True, num_splits=0)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        functions._flash_attn_backward(out, q, k, v, out, lse, *[None] * 6, *gradients,
                                       is_causal=True, softcap=0.0)
        return out, *gradients

    compiled = torch.compile(step, fullgraph=True, backend='aot_eager')
    for got, wanted in zip(compiled(q, k, v), step(q, k, v)):
        torch.testing.assert_close(got, wanted)


LENGTHS = torch.tensor([3, 2], dtype=torch.int32)
CALLS = {    # what follows q, k and v of `fwd`
    'dense': lambda q, k, v: ((), dict(is_causal=True)),
    'out': lambda q, k, v: ((None, None, None, torch.zeros_like(q)), {}),
    'packed': lambda q, k, v: ((), dict(cu_seqlens_k=torch.tensor([0, 4, 18], dtype=torch.int32))),
    'split': lambda q, k, v: ((), dict(softcap=15.0, window_size_left=3, num_splits=3)),
    'cache': lambda q, k, v: ((), dict(seqused_k=LENGTHS)),
    'append': lambda q, k, v: ((k[:, :5].clone(), v[:, :5].clone()), dict(seqused_k=LENGTHS)),
    'append_rotated': lambda q, k, v: ((k[:, :5].clone(), v[:, :5].clone()), dict(
        seqused_k=LENGTHS, rotary_cos=torch.rand(9, 4), rotary_sin=torch.rand(9, 4))),
    'append_into': lambda q, k, v: ((k[:, :5].clone(), v[:, :5].clone(), None, torch.zeros_like(q)),
                                    dict(seqused_k=LENGTHS, is_causal=True)),
}


def arguments_of(name: str) -> tuple[tuple, dict]:
    q, k, v = (x.float() for x in dense())
    others, named = CALLS[name](q, k, v)
    if name == 'packed':
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    return (q, k, v, *others), named


@pytest.mark.slow
@pytest.mark.parametrize('name', CALLS)
def test_opcheck(name):
    """PyTorch's own check of what torch.compile relies on; also of what is written."""
    arguments, named = arguments_of(name)
    torch.library.opcheck(OPS.fwd.default, arguments, named)


@pytest.mark.slow
def test_opcheck_of_the_others():
    q, k, v = (x.float() for x in dense())
    out, lse, *_ = OPS.fwd(q, k, v)
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    torch.library.opcheck(OPS.bwd.default, (out, q, k, v, out, lse, *gradients))
    parts = torch.randn(3, *q.shape), torch.randn(3, 2, 5, 4)
    for given in ((), (torch.zeros_like(q),)):
        torch.library.opcheck(OPS.fwd_combine.default, (*parts, *given))
    torch.library.opcheck(OPS.get_scheduler_metadata.default,
                          (2, 5, 9, 4, 2, 16, 16, torch.float32, LENGTHS))


@pytest.mark.filterwarnings('error')
def test_tensors_without_data_lie_nowhere():
    """Whatever their type is, and without a warning; the others where they are."""
    x, seen = torch.zeros(2, 3), []

    def look(x):
        seen.append(checks.address_of(x))
        return x + 0

    aot_function(look, nop)(x)    # a FunctionalTensor
    torch.func.vmap(look)(x)
    make_fx(look, tracing_mode='fake')(x)
    look(x.to('meta'))
    with FakeTensorMode():
        look(torch.empty(2, device='cuda'))
    assert len(seen) >= 5 and not any(seen)
    look(torch.nn.Parameter(x[1:]))
    assert seen[-1] == x[1:].data_ptr()


def packed_lists() -> tuple[tuple, dict]:
    """What follows packed q, k and v of two sequences, some rows of which do not count."""
    starts = [torch.arange(3, dtype=torch.int32) * rows for rows in (5, 9)]
    return (*starts, 5, 9), dict(seqused_q=LENGTHS, seqused_k=LENGTHS + 4)


@pytest.mark.slow
@pytest.mark.parametrize('named', [dict(softcap=15.0), dict(causal=True, window_size=(3, 1))],
                         ids=lambda named: '-'.join(named))
@pytest.mark.parametrize('num_splits', [1, 3])
@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('is_packed', [False, True], ids=['dense', 'packed'])
def test_upstreams_opcheck(is_packed, requires_grad, num_splits, named, monkeypatch):
    """As upstream's tests check its functions, in place of ops: AOTAutograd traces into them, with
    tensors that have no data, and torch.compiler.is_compiling() says no. On the way of a GPU.
    """
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    monkeypatch.setattr(library, 'kernels_serve', lambda _: True)
    function, lists = flash_attn_func, ()
    tensors = [x.float() for x in dense()]
    if is_packed:
        function, tensors = flash_attn_varlen_func, [x.flatten(0, 1) for x in tensors]
        lists, used = packed_lists()
        named = named | used
    arguments = *(x.requires_grad_(requires_grad) for x in tensors), *lists
    named = named | dict(num_splits=num_splits)
    safe_schema_check(function, arguments, named)
    safe_fake_check(function, arguments, named)
    for dynamic in (False, True):
        safe_aot_autograd_check(function, arguments, named, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.parametrize('name', CALLS)
def test_the_op_compiles_to_one_graph(name):
    """Results, and everything that is written: caches and a given output."""
    def step(arguments, named):
        out, lse, *_ = OPS.fwd(*arguments, **named)
        return out + 0, lse, arguments[1].sum()

    (wanted_given, named), (given, _) = arguments_of(name), arguments_of(name)
    wanted = step(wanted_given, named)
    got = torch.compile(step, fullgraph=True, backend='aot_eager')(given, named)
    for one, other in zip((*got, *given), (*wanted, *wanted_given)):
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_the_exported_op_writes_the_cache():
    """Without upstream's ops: by those of the package."""
    class Step(torch.nn.Module):
        def forward(self, q, k, v, new_k, new_v, lengths):
            return torch.ops.flash_attn_3.fwd(q, k, v, new_k, new_v, seqused_k=lengths)[0]

    arguments, _ = arguments_of('append')
    exported = torch.export.export(Step(), (*arguments, LENGTHS)).run_decompositions({})
    names = [str(node.target) for node in exported.graph.nodes]
    assert not any('flash_attn_3.' in name for name in names)
    caches = [x.clone() for x in arguments[1:3]]
    got = exported.module()(arguments[0], *caches, *arguments[3:], LENGTHS)
    torch.testing.assert_close(got, Step()(*arguments, LENGTHS))
    for cache, wanted in zip(caches, arguments[1:3]):
        assert torch.equal(cache, wanted)


# -------------------------------------------------------------------------------------- bad input
STARTS = torch.tensor([0, 5], dtype=torch.int32)
BAD = {
    'page_table': dict(cu_seqlens_k=STARTS, page_table=STARTS[None]),
    'leftpad_k': dict(cu_seqlens_k=STARTS, leftpad_k=STARTS[:1]),
    'k_new': dict(cu_seqlens_k=STARTS, k_new=torch.zeros(1, 1, 2, 16)),
    'rotary_cos': dict(cu_seqlens_k=STARTS, rotary_cos=torch.zeros(9, 4)),
    'seqused_q': dict(seqused_q=STARTS),
}


@each_layer
@pytest.mark.parametrize('name', BAD)
def test_arguments_that_do_not_go_together(name, layer):
    q, k, v = dense()
    forward, _ = LAYERS[layer]
    with pytest.raises(RuntimeError, match=f'^flash_attn3.compat.fwd: expected {name} to be None'):
        forward(q=q, k=k, v=v, **BAD[name])


@each_layer
def test_unsupported_arguments(layer):
    """Named; what upstream's interface does not have is Python's own error."""
    q, k, v = dense()
    forward, _ = LAYERS[layer]
    packed = {name: x.flatten(0, 1) for name, x in dict(q=q, k=k, v=v, qv=q).items()}
    with pytest.raises(NotImplementedError, match='qv to be None.*flash_attn_with_kvcache'):
        forward(**packed, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
    for name in ('dropout_p', 'alibi_slopes', 'cp_world_size'):
        with pytest.raises((TypeError, RuntimeError), match=name):
            forward(q=q, k=k, v=v, **{name: 2})
        with pytest.raises(TypeError, match=name):
            functions.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 5, 5, **{name: 2})


@each_layer
@pytest.mark.parametrize('scale', [None, 0.3])
@pytest.mark.parametrize('changes', [{}, {'seqused_k': torch.tensor([9, 9], dtype=torch.int32)}],
                         ids=['dense', 'cache'])
def test_qv(changes, scale, layer):
    """On a cache, or a batch; by default the op scales by the columns of q alone."""
    forward, _ = LAYERS[layer]
    q, k, v, qv = (torch.randn(2, rows, heads, dim, dtype=torch.float64)
                   for rows, heads, dim in ((5, 4, 16), (9, 1, 16), (9, 1, 24), (5, 4, 24)))
    out, lse = forward(q=q, k=k, v=v, qv=qv, softmax_scale=scale, **changes)[:2]
    scores = torch.einsum('bqhd,bkd->bhqk', q, k[:, :, 0]) + torch.einsum(
        'bqhd,bkd->bhqk', qv, v[:, :, 0])
    scores *= 0.25 if scale is None else scale
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum('bhqk,bkd->bqhd', scores.softmax(-1), v[:, :, 0]))


@each_layer
def test_bad_gradients(layer):
    """Another shape or dtype: an error, and nothing is written."""
    q, k, v = dense()
    _, backward = LAYERS[layer]
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    for scalars in ((), (None, False, 2, 1)):    # by bwd_out, and by a copy
        for i, bad in ((0, torch.full_like(q[:, :1], 7.0)), (1, torch.full_like(k.float(), 7.0))):
            gradients = [torch.full_like(x, 7.0) for x in (q, k, v)]
            gradients[i] = bad
            with pytest.raises(RuntimeError, match=f"expected d{'qkv'[i]}"):
                backward(out, q, k, v, out, lse, lists=(None,) * 6, gradients=tuple(gradients),
                         scalars=scalars)
            assert all((x == 7.0).all() for x in gradients)


def test_a_window_by_one_argument():
    """The gradients are returned too, also those that were not given."""
    q, k, v = dense()
    out, lse = flash_attn_func(q, k, v, window_size=(2, 3), return_attn_probs=True)
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    functions._flash_attn_backward(out, q, k, v, out, lse, *[None] * 6, *wanted,
                                   window_size_left=2, window_size_right=3)
    dq = torch.empty_like(q)
    for window in ((2, 3), torch.tensor([2, 3]), [2, 3]):
        for others in ({}, dict(window_size_left=2), dict(window_size_right=3)):
            *got, empty = functions._flash_attn_backward(out, q, k, v, out, lse, dq=dq,
                                                         window_size=window, **others)
            assert got[0] is dq and empty.numel() == 0
            assert all(torch.equal(*pair) for pair in zip(got, wanted))


@pytest.mark.parametrize('others', [dict(window_size_left=1), dict(window_size_right=0)], ids=str)
def test_two_windows(others):
    q, k, v = dense()
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    dq = torch.full_like(q, 7.0)
    for window in ((2, 3), (-1, -1)):
        with pytest.raises(RuntimeError, match=r'compat.bwd: expected window_size, or .* got \('):
            functions._flash_attn_backward(out, q, k, v, out, lse, dq=dq, window_size=window,
                                           **others)
    assert (dq == 7.0).all()


@each_layer
def test_positions_of_nothing_that_is_rotated(layer):
    """rotary_seqlens alone is not used: neither on packed keys nor with a batch."""
    q, k, v = dense()
    forward, _ = LAYERS[layer]
    positions = torch.tensor([1, 2], dtype=torch.int32)
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = dict(q=q, k=k.flatten(0, 1), v=v.flatten(0, 1), cu_seqlens_k=starts)
    for given in (dict(q=q, k=k, v=v), packed):
        assert torch.equal(forward(**given, seqlens_rotary=positions)[0], forward(**given)[0])


def test_a_margin_of_the_backward_warns_once():
    q, k, v = dense()
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    functions._warn_of_margin.cache_clear()
    with pytest.warns(UserWarning, match='expected sm_margin to be 0') as warned:
        for _ in range(2):
            OPS.bwd(out, q, k, v, out, lse, *gradients, sm_margin=8)
    assert len(warned) == 1


def test_functions_that_always_return_the_lse():
    """legacy_tuple: (out, lse) of all three."""
    q, k, v = dense()
    out, lse = functions.with_lse(functions.flash_attn_func)(q, k, v, causal=True)
    wanted = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    starts = [torch.arange(3, dtype=torch.int32) * x.size(1) for x in (q, k)]
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    got = functions.with_lse(functions.flash_attn_varlen_func)(*packed, *starts, 5, 9)
    wanted = flash_attn_varlen_func(*packed, *starts, 5, 9, return_attn_probs=True)
    assert all(torch.equal(*pair) for pair in zip(got, wanted))
    qkv = torch.stack([k, k, v], 2)
    got = functions.with_lse(functions.flash_attn_qkvpacked_func)(qkv)
    wanted = flash_attn_func(k, k, v, return_attn_probs=True)
    assert all(torch.equal(*pair) for pair in zip(got, wanted))
