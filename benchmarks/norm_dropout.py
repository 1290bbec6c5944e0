"""Norm and dropout in one kernel against PyTorch, torch.compile, Transformer Engine and Liger: time, bandwidth, memory.

First the operation alone, forward with backward, in each mode: milliseconds, GB/s over the bytes that it must move
(see megatron_lengthgen/dropout/fused.py) against a device copy, and peak memory. Then a whole TransformerLayer forward
with backward at the shapes of SmolLM3-3B and of an 8B model: this package's substituted layer against the stock one,
without dropout and with Megatron's own. Each measurement is a line of text as it comes, and so is a peer that is not
installed. At the end comes one JSON line per claim: {"claim", "ours", "peer", "ratio", "goal", "holds"}. Time is the
median of many calls, each behind a flush of the L2 cache.

    python benchmarks/norm_dropout.py --json norm_dropout.json

Without a GPU, `TRITON_INTERPRET=1 python benchmarks/norm_dropout.py --smoke` runs every line of it on tiny shapes, in
Triton's interpreter; its figures mean nothing, and its claims say "smoke".
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import peak_bytes
from torch import Tensor

from megatron_lengthgen import backends

DEVICE = "cuda" if backends.prepare() == "cuda" else "cpu"

from megatron_lengthgen.dropout import fused  # noqa: E402
from megatron_lengthgen.dropout.functional import pre_linear_dropout, vpad  # noqa: E402
from megatron_lengthgen.dropout.masks import MaskCoordinates  # noqa: E402
from megatron_lengthgen.dropout.moments import moments  # noqa: E402
from megatron_lengthgen.files import write_json  # noqa: E402

P = 0.1
P_OF_TE = 32 / 256  # Transformer Engine's kernel takes multiples of 1/256
EPS = 1e-6
#: name -> tokens and channels of the operation; heads, groups and ffn_hidden_size of the layer
SHAPES = {"SmolLM3-3B": (2048, 16, 4, 11008), "8B": (4096, 32, 8, 14336)}
SMOKE_SHAPES = {"smoke": (64, 4, 2, 96)}
#: mode -> placement, fill, statistics, and bytes that must move forward with backward, in times of x
MODES = {
    "norm alone": (None, "zero", "norm", 5),
    "pre_linear": ("pre_linear", "zero", "norm", 5),
    "vpad, norm statistics": ("vpad", "zero", "norm", 5),
    "vpad, batch statistics": ("vpad", "zero", "batch", 6),
    "vpad, mean fill, batch statistics": ("vpad", "mean", "batch", 6),
}
Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, measurements and claims to this file too")
    parser.add_argument("--only", choices=["operation", "layer"], help="leave the other part out")
    parser.add_argument("--tokens", type=int, default=65536, help="of the operation at 2,048 channels")
    parser.add_argument("--layer-tokens", type=int, nargs=2, default=(4096, 2), help="sequence length and batch")
    parser.add_argument("--milliseconds", type=int, default=60, help="of timing each, after a third of it to warm up")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any machine; figures mean nothing")
    options = parser.parse_args()
    if DEVICE == "cpu" and not (options.smoke and fused.IS_INTERPRETED):
        parser.error("there is no CUDA device: TRITON_INTERPRET=1 and --smoke try the script out")
    if options.smoke:
        options.tokens, options.layer_tokens = 8, (8, 2)
    found = Findings(options.smoke)
    if options.only != "layer":
        operation(options, found)
    if options.only != "operation":
        layers(options, found)
    for claim in found.claims:
        print(json.dumps(claim), flush=True)
    if options.json:
        write_json(options.json, {"machine": machine(), "measured": found.measured, "claims": found.claims})


class Findings:
    """What was measured, and what is claimed of it."""

    def __init__(self, is_smoke: bool) -> None:
        self.measured: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] = []
        self._prefix = "smoke: " if is_smoke else ""

    def measure(
        self, what: str, name: str, step: Step, options: argparse.Namespace, moved: int = 0
    ) -> tuple[float, int]:
        """Milliseconds and peak bytes of ``step``; ``moved``: bytes that it must move."""
        ms, peak = milliseconds(step, options), peak_bytes(step, DEVICE)
        line: dict[str, Any] = {"what": what, "name": name, "ms": round(ms, 4), "peak_mib": round(peak / 2**20, 2)}
        if moved:
            line["gb_per_s"] = round(moved / ms / 1e6, 1)
        self.measured.append(line)
        rate = f", {line['gb_per_s']} GB/s" if moved else ""
        print(f"{what}: {name}, {ms:.3f} ms{rate}, peak {peak / 2**20:.1f} MiB", flush=True)
        return ms, peak

    def skip(self, what: str, name: str, why: object) -> None:
        text = " ".join(str(why).split())[:200]
        self.measured.append({"what": what, "name": name, "skipped": text})
        print(f"{what}: skipped {name}: {text}", flush=True)

    def claim(self, what: str, ours: float, peer: float, ratio: float, goal: float) -> None:
        """``ratio`` of ours to the peer in the sense in which more is better."""
        line = {"claim": self._prefix + what, "ours": round(ours, 4), "peer": round(peer, 4), "ratio": round(ratio, 3)}
        self.claims.append(line | {"goal": goal, "holds": ratio >= goal})


def machine() -> dict[str, str]:
    import triton

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, Triton's interpreter"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def milliseconds(step: Step, options: argparse.Namespace) -> float:
    """Median of one call."""
    if DEVICE == "cuda":
        from triton.testing import do_bench

        return do_bench(step, warmup=options.milliseconds // 3, rep=options.milliseconds, return_mode="median")
    times = []
    for _ in range(2):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def copy_bandwidth(options: argparse.Namespace) -> float:
    """GB/s, read and written, of a device copy of 1 GiB."""
    source = torch.empty(2**29 if DEVICE == "cuda" else 2**12, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), options) / 1e6


# --- the operation alone


def operation(options: argparse.Namespace, found: Findings) -> None:
    copy = copy_bandwidth(options)
    print(f"device copy: {copy:.0f} GB/s", flush=True)
    found.measured.append({"what": "device copy", "gb_per_s": round(copy, 1)})
    for hidden in sorted({shape[0] for shape in shapes(options).values()}):
        tokens = max(options.tokens * 2048 // hidden, 1) if not options.smoke else options.tokens
        for mode in MODES:
            one_mode(options, found, mode, tokens, hidden, copy)
        sweep(options, found, tokens, hidden)


def sweep(options: argparse.Namespace, found: Findings, tokens: int, hidden: int) -> None:
    """Elements per thread, the kernel's one setting: whether the one that it comes with is the best here."""
    x, weight, dy = tensors(tokens, hidden)
    chosen = fused.ELEMENTS_PER_THREAD
    for elements in (8, 16, 32):
        fused.ELEMENTS_PER_THREAD = elements
        step = functools.partial(forward_backward, ours("pre_linear", weight), [x, weight], dy)
        what = f"pre_linear, {tokens} tokens x {hidden}, bf16"
        found.measure(what, f"ours, {elements} elements per thread", step, options, MODES["pre_linear"][3] * x.nbytes)
    fused.ELEMENTS_PER_THREAD = chosen


def tensors(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, gain and the output's gradient."""
    x, dy = (torch.randn(tokens, 1, hidden, device=DEVICE).bfloat16() for _ in range(2))
    return x.requires_grad_(), (torch.rand(hidden, device=DEVICE) + 0.5).bfloat16().requires_grad_(), dy


def one_mode(options: argparse.Namespace, found: Findings, mode: str, tokens: int, hidden: int, copy: float) -> None:
    what = f"{mode}, {tokens} tokens x {hidden}, bf16"
    x, weight, dy = tensors(tokens, hidden)
    moved = MODES[mode][3] * x.nbytes
    times: dict[str, tuple[float, int]] = {}
    for name, function in {"ours": ours, **peers(mode)}.items():
        try:
            forward = function(mode, weight)
            leaves = [x, getattr(forward, "weight", weight)]
            step = functools.partial(forward_backward, forward, leaves, dy)
            step()
        except Exception as error:  # a peer that is absent or does not run here must not end the others' measurement
            if name == "ours":
                raise
            found.skip(what, name, error)
            continue
        times[name] = found.measure(what, name, step, options, moved)
    ours_ms, ours_peak = times.pop("ours")
    rate = moved / ours_ms / 1e6
    found.claim(f"{what}: GB/s against a device copy", rate, copy, rate / copy, 0.9)
    for name, (ms, peak) in times.items():
        found.claim(f"{what}: ms (peer: {name})", ours_ms, ms, ms / ours_ms, 1.0)
        found.claim(f"{what}: peak MiB (peer: {name})", ours_peak / 2**20, peak / 2**20, peak / max(ours_peak, 1), 1.0)


def forward_backward(forward: Callable[[Tensor], Tensor], leaves: list[Tensor], dy: Tensor) -> None:
    torch.autograd.grad(forward(leaves[0]), leaves, dy)


def ours(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    placement, fill, kind, _ = MODES[mode]
    norm = fused.Norm(weight, None, EPS)

    def forward(x: Tensor) -> Tensor:
        if placement is None:
            return fused.norm_dropout(x, norm)
        given = None
        if kind == "batch":
            total = fused.norm_moments(x, norm)
            given = total.mean, total.variance
        return fused.norm_dropout(x, norm, P, where(x), placement=placement, fill=fill, moments=given)  # type: ignore[arg-type]

    return forward


def where(x: Tensor) -> MaskCoordinates:
    return MaskCoordinates(key=1234, stream=33, positions=((0, x.shape[0]),))


def peers(mode: str) -> dict[str, Callable[[str, Tensor], Callable[[Tensor], Tensor]]]:
    """What others offer: nobody has VPAD but the plain path, so that theirs is the nearest, a plain dropout."""
    found = {"PyTorch, eager": eager, "torch.compile": compiled}
    if mode == "norm alone":
        return found | {"TE RMSNorm": te_norm, "Liger RMSNorm": liger}
    if mode == "pre_linear":
        found |= {"TE RMSNorm + dropout": te_norm, "Liger RMSNorm + dropout": liger}
        found |= {f"TE ops RMSNorm + Dropout, p {P_OF_TE}": te_ops}
    return found | {"plain path, same masks": plain}


def dropped(x: Tensor, mode: str, weight: Tensor, mask: Any = None) -> Tensor:
    """Dropout behind a norm as PyTorch has it; VPAD by the plain path's formula."""
    placement, fill, kind, _ = MODES[mode]
    if placement is None:
        return x
    if placement == "pre_linear":
        return F.dropout(x, P) if mask is None else pre_linear_dropout(x, P, mask=mask)
    if kind == "batch":
        total = moments(x)
        mean, variance = total.mean, total.variance
    else:
        mean, variance = torch.zeros_like(weight, dtype=torch.float32), weight.detach().float().square()
    return vpad(x, P, mean, variance, fill=fill, mask=mask)  # type: ignore[arg-type]


def eager(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: dropped(F.rms_norm(x, x.shape[-1:], weight, EPS), mode, weight)


def plain(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: dropped(F.rms_norm(x, x.shape[-1:], weight, EPS), mode, weight, where(x))


def compiled(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    placement, fill, kind, _ = MODES[mode]
    q = 1.0 - P

    def forward(x: Tensor) -> Tensor:
        """The formulas in one graph, with the compiler's own generator."""
        z = F.rms_norm(x, x.shape[-1:], weight, EPS)
        if placement is None:
            return z
        if placement == "pre_linear":
            return F.dropout(z, P)
        wide = z.detach().float().flatten(0, 1)
        mean, variance = torch.zeros_like(weight, dtype=torch.float32), weight.detach().float().square()
        if kind == "batch":
            mean, variance = wide.mean(0), wide.var(0, correction=0)
        keep = (torch.rand_like(z, dtype=torch.float32) >= P).float()
        if fill == "mean":
            return (mean + keep * q**-0.5 * (z - mean)).to(x.dtype)
        a = torch.sqrt(variance / (q * (variance + P * mean.square())))
        return (a * keep * z + mean * (1.0 - a * q)).to(x.dtype)

    if DEVICE == "cpu":
        raise RuntimeError("torch.compile is compared on a GPU alone")
    return torch.compile(forward)


def te_norm(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    import transformer_engine.pytorch as te

    norm = te.RMSNorm(weight.shape[0], eps=EPS, dtype=weight.dtype, device=DEVICE)
    return _with_dropout(norm, mode)


def liger(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    from liger_kernel.transformers import LigerRMSNorm

    return _with_dropout(LigerRMSNorm(weight.shape[0], eps=EPS, in_place=False).to(DEVICE, weight.dtype), mode)


def te_ops(mode: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    import transformer_engine.pytorch.ops as ops

    norm = ops.RMSNorm(weight.shape[0], eps=EPS, dtype=weight.dtype, device=DEVICE)
    return _Forward(ops.Sequential(norm, ops.Dropout(P_OF_TE)), norm.weight)


def _with_dropout(norm: torch.nn.Module, mode: str) -> "_Forward":
    weight: Any = norm.weight
    return _Forward((lambda x: F.dropout(norm(x), P)) if mode == "pre_linear" else norm, weight)


class _Forward:
    """A peer whose module has a weight of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        self.function, self.weight = function, weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


# --- a whole layer


def layers(options: argparse.Namespace, found: Findings) -> None:
    start_megatron()
    for name, shape in shapes(options).items():
        measured: dict[str, tuple[float, int]] = {}
        what = f"layer, {name}, {options.layer_tokens[0]} tokens x {options.layer_tokens[1]}, bf16"
        for variant, step in layer_steps(options, shape):
            try:
                built = step()
                built()
            except ImportError as error:
                found.skip(what, variant, error)
                return
            measured[variant] = found.measure(what, variant, built, options)
            del built
        own = measured["stock, hidden_dropout"]
        for variant, (ms, peak) in measured.items():
            # Batch statistics read x once more: measured, and no claim.
            if not variant.startswith("ours") or "batch" in variant:
                continue
            found.claim(f"{what}: {variant}, ms (peer: stock with its own dropout)", ms, own[0], own[0] / ms, 0.98)
            sizes = (peak / 2**20, own[1] / 2**20)
            ratio = own[1] / max(peak, 1)
            found.claim(f"{what}: {variant}, peak MiB (peer: stock with its own dropout)", *sizes, ratio, 1.0)


def layer_steps(
    options: argparse.Namespace, shape: tuple[int, int, int, int]
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Name of a variant, and what builds it and returns its forward with backward."""
    chosen: dict[str, dict[str, Any] | None] = {
        "stock": None,
        "stock, hidden_dropout": None,
        "ours, pre_linear": {"placement": "pre_linear"},
        "ours, vpad, norm statistics": {"placement": "vpad", "statistics": "norm"},
        "ours, vpad, batch statistics": {"placement": "vpad", "statistics": "batch"},
    }
    for name, regularization in chosen.items():
        own = P if name == "stock, hidden_dropout" else 0.0
        yield name, functools.partial(layer_step, options, shape, own, regularization, "fused")
    yield (
        "plain path, pre_linear",
        functools.partial(layer_step, options, shape, 0.0, {"placement": "pre_linear"}, "plain"),
    )


def layer_step(
    options: argparse.Namespace,
    shape: tuple[int, int, int, int],
    hidden_dropout: float,
    regularization: dict[str, Any] | None,
    kernel: str,
) -> Step:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megatron_lengthgen.regularization import Regularization
    from megatron_lengthgen.specs import fused_norm
    from megatron_lengthgen.specs.binding import bind
    from megatron_lengthgen.specs.substitution import apply

    os.environ[fused_norm.SWITCH] = kernel
    hidden, heads, groups, ffn = shape
    on_gpu = DEVICE == "cuda"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        normalization="RMSNorm",
        layernorm_epsilon=EPS,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        hidden_dropout=hidden_dropout,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        transformer_impl="transformer_engine" if on_gpu else "local",
        use_cpu_initialization=not on_gpu,
    )
    spec = get_gpt_layer_with_transformer_engine_spec() if on_gpu else get_gpt_layer_local_spec(normalization="RMSNorm")
    if regularization is not None:
        spec = apply(spec, Regularization(p=P, sites=("attention", "mlp"), **regularization))
    model = OneLayer(build_module(spec, config=config, layer_number=1)).to(DEVICE, torch.bfloat16).train()
    bind([model], seed=1, step=lambda: 0, microbatches=lambda: 1)
    length, batch = options.layer_tokens
    x = torch.randn(length, batch, hidden, device=DEVICE).bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    leaves = [x, *model.parameters()]

    def step() -> None:
        torch.autograd.grad(model(x), leaves, dy)

    return step


class OneLayer(torch.nn.Module):
    """A model of one layer, whose forward sets the key of the masks."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, attention_mask=None)[0]


def start_megatron() -> None:
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def shapes(options: argparse.Namespace) -> dict[str, tuple[int, int, int, int]]:
    return SMOKE_SHAPES if options.smoke else SHAPES


if __name__ == "__main__":
    main()
