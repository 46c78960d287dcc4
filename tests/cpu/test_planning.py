"""explain(), can_use(), built_variants() and the command line, on a machine without a GPU."""
import itertools
import runpy
import sys

import pytest
import torch

import flash_attn3
from flash_attn3 import _plan
from flash_attn3.ops import library
from flash_attn3.tools import planning

from tests import sanitize
from tests.support import bad_inputs
from tests.support.cases import (DTYPES, GRADIENT_KINDS, KINDS, PLAIN_BACKWARD, SHAPES, SMOKE, Case,
                                 Kind, is_folded)

SHAPE = (2, 4096, 16, 128)
FP8 = 'float8_e4m3fn'


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
    assert list(rows) == ['variant', 'mask', 'head dims', 'tile', 'pack_gqa', 'warpgroups',
                          'overlap', 'stages', 'registers', 'shared memory', 'tiles', 'visited',
                          'grid', 'waves', 'padding', 'FLOPs', 'bytes']
    assert rows['mask'] == 'causal' and rows['head dims'] == '128; in shared memory 128'
    assert rows['variant'].startswith('FwdBf16D128Causal')
    assert rows['grid'] == '132 CTAs'


@pytest.mark.parametrize('seqlen, rows', [(4096, 64), (4032, 192)])
def test_explain_says_how_many_rows_the_first_tile_has(seqlen, rows, capsys):
    """192 x 96: of 4096 rows 64 are left, which the first tile has, not the last."""
    shape = (4, seqlen, 16, 128)
    tiles = explained(capsys, shape, shape, causal=True, dtype=FP8)['tiles']
    assert (f'the first of {rows} rows' in tiles) is (rows < 192)


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
    flags = m_tiles * facts['dq_adders'] * 16 * 2 + 1    # and the ticket
    assert rows == {
        'gradients': rows['gradients'],
        'head dim': '64 computed, 64 in shared memory',
        'tile': f'{facts["tile_n"]} keys of a CTA, {facts["tile_m"]} queries a step',
        'warpgroups': f'1 producer, {facts["consumer_warpgroups"]} consumers; '
                      f'{facts["threads"]} threads',
        'stages': f'{facts["q_stages"]} of Q, {facts["dout_stages"]} of dO',
        'registers': f'{facts["producer_registers"]} a producer thread, '
                     f'{facts["consumer_registers"]} a consumer thread',
        'shared memory': f'{facts["shared_bytes"] / 1024:.0f} KiB of 227: ' + ' + '.join(
            f'{name} {count * size / 1024:.3g}' for name, count, size in facts['shared_memory']),
        'tiles': f'{n_tiles} along the keys, {m_tiles} along the queries of a head',
        'grid': f'{n_tiles * 4 * 2} CTAs',
        'sum of dQ': 'in any order; the first is stored',
        'workspace': f'{stored_rows * 4 * (2 + 64) + 4 * flags} bytes: LSE {4 * stored_rows}, '
                     f'delta {4 * stored_rows}, dQ {4 * stored_rows * 64}, flags {4 * flags}'}
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


@pytest.mark.parametrize('head_dim, most', [(128, 4096), (256, 1024)])
def test_up_to_which_length_dq_is_not_zeroed(head_dim, most, capsys):
    """By the keys that a query sees: those of its window, if there is one."""
    for seqlen, window, order in ((most, (-1, -1), 'in any order; the first is stored'),
                                  (most + 1, (-1, -1), 'in any order, onto zeros'),
                                  (4 * most, (most - 8, 7), 'in any order; the first is stored')):
        shape = (1, seqlen, 2, head_dim)
        rows = explained_backward(capsys, shape, shape, window_size=window)
        assert rows['sum of dQ'] == order


def test_explain_text_of_deterministic_gradients(capsys):
    """By argument, and by PyTorch's setting: a flag for each who adds to a tile, and the ticket."""
    shape = (2, 1000, 16, 64)
    facts = planning.plan_backward(shape, shape)
    flags = -(-1000 // facts['tile_m']) * facts['dq_adders'] * 16 * 2 + 1
    rows = explained_backward(capsys, shape, shape, deterministic=True)
    assert rows['sum of dQ'] == 'in a fixed order'
    assert rows['workspace'].endswith(f', flags {4 * flags}')
    assert explained_backward(capsys, shape, shape)['workspace'] == rows['workspace']
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
    built = '' if computed == head_dim else f' computed as {computed};'
    assert explained(capsys, shape, shape)['head dims'] == (
        f'{head_dim};{built} in shared memory {stored}')


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
    assert text.startswith(
        'no kernel: flash_attn3.flash_attn_func: expected the head_dim of q to be')


def test_explain_text_of_packed_sequences(capsys):
    """What depends on the lengths is not known, and not said."""
    q, k = (1000, 8, 64), (1500, 2, 64)
    options = dict(cu_seqlens_q=[0, 300, 1000], max_seqlen_q=700, max_seqlen_k=torch.tensor(900))
    facts = planning.plan(q, k, **options)
    positions = facts['tile_m'] // facts['pack']
    rows = explained(capsys, q, k, **options)
    assert list(rows)[-5:] == ['shared memory', 'tiles', 'visited', 'grid', 'workspace']
    assert rows['tiles'] == (
        f'at most {facts["tiles"]}; {-(-700 // positions)} along the queries of a head of '
        'the longest sequence')
    assert facts['tiles'] == (1000 // positions + 2 + 1) * 8 // facts['pack']
    assert rows['visited'] == '100.0% of the keys of the longest sequence'
    assert rows['grid'] == f'{facts["grid"]} CTAs, which draw tiles'
    assert rows['workspace'].startswith(f'{facts["workspace_bytes"]} bytes')


def test_explain_text_of_a_window(capsys):
    """128 queries see 256 + 127 keys: 4 tiles of 128, of 32; the first two tiles of queries less.
    """
    rows = explained(capsys, SHAPE, SHAPE, window_size=(256, 0))
    assert rows['mask'] == ('general: packed sequences, windows, chunks, sinks, max logits at run '
                            'time')
    assert rows['variant'].startswith('FwdBf16D128General')
    assert rows['tile'] == '128 query rows x 128 keys'
    assert rows['visited'] == f'{(3 * 32 - 3) / 32 / 32:.1%} of the keys'


def test_explain_text_of_unequal_head_dims(capsys):
    shapes = SHAPE[:3] + (40,), SHAPE[:3] + (40,), SHAPE[:3] + (512,)
    assert explained(capsys, *shapes)['head dims'] == (
        '40 of q and k, 512 of v; computed as 64 of q and k, 256 of v; in 2 launches, each for a '
        'part of v; in shared memory 64 of q and k, 256 of v')


def test_plans_take_the_arguments_of_both_functions():
    general = {'softcap': 3.0, 'return_max_logits': True, 's_aux': torch.ones(16)}
    assert planning.plan(SHAPE, SHAPE, **general)['mask'] == 'softcap'
    assert planning.plan(SHAPE, SHAPE, s_aux=torch.ones(16))['mask'] == 'general'
    assert planning.plan(SHAPE, SHAPE, attention_chunk=9)['visited_share'] < 0.1
    with pytest.raises(TypeError, match="unexpected argument 'windows'"):
        planning.plan(SHAPE, SHAPE, windows=(1, 1))
    with pytest.raises(RuntimeError, match='window_size to be two ints'):
        planning.plan(SHAPE, SHAPE, window_size=3)


def test_explain_refuses_other_shapes():
    with pytest.raises(ValueError, match=r'expected a shape \(total, heads, head_dim\), got \(2, '):
        flash_attn3.explain(SHAPE, SHAPE, cu_seqlens_q=[0, 2])
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


def printed_by(capsys, monkeypatch, arguments: str) -> str:
    monkeypatch.setattr(sys, 'argv', ['explain', *arguments.split()])
    runpy.run_module('flash_attn3.explain', run_name='__main__')
    return capsys.readouterr().out


def test_command_line_of_general_calls(capsys, monkeypatch):
    printed = printed_by(capsys, monkeypatch,
                         '--batch 3 --seqlen-q 500 --seqlen-k 700 --heads 4 --head-dim 192 '
                         '--head-dim-v 128 --window-size 64 -1 --attention-chunk 256 '
                         '--softcap 20 --max-logits --packed')
    planning.explain((1500, 4, 192), (2100, 4, 192), (2100, 4, 128), window_size=(64, -1),
                     attention_chunk=256, softcap=20.0, return_max_logits=True,
                     cu_seqlens_q=range(4), max_seqlen_q=500, max_seqlen_k=700)
    assert printed == capsys.readouterr().out
    assert 'FwdBf16D256Softcap' in printed.split()


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
    is_fine, reasons = flash_attn3.can_use(**arguments, causal=True, qv=torch.ones(1))
    found = [reason.split('expected ')[1].split(',')[0] for reason in reasons]
    assert not is_fine and found == ['qv to be None',
                                     'q.dtype to be float16 or bfloat16',
                                     'q on a CUDA device']


@pytest.mark.parametrize('which', range(3), ids=['q', 'k', 'v'])
def test_can_use_asks_for_gradients_where_they_are_needed(which):
    """More tiles of keys than the backward takes, in tensors of one element's memory."""
    device = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'
    tiles = ('flash_attn3.flash_attn_func: expected twice the tiles of k, 64 rows each, to be at '
             'most 1073741824, got 2147483648; hint: split the batch')
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
        'flash_attn3.flash_attn_func: expected requires_grad=False together with out=, got '
        'requires_grad=True of k; hint: ')


ON_CPU = 'flash_attn3.can_use: expected q on a CUDA device, got cpu'


@pytest.mark.parametrize('changes', [
    {'window_size': (64, 0)}, {'attention_chunk': 64}, {'softcap': 30.0}, {'s_aux': torch.ones(4)},
    {'return_max_logits': True}], ids=lambda x: next(iter(x)))
def test_can_use_takes_what_needs_a_general_op(changes):
    arguments = bad_inputs.good_arguments('cpu')
    assert flash_attn3.can_use(**arguments, **changes) == (False, [ON_CPU])
    arguments['k'].requires_grad_()
    assert flash_attn3.can_use(**arguments, **changes) == (False, [ON_CPU])


def packed_arguments() -> dict:
    """A call on a sequence of 16 queries and 16 keys, in tensors of 16 and 24 rows."""
    q, k = torch.zeros(16, 4, 64, dtype=torch.half), torch.zeros(24, 2, 64, dtype=torch.half)
    cu = torch.tensor([0, 16], dtype=torch.int32)
    return {'q': q, 'k': k, 'v': k, 'cu_seqlens_q': cu, 'cu_seqlens_k': cu, 'max_seqlen_q': 16,
            'max_seqlen_k': 16}


def test_can_use_of_packed_sequences():
    arguments = packed_arguments()
    q, k = arguments['q'], arguments['k']
    assert flash_attn3.can_use(**arguments, causal=True) == (False, [ON_CPU])
    assert flash_attn3.can_use(**(arguments | {'v': k.float()})) == (False, [
        'flash_attn3.flash_attn_varlen_func: expected v.dtype to be that of q, float16, got '
        'float32', ON_CPU])
    assert flash_attn3.can_use(**(arguments | {'max_seqlen_k': -1})) == (False, [
        'flash_attn3.flash_attn_varlen_func: expected max_seqlen_k to be an int of 0 or more, got '
        '-1', ON_CPU])
    assert flash_attn3.can_use(**arguments, qv=q)[1][0].startswith(
        'flash_attn3.flash_attn_varlen_func: expected qv to be None')
    assert flash_attn3.can_use(q, k, k)[1][0].startswith(
        'flash_attn3.flash_attn_func: expected q to have the shape')


@pytest.mark.parametrize('is_packed', [False, True])
def test_can_use_of_gradients_of_wide_values(is_packed):
    arguments = packed_arguments() if is_packed else bad_inputs.good_arguments('cpu')
    for head_dim_v in (32, 256, 512):
        v = torch.zeros(*arguments['v'].shape[:-1], head_dim_v, dtype=arguments['v'].dtype)
        arguments['v'] = v.requires_grad_()
        assert flash_attn3.can_use(**arguments) == (False, [ON_CPU])


def test_can_use_takes_the_defaults_of_the_general_arguments():
    """They ask for nothing: the plan of a call without them decides."""
    arguments = bad_inputs.good_arguments('cpu')
    assert flash_attn3.can_use(
        **arguments, window_size=[-1, -1], attention_chunk=0, softcap=0.0, s_aux=None,
        return_max_logits=False) == flash_attn3.can_use(**arguments)


def test_can_use_refuses_unknown_arguments():
    with pytest.raises(TypeError, match='dropout'):
        flash_attn3.can_use(**bad_inputs.good_arguments('cpu'), dropout=0.1)


def test_built_variants(monkeypatch):
    monkeypatch.setattr(library, 'KERNELS_MISSING', '')
    built = {facts['name'] for facts in _plan.variants() + _plan.backward_variants()
             if facts['built']}
    assert set(flash_attn3.built_variants()) == built
    monkeypatch.setattr(library, 'KERNELS_MISSING', 'a reason')
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
    names = {facts['name'] for facts in PLAIN_BACKWARD}
    assert set(reached) == names and len(reached) == len(names) * len(sanitize.SMALL)
    assert {case.heads_q // case.heads_k for case in calls} == {1, 2, 3}


def plans_of(case):
    """Names of the kernels of a general case: forward, and backward if it has gradients."""
    shapes, options = sanitize.plan_arguments(case)
    options['dtype'] = DTYPES[case.dtype]
    names = {planning.plan(*shapes, pack_gqa=case.pack_gqa, return_max_logits=case.max_logits,
                           s_aux=case.sinks or None, **options)['name']}
    if case.has_gradients:
        names.add(planning.plan_backward(*shapes, **options)['name'])
    return names


def is_on_cache(row):
    return row['mask'].startswith('cache') or row['mask'] == 'latent'


def test_the_sanitizer_reaches_every_general_kernel():
    """And those of unequal head dims."""
    reached = set().union(*(plans_of(case) for case, _ in sanitize.general_calls()))
    names = {row['name'] for row in _plan.variants() + _plan.backward_variants()
             if row['dtype'] != FP8 and not is_folded(row)
             and (row['mask'] in ('general', 'softcap')
                  or row['head_dim'] != row['head_dim_v'] and not is_on_cache(row))}
    assert names <= reached


def test_the_sanitizer_reaches_every_kernel_of_masks():
    names = {row['name'] for row in _plan.variants() + _plan.backward_variants()
             if row['mask'].startswith('lists')}
    reached = set().union(*map(sanitize.kernels_of_mask, sanitize.mask_calls()))
    of_fp8 = set(map(sanitize.kernel_of_fp8_mask, sanitize.fp8_mask_calls()))
    assert names and reached | of_fp8 == names


def test_split_size_reaches_every_kernel_that_folds():
    """By a mask and head dims. tests/bits draws all of these."""
    masks = {'full': {}, 'causal': dict(causal=True), 'general': dict(window_size=(9, 9)),
             'softcap': dict(softcap=9.0)}
    reached = {planning.plan((1, 99, 2, dims[0]), (1, 99, 2, dims[0]), (1, 99, 2, dims[1]),
                             dtype=DTYPES[dtype], split_size=64, **masks[mask])['name']
               for dtype in ('bf16', 'fp16') for mask in masks
               for dims in ((64, 64), (128, 128), (192, 128), (256, 256))}
    assert reached == {row['name'] for row in _plan.variants() if is_folded(row)}


def test_the_sanitizer_reaches_every_kernel_of_fp8():
    """Each in a batch and, where it serves them, with packed sequences; by block and by head."""
    calls = sanitize.fp8_calls()
    reached = {(sanitize.kernel_of(call), call.case.is_packed) for call in calls}
    rows = [row for row in _plan.variants()
            if row['dtype'] == FP8 and row['mask'] != 'lists' and not is_on_cache(row)]
    expected = {(row['name'], is_packed) for row in rows for is_packed in (False, True)
                if row['mask'] in ('general', 'softcap') or not is_packed}
    assert rows and reached == expected
    both = {(call.granularity, call.case.is_packed) for call in calls}
    assert both == set(itertools.product(('block', 'head'), (False, True)))


def test_the_sanitizer_reaches_every_kernel_on_a_cache():
    """Each with the small cases: dense and paged, split in each way; tiles of two warpgroups with
    the one that has many queries.
    """
    calls = sanitize.cache_calls()
    names = {row['name'] for row in _plan.variants() if is_on_cache(row)}
    reached = [sanitize.kernel_on_cache(case) for case in calls]
    chosen = {sanitize.kernel_of_chosen(case) for case in sanitize.chosen_calls()}
    assert names and set(reached) | chosen == names
    assert all(reached.count(name) + reached.count(f'{name}Long') >= len(sanitize.ON_CACHE)
               for name in set(reached) if not name.endswith('Long'))
    assert {(case.num_splits > 0, case.split_size > 0) for case in calls} == {
        (False, False), (True, False), (False, True)}
    assert all(case.arguments('cpu') for case in sanitize.ON_CACHE)


def test_the_sanitizer_quantizes_in_every_way():
    """One pass, blocks that are read twice and two passes, for each dtype, rotated and not."""
    calls = sanitize.quantize_calls()
    packed_rows = sum(rows for rows, _ in sanitize.LENGTHS)
    for dtype, rotate in itertools.product(('bf16', 'fp16', 'fp32'), (False, True)):
        mine = [call for call in calls if (call.dtype, call.rotate) == (dtype, rotate)]
        bytes_of_tiles = {min(call.block, packed_rows) * call.head_dim * 2 for call in mine
                          if call.is_packed and not call.is_filled}
        # csrc/quantize/quantize.cu: kMostStashBytes
        assert min(bytes_of_tiles) < 100 * 1024 and max(bytes_of_tiles) > 226 * 1024
        assert {(call.is_filled, call.is_packed) for call in mine} == set(
            itertools.product((False, True), repeat=2))
