"""csrc/forward/ holds the dense kernel; what only FP8 or a cache needs is in fp8/ and cache/."""
from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / 'csrc'
FORWARD = CSRC / 'forward'


def included(path: Path) -> list[Path]:
    names = re.findall(r'^#include "([\w./]+)"', path.read_text(), re.MULTILINE)
    return [CSRC / name for name in names if (CSRC / name).exists()]


def test_every_file_of_the_folder_serves_the_dense_kernel():
    """What the dense kernel includes without the help of a subfolder."""
    seen, waiting = set(), [FORWARD / 'launch.h']
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += [other for other in included(path) if other.parent == FORWARD]
    assert seen == set(FORWARD.glob('*.h'))


def test_fp8_and_cache_are_independent():
    for path in (FORWARD / 'fp8').glob('*.h'):
        assert not any(other.parent == FORWARD / 'cache' for other in included(path)), path
