"""A Mamba-2 mixer on ``megatron_lengthgen.ssm`` against transformers' ``Mamba2Mixer`` in plain PyTorch, same weights.

A training step, a decode step, and a prefill of 64 times the training length: time, memory and agreement. Prints one
JSON line per claim: ``{"claim", "ours", "peer", "ratio", "goal", "holds"}``; a ratio above 1 is in our favour. The peer
takes the best of several chunk sizes. Its prefill holds [length, chunk, heads, state] numbers at once, so that one runs
on a smaller mixer; a chunk size that would not fit the memory is left out with a line that says so. Time is the best of
all turns, which both sides take one after another in this process; memory is the peak of what PyTorch's allocator
handed out during a call.

    python benchmarks/mamba.py --threads 2
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
from measuring import peak_bytes
from torch import Tensor
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from megatron_lengthgen import backends
from megatron_lengthgen.ssm.convolution import causal_conv1d, causal_conv1d_update
from megatron_lengthgen.ssm.gated_norm import gated_rms_norm
from megatron_lengthgen.ssm.mixer import split_conv1d_scan
from megatron_lengthgen.ssm.scan import chunk_scan, selective_state_update

#: Mamba-2 130M's mixer, and one whose prefill at 64 times the length the peer can hold.
TRAINING = dict(hidden_size=768, num_heads=24, head_dim=64, state_size=128)
PREFILL = dict(hidden_size=64, num_heads=2, head_dim=64, state_size=16)
PEER_CHUNKS = (64, 256)
clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a training step")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, default=128, help="ours; Megatron's default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    global clock
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    torch.set_num_threads(options.threads)
    backends.prepare()
    training(options)
    prefill(options)
    decode(options)


def training(options: argparse.Namespace) -> None:
    mixer = make(TRAINING)
    hidden = torch.randn(options.batch, options.length, TRAINING["hidden_size"], requires_grad=True)
    leaves, towards = [hidden, *mixer.parameters()], torch.randn(hidden.shape)

    def step(forward: Callable[[Tensor], Tensor], x: Tensor = hidden) -> tuple[Tensor, ...]:
        y = forward(x)
        return y, *torch.autograd.grad(y, [x, *leaves[1:]], towards[:, : x.size(1)])

    runs = {
        name: functools.partial(step, forward)
        for name, forward in fitting(mixer, options.batch * options.length, options.chunk_size).items()
    }
    what = f"forward and backward of {options.batch} x {options.length} tokens"
    compare_time(what, best(runs, options.repeats))
    ours, *peers = (run() for run in runs.values())
    for text, parts in ((f"{what}: output", slice(1)), (f"{what}: gradients", slice(1, None))):
        compare_results(text, ours[parts], peers[0][parts])
    for name in list(runs)[1:]:
        ours, peer = (peak_bytes(runs[side], "cpu") / 2**20 for side in ("ours", name))
        claim(f"{what}: peak MiB (peer: {name})", ours, peer, peer / ours, 1.0)
    forward = functools.partial(ours_forward, mixer, chunk_size=options.chunk_size)
    longer = hidden.detach().repeat(1, 4, 1).requires_grad_()
    towards = torch.randn(longer.shape)
    compare_memory(what, [peak_bytes(functools.partial(step, forward, x), "cpu") for x in (hidden, longer)], 4)


@torch.no_grad()
def prefill(options: argparse.Namespace) -> None:
    mixer, length = make(PREFILL), 64 * options.length
    hidden = torch.randn(1, length, PREFILL["hidden_size"])
    runs = {
        name: functools.partial(forward, hidden) for name, forward in fitting(mixer, length, options.chunk_size).items()
    }
    what = f"prefill of {length} tokens"
    compare_time(what, best(runs, options.repeats))
    ours, *peers = (run() for run in runs.values())
    for peer in peers[:1]:
        compare_results(f"{what}: output", [ours], [peer])
    pieces = Stepper(mixer, 1)
    parts = [pieces.prefill(part, options.chunk_size) for part in hidden.split(4001, 1)]
    compare_results(f"{what}: output in pieces of 4001 (peer: ours in one)", [torch.cat(parts, 1)], [ours])
    large = make(TRAINING)
    inputs = [torch.randn(1, length // part, TRAINING["hidden_size"]) for part in (16, 4)]
    compare_memory(
        f"prefill of {length // 16} tokens, {TRAINING['hidden_size']} wide",
        [peak_bytes(functools.partial(ours_forward, large, x, options.chunk_size), "cpu") for x in inputs],
        4,
    )


@torch.no_grad()
def decode(options: argparse.Namespace) -> None:
    mixer = make(TRAINING)
    hidden = torch.randn(options.batch, 65, TRAINING["hidden_size"])
    prompt, token = hidden[:, :64], hidden[:, 64:]
    ours, cache = Stepper(mixer, options.batch), DynamicCache(config=config(TRAINING))
    ours.prefill(prompt, options.chunk_size)
    mixer.torch_forward(prompt, cache_params=cache)
    compare_results("decode step: output", [ours.decode(token)], [mixer.torch_forward(token, cache_params=cache)])
    runs = {"ours": lambda: ours.decode(token), "transformers": lambda: mixer.torch_forward(token, cache_params=cache)}
    compare_time(f"decode step, batch {options.batch}", best(runs, 30 * options.repeats))


def config(shape: dict[str, int], chunk_size: int = 256) -> Mamba2Config:
    return Mamba2Config(**shape, n_groups=1, chunk_size=chunk_size, num_hidden_layers=1)


def make(shape: dict[str, int]) -> Mamba2Mixer:
    torch.manual_seed(1)
    return Mamba2Mixer(config(shape), layer_idx=0)


def fitting(mixer: Mamba2Mixer, tokens: int, chunk_size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Forward functions: ours, and the peer's at each chunk size that fits the memory."""
    runs = {"ours": functools.partial(ours_forward, mixer, chunk_size=chunk_size)}
    free = psutil.virtual_memory().available
    for size in PEER_CHUNKS:
        # Its products of C and B, its values times weights, and its sums over pairs of chunks.
        pairs = 4 * tokens * size * mixer.num_heads * (mixer.ssm_state_size + mixer.head_dim)
        states = 4 * (tokens / size + 1) ** 2 * mixer.num_heads * mixer.head_dim * mixer.ssm_state_size
        if pairs + states > 0.6 * free:
            print(f"{tokens} tokens: left out the peer at chunk size {size}, {(pairs + states) / 2**30:.1f} GiB")
        else:
            runs[f"transformers, chunk size {size}"] = functools.partial(peer_forward, mixer, chunk_size=size)
    return runs


def peer_forward(mixer: Mamba2Mixer, hidden: Tensor, chunk_size: int) -> Tensor:
    mixer.chunk_size = chunk_size
    return mixer.torch_forward(hidden)


def ours_forward(mixer: Mamba2Mixer, hidden: Tensor, chunk_size: int) -> Tensor:
    y = split_conv1d_scan(
        mixer.in_proj(hidden),
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        mixer.dt_bias,
        -torch.exp(mixer.A_log),
        mixer.D,
        chunk_size=chunk_size,
        headdim=mixer.head_dim,
        ngroups=mixer.n_groups,
    )
    return mixer.out_proj(gated_rms_norm(y, mixer.norm.weight, eps=mixer.norm.variance_epsilon))


class Stepper:
    """Ours with both states, as a generation engine drives it."""

    def __init__(self, mixer: Mamba2Mixer, batch: int):
        self.mixer = mixer
        self.conv_state = torch.zeros(batch, mixer.conv_dim, mixer.conv_kernel_size - 1)
        self.state = torch.zeros(batch, mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
        self.A = -torch.exp(mixer.A_log)

    def prefill(self, hidden: Tensor, chunk_size: int) -> Tensor:
        mixer = self.mixer
        z, xBC, dt = self._split(hidden)
        weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
        xBC, self.conv_state = causal_conv1d(xBC.mT, weight, bias, None, self.conv_state, True, "silu")
        x, B, C = self._parts(xBC.mT)
        fields = {"D": mixer.D, "dt_bias": mixer.dt_bias, "initial_states": self.state, "dt_softplus": True}
        y, self.state = chunk_scan(x, dt, self.A, B, C, chunk_size, **fields, return_final_states=True)
        return self._project(y, z)

    def decode(self, hidden: Tensor) -> Tensor:
        mixer = self.mixer
        z, xBC, dt = self._split(hidden)
        xBC = causal_conv1d_update(xBC, self.conv_state, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, "silu")
        x, B, C = self._parts(xBC)
        D, dt_bias = (t.unsqueeze(-1).expand(-1, mixer.head_dim) for t in (mixer.D, mixer.dt_bias))
        dt, A = dt.unsqueeze(-1).expand_as(x), self.A.view(-1, 1, 1).expand(self.state.shape[1:])
        return self._project(selective_state_update(self.state, x, dt, A, B, C, D, None, dt_bias, True), z)

    def _split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        mixer = self.mixer
        return mixer.in_proj(hidden).split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)

    def _parts(self, xBC: Tensor) -> tuple[Tensor, ...]:
        mixer = self.mixer
        x, B, C = xBC.split([mixer.intermediate_size, *[mixer.n_groups * mixer.ssm_state_size] * 2], dim=-1)
        return x.unflatten(-1, (mixer.num_heads, -1)), *(t.unflatten(-1, (mixer.n_groups, -1)) for t in (B, C))

    def _project(self, y: Tensor, z: Tensor) -> Tensor:
        norm = self.mixer.norm
        y = gated_rms_norm(y.flatten(2), norm.weight, z, norm.variance_epsilon, norm_before_gate=False)
        return self.mixer.out_proj(y)


def best(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of the fastest of ``repeats`` calls of each, taken in turn after one call to warm up."""
    fastest = dict.fromkeys(runs, float("inf"))
    for turn, (name, run) in itertools.product(range(repeats + 1), runs.items()):
        start = clock()
        run()
        if turn:
            fastest[name] = min(fastest[name], (clock() - start) * 1e3)
    return fastest


def compare_time(what: str, milliseconds: dict[str, float]) -> None:
    ours = milliseconds.pop("ours")
    if not milliseconds:
        print(f"{what}: ours {ours:.1f} ms; no chunk size of the peer fits the memory", flush=True)
        return
    name, peer = min(milliseconds.items(), key=lambda item: item[1])
    claim(f"{what}: ms (peer: {name})", ours, peer, peer / ours, 1.0)


def compare_results(what: str, ours: Any, peer: Any) -> None:
    """The largest difference in shares of the peer's largest number, which has to stay below 1e-5."""
    apart = max((((x - y).abs().max() / y.abs().max()).item()) for x, y in zip(ours, peer, strict=True))
    claim(f"{what}: largest difference (peer: 1e-5)", apart, 1e-5, 1e-5 / max(apart, 1e-12), 1.0)


def compare_memory(what: str, sizes: list[int], times: int) -> None:
    short, long = (size / 2**20 for size in sizes)
    claim(
        f"{what}, {times} times the length: peak MiB (peer: in proportion)",
        long,
        times * short,
        times * short / long,
        0.95,
    )


def claim(text: str, ours: float, peer: float, ratio: float, goal: float) -> None:
    line = {"claim": text, "ours": float(f"{ours:.4g}"), "peer": float(f"{peer:.4g}"), "ratio": round(ratio, 3)}
    print(json.dumps(line | {"goal": goal, "holds": ratio >= goal}), flush=True)


if __name__ == "__main__":
    main()
