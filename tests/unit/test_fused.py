"""The kernel of norm and dropout without a GPU: its own tests in Triton's interpreter, its machine code for a Hopper
chip read off the disassembly, and how a model comes to use it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from megatron_lengthgen.dropout import fused  # noqa: E402
from megatron_lengthgen.errors import UserError  # noqa: E402
from megatron_lengthgen.regularization import Regularization  # noqa: E402
from megatron_lengthgen.specs import fused_norm  # noqa: E402
from megatron_lengthgen.specs.site import SiteDropout  # noqa: E402
from megatron_lengthgen.training import config, run  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_in_the_interpreter():
    """Kernel against float64, and a model that uses it against one that does not: two files, one process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v"]
    command += ["tests/gpu/test_norm_dropout.py", "tests/unit/fused_in_models.py"]
    variables = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 100


@pytest.mark.parametrize(
    ("kernel", "mode", "bytes_read", "instructions"),
    [("forward", "pre_linear", 2, 25), ("forward", "mean", 2, 27), ("backward", "pre_linear", 4, 28)],
)
def test_machine_code_for_hopper(tmp_path, kernel, mode, bytes_read, instructions):
    """16 bytes at a time, no registers spilled, and few enough instructions an element to hide behind memory.

    An H200 issues 128 threads' instructions a cycle on each of 132 multiprocessors at 1.98 GHz: 33 a nanosecond, and so
    at most 31 in the time in which it moves the 4 bytes of the forward pass, 46 in that of the backward pass.
    """
    code, resources = compiled(getattr(fused, f"_{kernel}_kernel"), mode, tmp_path)
    loop = body(code)
    assert len(loop) / 16 < instructions
    loads = [name for _, name, _ in loop if name.startswith("LDG")]
    assert sum(name == "LDG.E.128" for name in loads) == bytes_read
    assert not any(name.startswith(("STL", "LDL")) for _, name, _ in code)
    assert "STACK:0" in resources


def compiled(kernel: Any, mode: str, folder: Path) -> tuple[list[tuple[int, str, str]], str]:
    """Address, name and operands of each instruction at 2,048 channels in bf16 (RMSNorm), and the resources."""
    options: dict[str, Any] = {"groups": 256, "mode": mode, "centred": False, "zero_centred": False}
    absent = {"bias", "row_mean", "dbias_sums"} | (set() if mode in ("zero", "mean") else {"mean", "variance"})
    kinds = dict.fromkeys(("x_pointer", "y_pointer", "dy_pointer", "dx_pointer", "weight"), "*bf16")
    kinds |= dict.fromkeys(("mean", "variance", "row_scale", "dgain_sums"), "*fp32")
    kinds |= {"key_pointer": "*i64", "p": "fp32", "eps": "fp32"}
    constants = {name: options.get(name) for name in kernel.arg_names if name in options or name in absent}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    # As at run time: pointers and the hidden size are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name == "hidden"
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    binary = triton.compile(source, target=target, options={"num_warps": fused._tile(2048)["num_warps"]})
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code, resources = (
        subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout
        for what in ("-sass", "-res-usage")
    )
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);", code)
    return [(int(address, 16), name, operands) for address, name, operands in found], resources


def body(code: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Instructions of the loop over rows: from the farthest backward jump's target to the jump."""
    jumps = [
        (int(target[1], 16), address)
        for address, name, operands in code
        if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", operands)) and int(target[1], 16) < address
    ]
    first, last = max(jumps, key=lambda jump: jump[1] - jump[0])
    return [line for line in code if first <= line[0] <= last]


class Norm(torch.nn.LayerNorm):
    """Somebody's own."""


def fuse(norm: torch.nn.Module) -> bool:
    config = SimpleNamespace(
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=False,
        sequence_parallel=False,
        context_parallel_size=1,
    )
    dropout = SiteDropout("mlp", Regularization("pre_linear", sites=("mlp",)), 0.1, config)
    return fused_norm.fuse(norm, dropout, config, 1e-5)


@pytest.mark.parametrize(
    ("kernel", "cuda", "taken"),
    [(None, True, True), ("auto", True, True), ("auto", False, False), ("plain", True, False)],
)
def test_the_switch(monkeypatch, kernel, cuda, taken):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.delenv(fused_norm.SWITCH, raising=False)
    if kernel:
        monkeypatch.setenv(fused_norm.SWITCH, kernel)
    norm = torch.nn.LayerNorm(8)
    assert fuse(norm) is taken
    assert ("forward" in norm.__dict__) is taken
    assert fused_norm.describe().startswith(
        "norm and dropout in one Triton" if taken else "norm and dropout by PyTorch"
    )
    assert not fuse(Norm(8))


def test_what_the_switch_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(fused_norm.SWITCH, "fused")
    with pytest.raises(
        UserError, match="LENGTHGEN_KERNEL is 'fused', and there is no CUDA device here: set it to 'auto'"
    ):
        fuse(torch.nn.LayerNorm(8))
    with pytest.raises(UserError, match=r"no kernel for the norm Norm in front of site 'mlp': set it to 'auto'"):
        fuse(Norm(8))
    monkeypatch.setenv(fused_norm.SWITCH, "fusd")
    with pytest.raises(UserError, match=r"unknown LENGTHGEN_KERNEL 'fusd' \(did you mean 'fused'"):
        fused_norm.describe()


@pytest.mark.parametrize(("placement", "line"), [("vpad", "norm and dropout by PyTorch"), ("none", "Megatron's own")])
def test_a_dry_run_names_the_kernel(capsys, placement, line):
    values = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 128}
    values |= {"max_position_embeddings": 64, "tokenizer_type": "NullTokenizer", "micro_batch_size": 1}
    values |= {"global_batch_size": 1, "train_iters": 1, "lr": 1e-3, "mock_data": True}
    run.dry_run(config.resolve(values, {"placement": placement, "p": 0.1}))
    assert f"kernel: {line}" in capsys.readouterr().out
