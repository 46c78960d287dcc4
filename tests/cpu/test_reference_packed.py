"""reference.attend_packed: bitwise what each sequence gives alone, and nothing elsewhere."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.cpu import by_row
from tests.cpu.drawn import examples
from tests.support.lists import ints, lengths_of, starts

SCORE = Score(0.7, 2.0, Mask(causal=True, window=(6, -1)))
# A sequence: rows of q and k, then how many of each are used, as a share of 4.
sequences = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(0, 4))


def packed_inputs(total_q, total_k, sinks=True):
    return by_row.random_inputs((total_q, 4, 6), (total_k, 2, 6), 5, sinks)


def rows_of(lengths):
    """[(rows of q, rows of k)], written out from the definition."""
    result = []
    for b in range(len(lengths.q.cu_seqlens) - 1):
        pair = []
        for cu, used in lengths:
            count = int(cu[b + 1] - cu[b]) if used is None else int(used[b])
            pair.append(list(range(int(cu[b]), int(cu[b]) + count)))
        result.append(pair)
    return result


def check_packed(inputs, lengths, score):
    """Forward and backward: the sequences alone, bit for bit; the rest 0 or -inf."""
    got = reference.attend_packed(inputs, score, lengths, with_row_max=True)
    dout, dlse = torch.randn_like(got.out), torch.randn_like(got.lse)
    gradients = reference.attend_packed_backward(dout, dlse, inputs, score, lengths)
    out, lse = torch.zeros_like(got.out), torch.full_like(got.lse, -math.inf)
    row_max, ds_aux = lse.clone(), None if inputs.s_aux is None else 0 * inputs.s_aux
    dq, dk, dv = (torch.zeros_like(x) for x in inputs[:3])
    for rows, keys in rows_of(lengths):
        alone = Inputs(inputs.q[rows][None], *(x[keys][None] for x in inputs[1:3]), inputs.s_aux)
        result = reference.attend(alone, score, with_row_max=True)
        out[rows], lse[:, rows], row_max[:, rows] = (x[0] for x in result)
        part = reference.attend_backward(dout[rows][None], dlse[:, rows][None], alone, score)
        dq[rows], dk[keys], dv[keys] = (x[0] for x in part[:3])
        ds_aux = None if ds_aux is None else ds_aux + part.ds_aux
    for value, wanted in zip((*got, *gradients), (out, lse, row_max, dq, dk, dv, ds_aux)):
        assert (value is None) == (wanted is None)
        if value is not None:
            assert torch.equal(value, wanted) and value.is_contiguous()


@given(st.lists(sequences, max_size=5), st.booleans(), st.booleans(), st.booleans(), by_row.SCORES)
@examples(40, derandomize=True)
def test_packed_is_each_sequence_alone(batch, use_q, use_k, sinks, score):
    lengths_q, lengths_k = [one[0] for one in batch], [one[1] for one in batch]
    used_q = ints([one[0] * one[2] // 4 for one in batch]) if use_q else None
    used_k = ints([one[1] * one[3] // 4 for one in batch]) if use_k else None
    lengths = lengths_of(starts(lengths_q), starts(lengths_k), used_q, used_k)
    check_packed(packed_inputs(sum(lengths_q), sum(lengths_k), sinks), lengths, score)


def test_packed_is_the_definition():
    """Against the definition row by row, on its own way to the rows."""
    lengths_q, lengths_k = [3, 0, 5, 2], [4, 3, 2, 0]
    inputs = packed_inputs(10, 9)
    packed = lengths_of(starts(lengths_q), starts(lengths_k))
    out, lse, _ = reference.attend_packed(inputs, SCORE, packed)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = reference.attend_packed_backward(dout, dlse, inputs, SCORE, packed)
    ds_aux = torch.zeros(4, dtype=torch.float64)
    parts = zip(*(x.split(lengths_q) for x in (inputs.q, out, got.dq, dout)),
                *(x.split(lengths_k) for x in (inputs.k, inputs.v, got.dk, got.dv)),
                *(x.split(lengths_q, dim=1) for x in (lse, dlse)))
    for q, part_out, dq, part_dout, k, v, dk, dv, part_lse, part_dlse in parts:
        alone = Inputs(q[None], k[None], v[None], inputs.s_aux)
        wanted = by_row.attend(alone, SCORE)
        torch.testing.assert_close((part_out[None], part_lse[None]), wanted[:2])
        gradients = by_row.gradients(part_dout[None], part_dlse[None], alone, SCORE)
        torch.testing.assert_close((dq[None], dk[None], dv[None]), gradients[:3])
        ds_aux += gradients.ds_aux
    torch.testing.assert_close(got.ds_aux, ds_aux)


def test_rows_that_do_not_count_are_never_read():
    """NaN there, behind the last sequence too, in inputs and gradients, changes no bit."""
    lengths = lengths_of(starts([4, 5, 3]), starts([6, 2, 4]), ints([3, 0, 3]), ints([5, 2, 0]))
    inputs = packed_inputs(14, 13)
    out, lse, _ = clean = reference.attend_packed(inputs, SCORE, lengths, with_row_max=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    clean_gradients = reference.attend_packed_backward(dout, dlse, inputs, SCORE, lengths)
    unused_q, unused_k = [3, 4, 5, 6, 7, 8, 12, 13], [5, 8, 9, 10, 11, 12]
    assert (out[unused_q] == 0).all() and lse[:, unused_q].isneginf().all()
    assert clean.row_max[:, unused_q].isneginf().all()
    assert (clean_gradients.dq[unused_q] == 0).all()
    assert (clean_gradients.dk[unused_k] == 0).all() and (clean_gradients.dv[unused_k] == 0).all()

    for x, rows in ((inputs.q, unused_q), (inputs.k, unused_k), (inputs.v, unused_k),
                    (dout, unused_q), (dlse.T, unused_q)):
        x[rows] = math.nan
    poisoned = reference.attend_packed(inputs, SCORE, lengths, with_row_max=True)
    gradients = reference.attend_packed_backward(dout, dlse, inputs, SCORE, lengths)
    for value, wanted in zip((*poisoned, *gradients), (*clean, *clean_gradients)):
        assert torch.equal(value, wanted)


def test_used_lengths_align_the_mask():
    """The last used row sees the last used key, wherever the slots end."""
    inputs = packed_inputs(6, 8, sinks=False)
    lengths = lengths_of(ints([0, 6]), ints([0, 8]), ints([2]), ints([3]))
    out, _, _ = reference.attend_packed(inputs, Score(0.7, mask=Mask(window=(0, 0))), lengths)
    expected = inputs.v[1:3].repeat_interleave(2, dim=1)    # row 0 sees key 1, row 1 sees key 2
    torch.testing.assert_close(out[:2], expected)


@pytest.mark.parametrize('lengths_q, lengths_k', [([], []), ([0], [0]), ([0, 0], [3, 1]),
                                                  ([2, 1], [0, 0])], ids=str)
def test_nothing_to_do(lengths_q, lengths_k):
    check_packed(packed_inputs(sum(lengths_q), sum(lengths_k)),
                 lengths_of(starts(lengths_q), starts(lengths_k)), SCORE)


def test_backward_without_dlse_is_that_of_zero():
    inputs, lengths = packed_inputs(7, 9), lengths_of(ints([0, 4, 7]), ints([0, 3, 9]))
    dout = torch.randn(7, 4, 5, dtype=torch.float64)
    zero = torch.zeros(4, 7, dtype=torch.float64)
    for a, b in zip(reference.attend_packed_backward(dout, None, inputs, SCORE, lengths),
                    reference.attend_packed_backward(dout, zero, inputs, SCORE, lengths)):
        assert torch.equal(a, b)


def test_sums_of_the_sink_are_rounded_once():
    """Many sequences in bfloat16: ds_aux is added up in the compute dtype."""
    inputs = packed_inputs(100, 100).to(torch.bfloat16)
    lengths = lengths_of(starts([1] * 100), starts([1] * 100))
    dlse = torch.ones(4, 100)
    dout = torch.zeros(100, 4, 5, dtype=torch.bfloat16)
    got = reference.attend_packed_backward(dout, dlse, inputs, SCORE, lengths, torch.float32)
    exact = Inputs(*(x.double() for x in inputs))
    wanted = reference.attend_packed_backward(dout.double(), dlse.double(), exact, SCORE, lengths)
    assert got.ds_aux.dtype == got.dq.dtype == torch.bfloat16
    assert torch.equal(got.ds_aux, wanted.ds_aux.to(torch.bfloat16))


def test_autograd_goes_through_packed():
    inputs = Inputs(*(x.requires_grad_() for x in packed_inputs(7, 9)))
    lengths = lengths_of(ints([0, 3, 7]), ints([0, 3, 9]), seqused_k=ints([3, 5]))
    out, lse, _ = reference.attend_packed(inputs, SCORE, lengths)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    with torch.no_grad():
        got = reference.attend_packed_backward(dout, dlse, inputs, SCORE, lengths)
    for gradient, wanted in zip(got, expected):
        torch.testing.assert_close(gradient, wanted)
