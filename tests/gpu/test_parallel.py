"""Parallel training on two GPUs with NCCL: DTensors, torch's plans, FSDP2 with selective
checkpointing and DDP, against one GPU. Bar: at most twice its errors. tests/cpu/test_parallel.py
has every placement, on gloo.
"""
from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts)

from flash_attn3 import AttentionMask, flash_attn_func, flash_attn_varlen_func

from tests.cpu.two_processes import COUNT, own_device, pair_on
from tests.support import compare

STARTS = 0, 3, 3, 150, 400
WIDTH, HEADS_Q, HEADS_K, DIM = 256, 4, 2, 64


@pytest.fixture(scope='module')
def pair(request):
    yield from pair_on(request.config.getoption('--device'))


def own_mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (COUNT,))


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_all(got: list[Tensor], one: list[Tensor], ref: list[Tensor], what: str) -> None:
    """one: of one GPU; ref: in float64."""
    assert len(got) == len(one) == len(ref)
    for number, (x, y, z) in enumerate(zip(got, one, ref)):
        compare.check_close(x, z.to(x.device), y, f'{what} {number}')


# ----------------------------------------------------------------------------------------- DTensors
def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    device = q.to_local().device if isinstance(q, DTensor) else q.device
    starts = torch.tensor(STARTS, dtype=torch.int32, device=device)
    return flash_attn_varlen_func(q, k, v, starts, starts, 400, 400, window_size=(60, 0),
                                  return_attn_probs=True)


def with_mask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """By head and by sequence; every process has the whole mask."""
    device = q.to_local().device if isinstance(q, DTensor) else q.device
    rows, blocks = q.size(1), -(-q.size(1) // 64)
    prefix = torch.arange(q.size(0), dtype=torch.int32, device=device) * 40
    shown = torch.arange(HEADS_Q * blocks ** 2, device=device).view(HEADS_Q, blocks, blocks)
    mask = AttentionMask.prefix_lm(prefix, rows) & AttentionMask.from_blocks(
        (shown % 3 != 1) | torch.eye(blocks, dtype=torch.bool, device=device), 64, 64)
    return flash_attn_func(q, k, v, mask=mask, return_attn_probs=True)


CALLS = {    # the function, the sizes before the heads, the placement of q and that of k and v
    'batch': (dense, (4, 200), Shard(0), Shard(0)),
    'heads': (dense, (4, 200), Shard(2), Shard(2)),
    'heads, k and v in all': (dense, (4, 200), Shard(2), Replicate()),
    'mask, batch': (with_mask, (4, 200), Shard(0), Shard(0)),
    'mask, heads': (with_mask, (4, 200), Shard(2), Shard(2)),
    'packed, heads': (packed, (STARTS[-1],), Shard(1), Shard(1))}


def results_and_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    out, lse = function(*tensors)
    loss = out.square().sum()
    return [whole(x) for x in (out, lse, *torch.autograd.grad(loss, tensors))]


def check_dtensors(rank: int, name: str) -> None:
    function, sizes, place_q, place_k = CALLS[name]
    device = own_device(rank)
    mesh = own_mesh(device)
    tensors = [torch.randn(*sizes, heads, DIM, device=device, dtype=torch.bfloat16)
               for heads in (HEADS_Q, HEADS_K, HEADS_K)]
    for x in tensors:    # ranks have generators of their own
        dist.broadcast(x, 0)
    sharded = [distribute_tensor(x.clone(), mesh, [place]).requires_grad_()
               for x, place in zip(tensors, (place_q, place_k, place_k))]
    ref = [x.double().cpu().requires_grad_() for x in tensors]
    one = [x.requires_grad_() for x in tensors]
    check_all(*(results_and_gradients(function, x) for x in (sharded, one, ref)), name)


@pytest.mark.parametrize('name', CALLS)
def test_dtensors(name, pair):
    pair.run(check_dtensors, name)


# ------------------------------------------------------------------------------------ whole modules
class Block(nn.Module):
    """A norm, projections and attention; the number of heads is that of the tensors that come."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * DIM)
                                  for heads in (HEADS_Q, HEADS_K, HEADS_K))
        self.out = nn.Linear(HEADS_Q * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (project(x).unflatten(-1, (-1, DIM)) for project in (self.q, self.k, self.v))
        return x + self.out(flash_attn_func(q, k, v, causal=True).flatten(2))


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    is_ours = op == torch.ops.flash_attn3._fwd.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """Its activations are computed again, all but those of attention."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


def sequence_parallel(block: Block, mesh: DeviceMesh) -> nn.Module:
    columns = {name: ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
               for name in 'qkv'}
    plan = {'norm': SequenceParallel(), **columns,
            'out': RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    return parallelize_module(block, mesh, plan)


def sharded(block: Block, mesh: DeviceMesh) -> nn.Module:
    fully_shard(block, mesh=mesh)
    return Checkpointed(block)


def replicated(block: Block, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(block)


WAYS = {'sequence parallel': sequence_parallel, 'FSDP2': sharded, 'DDP': replicated}


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    out = module(x)
    (out * out).mean().backward()
    return [whole(p.grad) for p in module.parameters()]


def check_module(rank: int, name: str) -> None:
    device = own_device(rank)
    mesh = own_mesh(device)
    block = Block().to(device, torch.bfloat16)
    x = torch.randn(4, 200, WIDTH, device=device, dtype=torch.bfloat16)
    for tensor in (x, *block.parameters()):
        dist.broadcast(tensor.detach(), 0)
    ref = copy.deepcopy(block).cpu().double()
    module = WAYS[name](copy.deepcopy(block), mesh)
    half = x.size(0) // COUNT
    given = distribute_tensor(x, mesh, [Shard(1)]) if name == 'sequence parallel' else \
        x[half * rank:][:half]
    check_all(gradients(module, given), gradients(block, x), gradients(ref, x.cpu().double()), name)


@pytest.mark.parametrize('name', WAYS)
def test_modules(name, pair):
    """The gradients of all weights; FSDP2 and DDP have half a batch in each process."""
    pair.run(check_module, name)
