"""How often attention of this package ran in a block of code, whoever called it."""
from __future__ import annotations

import functools

import torch
from torch.profiler import ProfilerActivity, profile

_FORWARDS, _BACKWARDS = ('fwd', 'attend'), ('bwd',)    # in the names of ops


class Ran:
    """with Ran(device) as ran: what the profiler saw in there, in all threads.

    Attributes:
        forwards, backwards: how often; on a GPU the kernels, on the CPU the ops.
        names: those kernels or ops, all of this package's.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.forwards = self.backwards = 0
        self.names: list[str] = []

    def __enter__(self) -> Ran:
        on_gpu = self._device.type == 'cuda'
        if on_gpu:
            _warm_up(self._device)
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self._profile = profile(activities=[activity], acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self._device.type == 'cuda':
            torch.cuda.synchronize(self._device)
        self._profile.__exit__(*error)
        names = [event.name for event in self._profile.events()]
        if self._device.type == 'cuda':
            self.names = [name for name in names if 'fa3' in name]
            self.forwards, self.backwards = (
                sum(any(kernel in name for kernel in kernels) for name in self.names)
                for kernels in (('forward_kernel', 'decode_kernel'), ('backward_kernel',)))
        else:
            self.names = [name for name in names if name.startswith('flash_attn3::')]
            self.forwards, self.backwards = (
                sum(any(word in name for word in words) for name in self.names)
                for words in (_FORWARDS, _BACKWARDS))


@functools.cache
def _warm_up(device: torch.device) -> None:
    """The first profile of a process may lose kernels while the profiler starts."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True):
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)
