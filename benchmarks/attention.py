"""One layer's core attention against Megatron's ``DotProductAttention`` and SDPA with a dense mask: time and memory.

Forward with backward, and a cached decode step, with a window and without, at growing lengths. Each measurement is a
line of text as it comes; a peer whose dense scores or mask would not fit the memory is skipped with a line that says
so. At the end comes one JSON line per claim: ``{"claim", "ours", "peer", "ratio", "goal", "holds"}``. Time is the best
of all turns, which ours and the peers take one after another in this process; memory is the peak of what PyTorch's
allocator handed out during a first call, masks and buffers included, inputs and caches not.

    python benchmarks/attention.py --threads 2 --max-length 16384
"""

import argparse
import functools
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

# Nothing is compiled on either side; a CPU machine need not have a compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import psutil
import torch
import torch.nn.functional as F
from measuring import peak_bytes, synchronize
from torch import Tensor

from megatron_lengthgen import backends

DEVICE = "cuda" if backends.prepare() == "cuda" else "cpu"
LENGTHS = [1024 << doubling for doubling in range(7)]
#: Tensors as large as all scores that DotProductAttention holds at once in a backward: 7.2 measured at 4,096 tokens.
SCORES = 8
PEERS = ("DotProductAttention", "dense-mask SDPA")
clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-length", type=int, default=65536 if DEVICE == "cuda" else 8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="those above --max-length are left out")
    parser.add_argument("--window", type=int, default=1024, help="tokens that a query sees")
    parser.add_argument("--heads", type=int, default=16 if DEVICE == "cuda" else 4)
    parser.add_argument("--groups", type=int, default=4 if DEVICE == "cuda" else 2)
    parser.add_argument("--head-dim", type=int, default=128 if DEVICE == "cuda" else 64)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--memory", type=float, default=None, help="GiB that a peer may take; default: half of the free"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    lengths = sorted(length for length in options.lengths if length <= options.max_length)
    if not lengths:
        parser.error(f"no length is at most {options.max_length}: raise --max-length, or give shorter --lengths")
    global clock
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    torch.set_num_threads(options.threads)
    start_megatron()

    training, decoding = {}, {}
    for length, window in itertools.product(lengths, (options.window, None)):
        what = f"{length} tokens, {layer(window)}"
        training[length, window] = measure(f"training, {what}", training_runs(options, length, window), options)
        decoding[length, window] = measure(f"decode step, {what}", decode_runs(options, length, window), options)

    claim_linear(options, lengths, training)
    for (length, window), found in training.items():
        compare(f"forward and backward, {length} tokens, {layer(window)}, {options.dtype}", found, length > 2048)
    for (length, window), found in decoding.items():
        compare(f"decode step behind {length} tokens, {layer(window)}, {options.dtype}", found, length > 2048)


Measured = dict[str, tuple[float, int]]  # seconds and bytes of each that ran
Runs = dict[str, tuple[Callable[[], Any], int]]  # what to call, and the bytes that it needs as a peer


def measure(what: str, runs: Runs, options: argparse.Namespace) -> Measured:
    """Peak bytes of the first call of each, then the fastest of ``repeats`` calls, taken in turn."""
    limit = free_memory() / 2 if options.memory is None else options.memory * 2**30
    fitting = {}
    for name, (run, need) in runs.items():
        if need <= limit:
            fitting[name] = run
        else:
            print(f"{what}: skipped {name}, {need / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB", flush=True)
    bytes_ = {name: peak_bytes(run, DEVICE) for name, run in fitting.items()}
    seconds = dict.fromkeys(fitting, float("inf"))
    for _, (name, run) in itertools.product(range(options.repeats), fitting.items()):
        synchronize(DEVICE)
        start = clock()
        run()
        synchronize(DEVICE)
        seconds[name] = min(seconds[name], clock() - start)
    for name in fitting:
        print(f"{what}: {name}, {seconds[name] * 1e3:.2f} ms, {bytes_[name] / 2**20:.1f} MiB", flush=True)
    return {name: (seconds[name], bytes_[name]) for name in fitting}


def claim_linear(options: argparse.Namespace, lengths: list[int], training: dict[Any, Measured]) -> None:
    """Time at the longest length in times of that at the shortest: 70 for 64 times the length, and in proportion."""
    short, long = lengths[0], lengths[-1]
    if short == long:
        return
    ours, peer = (training[length, options.window]["ours"][0] * 1e3 for length in (long, short))
    goal = round(70 / 64 * long / short, 2)
    what = f"forward and backward ms, {layer(options.window)}, {options.dtype}: {long} tokens against {short}"
    print_claim(what, ours, peer, ours / peer, goal, ours / peer <= goal)


def compare(what: str, found: Measured, has_time_goal: bool) -> None:
    ours_seconds, ours_bytes = found["ours"]
    for name in PEERS:
        if name not in found:
            continue
        seconds, bytes_ = found[name]
        if has_time_goal:
            ratio = seconds / ours_seconds
            print_claim(f"{what}: ms (peer: {name})", ours_seconds * 1e3, seconds * 1e3, ratio, 1.0, ratio >= 1.0)
            ratio = bytes_ / max(ours_bytes, 1)
            print_claim(f"{what}: peak MiB (peer: {name})", ours_bytes / 2**20, bytes_ / 2**20, ratio, 1.0, ratio >= 1)


def print_claim(what: str, ours: float, peer: float, ratio: float, goal: float, holds: bool) -> None:
    line = {"claim": what, "ours": round(ours, 3), "peer": round(peer, 3), "ratio": round(ratio, 3), "goal": goal}
    print(json.dumps(line | {"holds": holds}), flush=True)


def layer(window: int | None) -> str:
    return "full attention" if window is None else f"window {window}"


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else psutil.virtual_memory().available


def start_megatron() -> None:
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def core_attention(options: argparse.Namespace, window: int | None, kind: str) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_lengthgen.attention.core import SDPACoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.heads * options.head_dim,
        num_attention_heads=options.heads,
        num_query_groups=options.groups,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
        bf16=options.dtype == "bf16",
        params_dtype=dtype(options),
    )
    cls = SDPACoreAttention if kind == "ours" else DotProductAttention
    # Megatron keeps a buffer for scores from call to call; without it the first call shows its size.
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()
    return cls(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")


def dtype(options: argparse.Namespace) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]


def tensors(options: argparse.Namespace, queries: int, keys: int) -> list[Tensor]:
    """Query [queries, 1, heads, d], key and value [keys, 1, groups, d]."""
    shapes = [(queries, options.heads), (keys, options.groups), (keys, options.groups)]
    return [torch.randn(n, 1, heads, options.head_dim, device=DEVICE).to(dtype(options)) for n, heads in shapes]


def training_runs(options: argparse.Namespace, length: int, window: int | None) -> Runs:
    leaves = [x.requires_grad_() for x in tensors(options, length, length)]
    towards = torch.randn(length, 1, options.heads * options.head_dim, device=DEVICE).to(dtype(options))

    def run(attend: Callable[..., Tensor]) -> None:
        torch.autograd.grad(attend(*leaves, None), leaves, towards)

    return {
        "ours": (functools.partial(run, core_attention(options, window, "ours")), 0),
        PEERS[0]: (
            functools.partial(run, core_attention(options, window, PEERS[0])),
            SCORES * options.heads * length**2 * leaves[0].element_size(),
        ),
        PEERS[1]: (functools.partial(run, DenseMask(length, length, window)), length**2 * leaves[0].element_size()),
    }


def decode_runs(options: argparse.Namespace, length: int, window: int | None) -> Runs:
    from megatron_lengthgen.attention.cache import SequenceCache

    ours = core_attention(options, window, "ours").eval()
    query, key, value = tensors(options, 1, length)
    cache = SequenceCache(length + 4096)
    # The layer's own way in: a step appends its key and value, and attends to what the cache gives back.
    cache.append(1, *(x.permute(1, 2, 0, 3) for x in (key[:-1], value[:-1])), window)
    ours.caches = [cache]
    steps = {
        "ours": functools.partial(ours, query, key[-1:], value[-1:], None),
        PEERS[0]: functools.partial(core_attention(options, window, PEERS[0]).eval(), query, key, value, None),
        PEERS[1]: functools.partial(DenseMask(1, length, window), query, key, value, None),
    }
    return {name: (torch.no_grad()(step), 0) for name, step in steps.items()}


class DenseMask:
    """SDPA with an additive mask of all queries and keys, made in the first call and kept, as a model would."""

    def __init__(self, queries: int, keys: int, window: int | None):
        self.queries, self.keys, self.window = queries, keys, window
        self.mask: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, _: None) -> Tensor:
        if self.mask is None:
            mask = query.new_full((self.queries, self.keys), float("-inf"))
            past = self.keys - self.queries
            self.mask = mask.triu_(past + 1)
            if self.window is not None:
                old = torch.ones(self.queries, self.keys, dtype=torch.bool, device=query.device)
                self.mask.masked_fill_(old.tril_(past - self.window), float("-inf"))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if DEVICE == "cuda":  # kernels that take a mask do not share keys between heads there
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, self.mask, enable_gqa=DEVICE == "cpu")
        return out.permute(2, 0, 1, 3).flatten(2)


if __name__ == "__main__":
    main()
