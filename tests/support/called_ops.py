"""Which of our ops a call reaches; how often a compiled one was compiled."""
from torch._dynamo.testing import CompileCounterWithBackend
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


def compilations(counter: CompileCounterWithBackend) -> int:
    """The graphs that were compiled. PyTorch 2.15 begins with one that has no nodes."""
    return sum(len(module.graph.nodes) > 0 for module in counter.graphs)
