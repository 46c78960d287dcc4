"""The op on CUDA: opcheck, torch.compile, errors, and which kernel runs."""
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

import flash_attn3
from flash_attn3 import flash_attn_func
from flash_attn3.ops import checks
from flash_attn3.ops.dense_and_varlen import General

from tests.gpu.common import every_kind, run
from tests.support import bad_inputs, compare, layouts
from tests.support.cases import GRADIENT_KINDS, Case

pytestmark = pytest.mark.usefixtures('fresh_compiler')
OPS = torch.ops.flash_attn3
CASE = Case(65, 130, heads_q=6, heads_k=2, head_dim=64, causal=True)
SCALARS = (0.125, True, None, 0)    # softmax_scale, causal, pack_gqa, sm_margin


@pytest.mark.smoke
@pytest.mark.parametrize('op', [OPS.fwd.default, OPS._fwd.default, OPS._fwd_no_lse.default],
                         ids=str)
def test_opcheck(op, device):
    opcheck(op, (*CASE.tensors(device), *SCALARS))


@pytest.mark.smoke
def test_opcheck_out(device):
    q, k, v = CASE.tensors(device)
    out = torch.zeros_like(q)
    opcheck(OPS.attend.default, (q, k, v, out, *General(softmax_scale=0.125, causal=True)))
    opcheck(OPS._fwd_no_lse.default, (q, k, v, *SCALARS, out))


@pytest.mark.smoke
@pytest.mark.parametrize('deterministic', [False, True])
@pytest.mark.parametrize('with_dlse', [False, True])
def test_opcheck_bwd(with_dlse, deterministic, device):
    q, k, v = CASE.tensors(device)
    out, lse = OPS.fwd(q, k, v, *SCALARS)
    dlse = torch.randn_like(lse) if with_dlse else None
    opcheck(OPS.bwd.default,
            (torch.randn_like(out), dlse, q, k, v, out, lse, *SCALARS[:2], deterministic))


@pytest.mark.smoke
@pytest.mark.parametrize('with_dlse', [False, True])
def test_opcheck_bwd_out(with_dlse, device):
    q, k, v = CASE.tensors(device)
    out, lse = OPS.fwd(q, k, v, *SCALARS)
    dlse = torch.randn_like(lse) if with_dlse else None
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    opcheck(OPS.bwd_out.default, (torch.randn_like(out), dlse, q, k, v, out, lse, *gradients,
                                  *SCALARS[:2], True))


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('case', [CASE, Case(7, 0), Case(300, 10)], ids=Case.sizes)
def test_the_output_is_the_same_without_an_lse(case, kind, device):
    """Also into a given output, and with the scale left to the op."""
    case = case.of(kind)
    tensors = case.tensors(device)
    expected, _ = run(tensors, case)
    given = layouts.COPIED[0].place(torch.full_like(expected, torch.nan))
    options = {'causal': case.causal}
    flash_attn_func(*tensors, out=given, **options)
    results = [given, flash_attn_func(*tensors, **options),
               flash_attn_func(*tensors, softmax_scale=case.softmax_scale, **options)]
    for out in results:
        compare.check_equal(out, expected, 'out')


# -------------------------------------------------------------------------------------- compilers
def attention(q, k, v):
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out * 2, lse + 1


@pytest.mark.smoke
@pytest.mark.parametrize('mode', ['default', 'reduce-overhead'])
def test_compile(mode, cuda):
    tensors = CASE.tensors(cuda)
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.testing.assert_close(compiled(*tensors), attention(*tensors))


@pytest.mark.smoke
def test_one_compilation_for_many_lengths(device):
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=True)
    for seqlen in (50, 65, 130, 401):
        tensors = Case(seqlen, seqlen + 7, heads_q=6, heads_k=3, head_dim=64).tensors(device)
        torch.testing.assert_close(compiled(*tensors), attention(*tensors))
    assert counter.frame_count == 1


def test_export(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v)

    tensors = CASE.tensors(device)
    program = torch.export.export(Attention(), tensors, strict=True)
    torch.testing.assert_close(program.module()(*tensors), attention(*tensors))


# ----------------------------------------------------------------------------------------- errors
@pytest.mark.smoke
@pytest.mark.parametrize('bad', bad_inputs.EVERYWHERE + bad_inputs.KERNEL_RULES, ids=str)
def test_bad_input_has_the_same_text_as_on_the_cpu(bad, cuda):
    arguments = bad.arguments(cuda)
    text = checks.problem_text(arguments)
    assert text.startswith(bad.text)
    with pytest.raises(RuntimeError) as error:
        flash_attn_func(**arguments)
    assert text in str(error.value)


@pytest.mark.smoke
@pytest.mark.parametrize('names, text', [
    ('k', 'k on the device of q, cuda:0, got cpu'),
    ('v', 'v on the device of q, cuda:0, got cpu'),
    ('qv', 'k on the device of q, cpu, got cuda:0'),
])
def test_tensors_on_cpu_and_gpu(names, text, cuda):
    arguments = bad_inputs.good_arguments(cuda)
    arguments |= {name: arguments[name].cpu() for name in names}
    with pytest.raises(RuntimeError, match=f'flash_attn3.flash_attn_func: expected {text}'):
        flash_attn_func(**arguments)


@pytest.mark.smoke
def test_out_on_the_cpu(cuda):
    arguments = bad_inputs.good_arguments(cuda)
    text = 'flash_attn3.flash_attn_func: expected out on the device of q, cuda:0, got cpu'
    with pytest.raises(RuntimeError, match=text):
        flash_attn_func(**arguments, out=torch.empty_like(arguments['q'], device='cpu'))


@pytest.mark.smoke
@pytest.mark.parametrize('call', ['fwd', 'out', 'bwd'])
def test_out_of_memory_names_the_op_and_the_bytes(call, cuda):
    """1 TiB: an output, a copy of keys that TMA cannot address, a gradient."""
    shape = 1, 1 << 30, 8, 64
    small = torch.zeros(1, 3, 8, 64, dtype=torch.bfloat16, device=cuda)
    large = small[:, :1].expand(shape)
    unaligned = small.flatten().as_strided(shape, (0, 0, 4, 1))
    lse = torch.zeros(1, 8, 1, device=cuda).expand(1, 8, 1 << 30)
    calls = {'fwd': lambda: flash_attn_func(large, small, small),
             'out': lambda: flash_attn_func(small, unaligned, unaligned,
                                            out=torch.empty_like(small)),
             'bwd': lambda: OPS.bwd(large, None, large, small, small, large, lse, 1.0, False)}
    text = (f'flash_attn3.flash_attn_func: expected room for {1 << 40} bytes on {cuda}, got CUDA '
            'out of memory')
    with pytest.raises(RuntimeError, match=text):
        calls[call]()


@pytest.mark.smoke
@pytest.mark.parametrize('bad', bad_inputs.EVERYWHERE[:3], ids=str)
def test_an_error_leaves_the_next_call_right(bad, cuda):
    good = bad_inputs.good_arguments(cuda)
    expected = flash_attn_func(**good)
    with pytest.raises(RuntimeError):
        flash_attn_func(**bad.arguments(cuda))
    assert torch.equal(flash_attn_func(**good), expected)


FAILED_LAUNCH = '''
import torch, flash_attn3
x = torch.randn(1, 128, 4, 128, dtype=torch.bfloat16, device='cuda')
flash_attn3.flash_attn_func(x, x, x)
torch._assert_async(torch.zeros((), device='cuda'))    # every later launch fails
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    flash_attn3.flash_attn_func(x, x, x)
except RuntimeError as error:
    print(error)
'''


@pytest.mark.smoke
def test_a_failed_launch_names_the_kernel(cuda):
    if 'FwdBf16D128Full' not in flash_attn3.built_variants():
        pytest.skip('FwdBf16D128Full is not in this build')
    process = subprocess.run([sys.executable, '-c', FAILED_LAUNCH], text=True, capture_output=True,
                             env=os.environ, timeout=120)
    for part in ('FwdBf16D128Full', 'grid ', 'shared memory ', 'assert'):
        assert part in process.stdout, process.stdout + process.stderr


FORK = '''
import multiprocessing, torch, flash_attn3
assert not torch.cuda.is_initialized()

def work():
    x = torch.ones(1, 300, 4, 128, dtype=torch.bfloat16, device='cuda')
    assert (flash_attn3.flash_attn_func(x, x, x) == 1).all()

child = multiprocessing.get_context('fork').Process(target=work)
child.start()
child.join()
assert child.exitcode == 0
work()
'''


@pytest.mark.smoke
def test_a_child_forked_after_the_import_can_use_the_gpu(cuda):
    """So can its parent: as with a data loader that is made before the first call."""
    if 'FwdBf16D128Full' not in flash_attn3.built_variants():
        pytest.skip('FwdBf16D128Full is not in this build')
    process = subprocess.run([sys.executable, '-c', FORK], text=True, capture_output=True,
                             env=os.environ, timeout=120)
    assert process.returncode == 0, process.stderr


# -------------------------------------------------------------------------------- which kernel ran
@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('seqlen', [65, 2500])
def test_the_kernel_that_runs_is_the_one_explained(seqlen, kind, cuda, device, capsys):
    """Short and long queries: where a kind has several kernels, each of them runs once."""
    case = Case(seqlen, seqlen).of(kind)
    tensors = case.tensors(cuda)
    flash_attn_func(*tensors, causal=case.causal)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        flash_attn_func(*tensors, causal=case.causal)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiled.events() if 'forward_kernel' in event.name]
    flash_attn3.explain(*tensors, causal=case.causal)
    explained = capsys.readouterr().out.split()[1]
    assert len(kernels) == 1
    names = [facts['name'] for facts in kind.variants() if facts['name'] in kernels[0]]
    assert max(names, key=len) == explained


@pytest.mark.smoke
@every_kind
def test_can_use(kind, cuda, device):
    case = CASE.of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert flash_attn3.can_use(*case.tensors(cuda), causal=case.causal) == (True, [])
        flash_attn_func(*case.tensors(cuda), causal=case.causal)


# -------------------------------------------------------------------------------------- gradients
every_gradient_kind = pytest.mark.parametrize('kind', GRADIENT_KINDS, ids=str)


@pytest.mark.smoke
@every_gradient_kind
def test_the_kernels_of_the_gradients_are_those_explained(kind, cuda, device, capsys):
    case = CASE.of(kind)
    tensors = [x.requires_grad_() for x in case.tensors(cuda)]
    out = flash_attn_func(*tensors, causal=case.causal)
    dout = torch.ones_like(out)
    torch.autograd.grad(out, tensors, dout, retain_graph=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch.autograd.grad(out, tensors, dout)
        torch.cuda.synchronize()
    flash_attn3.explain(*tensors, causal=case.causal)
    explained = capsys.readouterr().out.split('\n\n')[1].split()[1]
    kernels = [event.name for event in profiled.events() if 'backward_' in event.name]
    assert len(kernels) == 3 and all(explained in name for name in kernels)
    for name in ('backward_preprocess_kernel', 'backward_kernel', 'backward_postprocess_kernel'):
        assert sum(name in kernel for kernel in kernels) == 1


@pytest.mark.smoke
@every_gradient_kind
def test_can_use_with_gradients(kind, cuda, device):
    case = CASE.of(kind)
    tensors = [x.requires_grad_() for x in case.tensors(cuda)]
    assert flash_attn3.can_use(*tensors, causal=case.causal) == (True, [])
    gradients = torch.autograd.grad(flash_attn_func(*tensors, causal=case.causal).sum(), tensors)
    assert all(x.isfinite().all() for x in gradients)


def test_empty_results_keep_no_gradients(cuda):
    """They are shared by calls, which autograd must not mark."""
    q, k = (torch.randn(1, 9, 2, 64, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    OPS.attend_cache(q.requires_grad_(), k, k, None)
    with torch.no_grad():
        _, lse = OPS.attend_cache(q, k, k, None)
    assert lse.numel() == 0 and not lse.requires_grad
