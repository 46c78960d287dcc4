"""A library that build.py made, for Python."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from flash_attn3.arguments import schemas

LIBRARY = Path(__file__).resolve().parent / '_emulated.so'


class Emulator:
    """Loads it. Its threads run in an order that seed() begins."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.emulator_launch.restype = ctypes.c_char_p
        if hasattr(self._library, 'flash_attn3_accept_schemas'):    # it has the ops
            accepts = self._library.flash_attn3_accept_schemas
            accepts.restype = ctypes.c_bool
            assert accepts(schemas().encode())

    def seed(self, seed: int) -> None:
        self._library.emulator_seed(ctypes.c_uint32(seed))

    def set_sm_count(self, count: int) -> None:
        """The GPU's multiprocessors; before the first call of an op, which asks once."""
        self._library.emulator_set_sm_count(count)

    def has_variant(self, name: str) -> bool:
        """Whether a variant of attention is in the library."""
        return bool(self._library.emulator_has_kernel(f'{len(name)}{name}E'.encode()))

    def launch(self, kernel: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
               grid: int = 1, threads: int = 32, dynamic_bytes: int = 0,
               cluster_ctas: int = 1) -> str:
        """A kernel whose one parameter is a struct of pointers; gives the error, or ''."""
        tensors = [*inputs, *outputs]
        self._library.emulator_forget_memory()
        for i, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            self._library.emulator_add_memory(ctypes.c_uint64(storage.data_ptr()),
                                              ctypes.c_uint64(storage.nbytes()), i >= len(inputs))
        pointers = (ctypes.c_uint64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        error = self._library.emulator_launch(kernel.encode(), grid, threads, dynamic_bytes,
                                              cluster_ctas, pointers)
        return error.decode() if error else ''
