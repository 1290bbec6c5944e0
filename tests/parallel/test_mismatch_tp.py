"""The mismatch on two tensor parallel ranks is that of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import torchrun

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parents[2] / "tools" / "mismatch.py"
OPTIONS = ("--task", "recall", "--tokens", 256, "--draws", 2, "--micro-batch", 2, "--p", 0.2, "--dtype", "fp32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, megatron_single: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_lengthgen.checkpoint.importing import import_model

    out = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(out / "hf")
    import_model(out / "hf", out / "imported")
    return out / "imported"


def figures(directory: Path) -> dict[tuple[str, ...], Any]:
    """Numbers by variant, linear, mode, part and name; of the worst coordinates all but their place."""
    variants = json.loads((directory / "mismatch.json").read_text())["variants"]
    found: dict[tuple[str, ...], Any] = {}
    for variant, rows in variants.items():
        for row in rows:
            for mode in ("alone", "together"):
                for part, gap in (row[mode] or {}).items():
                    for name, value in gap.items():
                        if name == "worst_shift":
                            value = value[0]["shift"]
                        elif name == "worst_ratio":
                            value = value[0]["ratio"]
                        found[variant, row["linear"], mode, part, name] = value
    return found


def test_ranks_give_what_one_process_gives(checkpoint: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    torchrun(1, TOOL, checkpoint, "--output", one, *OPTIONS)
    output = torchrun(2, TOOL, checkpoint, "--output", two, "--tensor-parallel", 2, *OPTIONS)
    assert output.count("## Mean over linears") == 1
    expected = figures(one)
    assert len(expected) == 5 * (5 * 2 * 2 * 9) - 2 * 9, "Pre-Norm has no site before the first layer"
    assert figures(two) == pytest.approx(expected, rel=2e-3, abs=1e-5)
