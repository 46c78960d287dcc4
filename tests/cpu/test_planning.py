"""explain(), can_use(), built_variants() and the command line, on a machine without a GPU."""
import itertools
import runpy
import sys

import pytest
import torch

import flash_attn3
from flash_attn3 import _library, _plan, planning

from tests import bad_inputs, sanitize
from tests.cases import DTYPES, GRADIENT_KINDS, KINDS, SHAPES, SMOKE, Case, Kind

SHAPE = (2, 4096, 16, 128)


def explained(capsys, *arguments, **options) -> dict[str, str]:
    """The rows of the forward."""
    flash_attn3.explain(*arguments, **options)
    return rows_of(capsys.readouterr().out.split('\n\n')[0])


def explained_backward(capsys, *arguments, **options) -> dict[str, str]:
    flash_attn3.explain(*arguments, **options)
    return rows_of(capsys.readouterr().out.split('\n\n')[1])


def rows_of(text: str) -> dict[str, str]:
    return {line[:14].strip(): line[15:] for line in text.splitlines()}


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_explain_names_the_kernel(kind, capsys):
    q, k, v = Case(4096, 64, batch=1).of(kind).tensors('cpu')
    name = f'Fwd{kind.dtype.capitalize()}D{kind.head_dim}{"Causal" if kind.causal else "Full"}'
    shown = explained(capsys, q, k, v, causal=kind.causal)['variant'].split()[0]
    assert shown.startswith(name) and shown in {facts['name'] for facts in kind.variants()}


def test_explain_text(capsys):
    rows = explained(capsys, SHAPE, SHAPE, causal=True)
    assert list(rows) == ['variant', 'head dim', 'tile', 'pack_gqa', 'warpgroups', 'overlap',
                          'stages', 'registers', 'shared memory', 'tiles', 'grid', 'waves',
                          'padding', 'FLOPs', 'bytes']
    assert rows['variant'].startswith('FwdBf16D128Causal')
    assert rows['grid'] == '132 CTAs'


@pytest.mark.parametrize('kind', GRADIENT_KINDS, ids=str)
def test_explain_names_the_kernel_of_the_gradients(kind, capsys):
    q, k, v = Case(300, 64, batch=1).of(kind).tensors('cpu')
    shown = explained_backward(capsys, q, k, v, causal=kind.causal)
    mask = 'Causal' if kind.causal else 'Full'
    assert shown['gradients'].split()[0] == f'Bwd{kind.dtype.capitalize()}D{kind.head_dim}{mask}'


def test_explain_text_of_the_gradients(capsys):
    q, k = (2, 1000, 16, 64), (2, 1000, 4, 64)
    facts = planning.plan_backward(q, k, causal=True)
    rows = explained_backward(capsys, q, k, causal=True)
    m_tiles, n_tiles = -(-1000 // facts['tile_m']), -(-1000 // facts['tile_n'])
    stored_rows = m_tiles * facts['tile_m'] * 16 * 2
    assert rows == {
        'gradients': rows['gradients'],
        'head dim': '64 computed, 64 in shared memory',
        'tile': f'{facts["tile_n"]} keys of a CTA, {facts["tile_m"]} queries a step',
        'warpgroups': f'1 producer, {facts["consumer_warpgroups"]} consumers; '
                      f'{facts["threads"]} threads',
        'stages': f'{facts["q_stages"]} of Q, {facts["dout_stages"]} of dO',
        'registers': f'{facts["producer_registers"]} a producer thread, '
                     f'{facts["consumer_registers"]} a consumer thread',
        'shared memory': f'{facts["shared_bytes"] / 1024:.0f} KiB of 227',
        'tiles': f'{n_tiles} along the keys, {m_tiles} along the queries of a head',
        'grid': f'{n_tiles * 4 * 2} CTAs',
        'sum of dQ': 'in any order',
        'workspace': f'{stored_rows * 4 * (2 + 64)} bytes: LSE {4 * stored_rows}, '
                     f'delta {4 * stored_rows}, dQ {4 * stored_rows * 64}'}
    assert rows['gradients'].startswith('BwdBf16D64Causal')


@pytest.mark.parametrize('head_dim', [136, 200, 256])
def test_explain_text_of_the_gradients_of_a_cluster(head_dim, capsys):
    """Two CTAs share a tile of keys; the three consumer warpgroups differ in registers."""
    shape = (2, 1000, 4, head_dim)
    facts = planning.plan_backward(shape, shape)
    rows = explained_backward(capsys, shape, shape)
    assert rows['tile'] == '128 keys of a cluster of 2 CTAs, 64 queries a step'
    assert rows['tiles'] == '8 along the keys, 16 along the queries of a head'
    assert rows['grid'] == f'{8 * 4 * 2 * 2} CTAs'
    assert rows['stages'] == f'{facts["q_stages"]} of Q, {facts["dout_stages"]} of dO'
    assert rows['registers'] == (f'24 a producer thread, {facts["consumer_registers"]} a consumer '
                                 'thread, by warpgroup')
    assert len(facts['consumer_registers'].split(', ')) == facts['consumer_warpgroups'] == 3


def test_explain_text_of_deterministic_gradients(capsys):
    """By argument, and by PyTorch's setting: a flag for each who adds to a tile, and the ticket."""
    shape = (2, 1000, 16, 64)
    facts = planning.plan_backward(shape, shape)
    flags = -(-1000 // facts['tile_m']) * facts['dq_adders'] * 16 * 2 + 1
    rows = explained_backward(capsys, shape, shape, deterministic=True)
    assert rows['sum of dQ'] == 'in a fixed order'
    assert rows['workspace'].endswith(f', flags {4 * flags}')
    before = explained_backward(capsys, shape, shape)['workspace']
    sizes = [int(text.split()[0]) for text in (rows['workspace'], before)]
    assert sizes[0] - sizes[1] == 4 * flags
    torch.use_deterministic_algorithms(True)
    try:
        assert explained_backward(capsys, shape, shape) == rows
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('head_dim, computed, stored', [
    (8, 32, 64), (40, 48, 64), (72, 80, 128), (80, 80, 128), (128, 128, 128), (136, 144, 192),
    (248, 256, 256)])
def test_head_dims_in_between(head_dim, computed, stored, capsys):
    """The next multiple of 16 is computed; the rest of a slice of 64 columns is only stored."""
    shape = (2, 4096, 16, head_dim)
    facts = planning.plan(shape, shape)
    assert (facts['head_dim'], facts['columns']) == (computed, stored)
    assert facts['flops'] == 4 * 2 * 16 * 4096 * 4096 * head_dim
    aligned = planning.plan((*shape[:3], computed), (*shape[:3], computed))
    assert facts['useful_share'] == pytest.approx(
        aligned['useful_share'] * head_dim / computed)
    assert explained(capsys, shape, shape)['head dim'] == (
        f'{computed} computed, {stored} in shared memory')


def test_plan_of_full_attention():
    """Figures that follow from the shape alone."""
    facts = planning.plan(SHAPE, SHAPE, dtype=torch.float16)
    m_tiles = -(-4096 // facts['tile_m'])
    assert facts['name'] == 'FwdFp16D128Full' and facts['m_tiles'] == m_tiles
    assert facts['tiles'] == m_tiles * 2 * 16
    assert facts['waves'] == pytest.approx(facts['tiles'] / 132)
    assert facts['flops'] == 4 * 2 * 16 * 4096 * 4096 * 128
    assert facts['bytes'] == 4 * (2 * 4096 * 16 * 128) * 2 + 4 * (2 * 16 * 4096)


def test_plan_of_causal_attention_counts_visible_pairs():
    q, k = (1, 100, 1, 64), (1, 150, 1, 64)
    visible = sum(min(150, i + 1 + 50) for i in range(100))
    assert planning.plan(q, k, causal=True)['flops'] == 4 * visible * 64


def test_plan_takes_the_gpu_from_the_caller():
    facts = planning.plan(SHAPE, SHAPE, sm_count=114, sm_margin=4)
    assert facts['grid'] == 110


def test_plan_packs_query_heads():
    q, k = (1, 1, 32, 128), (1, 4096, 4, 128)
    assert planning.plan(q, k)['pack'] == 8
    assert planning.plan(q, k, pack_gqa=False)['pack'] == 1
    assert planning.plan((1, 8192, 32, 128), k)['pack'] == 1
    assert planning.plan((1, 8192, 32, 128), k, pack_gqa=True)['pack'] == 8


def test_explain_of_what_no_kernel_takes(capsys):
    flash_attn3.explain((2, 128, 8, 84), (2, 128, 8, 84))
    text = capsys.readouterr().out
    assert text.startswith('no kernel: flash_attn3.fwd: expected q.size(3), the head_dim, to be')


def test_explain_refuses_other_shapes():
    with pytest.raises(ValueError, match=r'expected a shape \(batch, seqlen, heads, head_dim\), '
                                         r'got \(4096, 16, 128\)'):
        flash_attn3.explain((4096, 16, 128), SHAPE)


def test_command_line(capsys, monkeypatch):
    arguments = '--batch 2 --seqlen-q 1 --seqlen-k 4096 --heads 32 --heads-k 4 --head-dim 64 ' \
                '--dtype fp16 --causal --pack-gqa no --deterministic --sm-margin 2'
    monkeypatch.setattr(sys, 'argv', ['explain', *arguments.split()])
    runpy.run_module('flash_attn3.explain', run_name='__main__')
    printed = capsys.readouterr().out
    planning.explain((2, 1, 32, 64), (2, 4096, 4, 64), causal=True, dtype=torch.float16,
                     pack_gqa=False, deterministic=True, sm_margin=2)
    assert printed == capsys.readouterr().out
    assert 'FwdFp16D64CausalSmall' in printed.split()


# ---------------------------------------------------------------------------------------- can_use
def test_can_use_says_only_the_device_for_good_cpu_tensors():
    assert flash_attn3.can_use(**bad_inputs.good_arguments('cpu')) == (
        False, ['flash_attn3.can_use: expected q on a CUDA device, got cpu'])


@pytest.mark.parametrize('bad', bad_inputs.EVERYWHERE + bad_inputs.KERNEL_RULES, ids=str)
def test_can_use_gives_the_error(bad):
    is_fine, reasons = flash_attn3.can_use(**bad.arguments('cpu'))
    assert not is_fine and reasons[0].startswith(bad.text)


def test_can_use_gives_every_reason():
    arguments = bad_inputs.good_arguments('meta')
    arguments['q'] = torch.empty(2, 16, 4, 64, device='meta')    # float32
    is_fine, reasons = flash_attn3.can_use(**arguments, causal=True, softcap=30.0, num_splits=4)
    found = [reason.split('expected ')[1].split(',')[0] for reason in reasons]
    assert not is_fine and found == ['softcap to be 0.0', 'num_splits to be 0 or 1',
                                     'q.dtype to be float16 or bfloat16',
                                     'q on a CUDA device']


@pytest.mark.parametrize('which', range(3), ids=['q', 'k', 'v'])
def test_can_use_asks_for_gradients_where_they_are_needed(which):
    """More tiles of keys than the backward takes, in tensors of one element's memory."""
    device = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'
    tiles = ('flash_attn3.bwd: expected batch * heads * ceil(seqlen / 64) of k to be at most '
             '536870912, got 1073741824; hint: split the batch')
    rows = [torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16) for _ in range(3)]
    rows[which].requires_grad_()
    tensors = [x.expand(1, seqlen, 64, 64) for x, seqlen in zip(rows, (64, 1 << 30, 1 << 30))]
    assert flash_attn3.can_use(*tensors) == (False, [tiles, device])
    with torch.no_grad():
        assert flash_attn3.can_use(*tensors) == (False, [device])
    assert flash_attn3.can_use(*(x.detach() for x in tensors)) == (False, [device])


def test_can_use_says_that_out_takes_no_gradients():
    arguments = bad_inputs.good_arguments('cpu')
    arguments['out'] = torch.empty_like(arguments['q'])
    arguments['k'].requires_grad_()
    assert flash_attn3.can_use(**arguments)[1][0].startswith(
        'flash_attn3.flash_attn_func: expected no gradient together with out=, got '
        'requires_grad=True of k; hint: ')


def test_can_use_refuses_unknown_arguments():
    with pytest.raises(TypeError, match='dropout'):
        flash_attn3.can_use(**bad_inputs.good_arguments('cpu'), dropout=0.1)


def test_built_variants(monkeypatch):
    monkeypatch.setattr(_library, 'KERNELS_MISSING', '')
    built = {facts['name'] for kind in KINDS + GRADIENT_KINDS for facts in kind.variants()
             if facts['built']}
    assert set(flash_attn3.built_variants()) == built
    monkeypatch.setattr(_library, 'KERNELS_MISSING', 'a reason')
    assert flash_attn3.built_variants() == []


def test_every_kind_of_problem_has_kernels():
    for dtype, head_dim, causal in itertools.product(('bf16', 'fp16'), range(8, 257, 8),
                                                     (False, True)):
        assert Kind(dtype, head_dim, causal).variants()


@pytest.mark.parametrize('cases', [SMOKE, SHAPES, sanitize.CASES],
                         ids=['SMOKE', 'SHAPES', 'sanitize'])
def test_the_cases_reach_every_kernel(cases):
    """Where the planner chooses by the sizes, each list of cases makes it choose each kernel."""
    of_a_kind = [case.of(kind) for case in cases for kind in KINDS]
    reached = {planning.plan((case.batch, case.seqlen_q, case.heads_q, case.head_dim),
                             (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
                             causal=case.causal, dtype=DTYPES[case.dtype],
                             pack_gqa=case.pack_gqa)['name'] for case in of_a_kind}
    assert reached == {facts['name'] for kind in KINDS for facts in kind.variants()}


def test_the_sanitizer_reaches_every_backward():
    """Each with all the small cases, with and without shared KV heads."""
    calls = [case for case, kind in sanitize.calls() if kind in GRADIENT_KINDS]
    reached = [planning.plan_backward((case.batch, case.seqlen_q, case.heads_q, case.head_dim),
                                      (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
                                      causal=case.causal, dtype=DTYPES[case.dtype])['name']
               for case in calls]
    names = {facts['name'] for facts in _plan.backward_variants()}
    assert set(reached) == names and len(reached) == len(names) * len(sanitize.SMALL)
    assert {case.heads_q // case.heads_k for case in calls} == {1, 2, 3}
