"""Masks of csrc/core/mask_limits.h beside their definition, for the tests that count keys."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flash_attn3.cpu import reference
from tests.host import _host


@dataclass(frozen=True)
class Drawn:
    """A mask of the reference, of a kind that the kernels know; see reference.Mask."""
    kind: str    # 'full', 'causal' or 'general'
    left: int = -1
    right: int = -1
    chunk: int = 0

    @property
    def of_kernels(self):
        limits = (None if side < 0 else side for side in (self.left, self.right))
        return {'full': _host.FullMask, 'causal': _host.CausalMask,
                'general': lambda: _host.IntervalMask(*limits, self.chunk)}[self.kind]()

    def visible(self, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """(seqlen_q, seqlen_k): whether the query sees the key."""
        mask = reference.Mask(self.kind == 'causal', (self.left, self.right), self.chunk)
        return ~mask.hidden(seqlen_q, seqlen_k, torch.device('cpu'))


def limits(most: int):
    """A side of a window; -1 is none."""
    return st.one_of(st.just(-1), st.just(0), st.integers(0, most))


def masks(most: int):
    """Masks with limits of up to about `most` keys."""
    general = st.builds(Drawn, st.just('general'), limits(most), limits(most),
                        st.one_of(st.just(0), st.integers(1, most)))
    return st.one_of(st.just(Drawn('full')), st.just(Drawn('causal')), general)
