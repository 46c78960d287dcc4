"""Small calls that run every built kernel, under NVIDIA's compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --kernel-name kernel_substring=N3fa3 \\
        --error-exitcode 9 python -m tests.sanitize --filled
    compute-sanitizer --tool initcheck --kernel-name kernel_substring=N3fa3 \\
        --error-exitcode 9 python -m tests.sanitize

(`make sanitize` does both; the filter goes by mangled names and takes the namespace fa3: both
directions, and what makes their tables.) Lengths that fill no tile, GQA with packing, and a causal
call with rows that see no key; gradients of out and of the LSE where there is a backward kernel, in
both of its modes. Then the same of the general ops: with and without limits, for a batch and for
packed sequences, some of them empty, with rows that do not count; masks, with the kernels that make
their lists. Then attention on e4m3, on KV caches (dense and paged, appended to and rotated, split
in each way, latent), and quantize_fp8: with --filled also scales by head and by tensor; there
PyTorch fills memory first, which initcheck may take for not initialised.

racecheck does not understand bulk copies; tests/gpu/test_repeat.py and test_deterministic.py look
for races.
"""
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

import flash_attn3
from flash_attn3 import _plan
from flash_attn3.ops import checks
from flash_attn3.tools import planning, planning_cache
from flash_attn3.ops.dense_and_varlen import Execution, General, MaskTensors, for_backward
from flash_attn3.ops.fp8 import EightBit
from flash_attn3.ops.mask_lists import Tiles
from flash_attn3.cpu.reference_fp8 import Scales
from tests.support import cache_cases, chosen_cases, mask_cases, mask_cases_fp8
from tests.support.cache_cases import CacheCase, mixed
from tests.support.cases import DTYPES, GRADIENT_KINDS, KINDS, OTHER_TILES, Case, GradientKind, Kind
from tests.support.chosen_cases import LATENT, ChosenCase
from tests.support.described import describe_sizes
from tests.support.fp8_data import E4M3, descales, quantize_all
from tests.support.general_cases import GeneralCase, forward
from tests.support.lists import starts
from tests.support.mask_cases import Blocks, MaskCase

SMALL = [Case(67, 150, batch=1, heads_q=2, heads_k=2),
         Case(5, 33, heads_q=6, heads_k=2, pack_gqa=True),
         Case(150, 67, batch=1, heads_q=2, heads_k=1, pack_gqa=False)]
CASES = [*SMALL, *OTHER_TILES]

# More sequences than a warp has threads; lengths of no rows, and a list that its rows do not fill.
LENGTHS = ((67, 150), (0, 33), (1, 1), (150, 67), (5, 0), (0, 0)) * 6
USED = ((60, 150), (0, 20), (1, 1), (150, 3), (5, 0), (0, 0)) * 6
BATCH = GeneralCase(((67, 150),) * 2, heads=(2, 1), is_packed=False)
PACKED = GeneralCase(LENGTHS, heads=(2, 1), behind=(3, 5), pack_gqa=True)
GENERAL = [dataclasses.replace(BATCH, window=(20, 30), softcap=15.0, sinks='fp32', max_logits=True),
           dataclasses.replace(BATCH, lengths=((150, 67),) * 2, chunk=50, sinks='bf16'),
           dataclasses.replace(PACKED, chunk=40, window=(30, -1), softcap=15.0, max_logits=True),
           dataclasses.replace(PACKED, used=USED, window=(-1, 20), sinks='fp32')]
# For the planner's other tiles.
WINDOW = dataclasses.replace(BATCH, heads=(24, 8), window=(100, 100))
GENERAL += [dataclasses.replace(WINDOW, lengths=((60, 150),) * 2),
            dataclasses.replace(WINDOW, lengths=((150, 150),) * 8),
            dataclasses.replace(WINDOW, lengths=((700, 700),)),
            dataclasses.replace(WINDOW, lengths=((2100, 2100),)),
            dataclasses.replace(WINDOW, lengths=((2100, 2100),), window=(-1, 100))]
# With the masks of the other kernels, which unequal head dims have too.
PLAIN = [BATCH, PACKED, dataclasses.replace(PACKED, lengths=((60, 150), (0, 33), (1, 1)) * 4),
         dataclasses.replace(PACKED, used=USED, sinks='fp32', pack_gqa=False)]
# (head dim, that of v): a kernel each.
HEAD_DIMS = [*((x, x) for x in (64, 96, 128, 192, 256)), (64, 128), (64, 256), (96, 64), (128, 64),
             (192, 128), (64, 512), (512, 512)]

# Lists of intervals, of blocks of both sizes, of both; for each query head, sequence, or all; some
# of no tile.
FINE = Blocks(64, 64, 0.3, 'q')
MASKS = [MaskCase(((67, 300),) * 2, 'two', by_batch=True, s_aux=True, max_logits=True),
         MaskCase(((300, 270),) * 2, blocks=FINE._replace(by_batch=True)),
         MaskCase(((150, 200),), 'blind', Blocks(128, 64, heads='k'), softcap=3.0),
         MaskCase(LENGTHS, 'one', Blocks(), is_packed=True, behind=9),
         MaskCase(((3, 5), (200, 100), (0, 7), (130, 0), (300, 400)), blocks=FINE, is_packed=True)]
MASK_HEAD_DIMS = (64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (64, 512)
FP8_MASK_HEAD_DIMS = (128, 128), (256, 256)


class Fp8Call(NamedTuple):
    """A call of attention on e4m3 tensors."""
    case: GeneralCase
    granularity: str = 'block'
    fp8_accum: str = 'fast'
    out_dtype: str = 'bf16'


QUANTIZED_ROWS = 75


class Quantized(NamedTuple):
    """A call of quantize_fp8."""
    dtype: str
    head_dim: int
    block: int | str
    rotate: bool
    is_packed: bool

    @property
    def is_filled(self) -> bool:
        """Whether memory for maxima is filled first: two passes."""
        return self.block in ('head', 'tensor')


# Those of the kernels, and one in between for each.
FP8_HEAD_DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (48, 16), (80, 112), (144, 208)]
# Few keys and many, for both tiles of head dim 128; rows that see no key; query heads in a tile.
FP8_DENSE = [BATCH, dataclasses.replace(BATCH, lengths=((67, 2100),)),
             dataclasses.replace(BATCH, lengths=((67, 100),)),
             dataclasses.replace(BATCH, lengths=((150, 67),) * 2),
             dataclasses.replace(BATCH, lengths=((5, 33),) * 2, heads=(6, 2), pack_gqa=True)]
FP8_GENERAL = [dataclasses.replace(BATCH, window=(20, 30), sinks='fp32'),
               dataclasses.replace(BATCH, lengths=((150, 67),) * 2, chunk=50, sinks='bf16'), PACKED,
               dataclasses.replace(PACKED, used=USED, window=(30, -1), chunk=40, causal=True),
               dataclasses.replace(PACKED, lengths=((100, 128), (0, 33), (1, 1)) * 6)]
FP8_SOFTCAP = [dataclasses.replace(case, softcap=15.0) for case in FP8_GENERAL[::3]]
# More sequences than a warp has lanes; pages of whole K tiles, of parts of them, and of few rows.
DECODE = CacheCase(mixed(40, 300), heads=(4, 2))
ON_CACHE = [DECODE, dataclasses.replace(DECODE, page_size=16, num_splits=3),
            dataclasses.replace(DECODE, page_size=5, split_size=130, leftpad=(1, 0) * 20),
            dataclasses.replace(DECODE, page_size=256, new=(2,) * 40, window=(50, 20),
                                sinks='fp32'),
            CacheCase(((70, 200), (0, 33), (3, 3), (130, 150)), heads=(2, 1), is_packed=True,
                      causal=True),
            CacheCase(((5, 80), (5, 9)), heads=(6, 2), tree=True),
            CacheCase(((5, 80), (5, 0)), heads=(6, 2), batch_idx=True, new=(5, 5), causal=True,
                      chunk=40, num_splits=2, pack_gqa=False)]
CACHE_HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (48, 16), (512, 512)]
# Blocks in shared memory, blocks that are read twice, two passes.
QUANTIZED_BLOCKS = (32, 384, 2048, 'head', 'tensor')
QUANTIZED_HEADS, QUANTIZED_BATCH = 6, 2


def calls() -> list[tuple[Case, Kind]]:
    """What is run. Only the small cases have gradients: all reach the one backward of a kind."""
    return [(case.of(kind), kind) for kinds, cases in ((KINDS, CASES), (GRADIENT_KINDS, SMALL))
            for case in cases for kind in kinds]


def general_calls() -> list[tuple[GeneralCase, Kind]]:
    return [(case.of(kind, head_dim_v=columns_v), kind)
            for head_dim, columns_v in HEAD_DIMS for dtype in ('bf16', 'fp16')
            for cases, masks in ((GENERAL, (False,)), (PLAIN, (False, True)))
            for case in cases for causal in masks
            for kind in [GradientKind(dtype, head_dim, causal)]]


def mask_calls() -> list[MaskCase]:
    """Every kernel with lists for 16 bits."""
    found = [dataclasses.replace(case, dtype=dtype, head_dim=head_dim, head_dim_v=columns_v)
             for dtype in ('bf16', 'fp16') for head_dim, columns_v in MASK_HEAD_DIMS
             for case in MASKS]
    return [case for case in found if case.head_dim <= 256 or case.softcap == 0]


def fp8_mask_calls() -> list[MaskCase]:
    """Every kernel with lists for e4m3."""
    return [dataclasses.replace(case, head_dim=head_dim, head_dim_v=columns_v, max_logits=False)
            for head_dim, columns_v in FP8_MASK_HEAD_DIMS for case in MASKS if case.softcap == 0]


def with_lists(case: MaskCase, device: str,
               is_fp8: bool = False) -> tuple[tuple, General, MaskTensors]:
    """q, k and v, and what their ops take. Drawn on the CPU, for the sake of initcheck; the lists
    are made on the device.
    """
    given = mask_cases.moved(mask_cases.made(case, 'cpu'), device)
    tensors, lists = mask_cases.sequences(case, given)
    tensors = tuple(x.to(E4M3) for x in tensors) if is_fp8 else tensors
    general = General(**lists, sinks=given.s_aux, softcap=case.softcap)
    lengths = tuple(lists.values())
    tiles = Tiles.of(max(case.head_dim, case.columns_v), case.softcap > 0,
                     not is_fp8, is_fp8)
    return tensors, general, given.mask.tensors_of('attend', tensors[:2], lengths, tiles,
                                                   lambda: None, is_fp8)


def kernels_of_mask(case: MaskCase) -> set[str]:
    """Those that the planners take on an H100."""
    tensors, general, mask = with_lists(case, 'meta')
    return {checks.problem_text(dict(zip('qkv', tensors)), general, mask, rules_of='cuda',
                                check=planner)['name']
            for planner in (_plan.plan_forward, _plan.plan_backward)}


def kernel_of_fp8_mask(case: MaskCase) -> str:
    """The one that the planner takes on an H100."""
    tensors, general, mask = with_lists(case, 'meta', is_fp8=True)
    return checks.problem_text(dict(zip('qkv', tensors)), general, EightBit(), mask,
                               rules_of='cuda', check=_plan.plan_forward)['name']


def fp8_calls() -> list[Fp8Call]:
    masked = [dataclasses.replace(case, causal=causal)
              for case in FP8_DENSE for causal in (False, True)]
    found = [Fp8Call(case) for case in masked + FP8_GENERAL + FP8_SOFTCAP]
    found += [Fp8Call(case, 'head', out_dtype='fp16') for case in masked + FP8_GENERAL]
    found += [Fp8Call(case, fp8_accum='promote') for case in [BATCH] + FP8_GENERAL + FP8_SOFTCAP]
    return [call._replace(case=dataclasses.replace(call.case, head_dim=head_dim,
                                                   head_dim_v=columns_v))
            for head_dim, columns_v in FP8_HEAD_DIMS for call in found]


def _for_other_kernels(dtype: str, kv8: bool) -> list[CacheCase]:
    """Decode kernels take few 16-bit queries without split_size."""
    if dtype == 'e4m3':
        return []
    split = [dataclasses.replace(case, num_splits=0, split_size=130) for case in ON_CACHE]
    return split + [dataclasses.replace(case, page_size=5, split_size=0) for case in ON_CACHE
                    if not case.batch_idx and not kv8]


def cache_calls() -> list[CacheCase]:
    """Every kernel on a cache; 16-bit keys are also rotated, some scales of e4m3 are by page."""
    dtypes = [('bf16', False), ('bf16', True), ('fp16', False), ('fp16', True), ('e4m3', False)]
    found = [dataclasses.replace(case, dtype=dtype, kv8=kv8, head_dim=head_dim,
                                 head_dim_v=columns_v, softcap=softcap,
                                 rotary=0.5 * bool(case.new and dtype != 'e4m3'),
                                 by_page=kv8 and case.page_size in (5, 256))
             for dtype, kv8 in dtypes for head_dim, columns_v in CACHE_HEAD_DIMS
             if dtype != 'e4m3' or head_dim <= 256
             for softcap in (0.0, 15.0) for case in ON_CACHE + _for_other_kernels(dtype, kv8)]
    return found + [dataclasses.replace(case, dtype=dtype, latent=True, heads=(heads, 1), kv8=kv8,
                                        blocks=4, head_dim=64, head_dim_v=512,
                                        rotary=0.5 * bool(case.new))
                    for dtype, kv8 in dtypes[:4] for heads in (5, 128) for case in ON_CACHE]


def kernel_on_cache(case: CacheCase) -> str:
    """The one that the planner takes on an H100."""
    given = case.arguments('cpu')
    names = {'q': 'q', 'k_cache': 'k', 'v_cache': 'v', 'page_table': 'page_table',
             'cu_seqlens_q': 'cu_seqlens_q', 'cache_batch_idx': 'cache_batch_idx', 'qv': 'qv'}
    tensors = {own: describe_sizes(given[name].shape, checks.dtype_name(given[name].dtype))
               for name, own in names.items() if given.get(name) is not None}
    longest = max(queries for queries, _ in case.lengths) if case.is_packed else 0
    return _plan.plan_cache(**tensors, softcap=case.softcap, split_size=case.split_size,
                            max_seqlen_q=longest, sm_count=132)['name']


def chosen_calls() -> list[ChosenCase]:
    """Keys that queries choose; with many queries latents have another kernel."""
    return [ChosenCase(**{'counts': True, 'wild': True, 'count': 70, 'dtype': dtype, **kind},
                       tokens=(queries, 1))
            for dtype in ('bf16', 'fp16') for queries in (3, 132)
            for kind in (LATENT, dict(LATENT, kv8=True), dict(head_dim=128, head_dim_v=128))]


def kernel_of_chosen(case: ChosenCase) -> str:
    """The one that the planner takes, on an H100 where there is no GPU."""
    return planning_cache.reasons_and_plan(case.arguments('cpu'))[1]['name']


def quantize_calls() -> list[Quantized]:
    """Every kernel; 248 columns are split into pieces of all widths but 256."""
    return [Quantized(dtype, head_dim, block, rotate, is_packed)
            for dtype, head_dim, block, rotate, is_packed in itertools.product(
                ('bf16', 'fp16', 'fp32'), (248, 256), QUANTIZED_BLOCKS, (False, True),
                (False, True))]


def run(case: Case, with_gradients: bool) -> None:
    tensors = case.tensors('cuda')
    for deterministic in (False, True) if with_gradients else (False,):
        out, lse = flash_attn3.flash_attn_func(*tensors, return_attn_probs=True, **case.arguments())
        if with_gradients:
            out, lse, dout, dlse = map(from_host, (out, lse, out, lse))
            torch.ops.flash_attn3.bwd(dout, dlse, *tensors, out, lse, case.softmax_scale,
                                      case.causal, deterministic)
    torch.cuda.synchronize()


def run_general(case: GeneralCase) -> None:
    tensors = case.tensors('cpu')
    q, k, v, s_aux = tensors.inputs
    inputs = type(tensors.inputs)(*(None if x is None else x.cuda() for x in (
        q, k, v, None if s_aux is None else s_aux.float())))
    tensors = tensors._replace(inputs=inputs, lists=case.lists('cuda'))
    out, lse, *_ = forward(case, tensors)
    if case.has_gradients:
        lists = {f'{name}_{x}': tensors.lists.get(f'{name}_{x}', default) for x in 'qk'
                 for name, default in (('cu_seqlens', None), ('seqused', None), ('max_seqlen', 0))}
        general = General(**lists, sinks=inputs.s_aux, causal=case.causal,
                          window_left=case.window[0], window_right=case.window[1],
                          attention_chunk=case.chunk, softcap=case.softcap)
        out, lse, dout, dlse = map(from_host, (out, lse, out, lse))
        for deterministic in (False, True):
            torch.ops.flash_attn3.bwd(dout, dlse, *inputs[:3], out, lse,
                                      *for_backward(general, deterministic))
    torch.cuda.synchronize()


def run_masked(case: MaskCase) -> None:
    tensors, general, mask = with_lists(case, 'cuda')
    execution = Execution(return_max_logits=case.max_logits)[:-1]
    out, lse, _ = torch.ops.flash_attn3.attend(*tensors, None, *general, *execution, *EightBit(),
                                               *mask)
    out, lse, dout, dlse = map(from_host, (out, lse, out, lse))
    for deterministic in (False, True):
        torch.ops.flash_attn3.bwd(dout, dlse, *tensors, out, lse,
                                  *for_backward(general, deterministic, mask))
    torch.cuda.synchronize()


def run_masked_fp8(case: MaskCase) -> None:
    mask_cases_fp8.run(case, 'cuda')
    torch.cuda.synchronize()


def plan_arguments(case: GeneralCase) -> tuple[list[tuple[int, ...]], dict]:
    """Shapes of q, k and v, and what both plans take beside the dtype."""
    options = dict(causal=case.causal, window_size=case.window, attention_chunk=case.chunk,
                   softcap=case.softcap)
    before = [(rows,) for rows in case.rows()]
    if case.is_packed:
        options |= dict(cu_seqlens_q=range(len(case.lengths) + 1), seqused_q=case.used)
    else:
        before = [(len(case.lengths), rows // len(case.lengths)) for rows in case.rows()]
    heads_q, heads_k = case.heads
    return [(*before[0], heads_q, case.head_dim), (*before[1], heads_k, case.head_dim),
            (*before[1], heads_k, case.columns_v)], options


def kernel_of(call: Fp8Call) -> str:
    case = call.case
    shapes, options = plan_arguments(case)
    return planning.plan(*shapes, dtype=E4M3, pack_gqa=case.pack_gqa, s_aux=case.sinks or None,
                         fp8_accum=call.fp8_accum, **options)['name']


def run_fp8(call: Fp8Call) -> None:
    """Quantised on the CPU, for the sake of initcheck."""
    case = call.case
    tensors = case.tensors('cpu')
    *wide, s_aux = tensors.inputs
    lists = tuple((tensors.lists.get(f'cu_seqlens_{x}'), tensors.lists.get(f'seqused_{x}'))
                  for x in 'qk')
    values, scales = quantize_all(*wide, call.granularity, is_rotated=True, lists=lists)
    inputs = type(tensors.inputs)(*(x.cuda() for x in values),
                                  None if s_aux is None else s_aux.float().cuda())
    forward(case, tensors._replace(inputs=inputs, lists=case.lists('cuda')),
            **descales(Scales(*(x.cuda() for x in scales))), fp8_accum=call.fp8_accum,
            out_dtype=DTYPES[call.out_dtype])
    torch.cuda.synchronize()


def run_cache(case: CacheCase) -> None:
    """Drawn on the CPU, for the sake of initcheck."""
    given = {name: x.cuda() if isinstance(x, torch.Tensor) else x
             for name, x in case.arguments('cpu').items()}
    cache_cases.call(case, given)
    torch.cuda.synchronize()


def run_chosen(case: ChosenCase) -> None:
    """As run_cache."""
    chosen_cases.call(case, {name: x.cuda() if isinstance(x, torch.Tensor) else x
                             for name, x in case.arguments('cpu').items()})
    torch.cuda.synchronize()


def run_quantize(call: Quantized) -> None:
    heads, group, options = QUANTIZED_HEADS, 3, {}
    shape = [QUANTIZED_BATCH, QUANTIZED_ROWS]
    if call.is_packed:
        lengths, used = ([rows for rows, _ in lists] for lists in (LENGTHS, USED))
        shape = [sum(lengths) + 3]
        options = {'cu_seqlens': starts(lengths, 'cuda'),
                   'seqused': torch.tensor(used, dtype=torch.int32).cuda()}
    x = torch.randn(*shape, heads, call.head_dim).to(DTYPES[call.dtype]).cuda()
    flash_attn3.quantize_fp8(x, rotate=call.rotate, block=call.block, group=group, **options)
    torch.cuda.synchronize()


def from_host(like: torch.Tensor) -> torch.Tensor:
    """Random numbers that initcheck takes for initialised: it sees copies from the host, but
    neither what the copy engine writes nor what a kernel does that the filter skips.
    """
    return torch.randn(like.shape, dtype=like.dtype).cuda()


def run_all(what: list[tuple], run_one: Callable) -> int:
    """How many of these calls there are kernels for."""
    built = [(case, kind) for case, kind in what if not kind.missing_variants()]
    for case, kind in built:
        run_one(case, kind)
    return len(built)


def run_each(calls: list, run_one: Callable) -> int:
    for call in calls:
        run_one(call)
    return len(calls)


def main() -> None:
    count = run_all(calls(), lambda case, kind: run(case, kind in GRADIENT_KINDS))
    count += run_all(general_calls(), lambda case, kind: run_general(case))
    built = flash_attn3.built_variants()
    count += run_each([case for case in mask_calls() if kernels_of_mask(case) <= set(built)],
                      run_masked)
    if '--filled' in sys.argv:    # these are drawn on the GPU
        count += run_each([case for case in fp8_mask_calls() if kernel_of_fp8_mask(case) in built],
                          run_masked_fp8)
    count += run_each([call for call in fp8_calls() if kernel_of(call) in built], run_fp8)
    count += run_each([case for case in cache_calls() if kernel_on_cache(case) in built], run_cache)
    count += run_each([case for case in chosen_calls() if kernel_of_chosen(case) in built],
                      run_chosen)
    quantized = [call for call in quantize_calls() if '--filled' in sys.argv or not call.is_filled]
    count += run_each(quantized, run_quantize)
    print(f'{count} calls on {torch.cuda.get_device_name()}')


if __name__ == '__main__':
    main()
