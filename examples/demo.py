"""`make demo`: attention reads the Python standard library and predicts its next bytes.

Every query is the context of a byte, every key an earlier context, every value the byte that came
after it: attention looks up where the text was like this before. Nothing is trained; the tables
that turn bytes into vectors are fixed random numbers. Printed: what ran where, the error against
attention in float64, how many bytes were predicted, and the time against PyTorch's SDPA.
"""
from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flash_attn3
from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Mask, Score
from flash_attn3.tools import planning

HEAD_DIM = 128
CONTEXTS = (2, 3, 5, 8)          # bytes of context, one KV head each
SHARPNESS = (8, 12, 18, 27)      # logit of a perfect match, one query head of a KV head each
DTYPE = torch.bfloat16


def library_text(count: int) -> Tensor:
    """The first bytes of the standard library's own source, files in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path('stdlib')).rglob('*.py')):
        text += path.read_bytes()
        if len(text) >= count:
            break
    return torch.frombuffer(text[:count], dtype=torch.uint8).long()


def context_vectors(text: Tensor, length: int, table: Tensor) -> Tensor:
    """(batch, seqlen) bytes -> (batch, seqlen, head_dim), unit vectors of the last bytes."""
    vectors = torch.zeros(*text.shape, HEAD_DIM, device=text.device)
    for back in range(length):
        earlier = F.pad(text, (back, 0))[:, :text.size(1)]
        vectors += table[back, earlier] * 0.8 ** back
    return F.normalize(vectors, dim=-1)


def attention_inputs(text: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (batch, seqlen, 16, 128), k and v (batch, seqlen, 4, 128), and the code of each byte."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(max(CONTEXTS), 256, HEAD_DIM, generator=generator).to(text.device)
    codes = torch.randn(256, HEAD_DIM, generator=generator).sign().to(text.device)
    q, k = [], []
    for length in CONTEXTS:
        vectors = context_vectors(text, length, table)
        q += [vectors * sharpness * HEAD_DIM ** 0.5 for sharpness in SHARPNESS]
        k += [F.pad(vectors, (0, 0, 1, 0))[:, :-1]]    # the context before byte j, ...
    v = codes[text].unsqueeze(2).expand(-1, -1, len(CONTEXTS), -1)    # ... and byte j
    return (*(x.to(DTYPE) for x in (torch.stack(q, 2), torch.stack(k, 2), v.contiguous())), codes)


def exact_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Iterator[tuple[int, int, Tensor]]:
    """(batch entry, head, its output in float64), one head at a time to save memory."""
    group = q.size(2) // k.size(2)
    for b in range(q.size(0)):
        for h in range(q.size(2)):
            heads = ((q, h), (k, h // group), (v, h // group))
            one = (x[b:b + 1, :, head:head + 1].double() for x, head in heads)
            score = Score(HEAD_DIM ** -0.5, mask=Mask(causal))
            yield b, h, reference.attend(Inputs(*one), score).out[0, :, 0]


def largest_errors(outs: list[Tensor], inputs: list[Tensor],
                   causal: bool) -> tuple[list[float], Tensor]:
    """Each output's largest error against float64; and the exact output's mean over heads."""
    errors = [0.0] * len(outs)
    mean = torch.zeros(*outs[0].shape[:2], HEAD_DIM, dtype=torch.float64, device=outs[0].device)
    for b, h, exact in exact_heads(*inputs, causal):
        errors = [max(error, (out[b, :, h].double() - exact).abs().max().item())
                  for error, out in zip(errors, outs)]
        mean[b] += exact / outs[0].size(2)
    return errors, mean


def predicted_share(mean_over_heads: Tensor, codes: Tensor, text: Tensor) -> float:
    """How many next bytes are the one whose code is nearest to the mean output of all heads."""
    predicted = (mean_over_heads.double() @ codes.double().T).argmax(-1)
    return (predicted[:, :-1] == text[:, 1:]).double().mean().item()


def milliseconds(call: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Median time of a call, after two that do not count."""
    def wait() -> None:
        if device.type == 'cuda':
            torch.cuda.synchronize()

    times = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def speed(ms: float, flops: float) -> str:
    tera = flops / ms / 1e9
    rate = f'{tera:.0f} TFLOP/s' if tera >= 10 else f'{tera * 1e3:.0f} GFLOP/s'
    return f'{ms:.3g} ms, {rate}'


def run(causal: bool, text: Tensor, repeats: int) -> dict[str, str]:
    """One column of the table."""
    *inputs, codes = attention_inputs(text)
    turned = [x.transpose(1, 2) for x in inputs]

    def ours() -> Tensor:
        return flash_attn3.flash_attn_func(*inputs, causal=causal)

    def sdpa() -> Tensor:
        out = F.scaled_dot_product_attention(*turned, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    out = ours()
    (error, sdpa_error), exact_mean = largest_errors([out, sdpa()], inputs, causal)
    plan = planning.plan(*inputs, causal=causal)
    is_kernel, _ = flash_attn3.can_use(*inputs, causal=causal)
    shares = [predicted_share(mean, codes, text) for mean in (out.double().mean(2), exact_mean)]
    return {
        'ran': plan['name'] if is_kernel else 'PyTorch SDPA' if text.is_cuda else 'CPU path',
        'largest error': f'{error:.1e}',
        'largest error of SDPA': f'{sdpa_error:.1e}',
        'next bytes right': f'{shares[0]:.1%}' if causal else '(sees them)',
        'by exact attention': f'{shares[1]:.1%}' if causal else '',
        'time': speed(milliseconds(ours, text.device, repeats), plan['flops']),
        'time of SDPA': speed(milliseconds(sdpa, text.device, repeats), plan['flops']),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seqlen', type=int, help='bytes in a sequence')
    options = parser.parse_args()
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    batch, seqlen, repeats = (4, 16384, 20) if device.type == 'cuda' else (1, 1536, 3)
    seqlen = options.seqlen or seqlen
    text = library_text(batch * seqlen).view(batch, seqlen).to(device)
    columns = [run(causal, text, repeats) for causal in (False, True)]

    name = torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'
    print(f'flash_attn3 {flash_attn3.__version__} on {name}: {batch} x {seqlen} bytes of the '
          f'Python library,\n16 query and 4 KV heads, head dim {HEAD_DIM}, bfloat16')
    table = Table('', 'full', 'causal')
    for row, full in columns[0].items():
        table.add_row(row, full, columns[1][row])
    Console().print(table)
    if reasons := flash_attn3.can_use(*attention_inputs(text[:, :1])[:3])[1]:
        print(f'Not the kernel: {reasons[0]}')


if __name__ == '__main__':
    main()
