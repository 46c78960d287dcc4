"""A paged KV cache as servers have it, for the calls of clients: held to the reference."""
import torch

from flash_attn3 import reference

from tests import compare

SCALE = 0.125


class Cache:
    """Sequences on pages of a cache, whose keys and values lie as vLLM has them: (pages, heads,
    page_size, 2 * head_dim).
    """

    def __init__(self, page_size, lengths=(37, 5, 64), queries=(1, 3, 20), heads=(4, 2)):
        heads_q, heads_k = heads
        pages = [-(-n // page_size) for n in lengths]
        both = torch.randn(sum(pages), heads_k, page_size, 128, dtype=torch.bfloat16)
        self.k, self.v = both.transpose(1, 2).split(64, -1)
        self.table = torch.full((3, max(pages) + 2), -1, dtype=torch.int32)
        numbers = torch.randperm(sum(pages), dtype=torch.int32)
        for row, part in zip(self.table, numbers.split(pages)):
            row[:len(part)] = part
        self.q = torch.randn(sum(queries), heads_q, 64, dtype=torch.bfloat16)
        self.lengths, self.queries = lengths, queries
        self.used = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)

    def check(self, out, lse, window=(-1, -1), sinks=None, softcap=0.0):
        """Each sequence against the reference in float64."""
        score = reference.Score(SCALE, softcap, reference.Mask(True, window))
        for row, (n, start, end) in enumerate(zip(self.lengths, self.starts, self.starts[1:])):
            pages = self.table[row][self.table[row] >= 0]
            k, v = (x[pages].flatten(0, 1)[None, :n] for x in (self.k, self.v))
            inputs = reference.Inputs(self.q[None, start:end], k, v, sinks)
            wide = reference.attend(inputs.to(torch.float64), score)
            plain = reference.attend(inputs, score)
            compare.check_close(out[None, start:end], wide.out, plain.out, f'out of {row}')
            compare.check_lse(lse[None, :, start:end], wide.lse)
