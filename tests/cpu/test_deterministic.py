"""Deterministic mode of the backward: the order in which clusters of CTAs (of one, mostly) add to
dQ, played through with the kernel's own code, and how a call asks for it.
"""
from collections import Counter, defaultdict, deque
import random

from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func

from tests.cpu.drawn import examples
from tests.cpu.masks import FULL, mask_of_kind
from tests.cpu.packed import batches
from tests.cpu.test_backward_work import (FACTS, TILE_OF, causal_or_full, clusters_of, each_packed,
                                          each_variant, some_mask, work_of)
from tests.host import _host

OPS = torch.ops.flash_attn3


# ------------------------------------------------------------------------------------------ order
def blocks_of(tile, adder, m):
    """The blocks of dQ of tile m of queries that one of those adds who add for a cluster: a store
    warp the block of its warpgroup, a CTA of two its half; a middle one goes from hand to hand.
    """
    if tile['cluster_size'] == 1:
        return range(adder, adder + 1)
    return range(*(_host.DqLayout.first_of(rank, tile['dq_blocks'], m)
                   for rank in (adder, adder + 1)))


def adds_of(name, sizes, mask, lengths=None, **device):
    """For every cluster with steps, in the order of work, and every step: the tile of dQ that is
    added to (its number among those of its head, its index among all), and how many clusters add
    before this one.
    """
    plan, _, ctas = work_of(name, sizes, mask, deterministic=True, lengths=lengths, **device)
    return [[(m, tile, predecessors) for _, m, _, tile, predecessors in steps]
            for (_, steps), *_ in clusters_of(plan, ctas) if steps]


class Cluster:
    """Those who add for one, each with as many steps done; none gets ahead of another by more than
    `lead`, since each adds what all have computed.
    """

    def __init__(self, steps, facts, lead):
        self.steps, self.lead = steps, lead
        self.done = [0] * facts['dq_adders']

    def ready(self, flags):
        slowest = min(self.done)
        for adder, done in enumerate(self.done):
            if done < len(self.steps) and done - slowest < self.lead:
                _, tile, predecessors = self.steps[done]
                if flags[tile, adder] == predecessors:
                    yield self, adder

    def add(self, adder, flags):
        """Gives the step whose dQ was added, and increments the flags."""
        step = self.steps[self.done[adder]]
        self.done[adder] += 1
        flags[step[1], adder] += 1
        return step

    def is_running(self):
        return min(self.done) < len(self.steps)


def play(name, work, residents, lead, choose):
    """Runs the clusters in their order, at most `residents` at a time, add by add.

    choose picks one of those who can go on. Gives the predecessors of every block, in order.
    """
    flags, added = Counter(), defaultdict(list)
    waiting = deque(Cluster(steps, FACTS[name], lead) for steps in work)
    running = []
    while waiting or running:
        while waiting and len(running) < residents:
            running.append(waiting.popleft())
        ready = [who for cluster in running for who in cluster.ready(flags)]
        assert ready, 'every cluster on the GPU waits for one that is not'
        cluster, adder = choose(ready)
        m, tile, predecessors = cluster.add(adder, flags)
        for block in blocks_of(TILE_OF[name], adder, m):
            added[tile, block].append(predecessors)
        running = [cluster for cluster in running if cluster.is_running()]
    return added


def check_order(name, work, added):
    """Every block of a tile of dQ was added to by every cluster that meets it, in order."""
    clusters = Counter(tile for steps in work for _, tile, _ in steps)
    assert added == {(tile, block): list(range(count)) for tile, count in clusters.items()
                     for block in range(TILE_OF[name]['dq_blocks'])}


@each_variant
def test_who_adds_to_a_block_of_dq(name):
    """One for each: the number of the tile decides, the same in every cluster, which is why flags
    need not be those of blocks. Over two tiles all have as many; a CTA has K for all of its own.
    """
    tile, adders = TILE_OF[name], range(FACTS[name]['dq_adders'])
    counts = Counter()
    for m in range(2):
        shares = [blocks_of(tile, adder, m) for adder in adders]
        assert [block for share in shares for block in share] == list(range(tile['dq_blocks']))
        counts.update({adder: len(share) for adder, share in zip(adders, shares)})
        for rank, share in enumerate(shares if tile['cluster_size'] > 1 else ()):
            columns = range(share.start * tile['dq'].columns, share.stop * tile['dq'].columns)
            own = tile['other_columns'] or tile['head_dim'] // FACTS[name]['column_ctas']
            first = 0 if rank == 0 else tile['head_dim'] - own
            assert set(columns) <= set(range(first, first + own))
    assert len(set(counts.values())) == 1


sizes = st.tuples(st.integers(1, 2), st.integers(1, 500), st.integers(1, 1000), st.integers(1, 2),
                  st.integers(1, 2)).map(lambda x: (*x[:3], x[3] * x[4], x[4]))
SQUARE = 2, 512, 512, 4, 2


@each_variant
@given(sizes, st.data(), st.integers(1, 40), st.integers(0, 1 << 22), st.integers(1, 20),
       st.integers(1, 2), st.integers(0, 999))
@examples(20)
def test_no_cluster_waits_forever(name, sizes, data, sm_count, l2_bytes, residents, lead, seed):
    """However few run at a time, and however fast each is."""
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    work = adds_of(name, sizes, mask, sm_count=sm_count, l2_bytes=l2_bytes)
    check_order(name, work, play(name, work, residents, lead, random.Random(seed).choice))


@each_packed
@given(batches(), st.data(), st.integers(1, 20), st.integers(1, 2), st.integers(0, 999))
@examples(20)
def test_no_cluster_of_a_packed_batch_waits_forever(name, batch, data, residents, lead, seed):
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    work = adds_of(name, batch.sizes, mask, batch.lengths, sm_count=data.draw(st.integers(1, 40)))
    check_order(name, work, play(name, work, residents, lead, random.Random(seed).choice))


@each_variant
@pytest.mark.parametrize('pick', [0, -1], ids=['first', 'last'])
@pytest.mark.parametrize('residents', [1, 2, 5, 1000])
def test_one_cluster_runs_ahead(name, residents, pick):
    """The one that came first, or last."""
    work = adds_of(name, SQUARE, some_mask(name))
    check_order(name, work, play(name, work, residents, 2, lambda ready: ready[pick]))


def check_count(work):
    predecessors_of = defaultdict(list)
    for adds in work:
        for _, tile, predecessors in adds:
            predecessors_of[tile].append(predecessors)
    assert all(of_tile == list(range(len(of_tile))) for of_tile in predecessors_of.values())


@each_variant
@given(sizes, st.data(), st.integers(1, 140), st.integers(0, 1 << 22))
@examples(40)
def test_predecessors_count_up_in_the_order_of_work(name, sizes, data, sm_count, l2_bytes):
    """From 0, without a gap, for every tile of dQ: a cluster waits for earlier ones only, and for
    all.
    """
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    check_count(adds_of(name, sizes, mask, sm_count=sm_count, l2_bytes=l2_bytes))


@each_packed
@given(batches(), st.data(), st.integers(1, 140), st.integers(0, 1 << 22))
@examples(40)
def test_predecessors_of_a_packed_batch_count_up(name, batch, data, sm_count, l2_bytes):
    mask = data.draw(mask_of_kind(FACTS[name]['mask']))
    check_count(adds_of(name, batch.sizes, mask, batch.lengths, sm_count=sm_count,
                        l2_bytes=l2_bytes))


def ticks(work, residents):
    """How long the clusters take in all, and how long each waits, when a step takes a tick and the
    next cluster can add one tick after the one before.
    """
    flags, waits = Counter(), [0] * len(work)
    waiting, running = deque(enumerate(map(deque, work))), []
    now = 0
    while waiting or running:
        while waiting and len(running) < residents:
            running.append(waiting.popleft())
        ready = [flags[adds[0][1]] == adds[0][2] for _, adds in running]
        for (cluster, adds), is_ready in zip(running, ready):
            if is_ready:
                flags[adds.popleft()[1]] += 1
            else:
                waits[cluster] += 1
        running = [(cluster, adds) for cluster, adds in running if adds]
        now += 1
    return now, waits


@each_variant
def test_waiting_is_rare(name):
    """Causal: a tile comes to the queries of the next one after that one did, and never waits.
    Full: clusters that start together line up once, as many as have the same head.
    """
    sizes, sm_count = (1, 2048, 2048, 8, 8), 32
    residents = sm_count // FACTS[name]['cluster_size']
    device = {'sm_count': sm_count, 'l2_bytes': 1 << 30}    # one section
    mask = causal_or_full(name)
    work = adds_of(name, sizes, mask, **device)
    plan, *_ = work_of(name, sizes, mask, deterministic=True, **device)
    taken, waits = ticks(work, residents)
    if mask != FULL:
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


class _BackwardCalls(TorchDispatchMode):
    """The argument deterministic of every call of the ops `bwd` and `bwd_out`."""

    def __init__(self):
        super().__init__()
        self.flags = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (OPS.bwd.default, OPS.bwd_out.default):
            self.flags.append(is_deterministic(op, args))
        return op(*args, **(kwargs or {}))


def is_deterministic(op: torch._ops.OpOverload, arguments: tuple) -> bool:
    """PyTorch leaves trailing defaults out."""
    index = [argument.name for argument in op._schema.arguments].index('deterministic')
    return arguments[index] if len(arguments) > index else False


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
def test_under_compile(attention, _setting, fresh_compiler):
    """By argument, and by the setting, whose change compiles anew."""
    flags = []

    def keep_flags(module, _):
        flags.extend(is_deterministic(node.target, node.args) for node in module.graph.nodes
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
