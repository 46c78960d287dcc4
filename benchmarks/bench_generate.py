"""Tokens per second of transformers' generate: this attention, by its names there, and SDPA.

    python -m benchmarks.bench_generate                       # on a Hopper GPU, some minutes
    python -m benchmarks.bench_generate --device cpu --quick  # tries the machinery

A Llama with a billion random parameters: nothing is downloaded. A figure is of decode alone: for
`generate` the time of a long call minus that of a short one; for generate_batch (`paged`, on
transformers' paged cache) the tokens after the moment at which every sequence has its first one.
Contenders take turns. Their tokens are not compared here, where a random model has many near ties;
the tests do that.
"""
from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import harness
from flash_attn3.bench import DTYPES

SDPA, SHIM, OWN = 'sdpa', 'flash_attention_3', 'fa3_hopper'
PAGED = 'paged|'
SHORT = 2    # new tokens of the short call
MOST_PAGED_SDPA = 8    # sequences: it multiplies every query with every key of the batch, masked


@dataclass(frozen=True)
class Load:
    """`batch` sequences of `prompt` tokens, each of which gets `new` more."""
    batch: int
    prompt: int
    new: int


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.timing_parser('benchmarks.bench_generate', __doc__)
    return parser.parse_args(argv)


def loads(is_quick: bool) -> list[Load]:
    if is_quick:
        return [Load(2, 24, 6)]
    return [Load(1, 4000, 96), Load(8, 4000, 96), Load(64, 4000, 96)]


def model_of(device: torch.device, dtype: torch.dtype, is_quick: bool):
    """Random weights; the same for every contender."""
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64,
                 num_attention_heads=4, num_key_value_heads=2) if is_quick else dict(
                     hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                     vocab_size=32000, num_attention_heads=16, num_key_value_heads=4)
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1,
                         eos_token_id=None)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def rate(model, prompts: torch.Tensor, new: int) -> float:
    """Tokens per second of decode."""
    times = []
    for count in (SHORT, new):
        start = time.perf_counter()
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count)
        out.cpu()    # waits for the device
        times.append(time.perf_counter() - start)
    return len(prompts) * (new - SHORT) / max(times[1] - times[0], 1e-9)


def rate_paged(model, prompts: torch.Tensor, new: int) -> float:
    from transformers import GenerationConfig
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    results = model.generate_batch(prompts.tolist(), options, record_timestamps=True).values()
    begin = max(x.timestamps[0] for x in results)
    later = [moment for x in results for moment in x.timestamps if moment > begin]
    return len(later) / (max(later) - begin)


def contenders(device: torch.device) -> dict[str, Callable]:
    """By the name that set_attn_implementation takes. flash_attention_3 and the paged cache of
    transformers need a GPU."""
    found = {SDPA: rate, OWN: rate}
    if device.type == 'cuda':
        found |= {SHIM: rate, PAGED + SDPA: rate_paged, PAGED + SHIM: rate_paged}
    return found


def measure(model, load: Load, device: torch.device, rounds: int) -> dict:
    """Tokens per second of every contender."""
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(load.batch)
    prompts = torch.randint(2, vocabulary, (load.batch, load.prompt), generator=generator)
    prompts, named = prompts.to(device), contenders(device)
    if load.batch > MOST_PAGED_SDPA:
        named.pop(PAGED + SDPA, None)
    rates = {name: [] for name in named}
    for number in range(rounds + 1):    # the first round warms up
        for name, function in named.items():
            model.set_attn_implementation(name)
            found = function(model, prompts, load.new)
            if number > 0:
                rates[name].append(found)
    return dict(cell=dict(vars(load)), results=[
        dict(name=name, tokens_per_s=statistics.median(rates[name])) for name in named])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    rounds = args.rounds or (1 if args.quick else 3)
    integration = importlib.import_module('flash_attn3.integrations.transformers')
    integration.enable(name=OWN)
    try:
        model = model_of(device, DTYPES[args.dtype], args.quick)
        record = harness.new_record('generate', device, args.commit,
                                    dict(rounds=rounds, dtype=args.dtype))
        with torch.no_grad():
            for load in loads(args.quick):
                found = measure(model, load, device, rounds)
                record['cells'].append(found)
                print(load, *(f"{x['name']} {x['tokens_per_s']:.0f}" for x in found['results']),
                      'tokens/s', flush=True)
                path = harness.save(record, args.out)
    finally:
        integration.disable()
    print(f'written: {path}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
