"""The tiny siblings of the Mamba configurations: trained on several layouts alike, generated from, served again.

The file is also the script that four ranks run: torchrun test_mamba_layouts.py OUT
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator
from megatron_lengthgen.training import config

ROOT = Path(__file__).parents[2]
TRAIN = Path(__file__).parent / "train_layouts.py"
MAMBA, HYBRID = ROOT / "conf" / "mamba2_tiny_prelinear.yaml", ROOT / "conf" / "hybrid_tiny_vpad.yaml"
ONE = "tensor_model_parallel_size=1,sequence_parallel=false,pipeline_model_parallel_size=1"
STAGES = "tensor_model_parallel_size=1,sequence_parallel=false,pipeline_model_parallel_size=2"
WHOLE = "hybrid_layer_pattern='M-M*-M-*-M-'"
STILL = "train_iters=1,lr_warmup_iters=0,lr=0,min_lr=0"
GENERATING = ("mamba/tp2", "hybrid/tp2_pp2")
LAYOUTS = ((2, 1), (1, 2), (2, 2), (1, 4))


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    sizes = ((70, 15), (12, 30), (45, 1), (1, 9), (44, 22))
    prompts = [tuple(torch.randint(0, 250, (size,), generator=generator).tolist()) for size, _ in sizes]
    prompts[4] = prompts[0][:40] + prompts[4][40:]
    return [Request(prompt, new, frozenset()) for prompt, (_, new) in zip(prompts, sizes, strict=True)]


def answers(checkpoint: str, tensor: int = 1, pipeline: int = 1) -> dict[int, list[int]]:
    engine = MegatronGenerator.from_checkpoint(
        checkpoint,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        dtype="fp32",
        max_length=90,
        max_batch_tokens=250,
        prefill_chunk=16,
    )
    return dict(engine.generate(requests()))


def ranks(out: Path) -> None:
    from train_layouts import train_one

    train_one(HYBRID, out, f"hybrid/tp2_pp2:pretrained_checkpoint={out / 'hybrid' / 'start'}")
    found = {run: [answers(str(out / run), *layout) for layout in LAYOUTS] for run in GENERATING}
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, megatron_single: Any) -> Path:
    """``hf`` and ``pretrained``: a Mamba-2 model; ``mamba``, ``hybrid``: runs; ``rank*.json``: answers."""
    from launch import torchrun
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from megatron_lengthgen.checkpoint.importing import import_model

    out = tmp_path_factory.mktemp("mamba")
    os.environ["RUN"] = str(out)
    model = config.load(MAMBA).megatron
    torch.manual_seed(3)
    published = Mamba2Config(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        num_hidden_layers=len(model["hybrid_layer_pattern"]),
        num_heads=model["mamba_num_heads"],
        head_dim=model["mamba_head_dim"],
        state_size=model["mamba_state_dim"],
        n_groups=model["mamba_num_groups"],
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Mamba2ForCausalLM(published).save_pretrained(out / "hf")
    import_model(out / "hf", out / "pretrained")
    torchrun(
        *(1, TRAIN, MAMBA, out, f"mamba/tp1:{ONE}", HYBRID),
        f"hybrid/start:{ONE},{WHOLE},train_iters=1,lr_warmup_iters=0,no_save_optim=true",
        f"hybrid/tp1:{ONE},{WHOLE},pretrained_checkpoint={out / 'hybrid' / 'start'}",
    )
    halves = f"{STAGES},hybrid_layer_pattern='MM|MM'"
    torchrun(
        *(2, TRAIN, MAMBA, out, "mamba/tp2", f"mamba/pp2:{halves}"),
        f"mamba/tp1_to_tp2:{STILL},pretrained_checkpoint={out / 'mamba' / 'tp1'}",
        f"mamba/tp2_to_pp2:{halves},{STILL},pretrained_checkpoint={out / 'mamba' / 'tp1_to_tp2'}",
    )
    torchrun(4, Path(__file__), out)
    del os.environ["RUN"]
    return out


@pytest.mark.parametrize("run", ["mamba/tp2", "mamba/pp2", "hybrid/tp2_pp2"])
def test_layouts_train_alike(runs: Path, run: str) -> None:
    from launch import losses

    one, other = losses(runs / run), losses((runs / run).parent / "tp1")
    assert len(one) == len(other) == 6 and other[-1] < other[0]
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("run", ["tp1_to_tp2", "tp2_to_pp2"])
def test_resizing_keeps_every_bit(runs: Path, run: str) -> None:
    from megatron_lengthgen.checkpoint.load import checkpoint_args, find_checkpoint
    from megatron_lengthgen.checkpoint.tensors import StoredModel
    from megatron_lengthgen.models.mamba2 import key_map

    before, after = (StoredModel(find_checkpoint(runs / "mamba" / name)) for name in ("tp1", run))
    for entry in key_map(vars(checkpoint_args(find_checkpoint(runs / "mamba" / "tp1")))):
        assert torch.equal(before.read(entry.megatron), after.read(entry.megatron)), entry.megatron


@pytest.mark.parametrize("run", GENERATING)
def test_every_layout_generates_alike(runs: Path, run: str) -> None:
    expected = answers(str(runs / run))
    assert len({tuple(answer) for answer in expected.values()}) == len(expected)
    for rank in range(4):
        for found in json.loads((runs / f"rank{rank}.json").read_text())[run]:
            assert {int(position): answer for position, answer in found.items()} == expected


def test_a_trained_model_is_served_by_transformers(runs: Path) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_lengthgen.checkpoint.exporting import export_model
    from megatron_lengthgen.checkpoint.load import load_model

    for name in ("tp2", "pp2"):
        export_model(runs / "mamba" / name, runs / "served" / name)
    served = [AutoModelForCausalLM.from_pretrained(runs / "served" / name).eval() for name in ("tp2", "pp2")]
    for one, other in zip(*(model.state_dict().values() for model in served), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    model, _ = load_model(runs / "mamba" / "tp2", dtype="fp32")
    theirs, ours = dict(served[0].named_parameters()), dict(model.named_parameters())
    assert torch.equal(
        theirs["backbone.layers.3.mixer.in_proj.weight"], ours["decoder.layers.3.mixer.in_proj.weight"]
    ) and torch.equal(theirs["backbone.layers.0.mixer.conv1d.weight"], ours["decoder.layers.0.mixer.conv1d_weight"])


@pytest.mark.parametrize(("large", "tiny"), [("mamba2_1p3b_prelinear", MAMBA), ("hybrid_m_attn_vpad", HYBRID)])
def test_the_large_siblings_say_the_same(large: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN", raising=False)
    one, other = config.load(ROOT / "conf" / f"{large}.yaml"), config.load(tiny)
    assert one.lengthgen == other.lengthgen or one.lengthgen["attention"]["window"] == 1024
    assert {"M", *other.megatron["hybrid_layer_pattern"]} >= set(one.megatron["hybrid_layer_pattern"])
    assert one.megatron["weight_decay"] == other.megatron["weight_decay"] == 0
    if tiny is HYBRID:
        windows, skips = one.megatron["window_attn_skip_freq"], one.megatron["no_rope_freq"]
        symbols = one.megatron["hybrid_layer_pattern"].replace("|", "")
        marked = [number for number, symbol in enumerate(symbols) if symbol == "*"]
        assert [windows[number] for number in marked] == [1, 0, 1, 0]
        assert [skips[number] for number in marked] == [0, 1, 0, 1]


if __name__ == "__main__":
    ranks(Path(sys.argv[1]))
