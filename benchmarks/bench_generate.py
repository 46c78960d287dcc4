"""Tokens per second of transformers' generate: this attention, by its names there, and SDPA.

    python -m benchmarks.bench_generate                       # on a Hopper GPU, some minutes
    python -m benchmarks.bench_generate --device cpu --quick  # tries the machinery

A random model like Llama with a billion parameters, which nothing is downloaded for. A figure is of
the tokens after the first, the prompt not included: the time of a long call less that of a short
one. Contenders take turns. `paged` is generate_batch, the whole of it, on transformers' paged
cache. What the contenders write is compared with SDPA; random models have many near ties.
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

SDPA, SHIM, OWN = 'sdpa', 'flash_attention_3', 'fa3_hopper'
PAGED = 'paged '
SHORT = 2    # new tokens of the call that is taken off


@dataclass(frozen=True)
class Load:
    """batch sequences, which have `prompt` tokens and get `new` more."""
    batch: int
    prompt: int
    new: int


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.bench_generate',
                                     description=__doc__.splitlines()[0])
    harness.add_common_arguments(parser.add_argument)
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


def generated(model, prompts: torch.Tensor, new: int) -> list[list[int]]:
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new,
                         min_new_tokens=new, do_sample=False)
    return out[:, prompts.shape[1]:].tolist()


def generated_paged(model, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """In the order of the prompts, which differ."""
    from transformers import GenerationConfig
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    texts = prompts.tolist()
    found = {tuple(x.prompt_ids): x.generated_tokens
             for x in model.generate_batch(texts, options).values()}
    return [found[tuple(text)] for text in texts]


def timed(generate: Callable, model, prompts: torch.Tensor,
          new: int) -> tuple[float, list[list[int]]]:
    """Seconds of a call, and what it wrote."""
    device = prompts.device
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = generate(model, prompts, new)
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def contenders(device: torch.device) -> dict[str, tuple[str, Callable]]:
    """Name: what set_attn_implementation takes, and how it generates. transformers takes
    flash_attention_3 and its paged cache only where there is a GPU.
    """
    found = {SDPA: (SDPA, generated), OWN: (OWN, generated)}
    if device.type == 'cuda':
        found |= {SHIM: (SHIM, generated), PAGED + SDPA: (SDPA, generated_paged),
                  PAGED + SHIM: (SHIM, generated_paged)}
    return found


def measure(model, load: Load, device: torch.device, rounds: int) -> dict:
    """Tokens per second of every contender, and the share of tokens that are those of SDPA."""
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(load.batch)
    prompts = torch.randint(2, vocabulary, (load.batch, load.prompt), generator=generator)
    prompts, named = prompts.to(device), contenders(device)
    rates, texts = {name: [] for name in named}, {}
    for number in range(rounds + 1):    # the first round warms up
        for name, (attention, generate) in named.items():
            model.set_attn_implementation(attention)
            short, _ = timed(generate, model, prompts, SHORT)
            long, texts[name] = timed(generate, model, prompts, load.new)
            if number > 0:
                rates[name].append(load.batch * (load.new - SHORT) / max(long - short, 1e-9))
    wanted = sum(texts[SDPA], [])
    return dict(cell=dict(vars(load)), results=[dict(
        name=name, tokens_per_s=statistics.median(rates[name]), rounds=rates[name],
        agreeing=sum(map(int.__eq__, sum(texts[name], []), wanted)) / len(wanted))
        for name in named])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, dtype = torch.device(args.device), getattr(torch, dict(
        bf16='bfloat16', fp16='float16')[args.dtype])
    rounds = args.rounds or (1 if args.quick else 3)
    integration = importlib.import_module('flash_attn3.integrations.transformers')
    integration.enable(name=OWN)
    try:
        model = model_of(device, dtype, args.quick)
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
