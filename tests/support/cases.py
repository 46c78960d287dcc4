"""Test cases of the forward: what a call looks like, with its data; and the named lists of them.

A Case prints itself (its id in pytest) and seeds itself by that text, so that a failure can be
repeated alone: `Case(seqlen_q=113, seqlen_k=203, ...).tensors('cuda')`.
"""
from __future__ import annotations

import dataclasses
import itertools
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn3 import _plan

DTYPES = {'fp16': torch.float16, 'bf16': torch.bfloat16, 'fp32': torch.float32,
          'fp64': torch.float64}
HEADS = {'mha': (4, 4), 'gqa': (6, 2), 'mqa': (4, 1)}    # (heads_q, heads_k)


class NamedByChanges:
    """Base of dataclasses whose str() shows only the fields that differ from their defaults."""

    def __str__(self) -> str:
        changed = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)
                   if getattr(self, field.name) != field.default}
        fields = ', '.join(f'{name}={value!r}' for name, value in changed.items())
        return f'{type(self).__name__}({fields})'


@dataclass(frozen=True)
class Kind:
    """The part of a case that is chosen at compile time.

    Where several kernels (variants) serve one kind, the planner chooses by the sizes of the case.
    """
    dtype: str
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        return f'd{self.head_dim}-{self.dtype}-{"causal" if self.causal else "full"}'

    def variants(self) -> list[dict]:
        """The facts of the kernels that serve it, built or not: those of the next head dim."""
        mine = [facts for facts in PLAIN_VARIANTS if _kind_of(facts).takes(self)]
        smallest = min(facts['head_dim'] for facts in mine)
        return [facts for facts in mine if facts['head_dim'] == smallest]

    def takes(self, other: Kind) -> bool:
        """Whether a kernel made for this kind can run problems of the other one."""
        same_loop = (self.dtype, self.causal) == (other.dtype, other.causal)
        return same_loop and self.head_dim >= other.head_dim

    def missing_variants(self) -> list[str]:
        """Names of those that FLASH_ATTN3_VARIANTS skipped in this build."""
        return [facts['name'] for facts in self.variants() if not facts['built']]


class GradientKind(Kind):
    """A kind whose gradients are asked for too: that of a backward kernel."""

    def variants(self) -> list[dict]:
        return super().variants() + [facts for facts in PLAIN_BACKWARD
                                     if _kind_of(facts, GradientKind) == self]


def _kind_of(facts: dict, make: type[Kind] = Kind) -> Kind:
    short = {'float16': 'fp16', 'bfloat16': 'bf16'}
    return make(short[facts['dtype']], facts['head_dim'], facts['mask'] == 'causal')


# Kernels of 16-bit calls without windows, split_size and the like, and with one head dim for q, k
# and v.
def _is_plain(facts: dict) -> bool:
    return (facts['mask'] in ('full', 'causal') and facts['head_dim'] == facts['head_dim_v']
            and facts['dtype'] != 'float8_e4m3fn' and not is_folded(facts))


def is_folded(facts: dict) -> bool:
    """Whether a kernel serves calls with split_size, and no others."""
    return facts['name'].endswith('Folded')


PLAIN_VARIANTS = list(filter(_is_plain, _plan.variants()))
PLAIN_BACKWARD = list(filter(_is_plain, _plan.backward_variants()))
# What the kernels on the list are made for. Tests that are parametrised over `kind` skip those for
# which this build lacks a kernel (conftest.py).
KINDS = list(dict.fromkeys(map(_kind_of, PLAIN_VARIANTS)))
# And what those of the backward are made for.
GRADIENT_KINDS = [_kind_of(facts, GradientKind) for facts in PLAIN_BACKWARD]
# A head dim for each form of a tile, which most tests keep to.
MAIN_KINDS = [kind for kind in KINDS if kind.head_dim in (64, 96, 128, 192, 256, 512)]


@dataclass(frozen=True)
class Case:
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 128
    dtype: str = 'bf16'
    causal: bool = False
    batch: int = 2
    heads_q: int = 4
    heads_k: int = 4
    data: str = 'normal'        # a name in DATA
    logit_std: float = 1.0      # standard deviation of the scaled scores
    pack_gqa: bool | None = None
    sm_margin: int = 0

    def __str__(self) -> str:
        extras = {'': self.data if self.data != 'normal' else None,
                  'std': f'{self.logit_std:g}' if self.logit_std != 1.0 else None,
                  'pack': self.pack_gqa, 'margin': self.sm_margin or None}
        parts = [self.sizes(), str(Kind(self.dtype, self.head_dim, self.causal))]
        parts += [f'{name}{value}' for name, value in extras.items() if value is not None]
        return '-'.join(parts)

    def sizes(self) -> str:
        """The part of the name that holds for every kind."""
        return (f'b{self.batch}-h{self.heads_q}x{self.heads_k}'
                f'-s{self.seqlen_q}x{self.seqlen_k}')

    @property
    def seed(self) -> int:
        return zlib.crc32(str(self).encode())

    @property
    def softmax_scale(self) -> float:
        return self.head_dim ** -0.5

    def of(self, kind: Kind) -> Case:
        """This case for a kind of kernel."""
        return dataclasses.replace(self, dtype=kind.dtype, head_dim=kind.head_dim,
                                   causal=kind.causal)

    def tensors(self, device: str | torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_k, head_dim)."""
        generator = torch.Generator(device).manual_seed(self.seed)
        shapes = [(self.batch, self.seqlen_q, self.heads_q, self.head_dim)]
        shapes += [(self.batch, self.seqlen_k, self.heads_k, self.head_dim)] * 2
        q, k, v = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
        q, k, v = DATA[self.data](q * self.logit_std, k, v, generator)
        return tuple(x.to(DTYPES[self.dtype]) for x in (q, k, v))

    def arguments(self) -> dict:
        """The keyword arguments of flash_attn_func."""
        return {'causal': self.causal, 'pack_gqa': self.pack_gqa, 'sm_margin': self.sm_margin}


# ------------------------------------------------------------------------------------------- data
def _one_hot(v: Tensor) -> Tensor:
    """Row j of V is 1 in column j modulo head_dim: the output counts where the keys went."""
    positions = torch.arange(v.size(1), device=v.device) % v.size(3)
    rows = torch.nn.functional.one_hot(positions, v.size(3)).to(v.dtype)
    return rows[None, :, None, :].expand_as(v).contiguous()


def _with_outliers(x: Tensor, generator: torch.Generator) -> Tensor:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), as section 4.3 of the paper."""
    outliers = torch.randn(x.shape, generator=generator, device=x.device) * 10
    where = torch.rand(x.shape, generator=generator, device=x.device) < 0.001
    return x + outliers * where


DATA = {
    'normal': lambda q, k, v, generator: (q, k, v),
    # Sharp rows on one-hot values: a dropped or repeated key tile shows.
    'onehot': lambda q, k, v, generator: (q, k, _one_hot(v)),
    # Equal scores on one-hot values: the output counts how often each key was used.
    'uniform': lambda q, k, v, generator: (torch.zeros_like(q), k, _one_hot(v)),
    'outliers': lambda q, k, v, generator: tuple(_with_outliers(x, generator) for x in (q, k, v)),
}


# ------------------------------------------------------------------------------------------ lists
# (seqlen_q, seqlen_k): upstream's list, then lengths around the edges of tiles and warpgroups
# (64, 128, 192) and between them (80, 176), and one row or key more or less.
UPSTREAM_SHAPES = [(1, 1), (64, 128), (239, 1), (799, 3), (113, 203), (108, 256), (1023, 1024),
                   (1024, 1023), (4096, 4096), (4224, 4224)]
EDGE_SHAPES = [(1, 1000), (63, 79), (64, 80), (65, 81), (127, 127), (128, 128), (129, 129),
               (191, 175), (192, 176), (193, 177), (256, 352), (257, 353), (2, 2048), (2048, 2)]

# For the planner's other tiles: many heads of short sequences, few and more of long ones.
OTHER_TILES = [Case(256, 256, batch=8, heads_q=24, heads_k=8),
               Case(2100, 2100, batch=1, heads_q=2, heads_k=1),
               Case(2100, 2100, batch=1, heads_q=24, heads_k=8)]

SMOKE = [Case(113, 203, heads_q=6, heads_k=2), Case(1024, 1023), *OTHER_TILES]

SHAPES = [Case(seqlen_q, seqlen_k, heads_q=heads_q, heads_k=heads_k)
          for (seqlen_q, seqlen_k), (heads_q, heads_k)
          in itertools.product(UPSTREAM_SHAPES, HEADS.values())]
SHAPES += [Case(seqlen_q, seqlen_k) for seqlen_q, seqlen_k in EDGE_SHAPES]

# Where code takes another path: empty tensors, rows without keys, one of everything.
CORNERS = [
    Case(5, 7, batch=0),
    Case(0, 7),
    Case(7, 0),
    Case(0, 0),
    Case(1, 1, batch=1, heads_q=1, heads_k=1),
    Case(300, 10),                                   # causal: most rows see no key
    Case(300, 299),                                  # causal: the first row sees no key
    Case(10, 300),
    Case(1, 517, heads_q=64, heads_k=1, pack_gqa=True),
]
