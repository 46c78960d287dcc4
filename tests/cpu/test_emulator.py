"""The emulator of tools/ptx_emulator itself: what instructions give, and that it finds faults which
were put into small kernels. Needs g++ and the headers of CUDA, no GPU.
"""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from build_tools import toolchain, units
from tools.ptx_emulator import build
from tools.ptx_emulator.library import Emulator
from tools.ptx_emulator.ptx import PtxError, read_kernels

pytestmark = pytest.mark.slow

HEAD = '''.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
'''
# Pointers to what a kernel reads and writes are in rd1 and rd2, its thread in r1, the same times 4
# in rd3, and rd4, rd5 are the addresses of the thread's words.
KERNEL = '''.visible .entry {name}(
  .param .align 8 .b8 {name}_param_0[16]
)
{{
  .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .f32 %f<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [{name}_param_0];
  ld.param.u64 %rd2, [{name}_param_0+8];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  {body}
  ret;
}}
'''
STORE_R2 = 'st.global.u32 [%rd5], %r2;'
OWN_WORD = 'mov.u32 %r10, dynamic; cvt.u32.u64 %r11, %rd3; add.s32 %r10, %r10, %r11;'
MBARRIER = '''mov.u32 %r10, dynamic; setp.ne.s32 %p1, %r1, 0;
  @%p1 bra $start;
  mbarrier.init.shared::cta.b64 [%r10+512], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10+512], 128;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd1], 128, [%r10+512];
  $start: bar.sync 0;'''
WAIT = '{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r10+512], 0; ' \
       '@!done bra again; }'
# Thread 0 copies 16 bytes, 8 bytes and as many zeros, and 16 zeros; then it arrives.
OWN_COPIES = '''mov.u32 %r10, dynamic; setp.ne.s32 %p1, %r1, 0;
  @%p1 bra $start;
  mbarrier.init.shared::cta.b64 [%r10+512], 1;
  cp.async.cg.shared.global [%r10], [%rd1], 16, 16;
  cp.async.cg.shared.global [%r10+16], [%rd1+16], 16, 8;
  cp.async.cg.shared.global [%r10+32], [%rd1], 16, 0;
  cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r10+512];
  $start: bar.sync 0;'''
READ_COPY = f'{OWN_WORD} ld.shared.u32 %r2, [%r10]; {STORE_R2}'

# Bodies of kernels, and what the emulator says of them.
FAULTS = {
    'reads_outside': (f'ld.global.u32 %r2, [%rd4+4096]; {STORE_R2}', 'reads 4 bytes outside'),
    'writes_its_input': ('st.global.u32 [%rd4], %r1;', 'writes 4 bytes outside the results'),
    'reads_odd_address': (f'ld.global.u32 %r2, [%rd1+2]; {STORE_R2}', 'at an odd address'),
    'leaves_shared_memory': ('mov.u32 %r10, dynamic; st.shared.u32 [%r10+8192], %r1;',
                             'shared memory'),
    'waits_for_too_many': ('bar.sync 1, 96;', 'all threads wait for each other'),
    'lanes_apart': ('''and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 0;
                    @%p1 bra $other; bar.warp.sync -1; ret; $other: bar.warp.sync -1;''',
                    'lanes of a warp meet at instructions'),
    'store_without_fence': (f'''{OWN_WORD} st.shared.u32 [%r10], %r1; bar.sync 0;
                            setp.ne.s32 %p1, %r1, 0; @%p1 bra $end; mov.u32 %r10, dynamic;
                            cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r10], 128;
                            cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; $end:''',
                            'with no fence between'),
    'ends_before_its_copy': (MBARRIER, 'copies in flight'),
    'ends_before_its_store': ('''setp.ne.s32 %p1, %r1, 0; @%p1 bra $end; mov.u32 %r10, dynamic;
                              cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r10], 128;
                              cp.async.bulk.commit_group; $end:''', 'copies in flight'),
    'arrives_too_often': ('''mov.u32 %r10, dynamic; setp.ne.s32 %p1, %r1, 0; @%p1 bra $end;
                          mbarrier.init.shared::cta.b64 [%r10], 1;
                          mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 16;
                          mbarrier.arrive.shared::cta.b64 _, [%r10]; $end:''', 'more arrivals'),
}
RIGHT = {
    'waits_for_its_copy': f'{MBARRIER} {WAIT} {READ_COPY}',
    'store_with_fence': FAULTS['store_without_fence'][0].replace(
        'bar.sync 0;', 'fence.proxy.async.shared::cta; bar.sync 0;').replace(
            '%r10], %r1', '%r10], 7'),
    'reads_its_copy_early': f'{MBARRIER} {READ_COPY} mov.u32 %r10, dynamic; {WAIT}',
    'waits_for_own_copies': f'{OWN_COPIES} {WAIT} {READ_COPY}',
    'reads_own_copies_early': f'{OWN_COPIES} {READ_COPY} mov.u32 %r10, dynamic; {WAIT}',
    'reads_neighbours_word': f'''{OWN_WORD} st.shared.u32 [%r10], %r1; xor.b32 %r12, %r11, 128;
        mov.u32 %r13, dynamic; add.s32 %r13, %r13, %r12; ld.shared.u32 %r2, [%r13]; {STORE_R2}''',
    'e4m3_of_half': '''ld.global.u32 %r2, [%rd4]; cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r2;
        cvt.u32.u16 %r2, %rs1; st.global.u32 [%rd5], %r2;''',
    'half_of_float': f'''ld.global.u32 %r3, [%rd4]; cvt.rn.f16x2.f32 %r2, %r3, %r3; {STORE_R2}''',
    'bfloat_of_float': f'''ld.global.u32 %r3, [%rd4]; cvt.rn.bf16x2.f32 %r2, %r3, %r3;
        {STORE_R2}''',
    'bfloat_square': f'ld.global.u32 %r3, [%rd4]; mul.rn.bf16x2 %r2, %r3, %r3; {STORE_R2}',
    'half_square': f'ld.global.u32 %r3, [%rd4]; fma.rn.f16x2 %r2, %r3, %r3, %r3; {STORE_R2}',
    'half_limit': f'ld.global.u32 %r3, [%rd4]; min.NaN.f16x2 %r2, %r3, 0x44003c00; {STORE_R2}',
    'largest': f'''mov.u32 %r10, dynamic; st.shared.u32 [%r10], -100; bar.sync 0;
        ld.global.u32 %r3, [%rd4]; atom.shared.max.s32 %r4, [%r10], %r3; bar.sync 0;
        ld.shared.u32 %r2, [%r10]; {STORE_R2}''',
    'smallest': f'''mov.u32 %r10, dynamic; st.shared.u32 [%r10], -1; bar.sync 0;
        ld.global.u32 %r3, [%rd4]; atom.shared.min.u32 %r4, [%r10], %r3; bar.sync 0;
        ld.shared.u32 %r2, [%r10]; {STORE_R2}''',
    'all_agree': '''ld.global.u32 %r3, [%rd4]; setp.ne.s32 %p1, %r3, 0;
        bar.red.and.pred %p2, 0, %p1; bar.red.and.pred %p3, 0, %p1; selp.u32 %r2, 2, 3, %p2;
        selp.u32 %r2, %r2, 5, %p3; st.global.u32 [%rd5], %r2;''',
    'wide_sum': 'atom.global.add.u64 %rd6, [%rd2], %rd3;',
    'lane_before': f'shfl.sync.up.b32 %r2|%p1, %r1, 1, 0, -1; {STORE_R2}',
    'bits_of_warp': f'''redux.sync.or.b32 %r3, %r1, -1; redux.sync.and.b32 %r4, %r1, -1;
        mad.lo.s32 %r2, %r4, 1000, %r3; {STORE_R2}''',
    'lane_across': f'shfl.sync.bfly.b32 %r2|%p1, %r1, 5, 31, -1; {STORE_R2}',
    'negative_quotient': f'''ld.global.u32 %r3, [%rd4]; div.s32 %r4, %r3, -7; rem.s32 %r5, %r3, -7;
        mad.lo.s32 %r6, %r4, -7, %r5; shr.s32 %r7, %r3, 40; sub.s32 %r2, %r6, %r7; {STORE_R2}''',
}


@pytest.fixture(scope='module')
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    try:
        cuda = toolchain.find_cuda()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    bodies = {name: body for name, (body, _) in FAULTS.items()} | RIGHT
    ptx = HEAD + ''.join(KERNEL.format(name=name, body=body) for name, body in bodies.items())
    folder = build.BUILD / 'small_kernels'
    objects = units.compile_units([*build.kernel_units([ptx], folder), *build.machine_units(cuda)])
    library = tmp_path_factory.mktemp('emulator') / 'small.so'
    build.link(list(objects.values()), library)
    return Emulator(library)


def run(emulator: Emulator, kernel: str, words: Tensor, threads: int = 64) -> tuple[str, Tensor]:
    """The error and what the kernel wrote, 0xff where it did not."""
    out = torch.full((threads,), -1, dtype=torch.int32)
    return emulator.launch(kernel, [words], [out], threads=threads, dynamic_bytes=1024), out


@pytest.mark.parametrize('name', FAULTS)
def test_faults_are_found(name, emulator):
    for seed in range(3):
        emulator.seed(seed)
        error, _ = run(emulator, name, torch.zeros(64, dtype=torch.int32))
        assert FAULTS[name][1] in error and f'emulator: {name}: ' in error, error


def test_a_run_after_a_fault_is_right(emulator):
    run(emulator, 'waits_for_too_many', torch.zeros(64, dtype=torch.int32))
    error, out = run(emulator, 'lane_across', torch.zeros(64, dtype=torch.int32))
    assert not error and torch.equal(out, torch.arange(64, dtype=torch.int32) ^ 5)


@pytest.mark.parametrize('name, is_steady', [('waits_for_its_copy', True),
                                             ('reads_its_copy_early', False),
                                             ('reads_neighbours_word', False)])
def test_what_depends_on_the_order(name, is_steady, emulator):
    """A race gives different results in different orders."""
    found = []
    words = torch.arange(64, dtype=torch.int32) + 100
    for seed in range(30):
        emulator.seed(seed)
        error, out = run(emulator, name, words, threads=32 if 'copy' in name else 64)
        assert not error
        found.append(tuple(out.tolist()))
    assert (len(set(found)) == 1) == is_steady
    if is_steady:
        assert list(found[0]) == words[:32].tolist()


@pytest.mark.parametrize('name, is_steady', [('waits_for_own_copies', True),
                                             ('reads_own_copies_early', False)])
def test_copies_of_a_thread_that_arrive(name, is_steady, emulator):
    """The mbarrier counts the thread once its copies have ended; the bytes not read are zeros."""
    found = set()
    for seed in range(30):
        emulator.seed(seed)
        error, out = run(emulator, name, torch.arange(64, dtype=torch.int32) + 100, threads=32)
        assert not error
        found.add(tuple(out[:12].tolist()))
    assert (found == {(100, 101, 102, 103, 104, 105, *6 * (0,))}) == is_steady


def test_store_with_fence(emulator):
    error, out = run(emulator, 'store_with_fence', torch.zeros(64, dtype=torch.int32))
    assert not error and (out[:32] == 7).all() and (out[32:] == -1).all()


def in_pieces(emulator: Emulator, kernel: str, words: Tensor) -> Tensor:
    """A kernel on any number of words."""
    found = []
    for piece in words.split(1024):
        error, out = run(emulator, kernel, piece.contiguous(), threads=len(piece))
        assert not error
        found.append(out)
    return torch.cat(found)


def halves() -> Tensor:
    """Every one of 16 bits, in words of two."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16)


def check_numbers(found: Tensor, expected: Tensor) -> None:
    """The same bits, or NaN in both."""
    bits = {1: torch.uint8, 2: torch.int16}[expected.itemsize]
    is_nan = expected.float().isnan()
    same = found.view(bits) == expected.view(bits)
    assert (same | is_nan & found.view(expected.dtype).float().isnan()).all()


def test_e4m3_of_every_half(emulator):
    found = in_pieces(emulator, 'e4m3_of_half', halves().view(torch.int32))
    x = halves().view(torch.float16).float()
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    check_numbers(found.view(torch.uint8).view(-1, 4)[:, :2].reshape(-1).contiguous(), expected)


@pytest.mark.parametrize('dtype, kernel', [(torch.float16, 'half_of_float'),
                                           (torch.bfloat16, 'bfloat_of_float')])
def test_floats_are_rounded(dtype, kernel, emulator):
    x = torch.randint(-(1 << 31), 1 << 31, (20_480,), dtype=torch.int32).view(torch.float32)
    near = torch.randn(4096) * torch.exp2(torch.randint(-30, 18, (4096,)).float())
    x = torch.cat([x, near, near.to(dtype).float() * (1 + 2. ** -9)])
    found = in_pieces(emulator, kernel, x.view(torch.int32)).view(torch.int16)[::2].contiguous()
    check_numbers(found, x.to(dtype))


def test_products_of_halves(emulator):
    """Rounded once; of bfloat16 subnormal numbers count."""
    x = halves().view(torch.bfloat16)
    found = in_pieces(emulator, 'bfloat_square', halves().view(torch.int32)).view(torch.int16)
    check_numbers(found, (x.double() * x.double()).to(torch.bfloat16))
    x = halves().view(torch.float16)
    found = in_pieces(emulator, 'half_square', halves().view(torch.int32)).view(torch.int16)
    check_numbers(found, (x.double() * x.double() + x.double()).to(torch.float16))


def test_minima_keep_nan(emulator):
    """The limits are 1 and 4."""
    x = halves().view(torch.float16)
    found = in_pieces(emulator, 'half_limit', halves().view(torch.int32)).view(torch.int16)
    check_numbers(found, torch.minimum(x.view(-1, 2), torch.tensor([1., 4.]).half()).flatten())


def test_kernels_say_their_clusters():
    kernels, _ = read_kernels('.entry a() .maxntid 512 .reqnctapercluster 2, 1, 1 { ret; }'
                              '.entry b() { ret; }')
    assert [(kernel.name, kernel.cluster_ctas) for kernel in kernels] == [('a', 2), ('b', 1)]


def test_shuffles(emulator):
    lanes = torch.arange(64, dtype=torch.int32)
    _, out = run(emulator, 'lane_before', lanes)
    assert torch.equal(out, torch.where(lanes % 32 == 0, lanes, lanes - 1))
    _, out = run(emulator, 'lane_across', lanes)
    assert torch.equal(out, lanes ^ 5)
    _, out = run(emulator, 'bits_of_warp', lanes)    # of the threads' numbers: 31, and 32 | 31
    assert torch.equal(out, torch.where(lanes < 32, 31, 32 * 1000 + 63).int())


def test_negative_quotients(emulator):
    x = torch.randint(-(1 << 31), 1 << 31, (1024,), dtype=torch.int32)
    assert torch.equal(in_pieces(emulator, 'negative_quotient', x), x - (x < 0) * -1)


def test_atomics(emulator):
    x = torch.randint(-50, 50, (64,), dtype=torch.int32)
    error, out = run(emulator, 'largest', x)
    assert not error and (out == x.max()).all()
    error, out = run(emulator, 'smallest', x)    # as unsigned: -50 is large
    assert not error and (out == x[x >= 0].min()).all()
    error, out = run(emulator, 'wide_sum', x)    # sums of 4 * thread, from all ones
    assert not error and out.view(torch.int64)[0] == 4 * sum(range(64)) - 1


def test_a_vote_of_all_threads(emulator):
    x = torch.ones(64, dtype=torch.int32)
    error, out = run(emulator, 'all_agree', x)
    assert not error and (out == 2).all()
    x[37] = 0
    error, out = run(emulator, 'all_agree', x)
    assert not error and (out == 5).all()


def test_what_is_not_known(tmp_path: Path):
    """An error that names the kernel and the instruction, not a wrong result."""
    for body, text in (('vadd.u32.u32.u32 [%r1], %r2;', 'vadd'),
                       ('mov.u32 %r2, nothing;', 'nothing')):
        with pytest.raises(PtxError, match=f'strange: .*{text}'):
            build.translate([HEAD + KERNEL.format(name='strange', body=body)], tmp_path)


def test_names_in_braces():
    """Those of two pieces of inline assembly are not the same."""
    body = '{ .reg .pred done; again: @done bra again; } { .reg .pred done; again: bra again; }'
    kernel, = read_kernels(HEAD + KERNEL.format(name='k', body=body))[0]
    labels = [one.name for one in kernel.body if hasattr(one, 'name')]
    assert labels == ['again_1', 'again_2'] and {'done_1', 'done_2'} <= set(kernel.registers)
    assert kernel.body[-4].operands == ['again_1'] and kernel.body[-1].op == 'ret'


def test_cache_operators(tmp_path: Path):
    """A load or a store through one cache is translated as any other."""
    def text(operator: str) -> str:
        body = f'ld.global{operator}.u32 %r2, [%rd4]; st.global{operator}.u32 [%rd5], %r2;'
        path, _ = build.translate([HEAD + KERNEL.format(name='copy', body=body)], tmp_path)
        return path.read_text()
    assert text('.cg') == text('.ca') == text('')
