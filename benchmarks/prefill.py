"""Generation with a Megatron model against transformers, same weights: prefill tokens/s and decode time.

Prints one JSON line per claim: ``{"claim", "ours", "peer", "ratio", "goal", "holds"}``; a ratio above 1 means that ours
is faster. The model has the shape of SmolLM2-135M and random weights. Both sides of a claim take turns in this process,
and the best of all turns counts.

    python benchmarks/prefill.py --threads 2
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

# Nothing is compiled on either side; a CPU machine need not have a compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch

from megatron_lengthgen import backends

DEVICE = "cuda" if backends.prepare() == "cuda" else "cpu"

SHAPE = dict(
    num_layers=30, hidden_size=576, ffn_hidden_size=1536, num_attention_heads=9, num_query_groups=3, kv_channels=64
)
VOCAB, ROTARY_BASE = 49152, 100000
clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384], help="prompt lengths")
    parser.add_argument("--window", type=int, default=1024, help="tokens of the window on three of four layers")
    parser.add_argument("--chunk", type=int, default=None, help="prefill chunk; default: the engine's own")
    parser.add_argument("--decode-length", type=int, default=8192, help="cached tokens per sequence in decode; 0: skip")
    parser.add_argument("--batch", type=int, default=4, help="sequences in decode")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    global clock
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    torch.set_num_threads(options.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    longest = max([*options.lengths, options.decode_length]) + 64

    start_megatron()
    peer = hugging_face_model(longest, dtype)
    full, windowed = (megatron_model(peer, longest, dtype, window) for window in (None, options.window))
    for length in options.lengths:
        runs = {
            "peer": lambda n=length: hugging_face_prefill(peer, n),
            "full": lambda n=length: megatron_prefill(full, n, options.chunk),
            "windowed": lambda n=length: megatron_prefill(windowed, n, options.chunk),
        }
        seconds = best(runs, options.repeats)
        speed = {name: length / value for name, value in seconds.items()}
        claim(f"prefill tokens/s, {length} tokens, full attention, {options.dtype}", speed["full"], speed["peer"], 1.0)
        if length > options.window:
            what = f"prefill tokens/s, {length} tokens, window {options.window} on 3 of 4 layers, {options.dtype}"
            claim(f"{what} (peer: full attention)", speed["windowed"], speed["peer"], 1.0)
    if options.decode_length:
        decode_claims(options, peer, full, windowed)


def decode_claims(options: argparse.Namespace, peer: Any, full: Any, windowed: Any) -> None:
    what = f"decode ms/step, batch {options.batch} at {options.decode_length} tokens, {options.dtype}"
    steps, caches = {}, {}
    for name, model in (("full", full), ("windowed", windowed)):
        steps[name], caches[name] = megatron_decode(model, options.batch, options.decode_length)
    steps["peer"] = hugging_face_decode(peer, options.batch, options.decode_length)
    weights = sum(parameter.nbytes for parameter in full.parameters())
    for name in ("full", "windowed"):
        steps[f"read {name}"] = reading(weights + caches[name])
    ms = {name: value * 1e3 for name, value in best(steps, 5 * options.repeats).items()}
    claim(f"{what}, full attention", ms["full"], ms["peer"], 1.0, less_is_better=True)
    claim(
        f"{what}, window {options.window} on 3 of 4 layers (peer: full)",
        ms["windowed"],
        ms["peer"],
        1.0,
        less_is_better=True,
    )
    for name in ("full", "windowed"):
        size = (weights + caches[name]) / 2**20
        claim(
            f"{what}, {name} (peer: summing {size:.0f} MiB, the weights and the cache)",
            ms[name],
            ms[f"read {name}"],
            0.67,
            less_is_better=True,
        )


def claim(text: str, ours: float, peer: float, goal: float, *, less_is_better: bool = False) -> None:
    ratio = peer / ours if less_is_better else ours / peer
    line = {"claim": text, "ours": round(ours, 2), "peer": round(peer, 2), "ratio": round(ratio, 3), "goal": goal}
    print(json.dumps(line | {"holds": ratio >= goal}), flush=True)


def best(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest of ``repeats`` calls of each, taken in turn after one call to warm up."""
    seconds = dict.fromkeys(runs, float("inf"))
    for turn, (name, run) in itertools.product(range(repeats + 1), runs.items()):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = clock()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if turn:
            seconds[name] = min(seconds[name], clock() - start)
    return seconds


def start_megatron() -> None:
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def hugging_face_model(longest: int, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SHAPE["hidden_size"],
        intermediate_size=SHAPE["ffn_hidden_size"],
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_attention_heads"],
        num_key_value_heads=SHAPE["num_query_groups"],
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": float(ROTARY_BASE)},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).to(DEVICE).eval()


def megatron_model(peer: Any, longest: int, dtype: torch.dtype, window: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_lengthgen.models.llama import key_map
    from megatron_lengthgen.specs.gpt import stock_block

    config = TransformerConfig(
        **SHAPE,
        normalization="RMSNorm",
        layernorm_epsilon=peer.config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=4,
        transformer_impl="local",
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=DEVICE == "cpu",
        perform_initialization=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=stock_block(config),
        vocab_size=VOCAB,
        max_sequence_length=longest,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        share_embeddings_and_output_weights=True,
    )
    source = peer.state_dict()
    args = SHAPE | dict(
        group_query_attention=True,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        untie_embeddings_and_output_weights=False,
    )
    state = {entry.megatron: entry.pack([source[name] for name in entry.hugging_face]) for entry in key_map(args)}
    result = model.load_state_dict(state, strict=False)
    assert not [key for key in result.missing_keys if not key.endswith("_extra_state")], result
    return model.to(DEVICE).eval()


def prompt(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def megatron_prefill(model: Any, length: int, chunk: int | None) -> None:
    from megatron_lengthgen.evaluation.generation.base import Request
    from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator

    engine = MegatronGenerator(model, max_length=length + 1, prefill_chunk=chunk)
    list(engine.generate([Request(tuple(prompt(length)), 1, frozenset())]))


def hugging_face_prefill(model: Any, length: int) -> None:
    with torch.inference_mode():
        tokens = torch.tensor([prompt(length)], device=DEVICE)
        int(model(tokens, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def megatron_decode(model: Any, batch: int, length: int) -> tuple[Callable[[], Any], int]:
    """A decode step behind ``length`` cached tokens, and the bytes that the caches hold."""
    from megatron_lengthgen.attention.cache import SequenceCache
    from megatron_lengthgen.evaluation.generation.cached_forward import CachedForward

    run = CachedForward(model, max_length=length + 4096, prefill_chunk=2048)
    caches = [SequenceCache(length + 4096) for _ in range(batch)]
    for cache in caches:
        run.prefill(prompt(length), cache)
    position = itertools.count(length)

    def step() -> None:
        run.decode([1] * batch, [next(position)] * batch, caches)

    token = 2 * SHAPE["num_query_groups"] * SHAPE["kv_channels"] * next(model.parameters()).element_size()
    windows = [layer.self_attention.core_attention.window for layer in model.decoder.layers]
    return step, batch * token * sum(length if window is None else min(window, length) for window in windows)


def hugging_face_decode(model: Any, batch: int, length: int) -> Callable[[], Any]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([prompt(length)] * batch, device=DEVICE)
    with torch.inference_mode():
        for chunk in tokens.split(2048, dim=1):
            model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def step() -> None:
        with torch.inference_mode():
            logits = model(tokens[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            logits[:, -1].argmax(-1).tolist()

    return step


def reading(size: int) -> Callable[[], Any]:
    """Sum ``size`` bytes: what the memory gives."""
    block = torch.ones(size // 4, device=DEVICE)
    return lambda: block.sum().item()


if __name__ == "__main__":
    main()
