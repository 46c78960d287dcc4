"""Tensor and sequence parallel plans, DTensors, and sharded training with selective checkpointing:
two processes with gloo, values and gradients against one process on whole tensors.
"""
from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (DTensor, Partial, Placement, Replicate, Shard,
                                      distribute_tensor)
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts)

from flash_attn3 import (AttentionMask, flash_attn_completions_func, flash_attn_fp8_func,
                         flash_attn_func,
                         flash_attn_qkvpacked_func, flash_attn_varlen_func,
                         flash_attn_with_kvcache)

from tests.cpu.layer import Layer
from tests.cpu.two_processes import COUNT, Pair

pytestmark = pytest.mark.slow

R, B, H = Replicate(), Shard(0), Shard(2)    # dense tensors: by batch, by heads
STARTS = torch.tensor([0, 3, 3, 11], dtype=torch.int32)


@pytest.fixture(scope='module')
def pair():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('GLOO_SOCKET_IFNAME', 'lo')
        pair = Pair()
        yield pair
        pair.close()


# ---------------------------------------------------------------------------------- DTensor inputs
def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (flash_attn_func(q, k, v, causal=True),)


def with_features(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_func(q, k, v, window_size=(3, 1), softcap=5.0, s_aux=s_aux,
                           return_attn_probs=True, return_max_logits=True)


def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor = STARTS) -> tuple[Tensor, ...]:
    return flash_attn_varlen_func(q, k, v, starts, starts, 8, 8, causal=True,
                                  return_attn_probs=True)


def five(qkv: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, return_attn_probs=True)


def four(qkv: Tensor) -> tuple[Tensor, ...]:
    return (flash_attn_qkvpacked_func(qkv, num_heads_q=4),)


def with_mask(make, is_packed: bool = False):
    """Attention with a mask that make() makes, which all processes have whole."""
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        function, lengths = flash_attn_func, {}
        if is_packed:
            function, lengths = flash_attn_varlen_func, dict(
                cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=8, max_seqlen_k=8)
        out, lse = function(q, k, v, **lengths, mask=make(), return_attn_probs=True)
        return out, lse.exp()
    return call


def intervals_by_batch() -> AttentionMask:
    ends = torch.arange(1, 16, dtype=torch.int32).view(3, 5, 1, 1) % 8
    return AttentionMask.from_intervals(torch.cat([ends.div(2, rounding_mode='floor'), ends], -1))


def blocks_by(heads: int, batch: int = 3) -> AttentionMask:
    shown = torch.arange(batch * heads).view(batch, heads, 1, 1) % 5 != 1
    return AttentionMask.from_blocks(shown, 64, 128)


def documents_by_batch() -> AttentionMask:
    ends = [[0, 2, 5], [1, 4, 5], [0, 0, 3]]
    return AttentionMask.documents(torch.tensor(ends, dtype=torch.int32), 5)


def prefixes() -> AttentionMask:
    return AttentionMask.prefix_lm(torch.tensor([2, 0, 4], dtype=torch.int32), 11, STARTS)


SIZES = {'q': (3, 5, 4, 16), 'k': (3, 7, 2, 16), 'v': (3, 7, 2, 8), 's_aux': (4,)}
PACKED = {'q': (11, 4, 16), 'k': (11, 2, 16), 'v': (11, 2, 16)}
CALLS = {    # the function, sizes of its tensors, their placements on the axes of a mesh
    'batch': (dense, SIZES, {'q': [B], 'k': [B], 'v': [B]}),    # in shards of 2 and 1
    'heads': (dense, SIZES, {'q': [H], 'k': [H], 'v': [H]}),
    'heads, k and v in all': (dense, SIZES, {'q': [H], 'k': [R], 'v': [R]}),
    'q in all': (dense, SIZES, {'q': [R], 'k': [H], 'v': [H]}),
    'all in all': (dense, SIZES, {'q': [R], 'k': [R], 'v': [R]}),
    'a mesh of two axes': (dense, SIZES, {'q': [B, H], 'k': [B, H], 'v': [B, R]}),
    'features, batch': (with_features, SIZES, {'q': [B], 'k': [B], 'v': [B], 's_aux': [R]}),
    'features, heads': (with_features, SIZES, {'q': [H], 'k': [H], 'v': [H], 's_aux': [Shard(0)]}),
    'packed, heads': (packed, PACKED, {'q': [Shard(1)], 'k': [Shard(1)], 'v': [Shard(1)]}),
    'packed, starts in all': (packed, PACKED, {'q': [R], 'k': [R], 'v': [R], 'starts': [R]}),
    'qkv, batch': (five, {'qkv': (2, 5, 3, 4, 16)}, {'qkv': [B]}),
    'qkv, heads': (five, {'qkv': (2, 5, 3, 4, 16)}, {'qkv': [Shard(3)]}),
    'qkv of GQA, batch': (four, {'qkv': (3, 5, 8, 16)}, {'qkv': [B]}),
}

SQUARE = {'q': (3, 5, 4, 16), 'k': (3, 5, 2, 16), 'v': (3, 5, 2, 8)}
MASKS = {'intervals': intervals_by_batch, 'query heads': lambda: blocks_by(4),
         'KV heads': lambda: blocks_by(2, 1), 'documents': documents_by_batch,
         'both': lambda: blocks_by(4, 1) & intervals_by_batch()}
for _name, _make in MASKS.items():
    for _way, _placements in (('batch', [B]), ('heads', [H]), ('two axes', [B, H])):
        CALLS[f'mask of {_name}, {_way}'] = (
            with_mask(_make), SQUARE if _name == 'documents' else SIZES,
            dict.fromkeys('qkv', _placements))
CALLS['mask, packed, heads'] = (with_mask(prefixes, is_packed=True), PACKED,
                                dict.fromkeys('qkv', [Shard(1)]))


def results_and_gradients(function, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Whole ones: those of DTensors are gathered."""
    def whole(x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    results = [whole(x) for x in function(**tensors)]
    loss = sum((x * torch.arange(x.numel()).view_as(x).sin()).sum()
               for x in results if x.requires_grad)
    leaves = [x for x in tensors.values() if x.requires_grad]
    return [*results, *map(whole, torch.autograd.grad(loss, leaves))]


def check_call(rank: int, name: str, mesh_shape: tuple[int, ...]) -> None:
    function, sizes, placements = CALLS[name]
    mesh = init_device_mesh('cpu', mesh_shape)
    tensors = {key: torch.randn(sizes[key], dtype=torch.float64) if key in sizes else STARTS
               for key in placements}
    sharded = {key: distribute_tensor(x.clone(), mesh, placements[key])
               for key, x in tensors.items()}
    for group in (tensors, sharded):
        for x in group.values():
            x.requires_grad_(x.is_floating_point())
    local = function(**sharded)[0]
    assert local.placements == next(
        (tuple(p) for p in placements.values() if any(not x.is_replicate() for x in p)),
        (R,) * len(mesh_shape)) or 'qkv' in placements
    torch.testing.assert_close(results_and_gradients(function, sharded),
                               results_and_gradients(function, tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', CALLS)
def test_dtensors(name, pair):
    """Results and the gradients of all inputs, put together, are those of whole tensors."""
    axes = len(next(iter(CALLS[name][2].values())))
    for mesh_shape in [(COUNT,)] if axes == 1 else [(COUNT, 1), (1, COUNT)]:
        pair.run(check_call, name, mesh_shape)


def check_no_communication(rank: int) -> None:
    """By the debugger of torch."""
    from torch.distributed.tensor.debug import CommDebugMode
    mesh = init_device_mesh('cpu', (COUNT,))
    q, k, v = (distribute_tensor(torch.randn(SIZES[name]), mesh, [H]) for name in 'qkv')
    with CommDebugMode() as communication:
        flash_attn_func(q, k, v)
        flash_attn_func(q, k, v, mask=blocks_by(4))
    assert communication.get_total_counts() == 0


def test_the_forward_communicates_nothing(pair):
    pair.run(check_no_communication)


def check_compiled(rank: int) -> None:
    mesh = init_device_mesh('cpu', (COUNT,))
    tensors = [torch.randn(SIZES[name], dtype=torch.float64, requires_grad=True) for name in 'qkv']
    q, k, v = (distribute_tensor(x.detach(), mesh, [H]).requires_grad_() for x in tensors)
    mask = blocks_by(4) & intervals_by_batch()
    for function in (dense, lambda q, k, v: (flash_attn_func(q, k, v, mask=mask),)):
        compiled = torch.compile(function, backend='aot_eager', fullgraph=True)
        torch.testing.assert_close(
            results_and_gradients(compiled, dict(q=q, k=k, v=v)),
            results_and_gradients(function, dict(zip('qkv', tensors))), rtol=1e-12, atol=1e-12)


def test_dtensors_under_compile(pair):
    """In one graph."""
    pair.run(check_compiled)


# ------------------------------------------------------------------------------------------ errors
def dtensors(*placements: Placement, sizes: tuple[str, ...] = ('q', 'k', 'v')) -> list[DTensor]:
    mesh = init_device_mesh('cpu', (COUNT,))
    return [DTensor.from_local(torch.randn(SIZES[name]), mesh, [placement], run_check=False)
            for name, placement in zip(sizes, placements)]


def plain_k(q: DTensor, k: DTensor, v: DTensor) -> Tensor:
    return flash_attn_func(q, k.to_local(), v)


def other_mesh(q: DTensor, k: DTensor, v: DTensor) -> Tensor:
    mesh = init_device_mesh('cpu', (1, COUNT))
    return flash_attn_func(q, k, DTensor.from_local(v.to_local(), mesh, [H, H], run_check=False))


def other_mask(*tensors: DTensor) -> Tensor:
    """For other heads, although those of a shard would fit."""
    return flash_attn_func(*tensors, mask=blocks_by(2))


def one_kv_head(q: DTensor, k: DTensor, v: DTensor) -> Tensor:
    return flash_attn_func(q, k[:, :, :1], v[:, :, :1])


def with_out(q: DTensor, k: DTensor, v: DTensor) -> Tensor:
    return flash_attn_func(q, k, v, out=q)


def packed_heads(qkv: DTensor, *_) -> Tensor:
    return flash_attn_qkvpacked_func(qkv, num_heads_q=2)


def packed_batch(*tensors: DTensor) -> Tensor:
    return flash_attn_varlen_func(*(x[0] for x in tensors), STARTS, STARTS, 8, 8)


def completions(*tensors: DTensor) -> Tensor:
    return flash_attn_completions_func(*tensors, STARTS, STARTS[:2])


ERRORS = {    # the call, the placements of q, k and v, the error
    'queries': (flash_attn_func, [Shard(1), R, R],
                r'q sharded by batch or heads .*got S.*hint: q.redistribute.*merge_states'),
    'head dim': (flash_attn_func, [Shard(3), R, R], 'q sharded by batch or heads'),
    'sums': (flash_attn_func, [Partial(), R, R], 'q sharded by batch or heads .*got P'),
    'two kinds': (flash_attn_func, [B, H, H], 'k sharded by batch or heads like the other'),
    'plain k': (plain_k, [B, B, B], 'k to be a DTensor like q, got a plain tensor; hint: .*from'),
    'other mesh': (other_mesh, [H, H, H], 'v to be on the mesh of q'),
    'other mask': (other_mask, [H, H, H], 'mask for 8 heads of q, 4 heads of k, or all, got 2'),
    'one KV head': (one_kv_head, [H, R, R], 'the heads of k to be divisible by 2, .*got 1; hint'),
    'out': (with_out, [H, H, H], 'out to be None with DTensors'),
    'heads of GQA in one': (packed_heads, [H, R, R], 'qkv of 4 dimensions .*hint: shard q'),
    'packed rows': (packed_batch, [Shard(1), R, R], 'q sharded by heads like'),
    'a cache': (flash_attn_with_kvcache, [H, H, H], 'plain tensors, got a DTensor; hint: .*local'),
    'completions': (completions, [H, H, H], 'plain tensors, got a DTensor; hint: .*local_map'),
    'FP8': (flash_attn_fp8_func, [H, H, H], 'plain tensors, got a DTensor; hint: .*local_map')}


def check_error(rank: int, name: str) -> None:
    function, placements, text = ERRORS[name]
    with pytest.raises((RuntimeError, NotImplementedError), match=r'flash_attn3\..*' + text):
        function(*dtensors(*placements))


@pytest.mark.parametrize('name', ERRORS)
def test_what_is_refused(name, pair):
    """With an error that names the tensor and says what to do."""
    pair.run(check_error, name)


def check_local_map(rank: int) -> None:
    """What the errors of other functions advise: here decode on a cache, by heads."""
    mesh = init_device_mesh('cpu', (COUNT,))
    q, k, v = (torch.randn(3, rows, heads, 16) for rows, heads in ((1, 4), (9, 2), (9, 2)))
    sharded = [distribute_tensor(x, mesh, [H]) for x in (q, k, v)]
    decode = functools.partial(flash_attn_with_kvcache, cache_seqlens=6)
    mapped = local_map(decode, out_placements=[H], in_placements=([H],) * 3, device_mesh=mesh)
    torch.testing.assert_close(mapped(*sharded).full_tensor(), flash_attn_func(q, k[:, :6],
                                                                               v[:, :6]))


def test_local_map_serves_the_other_functions(pair):
    pair.run(check_local_map)


# ----------------------------------------------------------------------------------- torch's plans
class Block(nn.Module):
    """A norm, projections and attention; the number of heads is that of the tensors that come."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.q, self.k, self.v = (nn.Linear(24, heads * 16) for heads in (4, 2, 2))
        self.out = nn.Linear(4 * 16, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (project(x).unflatten(-1, (-1, 16)) for project in (self.q, self.k, self.v))
        return self.out(flash_attn_func(q, k, v, causal=True).flatten(2))


def columns(**options) -> dict:
    return {name: ColwiseParallel(**options) for name in 'qkv'}


PLANS = {
    'tensor parallel': {**columns(), 'out': RowwiseParallel()},
    'tensor parallel, DTensors': {**columns(use_local_output=False), 'out': RowwiseParallel()},
    'sequence parallel': {
        'norm': SequenceParallel(), **columns(input_layouts=Shard(1), use_local_output=False),
        'out': RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}}


def losses_and_gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    loss = block(x).square().mean()
    loss.backward()
    return [x.full_tensor() if isinstance(x, DTensor) else x
            for x in (loss, *(p.grad for p in block.parameters()))]


def check_plan(rank: int, name: str) -> None:
    mesh = init_device_mesh('cpu', (COUNT,))
    x, block, sharded = torch.randn(2, 6, 24).double(), Block().double(), Block().double()
    sharded.load_state_dict(block.state_dict())
    parallelize_module(sharded, mesh, PLANS[name])
    given = distribute_tensor(x, mesh, [Shard(1)]) if 'norm' in PLANS[name] else x
    torch.testing.assert_close(losses_and_gradients(sharded, given), losses_and_gradients(block, x))


@pytest.mark.parametrize('name', PLANS)
def test_parallel_plans(name, pair):
    """The gradients of all weights are those of one process."""
    pair.run(check_plan, name)


# ----------------------------------------------------------------------- FSDP2 with checkpointing
def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    is_ours = op == torch.ops.flash_attn3._fwd.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_attention)


class Checkpointed(nn.Module):
    """A layer whose activations are computed again, all or all but those of attention."""

    def __init__(self, selective: bool):
        super().__init__()
        self.layer = Layer()
        self.context_fn = SELECTIVE if selective else (
            lambda: (contextlib.nullcontext(), contextlib.nullcontext()))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=self.context_fn)


def check_fully_sharded(rank: int, selective: bool) -> None:
    layer, sharded = Layer().double(), Checkpointed(selective).double()
    sharded.layer.load_state_dict(layer.state_dict())
    fully_shard(sharded.layer, mesh=init_device_mesh('cpu', (COUNT,)))
    x = torch.randn(4, 9, 24).double()
    layer(x).square().mean().backward()
    sharded(x[2 * rank:][:2]).square().mean().backward()
    torch.testing.assert_close([p.grad.full_tensor() for p in sharded.parameters()],
                               [p.grad for p in layer.parameters()])


@pytest.mark.parametrize('selective', [False, True])
def test_fully_sharded_with_checkpointing(selective, pair):
    """Half a batch in each process: the averaged gradients are those of the batch."""
    pair.run(check_fully_sharded, selective)
