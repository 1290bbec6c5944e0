"""The Megatron engine against transformers' ``generate``, same weights: prefill, decode and peak memory, 1K to 16K.

Two models: SmolLM2-135M (its shape with random weights, unless ``--model`` names a directory of any Llama-like model)
with full attention, and a tiny SmolLM3 with a window in three of four layers. Both sides go the whole way: transformers
loads the directory, Megatron a checkpoint that was imported from it; each is given a prompt and asked for new tokens,
one after another; their greedy ids are compared in float32. The second peer is transformers' ``generate`` without a
cache: a full forward for each token.

One JSON line per claim: ``{"claim", "ours", "peer", "ratio", "goal", "holds"}``; a ratio above 1 means that ours is
better. Time is the best of all turns, which both take one after the other in this process. Memory is the peak of what
PyTorch's allocator handed out, caches included and weights not.

    python benchmarks/generation.py --threads 2 --model SMOLLM2_DIRECTORY
"""

import argparse
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Nothing is compiled on either side; a CPU machine need not have a compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from measuring import peak_bytes, synchronize

from megatron_lengthgen import backends

DEVICE = "cuda" if backends.prepare() == "cuda" else "cpu"

from megatron_lengthgen.evaluation.generation.base import Request  # noqa: E402 - after the backend is prepared

SMOLLM2_135M = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
TINY = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FULL_EVERY = 4
SHARERS = 8
clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory in place of random weights")
    parser.add_argument("--only", choices=["full", "windowed"], help="one of the two models")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="of prompts")
    parser.add_argument("--window", type=int, default=1024, help="tokens of the tiny model's windows")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-sharing", action="store_true", help="leave out prompts that share text: minutes at 16K")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    global clock
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        if options.only != "windowed":
            directory = options.model or smollm2(Path(scratch))
            compare(options.model.name if options.model else "SmolLM2-135M", directory, Path(scratch) / "a", options)
        if options.only != "full":
            what = f"tiny, window {options.window} in 3 of 4 layers"
            compare(what, tiny(Path(scratch), options.window), Path(scratch) / "b", options)


# ------------------------------------------------------------------------------------------------------- the models


def smollm2(scratch: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).save_pretrained(scratch / "smollm2")
    return scratch / "smollm2"


def tiny(scratch: Path, window: int) -> Path:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    full = [layer % FULL_EVERY == FULL_EVERY - 1 for layer in range(TINY["num_hidden_layers"])]
    torch.manual_seed(1)
    config = SmolLM3Config(
        **TINY,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention" if is_full else "sliding_attention" for is_full in full],
        no_rope_layers=[int(not is_full) for is_full in full],
    )
    SmolLM3ForCausalLM(config).save_pretrained(scratch / "tiny")
    return scratch / "tiny"


@dataclass(frozen=True)
class Engine:
    """An engine and the layer that it calls once for each new token."""

    generate: Callable[[list[Request]], Any]
    head: torch.nn.Module


def ours(checkpoint: Path, dtype: str) -> Callable[..., Engine]:
    """How to make an engine of the model in ``checkpoint``."""
    from megatron_lengthgen.checkpoint.load import load_model
    from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator

    model, args = load_model(checkpoint, dtype=dtype, overrides={"no_rope_fusion": True})

    def make(length: int, **settings: Any) -> Engine:
        engine = MegatronGenerator(model, max_length=length, vocab_size=args.vocab_size, **settings)
        return Engine(lambda requests: dict(engine.generate(requests)), model.output_layer)

    return make


def transformers_engines(directory: Path, dtype: str) -> tuple[Engine, Engine]:
    """With its cache, and without."""
    from transformers import GenerationConfig

    from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator

    engine = HuggingFaceGenerator.from_pretrained(str(directory), dtype=dtype)

    def without_cache(requests: list[Request]) -> None:
        for request in requests:
            prompt = torch.tensor([request.prompt_ids], device=engine.model.device)
            config = GenerationConfig(
                do_sample=False, use_cache=False, max_new_tokens=request.max_new_tokens, pad_token_id=0
            )
            with torch.inference_mode():
                engine.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)

    head = engine.model.lm_head
    return Engine(lambda requests: dict(engine.generate(requests)), head), Engine(without_cache, head)


# -------------------------------------------------------------------------------------------------------- the claims


def compare(name: str, directory: Path, checkpoint: Path, options: argparse.Namespace) -> None:
    from megatron_lengthgen.checkpoint.importing import import_model

    import_model(directory, checkpoint)
    same_ids(name, directory, checkpoint, options)
    make = ours(checkpoint, options.dtype)
    cached, uncached = transformers_engines(directory, options.dtype)
    for length in options.lengths:
        what = f"{name}, {length} tokens, {options.dtype}"
        engine = make(length + options.new_tokens)
        request = Request(prompt(length), options.new_tokens, frozenset())
        seconds = best({"ours": engine, "peer": cached}, request, options.repeats)
        prefill = {who: length / first for who, (first, _) in seconds.items()}
        decode = {who: 1 / each for who, (_, each) in seconds.items()}
        claim(f"prefill tokens/s, {what} (peer: transformers)", prefill["ours"], prefill["peer"], 1.0)
        claim(f"decode tokens/s, {what} (peer: transformers)", decode["ours"], decode["peer"], 1.0)
        short = Request(request.prompt_ids, 2, frozenset())
        slow = turn(uncached, short)[1]
        claim(f"decode tokens/s, {what} (peer: a full forward per token)", decode["ours"], 1 / slow, 1.0)
        peaks = [peak_bytes(partial(e.generate, [short]), DEVICE) / 2**20 for e in (engine, cached)]
        goal = 2.0 if directory.name == "tiny" and length >= 16384 else 1.0
        claim(f"peak MiB, {what} (peer: transformers)", *peaks, goal, less_is_better=True)
        # Shorter prompts are one chunk or two, of which nothing or little can be shared.
        if length >= 4096 and not options.no_sharing:
            sharing(what, make, length)


def same_ids(name: str, directory: Path, checkpoint: Path, options: argparse.Namespace) -> None:
    """New tokens that agree with transformers' in float32 at the shortest length."""
    length = min(options.lengths)
    request = Request(prompt(length), options.new_tokens, frozenset())
    [(_, mine)] = ours(checkpoint, "fp32")(length + options.new_tokens).generate([request]).items()
    [(_, theirs)] = transformers_engines(directory, "fp32")[0].generate([request]).items()
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    claim(f"greedy ids equal to transformers', {name}, {length} tokens, fp32", same, len(theirs), 1.0)


def sharing(what: str, make: Callable[..., Engine], length: int) -> None:
    """Prompts that leave one text at evenly spread depths, as single-needle samples leave their haystack."""
    text = prompt(length)
    depths = [int(length * (i + 0.5) / SHARERS) for i in range(SHARERS)]
    requests = [
        Request(text[:depth] + prompt(length - depth, 100 + i), 1, frozenset()) for i, depth in enumerate(depths)
    ]
    seconds = {}
    for share in (True, False):
        engine = make(length + 1, share_prefixes=share)
        start = clock()
        engine.generate(requests)
        synchronize(DEVICE)
        seconds[share] = clock() - start
    claim(
        f"prefill seconds of {SHARERS} prompts that share 1/16 to 15/16, {what} (peer: ours without sharing)",
        seconds[True],
        seconds[False],
        1.0,
        less_is_better=True,
    )


def claim(text: str, ours: float, peer: float, goal: float, *, less_is_better: bool = False) -> None:
    ratio = peer / ours if less_is_better else ours / peer
    line = {"claim": text, "ours": round(ours, 2), "peer": round(peer, 2), "ratio": round(ratio, 3), "goal": goal}
    print(json.dumps(line | {"holds": ratio >= goal}), flush=True)


# ------------------------------------------------------------------------------------------------------- measurement


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Of ids that both models have."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, TINY["vocab_size"], (length,), generator=generator).tolist())


def best(engines: dict[str, Engine], request: Request, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds to the first token and for each further one: the best of ``repeats`` turns after one to warm up."""
    seconds = {name: (float("inf"), float("inf")) for name in engines}
    for number, (name, engine) in itertools.product(range(repeats + 1), engines.items()):
        found = turn(engine, request)
        if number:
            seconds[name] = (min(seconds[name][0], found[0]), min(seconds[name][1], found[1]))
    return seconds


def turn(engine: Engine, request: Request) -> tuple[float, float]:
    with ticking(engine.head) as ticks:
        start = clock()
        engine.generate([request])
    return ticks[0] - start, (ticks[-1] - ticks[0]) / (len(ticks) - 1)


@contextmanager
def ticking(head: torch.nn.Module) -> Iterator[list[float]]:
    """The time of each call of ``head`` with a token."""
    ticks: list[float] = []

    def tick(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        if inputs[0].numel():  # ours is shown no token of a prompt's chunks but the last
            synchronize(DEVICE)
            ticks.append(clock())

    hook = head.register_forward_hook(tick)
    try:
        yield ticks
    finally:
        hook.remove()


if __name__ == "__main__":
    main()
