"""Sequences of several lengths in one tensor: any lengths next to each other, each as it is alone;
rows that do not count are not read, and get 0; wrong lists do no harm.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from flash_attn3 import _plan, flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu.reference import Inputs

from tests.gpu.common import spoil_allocator
from tests.support import compare, layouts
from tests.support.cases import GradientKind
from tests.support.general_cases import GeneralCase, Results, Tensors, forward, run
from tests.support.general_oracle import check, check_case, check_same, check_sequences, groups
from tests.support.lists import starts

# A kernel of each form: with the mask of a dense call, and under GENERAL with the general one.
KINDS = [GradientKind('bf16', 64, True), GradientKind('bf16', 128, False),
         GradientKind('fp16', 96, True), GradientKind('bf16', 256, False)]
every_kind = pytest.mark.parametrize('kind', KINDS, ids=str)
two_kinds = pytest.mark.parametrize('kind', KINDS[:2], ids=str)
GENERAL = {'window': (70, 40), 'softcap': 15.0, 'sinks': 'fp32', 'max_logits': True}
PLAIN_OR_GENERAL = pytest.mark.parametrize('features', [{}, GENERAL], ids=['plain', 'general'])

# No length fills a tile; some have no queries, some no keys.
LENGTHS = ((113, 203), (1, 1), (0, 7), (260, 131), (7, 0), (64, 300), (0, 0), (129, 128))
USED = ((100, 203), (1, 1), (0, 3), (131, 65), (5, 0), (0, 300), (0, 0), (129, 0))
CASE = GeneralCase(LENGTHS, heads=(6, 2), deterministic=True)
PARTLY_USED = dataclasses.replace(CASE, used=USED, behind=(37, 70))


def pieces(tensors: Tensors, rows: list[Tensor], keys: list[Tensor], lists: dict) -> Tensors:
    """The same with other rows in another order."""
    at_q, at_k = torch.cat(rows), torch.cat(keys)
    q, k, v, s_aux = tensors.inputs
    return Tensors(Inputs(q[at_q], k[at_k], v[at_k], s_aux), tensors.dout[at_q],
                   tensors.dlse[:, at_q].contiguous(), lists)


# ------------------------------------------------------------------------------------- right values
@pytest.mark.parametrize('case', [
    GeneralCase(tuple((i, i) for i in range(1, 258)), 64, heads=(6, 2), causal=True),
    GeneralCase(tuple((i, 258 - i) for i in range(1, 258)), 64, dtype='fp16', heads=(4, 4)),
    GeneralCase(tuple((i, 258 - i) for i in range(1, 258)), 128, heads=(6, 2), causal=True),
    GeneralCase(tuple((i, i) for i in range(1, 258)), 128, heads=(4, 4), window=(50, 20),
                deterministic=True)], ids=lambda case: f'd{case.head_dim}-{case.dtype}')
def test_every_length(case, device):
    """Lengths of queries and keys, up or down; compared sequence by sequence."""
    tensors = case.tensors(device)
    check_sequences(case, tensors, run(case, tensors))


@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('case', [CASE, PARTLY_USED], ids=['all', 'used'])
def test_smoke(case, features, kind, device):
    check_case(case.of(kind, **features), device)


@every_kind
@pytest.mark.parametrize('lengths', [
    ((0, 1), (1023, 1)), ((1, 8000),), ((2500, 3),), ((900, 1100), (1, 1), (1100, 900)),
    ((5, 0), (0, 5)), ((3, 0), (2, 0)), ((0, 3), (0, 2)), ((1, 1),) * 33 + ((0, 0),) * 31], ids=str)
def test_lengths(lengths, kind, device):
    check_case(GeneralCase(lengths).of(kind), device)


@pytest.mark.parametrize('batch', [31, 32, 33, 1023, 1024, 1025, 2049])
def test_batches(batch, device):
    """Around the number of threads that prepare the tiles, and of those in a warp."""
    pick = random.Random(batch)
    short = [(1, 1), (3, 5), (0, 2), (17, 9), (2, 0)]
    lengths = tuple(pick.choice(short) for _ in range(batch - 1)) + ((200, 180),)
    check_case(GeneralCase(lengths, causal=True, heads=(2, 1)), device)


@two_kinds
def test_8192_short_sequences(kind, device):
    """At most 64 queries each: the tiles of which a multiprocessor has two."""
    pick = random.Random(0)
    some = [(1, 1), (64, 64), (33, 50), (7, 3), (20, 0), (0, 9), (12, 12), (3, 40)]
    lengths = tuple(pick.choice(some) for _ in range(8192))
    check_case(GeneralCase(lengths, heads=(2, 1), causal=True).of(kind), device)


@two_kinds
def test_few_queries_and_many_keys(kind, device):
    lengths = tuple((1 + i % 64, 900 + 17 * i) for i in range(40))
    check_case(GeneralCase(lengths, heads=(6, 2)).of(kind), device)


@two_kinds
def test_more_sequences_than_rows(kind, device):
    lengths = [(0, 0)] * 300
    lengths[137], lengths[299] = (2, 3), (1, 1)
    check_case(GeneralCase(tuple(lengths)).of(kind), device)


@every_kind
@pytest.mark.parametrize('seqlen', [64, 192, 65])
def test_padded_keys_with_a_very_low_lse_stay_finite(seqlen, kind, device):
    """All scores far below zero: a key past the end, of score 0, would have P = exp(-LSE) = inf."""
    case = GeneralCase(((seqlen, seqlen), (1, seqlen + 1), (65, 64))).of(kind)
    tensors = case.tensors(device)
    q, k, v, _ = tensors.inputs
    tensors = tensors._replace(inputs=Inputs(torch.full_like(q, 4.0), 0.01 * k - 4, v))
    got = run(case, tensors)
    assert all(x.isfinite().all() for x in (got.dq, got.dk, got.dv))
    check(case, tensors, got)


# --------------------------------------------------------------------------------------- invariance
@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
def test_the_order_of_the_sequences_changes_no_bit(features, kind, device):
    case = CASE.of(kind, **features)
    tensors = case.tensors(device)
    wanted = run(case, tensors)
    order = random.Random(0).sample(range(len(LENGTHS)), len(LENGTHS))
    parts = [torch.arange(sum(lengths), device=device).split(lengths) for lengths in zip(*LENGTHS)]
    rows, keys = ([part[i] for i in order] for part in parts)
    turned = dataclasses.replace(case, lengths=tuple(LENGTHS[i] for i in order))
    got = run(turned, pieces(tensors, rows, keys, turned.lists(device)))
    rows, keys = torch.cat(rows), torch.cat(keys)
    # The sum over all rows of a sink's gradient may have another order.
    check_same(got._replace(ds_aux=None), Results(
        wanted.out[rows], *(None if x is None else x[:, rows] for x in wanted[1:3]),
        wanted.dq[rows], wanted.dk[keys], wanted.dv[keys], None))


def same_tiles(kind: GradientKind, features: dict) -> bool:
    """Whether all kernels among which the planner chooses, for packed and for dense batches, have
    the same keys per tile. With a softcap there is one kernel for both.
    """
    if 'softcap' in features:
        return True
    name = f'Fwd{kind.dtype.capitalize()}D{kind.head_dim}'
    names = f'{name}General', name + ('Causal' if kind.causal else 'Full')
    serving = {facts['tile_n'] for facts in _plan.variants() if facts['name'].startswith(names)}
    assert serving
    return len(serving) == 1


@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
def test_each_sequence_is_what_it_is_alone(features, kind, device):
    """Bit for bit where keys are added up in the same order; the bar is for others."""
    case = CASE.of(kind, **features)
    tensors = case.tensors(device)
    got = run(case, tensors)
    check(case, tensors, got)
    if not same_tiles(kind, features):
        return
    for rows in groups(case, device):
        alone = dataclasses.replace(case, lengths=((rows.q.size(1), rows.k.size(1)),),
                                    is_packed=False)
        q, k, v, s_aux = tensors.inputs
        dense = Tensors(Inputs(q[rows.q], k[rows.k], v[rows.k], s_aux), tensors.dout[rows.q],
                        tensors.dlse[:, rows.q].transpose(0, 1).contiguous(), {})
        wanted = run(alone, dense)
        check_same(Results(got.out[rows.q], *(None if x is None else x[:, rows.q].transpose(0, 1)
                                              for x in got[1:3]),
                           got.dq[rows.q], got.dk[rows.k], got.dv[rows.k], None),
                   wanted._replace(ds_aux=None))


@every_kind
@PLAIN_OR_GENERAL
def test_equal_lengths_are_a_dense_call(features, kind, device):
    """Bit for bit where keys are added up in the same order; the bar is for others."""
    case = GeneralCase(((260, 260),) * 3, heads=(6, 2), deterministic=True).of(kind, **features)
    tensors = case.tensors(device)
    dense_case = dataclasses.replace(case, is_packed=False)
    q, k, v, s_aux = tensors.inputs
    q, k, v, dout = (x.unflatten(0, (3, 260)) for x in (q, k, v, tensors.dout))
    dlse = tensors.dlse.unflatten(1, (3, 260)).transpose(0, 1).contiguous()
    wanted = run(dense_case, Tensors(Inputs(q, k, v, s_aux), dout, dlse, {}))
    of_rows = [None if x is None else x.transpose(0, 1).flatten(1) for x in wanted[1:3]]
    got = run(case, tensors)
    check(case, tensors, got)
    if same_tiles(kind, features):
        check_same(got._replace(ds_aux=None), Results(
            wanted.out.flatten(0, 1), *of_rows, *(x.flatten(0, 1) for x in wanted[3:6]), None))


@pytest.mark.smoke
@every_kind
def test_a_changed_sequence_changes_no_other(kind, device):
    """With another length and other rows: the other sequences keep their bits."""
    case = CASE.of(kind)
    tensors = case.tensors(device)
    wanted = run(case, tensors)
    changed = 3
    used = list(LENGTHS)
    used[changed] = (17, 100)
    firsts = [[sum(one[i] for one in LENGTHS[:b]) for b in (changed, changed + 1)] for i in (0, 1)]
    others_q, others_k = (
        torch.cat([torch.arange(first, device=device), torch.arange(end, rows, device=device)])
        for (first, end), rows in zip(firsts, case.rows()))
    q, k, v, _ = (None if x is None else x.clone() for x in tensors.inputs)
    for x, (first, end) in zip((q, k, v), (firsts[0], firsts[1], firsts[1])):
        x[first:end] = torch.randn_like(x[first:end]) * 5
    shorter = dataclasses.replace(case, used=tuple(used))
    got = run(shorter, tensors._replace(inputs=Inputs(q, k, v), lists=shorter.lists(device)))
    for name, at in (('out', others_q), ('dq', others_q), ('dk', others_k), ('dv', others_k)):
        compare.check_equal(getattr(got, name)[at], getattr(wanted, name)[at], name)
    compare.check_equal(got.lse[:, others_q], wanted.lse[:, others_q], 'lse')


@two_kinds
@pytest.mark.parametrize('hint', [0, 1, 64, 260, 1000, 2 ** 31 - 1])
@pytest.mark.parametrize('as_tensor', [False, True], ids=['int', 'tensor'])
def test_max_seqlen_is_a_hint(as_tensor, hint, kind, device):
    """It may choose another kernel. A tensor on the GPU is not read: all rows stand for it."""
    case = CASE.of(kind)
    tensors = case.tensors(device)
    value = torch.tensor(hint, device=device) if as_tensor else hint
    check(case, tensors, run(case, tensors, max_seqlen_q=value, max_seqlen_k=value))
    if as_tensor:
        on_cpu = torch.tensor(hint)
        check(case, tensors, run(case, tensors, max_seqlen_q=on_cpu, max_seqlen_k=on_cpu))


# ------------------------------------------------------------------------------ what does not count
def poison(case: GeneralCase, tensors: Tensors, value: float) -> Tensors:
    """`value` in every row that does not count."""
    counts = [torch.zeros(rows, dtype=torch.bool, device=tensors.dout.device)
              for rows in case.rows()]
    for rows in groups(case, tensors.dout.device):
        for count, index in zip(counts, rows):
            count[index.flatten()] = True
    idle_q, idle_k = (~count[:, None, None] for count in counts)
    q, k, v, s_aux = tensors.inputs
    return Tensors(Inputs(q.masked_fill(idle_q, value), k.masked_fill(idle_k, value),
                          v.masked_fill(idle_k, value), s_aux),
                   tensors.dout.masked_fill(idle_q, value),
                   tensors.dlse.masked_fill(idle_q[:, 0, 0], value), tensors.lists)


@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('value', [math.nan, math.inf], ids=str)
@pytest.mark.parametrize('case', [PARTLY_USED, dataclasses.replace(CASE, behind=(37, 70))],
                         ids=['used', 'behind'])
def test_what_does_not_count_changes_no_bit(case, value, features, kind, device):
    case = case.of(kind, **features)
    tensors = case.tensors(device)
    clean = run(case, tensors)
    check(case, tensors, clean)
    spoil_allocator(device)
    check_same(run(case, poison(case, tensors, value)), clean)


@pytest.mark.smoke
@every_kind
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('lengths', [LENGTHS, ((113, 203), (40, 40))], ids=['some_empty', 'none'])
def test_out_is_written_whole(lengths, features, kind, device):
    """Also its rows after the last sequence, which get zeros."""
    case = GeneralCase(lengths, behind=(37, 70)).of(kind, **features)
    tensors = case.tensors(device)
    wanted = forward(case, tensors)
    out = torch.full_like(wanted[0], math.nan)
    spoil_allocator(device)
    got = forward(case, tensors, out=out)
    assert got[0] is out
    for name, *values in zip(Results._fields, got, wanted):
        compare.check_equal(*values, name)


@pytest.mark.parametrize('where', ['q', 'k', 'both'])
@pytest.mark.parametrize('slot', [0, 1, 3])
@two_kinds
@PLAIN_OR_GENERAL
def test_an_empty_sequence_in_any_slot(features, kind, slot, where, device):
    """Without any row it is as if it were not there."""
    lengths = [(65, 130), (200, 129), (30, 64)]
    case = GeneralCase(tuple(lengths), deterministic=True).of(kind, **features)
    empty = {'q': (0, 77), 'k': (77, 0), 'both': (0, 0)}[where]
    more = dataclasses.replace(case, lengths=(*lengths[:slot], empty, *lengths[slot:]))
    spoil_allocator(device)
    check_case(more, device)
    if where == 'both':
        tensors = case.tensors(device)
        got = run(more, tensors._replace(lists=more.lists(device)))
        check_same(got._replace(ds_aux=None), run(case, tensors)._replace(ds_aux=None))


@two_kinds
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('lengths', [(), ((0, 0),), ((0, 0), (0, 0)), ((0, 3), (0, 1)),
                                     ((2, 0), (1, 0))], ids=str)
@pytest.mark.parametrize('behind', [(0, 0), (3, 0), (3, 5)], ids=str)
def test_nothing_to_do(behind, lengths, features, kind, device):
    """No batch, no rows, or no pair of a query and a key."""
    spoil_allocator(device)
    check_case(GeneralCase(lengths, behind=behind).of(kind, **features), device)


# ------------------------------------------------------------------------------------------ strides
@pytest.mark.smoke
@two_kinds
@pytest.mark.parametrize('layout', layouts.DIRECT + layouts.COPIED, ids=str)
def test_strides(layout, kind, device):
    """Inputs and dout inside NaN, and out: the same bits; nothing around out is written."""
    case = PARTLY_USED.of(kind)
    tensors = case.tensors(device)
    wanted = run(case, tensors)
    q, k, v, dout = (layout.place(x[None])[0] for x in (*tensors.inputs[:3], tensors.dout))
    check_same(run(case, tensors._replace(inputs=Inputs(q, k, v), dout=dout)), wanted)

    out = layout.place(torch.full_like(wanted.out, math.nan)[None])[0]
    around = layouts.nan_count(out) - out.numel()
    result, lse = forward(case, tensors._replace(inputs=Inputs(q, k, v)), out=out)
    assert result is out
    compare.check_equal(out, wanted.out, 'out')
    compare.check_equal(lse, wanted.lse, 'lse')
    assert layouts.nan_count(out) == around


@two_kinds
@PLAIN_OR_GENERAL
@pytest.mark.parametrize('offset', [0, 1, 8], ids=['packed', 'unaligned', 'shifted'])
def test_slices_of_one_projection(offset, features, kind, device):
    """q, k and v out of one (total, heads_q + 2 * heads_k, head_dim) tensor."""
    lengths = ((113, 113), (1, 1), (260, 260), (64, 64))
    case = GeneralCase(lengths, heads=(6, 2), deterministic=True).of(kind, **features)
    tensors = case.tensors(device)
    flat = torch.cat(tensors.inputs[:3], dim=1)
    buffer = torch.full((offset + flat.numel(),), math.nan, dtype=flat.dtype, device=device)
    fused = buffer[offset:].view(flat.shape).copy_(flat)
    sliced = Inputs(*fused.split((6, 2, 2), dim=1), tensors.inputs.s_aux)
    check_same(run(case, tensors._replace(inputs=sliced)), run(case, tensors))


@two_kinds
def test_dout_of_a_sum_has_stride_zero(kind, device):
    case = dataclasses.replace(CASE.of(kind), dlse=False)
    tensors = case.tensors(device)
    ones = tensors._replace(dout=torch.ones((), dtype=tensors.dout.dtype, device=device)
                            .expand_as(tensors.dout))
    wanted = run(case, ones._replace(dout=ones.dout.contiguous()))
    check_same(run(case, ones), wanted)
    check(case, ones, wanted)


@pytest.mark.parametrize('stride', [0, 1, 7, 2 ** 45 + 1])
def test_strides_of_size_1_dimensions_mean_nothing(stride, device):
    for lengths, heads in ((((1, 1),), (3, 1)), (((100, 90),), (1, 1)), (((1, 90),), (8, 1))):
        case = GeneralCase(lengths, heads=heads, deterministic=True)
        tensors = case.tensors(device)
        odd = Inputs(*(layouts.with_odd_size_1_strides(x, stride) for x in tensors.inputs[:3]))
        check_same(run(case, tensors._replace(inputs=odd)), run(case, tensors))


# ------------------------------------------------------------------------------------------ repeats
@every_kind
@PLAIN_OR_GENERAL
def test_repeats_are_bitwise(features, kind, device):
    """CTAs draw tiles in any order; no result depends on it."""
    lengths = tuple(itertools.chain(LENGTHS, ((400, 700), (300, 3)) * 3))
    case = GeneralCase(lengths, heads=(8, 2), deterministic=True).of(kind, **features)
    tensors = case.tensors(device)
    first = run(case, tensors)
    for _ in range(10 if device.type == 'cuda' else 1):
        check_same(run(case, tensors), first)


@pytest.mark.parametrize('causal', [False, True], ids=['full', 'causal'])
def test_beyond_2_to_the_31_elements(causal, cuda, needs_memory):
    """In q, k and v: the sequences after the long ones, and their neighbours."""
    needs_memory(70)
    heads, head_dim = 16, 128
    far = 2 ** 31 // (heads * head_dim) + 37
    lengths = ((200, 77), (far, 65), (65, far), (150, 211))
    cu = [starts([one[i] for one in lengths], cuda) for i in (0, 1)]
    rows = [int(x[-1]) for x in cu]
    q, k, v, dout = (torch.randn(n, heads, head_dim, dtype=torch.bfloat16, device=cuda)
                     for n in (rows[0], rows[1], rows[1], rows[0]))
    assert min(q[200:-150].numel(), k[77 + 65:-211].numel()) > 2 ** 31
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*leaves, *cu, far, far, causal=causal,
                                      return_attn_probs=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    for b in (0, 3):
        at_q, at_k = (slice(int(x[b]), int(x[b + 1])) for x in cu)
        case = GeneralCase((lengths[b],), head_dim, heads=(heads, heads), causal=causal, dlse=False)
        one = Tensors(Inputs(q[at_q].detach(), k[at_k].detach(), v[at_k].detach()), dout[at_q],
                      None, case.lists(cuda))
        dq, dk, dv = gradients
        check(case, one, Results(out[at_q].detach(), lse[:, at_q].detach(), None, dq[at_q],
                                 dk[at_k], dv[at_k], None))
    # Aligned bottom-right: the last 65 queries of the long sequence and its 65 keys are a problem
    # by themselves.
    at_q, at_k = slice(200 + far - 65, 200 + far), slice(77, 77 + 65)
    compare.check_forward(out[None, at_q].detach(), lse[None, :, at_q].detach(),
                          (q[None, at_q].detach(), k[None, at_k].detach(), v[None, at_k].detach()),
                          causal)


@pytest.mark.smoke
def test_a_plain_call_is_one_sequence(device):
    """Both functions, on the same rows; all kernels of this head dim have the same K tiles."""
    case = GeneralCase(((150, 170),), 64, causal=True)
    q, k, v, _ = case.tensors(device).inputs
    cu = [starts([length], device) for length in (150, 170)]
    out = flash_attn_varlen_func(q, k, v, *cu, 150, 170, causal=True)
    compare.check_equal(out, flash_attn_func(q[None], k[None], v[None], causal=True)[0], 'out')
