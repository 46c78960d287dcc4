"""Gradients of a small transformer in the settings of a training run: autocast, checkpointing,
torch.compile, DDP and FSDP2. (tests/cpu has the same of one layer, on CPU tensors.)

What has to compute the same again gives the same bits, with deterministic=True. What may choose
other kernels around the attention is held to the bar of tests/support/compare.py: against float64,
with the errors of the same model with plain attention.
"""
from __future__ import annotations

import copy
import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts)

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func

from tests.support import compare, plain
from tests.support.cases import GRADIENT_KINDS

OPS = torch.ops.flash_attn3
WIDTH, HEADS_Q, HEADS_K, LAYERS = 256, 4, 2, 2
every_kind = pytest.mark.parametrize('kind', [
    kind for kind in GRADIENT_KINDS
    if kind.head_dim in (64, 128) and kind.dtype == 'bf16' and kind.causal], ids=str)


# ---------------------------------------------------------------------------------------- the model
def packed_attention(qkv: Tensor) -> Tensor:
    return flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=HEADS_Q, deterministic=True)


def sliced_attention(qkv: Tensor) -> Tensor:
    return flash_attn_func(*slices(qkv), causal=True, deterministic=True)


def plain_attention(qkv: Tensor) -> Tensor:
    """In the dtype of qkv."""
    return plain.forward(*slices(qkv), qkv.size(-1) ** -0.5, True)[0]


def slices(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.split((HEADS_Q, HEADS_K, HEADS_K), dim=2)


every_function = pytest.mark.parametrize('attend', [packed_attention, sliced_attention],
                                         ids=['packed', 'sliced'])


class Layer(nn.Module):
    def __init__(self, head_dim: int, attend):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.project_in = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_K) * head_dim, bias=False)
        self.project_out = nn.Linear(HEADS_Q * head_dim, WIDTH, bias=False)
        self.head_dim = head_dim
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.project_in(self.norm(x)).unflatten(-1, (-1, self.head_dim))
        return x + self.project_out(self.attend(qkv).flatten(2))


class Model(nn.Module):
    """Layers with residuals; how one is called may be set."""

    def __init__(self, head_dim: int, attend):
        super().__init__()
        self.layers = nn.ModuleList(Layer(head_dim, attend) for _ in range(LAYERS))
        self.call = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def model_and_input(head_dim: int, attend, device: torch.device) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(head_dim, attend).to(device), torch.randn(2, 200, WIDTH, device=device)


def gradients(model: nn.Module, x: Tensor, autocast: bool = True) -> list[Tensor]:
    """Gradients of x and every parameter, float32; bfloat16 products and attention by autocast."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        out = model(x)
    out.square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def check_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        compare.check_equal(a, b, f'gradient {i}')


def check_bar(got: list[Tensor], model: Model, x: Tensor) -> None:
    """Against the same parameters and input in float64, with the errors of plain bfloat16."""
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.attend = plain_attention
    pt = gradients(plain, x)
    ref = gradients(plain.double(), x.double(), autocast=False)
    assert all(gradient.dtype == torch.float32 for gradient in got)
    for i, tensors in enumerate(zip(got, ref, pt, strict=True)):
        compare.check_close(*tensors, f'gradient {i}')


# ----------------------------------------------------------------------------------- in one process
@pytest.mark.smoke
@every_kind
@every_function
def test_autocast(attend, kind, device):
    """float32 inputs and parameters, 16-bit products; the same bits on every call."""
    model, x = model_and_input(kind.head_dim, attend, device)
    first = gradients(model, x)
    check_bar(first, model, x)
    check_bits(gradients(model, x), first)


@pytest.mark.smoke
@every_kind
def test_both_functions_give_the_same_gradients(kind, device):
    check_bits(*(gradients(*model_and_input(kind.head_dim, attend, device))
                 for attend in (packed_attention, sliced_attention)))


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    """A selective policy: our forward is kept (`_fwd` in eager, `fwd` when traced), no other op."""
    is_ours = op in (OPS._fwd.default, OPS.fwd.default)
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_attention)
every_checkpoint = pytest.mark.parametrize('options, calls', [
    ({}, 2), ({'context_fn': SELECTIVE}, 1)], ids=['full', 'selective'])


class ForwardCalls(TorchDispatchMode):
    """How often the forward of an attention was computed in eager mode."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is OPS._fwd.default
        return op(*args, **(kwargs or {}))


@every_kind
@every_function
@every_checkpoint
def test_checkpointing(options, calls, attend, kind, device):
    model, x = model_and_input(kind.head_dim, attend, device)
    expected = gradients(model, x)
    model.call = functools.partial(checkpoint, use_reentrant=False, **options)
    with ForwardCalls() as forward:
        got = gradients(model, x)
    check_bits(got, expected)
    assert forward.count == calls * LAYERS


@every_kind
@every_function
def test_compile(attend, kind, device, fresh_compiler):
    model, x = model_and_input(kind.head_dim, attend, device)
    compiled = torch.compile(model, fullgraph=True)
    first = gradients(compiled, x)
    check_bar(first, model, x)
    check_bits(gradients(compiled, x), first)


@every_kind
def test_selective_checkpointing_under_compile(kind, device, fresh_compiler):
    model, x = model_and_input(kind.head_dim, packed_attention, device)
    model.call = functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE)
    compiled = torch.compile(model, fullgraph=True)
    check_bar(gradients(compiled, x), model, x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gradients(compiled, x)
    names = [event.name for event in profiler.events()]
    assert names.count('flash_attn3::fwd') == names.count('flash_attn3::bwd') == LAYERS


# --------------------------------------------------------------------------------- data parallelism
def check_wrapped(_, rendezvous: str, head_dim: int, device: torch.device) -> None:
    """In a process of its own, the only one of its group."""
    backend = 'nccl' if device.type == 'cuda' else 'gloo'
    dist.init_process_group(backend, init_method=f'file://{rendezvous}', rank=0, world_size=1)
    model, x = model_and_input(head_dim, packed_attention, device)
    sharded = copy.deepcopy(model)
    expected = gradients(model, x)
    check_bits(gradients(DistributedDataParallel(model), x), expected)

    mesh = init_device_mesh(device.type, (1,))
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    input_gradient, *others = gradients(sharded, x)
    check_bar([input_gradient, *(gradient.full_tensor() for gradient in others)], model, x)
    dist.destroy_process_group()
    # After FSDP2 with gloo, torch 2.11 aborts one process in ten while the interpreter ends.
    os._exit(0)


@every_kind
def test_data_parallel_gradients(kind, device, tmp_path, monkeypatch):
    for backend in ('GLOO', 'NCCL'):
        monkeypatch.setenv(f'{backend}_SOCKET_IFNAME', 'lo')
    arguments = str(tmp_path / 'rendezvous'), kind.head_dim, device
    torch.multiprocessing.spawn(check_wrapped, arguments, nprocs=1)
