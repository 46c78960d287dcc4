"""How many examples a property test draws."""
from __future__ import annotations

from hypothesis import settings

USUAL = 100    # hypothesis' own default


def examples(count: int, **changes) -> settings:
    """`count` of them, fewer or more under `--hypothesis-profile fast` or `long`."""
    share = settings.default.max_examples / USUAL
    return settings(max_examples=max(1, round(count * share)), deadline=None, **changes)
