"""Deterministic mode of the backward: the turns in which CTAs add to dQ, played through with the
kernel's own code, and how a call asks for it.
"""
from collections import Counter, defaultdict, deque
import random

from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func

from tests import _host
from tests.cpu.test_backward_work import each_variant, work_of

OPS = torch.ops.flash_attn3


# ------------------------------------------------------------------------------------------ turns
def adds_of(name, sizes, **device):
    """For every CTA, in the order of work: the blocks of dQ that it adds to, and its turn there."""
    plan, ctas = work_of(name, sizes, deterministic=True, **device)
    _, seqlen_q, seqlen_k, _, _ = sizes
    tile_m, tile_n = plan['tile_m'], plan['tile_n']

    def turn(key_begin, m):
        last = _host.last_key_tile(m, seqlen_q, seqlen_k, tile_m, tile_n, plan['causal'])
        return last - key_begin // tile_n

    return [[(place, turn(key_begin, m)) for _, m, _, place in steps]
            for (_, _, _, key_begin, _), steps in ctas]


def play(work, residents, choose):
    """Runs the CTAs in their order, at most `residents` at a time; one step of one CTA at a time.

    choose picks one of those that can go on. Gives the turns of every block as they were taken.
    """
    flags, taken = Counter(), defaultdict(list)
    waiting, running = deque(map(deque, work)), []
    while waiting or running:
        while waiting and len(running) < residents:
            running.append(waiting.popleft())
        ready = [adds for adds in running if flags[adds[0][0]] == adds[0][1]]
        assert ready, 'every CTA on the GPU waits for one that is not'
        chosen = choose(ready)
        place, turn = chosen.popleft()
        flags[place] += 1
        taken[place].append(turn)
        running = [adds for adds in running if adds]
    return taken


sizes = st.tuples(st.integers(1, 2), st.integers(1, 500), st.integers(1, 1000), st.integers(1, 2),
                  st.integers(1, 2)).map(lambda x: (*x[:3], x[3] * x[4], x[4]))
SQUARE = 2, 1024, 1024, 4, 2


@each_variant
@given(sizes, st.integers(1, 40), st.integers(0, 1 << 22), st.integers(1, 20), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_no_cta_waits_forever(name, sizes, sm_count, l2_bytes, residents, seed):
    """However few CTAs run at a time, and however fast each is."""
    work = adds_of(name, sizes, sm_count=sm_count, l2_bytes=l2_bytes)
    taken = play(work, residents, random.Random(seed).choice)
    for turns in taken.values():
        assert turns == list(range(len(turns)))


@each_variant
@pytest.mark.parametrize('pick', [0, -1], ids=['first', 'last'])
@pytest.mark.parametrize('residents', [1, 2, 5, 1000])
def test_one_cta_runs_ahead(name, residents, pick):
    """The one that came first, or last."""
    taken = play(adds_of(name, SQUARE), residents, lambda ready: ready[pick])
    assert all(turns == list(range(len(turns))) for turns in taken.values())


@each_variant
@given(sizes, st.integers(1, 140), st.integers(0, 1 << 22))
@settings(max_examples=40, deadline=None)
def test_turns_count_up_in_the_order_of_work(name, sizes, sm_count, l2_bytes):
    """From 0, without a gap, for every block: a CTA waits for earlier ones only, and for all."""
    turns = defaultdict(list)
    for adds in adds_of(name, sizes, sm_count=sm_count, l2_bytes=l2_bytes):
        for place, turn in adds:
            turns[place].append(turn)
    assert all(of_block == list(range(len(of_block))) for of_block in turns.values())


def ticks(work, residents):
    """How long the CTAs take in all, and how long each waits, when a step takes a tick and the next
    CTA can add one tick after the one before.
    """
    flags, waits = Counter(), [0] * len(work)
    waiting, running = deque(enumerate(map(deque, work))), []
    now = 0
    while waiting or running:
        while waiting and len(running) < residents:
            running.append(waiting.popleft())
        ready = [flags[adds[0][0]] == adds[0][1] for _, adds in running]
        for (cta, adds), is_ready in zip(running, ready):
            if is_ready:
                flags[adds.popleft()[0]] += 1
            else:
                waits[cta] += 1
        running = [(cta, adds) for cta, adds in running if adds]
        now += 1
    return now, waits


@each_variant
def test_waiting_is_rare(name):
    """Causal: a tile comes to the queries of the next one after that one did, and never waits.
    Full: CTAs that start together line up once, as many as have the same head.
    """
    sizes, residents = (1, 2048, 2048, 8, 8), 32
    device = {'sm_count': residents, 'l2_bytes': 1 << 30}    # one section
    work = adds_of(name, sizes, **device)
    plan, _ = work_of(name, sizes, deterministic=True, **device)
    taken, waits = ticks(work, residents)
    if plan['causal']:
        assert not any(waits)
    else:
        together = -(-residents // plan['section_pairs'])
        assert taken <= sum(map(len, work)) // residents + together + plan['m_tiles']
        assert max(waits) < together


# -------------------------------------------------------------------------------------- arguments
@pytest.fixture
def _setting():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _BackwardCalls(TorchDispatchMode):
    """The argument deterministic of every call of the op `bwd`."""

    def __init__(self):
        super().__init__()
        self.flags = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is OPS.bwd.default:
            self.flags.append(is_deterministic(args))
        return op(*args, **(kwargs or {}))


def is_deterministic(arguments: tuple) -> bool:
    """Of the op `bwd`; PyTorch leaves a default out."""
    return arguments[9] if len(arguments) > 9 else False


def packed(**options):
    qkv = torch.randn(2, 9, 8, 16, requires_grad=True)
    return flash_attn_qkvpacked_func(qkv, num_heads_q=4, causal=True, **options)


def separate(**options):
    q, k, v = (torch.randn(2, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    return flash_attn_func(q, k, v, causal=True, **options)


def traced(**options):
    """The op that compilers see, called directly."""
    q, k, v = (torch.randn(2, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    return OPS.fwd(q, k, v, 0.3, True, **options)[0]


every_function = pytest.mark.parametrize('attention', [separate, packed, traced])


@every_function
def test_by_argument(attention):
    with _BackwardCalls() as called:
        for options in ({}, {'deterministic': False}, {'deterministic': True}):
            attention(**options).sum().backward()
    assert called.flags == [False, False, True]


@every_function
def test_by_the_setting_at_the_time_of_the_forward(attention, _setting):
    with _BackwardCalls() as called:
        for at_forward, at_backward in ((True, False), (False, True)):
            torch.use_deterministic_algorithms(at_forward)
            loss = attention(deterministic=False).sum()
            torch.use_deterministic_algorithms(at_backward)
            loss.backward()
    assert called.flags == [True, False]


@pytest.mark.parametrize('attention', [separate, packed])
def test_under_compile(attention, _setting, _fresh_compiler):
    """By argument, and by the setting, whose change compiles anew."""
    flags = []

    def keep_flags(module, _):
        flags.extend(is_deterministic(node.args) for node in module.graph.nodes
                     if node.target is OPS.bwd.default)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep_flags, bw_compiler=keep_flags)
    compiled = torch.compile(attention, backend=backend)
    for setting, options in ((False, {}), (False, {'deterministic': True}), (True, {}),
                             (True, {'deterministic': True})):
        torch.use_deterministic_algorithms(setting)
        compiled(**options).sum().backward()
    assert flags == [False, True, True, True]


def test_the_gradients_are_the_same_on_the_cpu():
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    out, lse = OPS.fwd(q, k, v)
    results = [OPS.bwd(out, lse, q, k, v, out, lse, 0.25, False, *flag)
               for flag in ((), (False,), (True,))]
    for gradients in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0]))
