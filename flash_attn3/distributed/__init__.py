"""Attention over several ranks that hold a part of the sequence each: context parallelism.

    out = flash_attn3.distributed.ring_attention(q, k, v, causal=True)    # rows of this rank

On torch.distributed: NCCL for GPUs, gloo for CPU tensors.
"""
from flash_attn3.distributed.orders import balanced_order
from flash_attn3.distributed.ring import ring_attention
from flash_attn3.distributed.sharding import positions, shard, shard_batch, unshard
from flash_attn3.distributed.ulysses import ulysses_attention

__all__ = ['balanced_order', 'positions', 'ring_attention', 'shard', 'shard_batch',
           'ulysses_attention', 'unshard']
