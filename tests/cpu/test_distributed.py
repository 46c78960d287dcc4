"""Two processes that train together: DDP and FSDP2, with gloo on the CPU."""
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.cpu.layer import Layer

pytestmark = pytest.mark.slow


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer(x).square().mean().backward()
    return [p.grad for p in layer.parameters()]


def check_one_rank(rank: int, rendezvous: str) -> None:
    """Gradients of half a batch, averaged with the other rank's, against those of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{rendezvous}', rank=rank, world_size=2)
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 9, 24)
    mine = x[2 * rank:][:2]
    sharded = Layer()
    sharded.load_state_dict(layer.state_dict())
    fully_shard(sharded, mesh=init_device_mesh('cpu', (2,)))

    expected = [gradient.clone() for gradient in gradients(layer, x)]
    layer.zero_grad()
    torch.testing.assert_close(gradients(DistributedDataParallel(layer), mine), expected)
    torch.testing.assert_close([gradient.full_tensor() for gradient in gradients(sharded, mine)],
                               expected)
    dist.barrier()
    dist.destroy_process_group()
    # After FSDP2 with gloo, torch 2.11 aborts one process in ten while the interpreter ends.
    os._exit(0)


def test_data_parallel_gradients(tmp_path, monkeypatch):
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'lo')
    torch.multiprocessing.spawn(check_one_rank, (str(tmp_path / 'rendezvous'),), nprocs=2)
