"""How long attention takes on a mesh of GPUs, computed from its plan: no GPU, no measurement.

A step of a ring takes as long as its attention or as the messages next to it, whichever is longer;
what nothing hides is added. FLOPs and bytes are those of the plan of each rank (tiles.py); the
slowest rank counts. `python -m flash_attn3.explain --ring 8` prints it.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from flash_attn3.distributed.tiles import Layout, Plan, Tile, layout_of, plan_of

# Two H100 SXM5 of a host, 2026-11-26: flash_attn_func at 32k and 128k tokens, head dim 128, causal;
# messages of 134 MB, of copy engines and of NCCL. What a byte between two hosts takes: 400 Gbit/s a
# GPU, no measurement.
FORWARD_TFLOPS, BACKWARD_TFLOPS = 680.0, 580.0
COPY_GB_S, HOST_GB_S, NETWORK_GB_S = 385.0, 255.0, 45.0
# A message of NCCL slows the attention next to it by half of its time: its multiprocessors are
# taken.
SLOWED_BY = 0.5
MEMORY_GB_S = 1500.0    # merges and sums
STEP_MS = 0.11          # barriers, launches and small kernels of a step; fits both records
GPUS_A_HOST = 8


class Mesh(NamedTuple):
    """GPUs of a ring and of ulysses, and what they can do. link_gb_s None: that of a host for up to
    8 GPUs, else of the network.
    """
    ring: int
    ulysses: int = 1
    forward_tflops: float = FORWARD_TFLOPS
    backward_tflops: float = BACKWARD_TFLOPS
    link_gb_s: float | None = None

    @property
    def has_copies(self) -> bool:
        """Copy engines carry the keys, not NCCL."""
        return self.link_gb_s is None and self.ring * self.ulysses <= GPUS_A_HOST

    @property
    def ring_gb_s(self) -> float:
        """What NCCL moves."""
        return self.link_gb_s or (HOST_GB_S if self.ring * self.ulysses <= GPUS_A_HOST
                                  else NETWORK_GB_S)


class Problem(NamedTuple):
    """Self-attention in 16 bits of a whole sequence; window as in `plan_of`, causal is (-1, 0)."""
    seqlen: int
    heads: int = 16
    heads_k: int = 16
    head_dim: int = 128
    batch: int = 1
    window: tuple[int, int] = (-1, 0)


def pairs_of(tile: Tile) -> int:
    """Pairs of a query and a key that it sees."""
    def triangle(x: int) -> int:
        return x * (x + 1) // 2 if x > 0 else 0
    rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    after = 0 if tile.right == -1 else triangle(rows - 1 - tile.right)
    before = 0 if tile.left == -1 else (
        triangle(keys - 1 - tile.left) - triangle(keys - rows - 1 - tile.left))
    return rows * keys - after - before


def estimate(problem: Problem, mesh: Mesh) -> dict[str, float]:
    """What a call takes, in ms, and its parts. The ranks of ulysses divide the heads, or KV heads
    repeated until they do.

    Returns:
        forward_ms, backward_ms: of the slowest rank. forward_share, backward_share: of the time of
        one GPU. flops_balance: mean FLOPs of a rank over the most. keys_mb: what a rank of the ring
        receives of keys and values in the forward, in MB; exchange_mb: of the exchanges of ulysses.
    """
    layout = layout_of(problem.seqlen, mesh.ring, mesh.ulysses)
    plans = [plan_of(layout, rank, problem.window) for rank in range(mesh.ring)]
    problem = problem._replace(heads_k=math.lcm(problem.heads_k, mesh.ulysses))
    own = problem._replace(heads=problem.heads // mesh.ulysses,
                           heads_k=problem.heads_k // mesh.ulysses)
    times = [_times(plan, own, layout, mesh) for plan in plans]
    exchange_mb = _exchange_mb(problem, layout, mesh)
    exchange_ms = exchange_mb / HOST_GB_S
    (one_plan,) = [plan_of(layout_of(problem.seqlen, 1), 0, problem.window)]
    flops = [sum(_flops(plan, own)) for plan in plans]
    forward = max(time[0] for time in times) + exchange_ms
    backward = max(time[1] for time in times) + 2 * exchange_ms
    one = sum(_flops(one_plan, problem)) / 1e9
    return {'forward_ms': forward, 'backward_ms': backward,
            'forward_share': forward / (one / mesh.forward_tflops),
            'backward_share': backward / (2.5 * one / mesh.backward_tflops),
            'flops_balance': sum(flops) / len(flops) / max(flops) if max(flops) else 1.0,
            'keys_mb': max(sum(_keys_mb(plan, own)) for plan in plans),
            'exchange_mb': exchange_mb}


def _flops(plan: Plan, problem: Problem) -> list[float]:
    """The forward's, step by step."""
    per_pair = 4 * problem.batch * problem.heads * problem.head_dim
    return [per_pair * sum(pairs_of(tile) for call in step.calls for tile in call.tiles)
            for step in plan.steps]


def _keys_mb(plan: Plan, problem: Problem) -> list[float]:
    """Keys and values that come for each step, or their gradients that go: in 16 bits."""
    per_row = 4 * problem.batch * problem.heads_k * problem.head_dim / 1e6
    return [0.0] + [per_row * (step.keys[1] - step.keys[0]) if step.keys else 0.0
                    for step in plan.steps[1:]]


def _times(plan: Plan, problem: Problem, layout: Layout, mesh: Mesh) -> tuple[float, float]:
    """The forward and the backward of a rank, ms."""
    flops, steps = _flops(plan, problem), len(plan.steps)
    keys_mb = [*_keys_mb(plan, problem), 0.0]
    results_mb = 2 * problem.batch * problem.heads * problem.head_dim * layout.rows / 1e6
    forward = backward = (steps - 1) * STEP_MS
    for step in range(steps):
        ahead = keys_mb[step + 1] / (COPY_GB_S if mesh.has_copies else mesh.ring_gb_s)
        slows = 0.0 if mesh.has_copies else SLOWED_BY * ahead
        behind = keys_mb[step - 1] / mesh.ring_gb_s if step > 1 else 0.0    # gradients
        forward += max(flops[step] / mesh.forward_tflops / 1e9 + slows, ahead)
        attention = 2.5 * flops[step] / mesh.backward_tflops / 1e9
        backward += max(attention + slows + SLOWED_BY * behind, ahead + behind)
    if steps > 1:
        forward += results_mb * (steps + 1) / MEMORY_GB_S
        sums_mb = results_mb * (1 + 2 * problem.heads_k / problem.heads)    # dq, dk and dv
        sums_mb *= 2 if steps == 2 else 5 * steps    # two parts: in 16 bits; more: in 32
        backward += keys_mb[-2] / mesh.ring_gb_s + sums_mb / MEMORY_GB_S
    return forward, backward


def _exchange_mb(problem: Problem, layout: Layout, mesh: Mesh) -> float:
    """What a rank sends for q, k, v and out, but for its own part."""
    rows = layout.rows / mesh.ulysses
    heads = 2 * (problem.heads + problem.heads_k)
    return (2 * problem.batch * rows * heads * problem.head_dim / 1e6
            * (mesh.ulysses - 1) / mesh.ulysses)
