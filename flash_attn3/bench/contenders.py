"""flash_attn_func and the backends of PyTorch's SDPA, timed against each other on one problem."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .problem import WRONG, Result, Shape, error_of, function_of, make_inputs, rules_of
from .timing import Contender, Figure, Timer, interleaved, peak_share

OURS = 'flash_attn3'
CPU = torch.device('cpu')
SDPA_BACKENDS = {
    'sdpa flash': SDPBackend.FLASH_ATTENTION,
    'sdpa cudnn': SDPBackend.CUDNN_ATTENTION,
    'sdpa efficient': SDPBackend.EFFICIENT_ATTENTION,
    'sdpa math': SDPBackend.MATH,
}
PADDED = f'{OURS} padded'                # packed sequences as a dense batch
NAMES = (OURS, 'sdpa', *SDPA_BACKENDS)   # 'sdpa': the backend that PyTorch picks
MATH_BYTES = 1 << 30                     # with more scores 'sdpa math' is skipped


def ours(shape: Shape, device: torch.device = CPU) -> Contender:
    import flash_attn3
    return Contender(OURS, function_of(flash_attn3, shape, device))


def padded(one: Contender, shape: Shape, device: torch.device) -> Contender:
    """Packed sequences padded to a dense batch, for contenders that take dense tensors.

    Under a causal mask no query of a sequence sees its padding."""
    if not shape.causal:
        raise RuntimeError('would need a mask of the lengths')
    lengths = torch.tensor(shape.lengths, device=device)
    is_row = torch.arange(max(shape.lengths), device=device) < lengths[:, None]

    def arrange(x: torch.Tensor) -> torch.Tensor:
        filled = x.new_zeros((*is_row.shape, *x.shape[1:]))
        filled[is_row] = x
        return filled

    return replace(one, arrange=arrange, restore=lambda x: x[is_row])


def _lower_right(shape: Shape) -> bool:
    """Whether top-left (SDPA's is_causal) and bottom-right alignment (ours) differ."""
    return shape.causal and shape.seqlen_q not in (1, shape.seqlen_k)


def sdpa(name: str, shape: Shape, device: torch.device = CPU) -> Contender:
    """SDPA on the same (batch, seqlen, heads, head_dim) tensors, as transposed views."""
    options: dict = dict(enable_gqa=shape.heads != shape.heads_k)
    if shape.has_window:
        rows = torch.arange(shape.seqlen_q, device=device)
        hidden = rules_of(shape, device).hidden(rows, shape.seqlen_q, shape.seqlen_k)
        options['attn_mask'] = ~hidden
    elif _lower_right(shape):
        options['attn_mask'] = causal_lower_right(shape.seqlen_q, shape.seqlen_k)
    elif shape.seqlen_q > 1:
        options['is_causal'] = shape.causal

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    if name == 'sdpa':
        return Contender(name, call)
    return Contender(name, call, functools.partial(sdpa_kernel, [SDPA_BACKENDS[name]]))


def contender(name: str, shape: Shape, device: torch.device = CPU) -> Contender:
    """Raises RuntimeError where a contender is skipped on purpose."""
    if name == OURS:
        return ours(shape, device)
    if name == PADDED:
        dense = ours(replace(shape, lengths=()), device)
        return padded(replace(dense, name=PADDED), shape, device)
    if 'sinks' in shape.features:
        raise RuntimeError('has no sinks')
    if _lower_right(shape) and not shape.has_window and name == 'sdpa cudnn':
        raise RuntimeError('has no bottom-right causal mask in PyTorch')
    if name == 'sdpa math':
        score_bytes = 4 * shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
        if score_bytes > MATH_BYTES:
            raise RuntimeError(f'its score matrix takes {score_bytes / 2**30:.1f} GiB')
    one = sdpa(name, shape, device)
    return padded(one, shape, device) if shape.lengths else one


def reason(error: Exception) -> str:
    """The reason of an error as one line of a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'out of memory'
    if 'No viable backend' in str(error):
        return 'does not take this problem'
    lines = str(error).strip().splitlines() or ['']
    kind = '' if type(error) is RuntimeError else f'{type(error).__name__}: '
    return (kind + lines[0])[:120]


def measure(shape: Shape, device: torch.device, names: Sequence[str] = NAMES, rounds: int = 5,
            target_ms: float = 8.0) -> list[dict]:
    """Times the contenders of a problem against each other. Returns a dict for each contender: the
    keys of result(), or 'na' with the reason if it does not run."""
    timer = Timer(device, target_ms)
    skipped: dict[str, str] = {}
    calls: dict[str, Callable] = {}
    checks: dict[str, tuple[float, float | None]] = {}
    with torch.no_grad():
        sets = make_inputs(shape, device)
        for name in names:
            try:
                calls[name], checks[name] = _prepare(name, shape, sets, timer)
            except Exception as failure:
                skipped[name] = reason(failure)
        figures = interleaved(
            calls, timer, rounds, lambda name, error: skipped.update({name: reason(error)}))
    del sets, calls
    if device.type == 'cuda':
        torch.cuda.empty_cache()
    return [dict(name=name, na=skipped[name]) if name in skipped
            else result(shape, device, name, figures[name], *checks[name])
            for name in names]


def _prepare(name: str, shape: Shape, sets: Sequence[tuple[torch.Tensor, ...]],
             timer: Timer) -> tuple[Callable, tuple[float, float | None]]:
    """The call to time, its error and its host time."""
    one = contender(name, shape, sets[0][0].device)
    with one.context():
        result = one.restored(one.prepare(sets[0])())
        error = error_of(shape, result, sets[0])
        call = one.rotating(sets)
        host_us = timer.host_us(call)

    def in_context() -> Result:
        with one.context():
            return call()
    return in_context, (error, host_us)


def result(shape: Shape, device: torch.device, name: str, figure: Figure, error: float,
           host_us: float | None) -> dict:
    tflops = shape.flops / figure.ms / 1e9
    return dict(name=name, ms=figure.ms, spread=figure.spread, rounds=figure.rounds, tflops=tflops,
                clock_mhz=figure.clock_mhz,
                peak_share=peak_share(tflops, figure.clock_mhz, device), host_us=host_us,
                error=error, wrong=not error < WRONG)
