"""Which of our ops a call reaches."""
from torch.utils._python_dispatch import TorchDispatchMode


class CalledOps(TorchDispatchMode):
    """The names of our ops, as they are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == 'flash_attn3':
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))
