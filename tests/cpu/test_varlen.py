"""flash_attn_varlen_func on CPU tensors: each sequence is what it is alone; nothing else counts."""
import inspect
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.ops import checks
from flash_attn3.cpu.reference import Inputs

from tests.cpu import by_row
from tests.cpu.drawn import examples
from tests.cpu.test_general import EVERY_FEATURE, FEATURES, arguments_of, score_of
from tests.cpu.test_reference_packed import packed_inputs, sequences
from tests.support.lists import ints, starts

UPSTREAM_PARAMETERS = [    # flash_attn_interface.flash_attn_varlen_func, in order
    'q', 'k', 'v', 'cu_seqlens_q', 'cu_seqlens_k', 'max_seqlen_q', 'max_seqlen_k', 'seqused_q',
    'seqused_k', 'softmax_scale', 'causal', 'qv', 'q_descale', 'k_descale', 'v_descale',
    'window_size', 'attention_chunk', 'softcap', 'num_splits', 'pack_gqa', 'deterministic',
    'sm_margin', 'return_attn_probs']
UPSTREAM_DEFAULTS = [None, None, None, False, None, None, None, None, (-1, -1), 0, 0.0, 1, None,
                     False, 0, False]
EVERYTHING = FEATURES['all']
# Lengths of q and k, sequence by sequence; then how many rows of each count.
LENGTHS = ([3, 0, 5, 2, 4], [4, 3, 0, 2, 6])
USED = ([2, 0, 5, 0, 3], [4, 1, 0, 2, 0])


def test_parameters_are_upstreams():
    parameters = inspect.signature(flash_attn_varlen_func).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == UPSTREAM_PARAMETERS
    assert [p.default for p in positional[7:]] == UPSTREAM_DEFAULTS
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


def call(inputs: Inputs, lengths: tuple, options: dict, used: tuple = (None, None)):
    """(out, lse, max_logits) of sequences of these lengths."""
    options = {name: value for name, value in options.items() if name != 's_aux'}
    return flash_attn_varlen_func(
        *inputs[:3], *map(starts, lengths), *(max(x, default=0) for x in lengths),
        *(None if x is None else ints(x) for x in used), **options, s_aux=inputs.s_aux,
        return_attn_probs=True, return_max_logits=True)


def random_case(options=EVERYTHING, lengths=LENGTHS, more=(0, 0)) -> Inputs:
    """Inputs of these lengths, and so many rows of q and k behind the last sequence."""
    return packed_inputs(*(sum(x) + rest for x, rest in zip(lengths, more)), 's_aux' in options)


def with_gradients(inputs: Inputs, lengths, options, used=(None, None)) -> list:
    """Results and gradients of a weighted sum of them, where the weights are the same each time."""
    leaves = Inputs(*(None if x is None else x.detach().requires_grad_() for x in inputs))
    out, lse, max_logits = call(leaves, lengths, options, used)
    generator = torch.Generator().manual_seed(0)
    dout, dlse = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse))
    named = [x for x in leaves if x is not None]
    return [x.detach() for x in (out, lse, max_logits,
                                 *torch.autograd.grad((out, lse), named, (dout, dlse)))]


# ----------------------------------------------------------------------------------------- results
@EVERY_FEATURE
@pytest.mark.parametrize('used', [(None, None), USED], ids=['all', 'used'])
def test_every_feature_is_each_sequence_written_out(used, options):
    inputs = random_case(options, more=(2, 3))
    score = score_of(options, 6)
    out, lse, max_logits, dq, dk, dv, *dsinks = with_gradients(inputs, LENGTHS, options, used)
    generator = torch.Generator().manual_seed(0)
    dout, dlse = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse))

    wanted = [torch.zeros_like(out), *(torch.full_like(lse, -math.inf) for _ in range(2)),
              *(torch.zeros_like(x) for x in (dq, dk, dv))]
    wanted_dsinks = torch.zeros(4, dtype=torch.float64)
    first_q = first_k = 0
    counts = [length if use is None else use for length, use in zip(LENGTHS, used)]
    for length_q, length_k, count_q, count_k in zip(*LENGTHS, *counts):
        rows, keys = slice(first_q, first_q + count_q), slice(first_k, first_k + count_k)
        alone = Inputs(inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys],
                       inputs.s_aux)
        part = by_row.attend(alone, score)
        gradients = by_row.gradients(dout[None, rows], dlse[None, :, rows], alone, score)
        wanted[0][rows], wanted[1][:, rows], wanted[2][:, rows] = (x[0] for x in part)
        wanted[3][rows], wanted[4][keys], wanted[5][keys] = (x[0] for x in gradients[:3])
        if dsinks:
            wanted_dsinks += gradients.ds_aux
        first_q, first_k = first_q + length_q, first_k + length_k
    for got, expected in zip((out, lse, max_logits, dq, dk, dv), wanted):
        torch.testing.assert_close(got, expected)
        assert got.is_contiguous()
    if dsinks:
        torch.testing.assert_close(dsinks[0], wanted_dsinks)


@given(st.lists(sequences, max_size=5), st.booleans(), st.booleans(), st.booleans(), by_row.SCORES)
@examples(40, derandomize=True)
def test_each_sequence_is_what_it_is_alone(batch, use_q, use_k, sinks, score):
    """Bit for bit what flash_attn_func gives for it."""
    lengths = [one[0] for one in batch], [one[1] for one in batch]
    counts = [[one[i] * one[i + 2] // 4 if use else one[i] for one in batch]
              for i, use in ((0, use_q), (1, use_k))]
    options = arguments_of(score)
    inputs = packed_inputs(sum(lengths[0]), sum(lengths[1]), sinks)
    got = call(inputs, lengths, options, tuple(x if use else None
                                               for x, use in zip(counts, (use_q, use_k))))
    firsts = [[sum(x[:i]) for i in range(len(x))] for x in lengths]
    for first_q, first_k, count_q, count_k in zip(*firsts, *counts):
        rows, keys = slice(first_q, first_q + count_q), slice(first_k, first_k + count_k)
        wanted = flash_attn_func(
            inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys], **options,
            s_aux=inputs.s_aux, return_attn_probs=True, return_max_logits=True)
        assert torch.equal(got[0][rows], wanted[0][0])
        assert torch.equal(got[1][:, rows], wanted[1][0])
        assert torch.equal(got[2][:, rows], wanted[2][0])


@EVERY_FEATURE
def test_one_sequence_is_flash_attn_func(options):
    inputs = random_case(options, ([7], [9]))
    dense = Inputs(*(x[None] for x in inputs[:3]), inputs.s_aux)
    leaves = Inputs(*(None if x is None else x.requires_grad_() for x in dense))
    options_of_it = {name: value for name, value in options.items() if name != 's_aux'}
    out, lse, max_logits = flash_attn_func(*leaves[:3], **options_of_it, s_aux=leaves.s_aux,
                                           return_attn_probs=True, return_max_logits=True)
    generator = torch.Generator().manual_seed(0)
    dout, dlse = (torch.randn(x[0].shape, generator=generator, dtype=x.dtype)[None]
                  for x in (out, lse))
    named = [x for x in leaves if x is not None]
    dq, dk, dv, *dsinks = torch.autograd.grad((out, lse), named, (dout, dlse))
    wanted = [*(x[0] for x in (out, lse, max_logits, dq, dk, dv)), *dsinks]
    for got, expected in zip(with_gradients(inputs, ([7], [9]), options), wanted, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize('used', [(None, None), ([2, 1], [2, 3])], ids=['all', 'used'])
@EVERY_FEATURE
def test_gradcheck(options, used):
    """Numerical derivatives of out and of the LSE where there is one, along random directions."""
    inputs = by_row.random_inputs((5, 2, 2), (7, 1, 2), 3, 's_aux' in options)

    def attention(*leaves):
        out, lse, _ = call(Inputs(*leaves), ([3, 2], [3, 4]), options, used)
        return out, lse.masked_fill(lse.isneginf(), 0)

    assert gradcheck(attention, [x.requires_grad_() for x in inputs if x is not None],
                     fast_mode=True)


# -------------------------------------------------------------------------------------- invariance
@EVERY_FEATURE
def test_the_order_of_the_sequences_changes_no_bit(options):
    inputs = random_case(options)
    order = random.Random(0).sample(range(5), 5)
    results = with_gradients(inputs, LENGTHS, options)
    parts_q, parts_k = (torch.arange(sum(x)).split(x) for x in LENGTHS)
    rows, keys = (torch.cat([parts[i] for i in order]) for parts in (parts_q, parts_k))
    turned = Inputs(inputs.q[rows], inputs.k[keys], inputs.v[keys], inputs.s_aux)
    lengths = tuple([x[i] for i in order] for x in LENGTHS)
    got = call(turned, lengths, options)
    for value, wanted, dim in zip(got, results, (0, 1, 1)):
        assert torch.equal(value, wanted.index_select(dim, rows))


@EVERY_FEATURE
def test_what_does_not_count_changes_no_bit(options):
    """NaN behind used lengths and behind the last sequence."""
    inputs = random_case(options, more=(2, 3))
    clean = with_gradients(inputs, LENGTHS, options, USED)
    counts_q, counts_k = (
        torch.cat([torch.arange(length) < use for length, use in zip(lengths, used)]
                  + [torch.zeros(rest, dtype=torch.bool)])
        for lengths, used, rest in zip(LENGTHS, USED, (2, 3)))
    poisoned = Inputs(inputs.q.masked_fill(~counts_q[:, None, None], math.nan),
                      *(x.masked_fill(~counts_k[:, None, None], math.nan) for x in inputs[1:3]),
                      inputs.s_aux)
    out, lse, max_logits, dq, dk, dv, *_ = got = with_gradients(poisoned, LENGTHS, options, USED)
    for value, wanted in zip(got, clean, strict=True):
        assert torch.equal(value, wanted)
    assert (out[~counts_q] == 0).all() and (dq[~counts_q] == 0).all()
    assert lse[:, ~counts_q].isneginf().all() and max_logits[:, ~counts_q].isneginf().all()
    assert (dk[~counts_k] == 0).all() and (dv[~counts_k] == 0).all()


@pytest.mark.parametrize('where', ['q', 'k', 'both'])
@pytest.mark.parametrize('slot', range(4))
def test_an_empty_sequence_in_any_slot(slot, where):
    lengths = ([3, 2, 4], [2, 5, 3])
    inputs = random_case(EVERYTHING, lengths)
    expected = with_gradients(inputs, lengths, EVERYTHING)
    empty_q, empty_k = ([*x[:slot], 0, *x[slot:]] for x in lengths)
    other = slot % 3
    if where == 'both':    # no row of either: as if it were not there
        for got, wanted in zip(with_gradients(inputs, (empty_q, empty_k), EVERYTHING), expected,
                               strict=True):
            assert torch.equal(got, wanted)
        return
    short = [list(x) for x in lengths]
    short['qk'.index(where)][other] = 0
    inputs = random_case(EVERYTHING, short)
    out, lse, max_logits, dq, dk, dv, _ = with_gradients(inputs, short, EVERYTHING)
    rows = slice(sum(short[0][:other]), sum(short[0][:other + 1]))
    keys = slice(sum(short[1][:other]), sum(short[1][:other + 1]))
    if where == 'k':    # its queries see no key
        assert (out[rows] == 0).all() and (dq[rows] == 0).all()
        torch.testing.assert_close(lse[:, rows], inputs.s_aux[:, None].expand_as(lse[:, rows]))
        assert max_logits[:, rows].isneginf().all()
    else:               # its keys are seen by no query
        assert (dk[keys] == 0).all() and (dv[keys] == 0).all()


@pytest.mark.parametrize('lengths', [([], []), ([0], [0]), ([0, 0], [3, 1]), ([2, 1], [0, 0])],
                         ids=str)
def test_nothing_to_do(lengths):
    for options in ({}, EVERYTHING):
        inputs = random_case(options, lengths, more=(1, 2))
        out, lse, max_logits, dq, dk, dv, *dsinks = with_gradients(inputs, lengths, options)
        assert out.shape == (sum(lengths[0]) + 1, 4, 5) and (out == 0).all()
        assert lse.shape == max_logits.shape == (4, sum(lengths[0]) + 1)
        assert max_logits.isneginf().all() and lse[:, -1:].isneginf().all()
        assert all((x == 0).all() for x in (dq, dk, dv))
        assert len(dsinks) == ('s_aux' in options)


# --------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize('max_seqlen', [0, 1, 5, 1000, torch.tensor(6), torch.tensor([6])], ids=str)
def test_max_seqlen_is_a_hint(max_seqlen):
    inputs = random_case()
    cu = [starts(x) for x in LENGTHS]
    wanted = flash_attn_varlen_func(*inputs[:3], *cu, 6, 6)
    assert torch.equal(flash_attn_varlen_func(*inputs[:3], *cu, max_seqlen, max_seqlen), wanted)


def test_max_seqlen_of_another_device_is_not_read():
    x = torch.zeros(7, 2, 8)
    unreadable = torch.tensor(3, device='meta')
    assert checks.length_bound('max_seqlen_q', unreadable, x) == 7
    assert checks.length_bound('max_seqlen_q', torch.tensor(3), x) == 3


@pytest.mark.parametrize('changes', [{'pack_gqa': True}, {'pack_gqa': False}, {'sm_margin': 3},
                                     {'deterministic': True}, {'num_splits': 0},
                                     {'window_size': [-1, -1]}, {'attention_chunk': 100},
                                     {'softmax_scale': 6 ** -0.5}], ids=str)
def test_arguments_that_do_not_change_the_result(changes):
    inputs = random_case()
    cu = [starts(x) for x in LENGTHS]
    wanted = flash_attn_varlen_func(*inputs[:3], *cu, 6, 6)
    assert torch.equal(flash_attn_varlen_func(*inputs[:3], *cu, 6, 6, **changes), wanted)


def test_strided_inputs_and_out():
    inputs = random_case({})
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in inputs[:3]]
    target = torch.full((4, 14, 5), math.nan, dtype=torch.float64).transpose(0, 1)
    cu = [starts(x) for x in LENGTHS]
    out, lse = flash_attn_varlen_func(*turned, *cu, 5, 6, out=target, return_attn_probs=True)
    wanted = flash_attn_varlen_func(*inputs[:3], *cu, 5, 6, return_attn_probs=True)
    assert out is target
    torch.testing.assert_close((out, lse), wanted)


def test_out_refuses_gradients():
    inputs = random_case({})
    with pytest.raises(RuntimeError, match='^flash_attn3.flash_attn_varlen_func: expected '
                                           'requires_grad=False together with out=, got '
                                           'requires_grad=True of k; hint: '):
        flash_attn_varlen_func(inputs.q, inputs.k.requires_grad_(), inputs.v,
                               *map(starts, LENGTHS), 5, 6, out=torch.empty(14, 4, 5).double())


def test_meta_tensors():
    q, k, v, s_aux = (x.to('meta') for x in random_case())
    cu = [starts(x).to('meta') for x in LENGTHS]
    out, lse, max_logits = flash_attn_varlen_func(
        q.requires_grad_(), k, v, *cu, torch.tensor(5, device='meta'), 6, s_aux=s_aux,
        return_attn_probs=True, return_max_logits=True)
    assert out.shape == (14, 4, 5) and lse.shape == max_logits.shape == (4, 14) and out.is_meta


def test_half_precision_is_that_of_the_sequences():
    inputs = random_case().to(torch.bfloat16)
    out, lse, _ = call(inputs, LENGTHS, EVERYTHING)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    exact = call(Inputs(*(x.double() for x in inputs)), LENGTHS, EVERYTHING)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), exact[0], rtol=2 ** -8, atol=1e-5)


def test_a_changed_list_is_refused_by_the_backward():
    inputs = random_case({})
    cu_q, cu_k = map(starts, LENGTHS)
    out = flash_attn_varlen_func(inputs.q.requires_grad_(), inputs.k, inputs.v, cu_q, cu_k, 5, 6)
    cu_q[1] = 2
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.sum().backward()
