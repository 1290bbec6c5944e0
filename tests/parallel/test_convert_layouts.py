"""One imported checkpoint, and one that the trainer saved from it, on every layout: the same logits, the same export.

The file is also the script that the ranks run: torchrun test_convert_layouts.py IMPORTED TRAINED OUT
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lengthgen import backends

backends.prepare()

ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH, EPSILON = 1003, 96, 1e-6
WINDOWS: dict[str, Any] = {"window_size": "15,0", "window_attn_skip_freq": "[1,1,0,1]", "no_rope_freq": "[0,0,1,0]"}
CONF = f"""
model: {{seq_length: {LENGTH}, max_position_embeddings: 128, num_layers: 4, hidden_size: 48, ffn_hidden_size: 80,
  num_attention_heads: 4, group_query_attention: true, num_query_groups: 2, normalization: RMSNorm, swiglu: true,
  disable_bias_linear: true, position_embedding_type: rope, rotary_base: 50000, norm_epsilon: {EPSILON},
  untie_embeddings_and_output_weights: true}}
data: {{mock_data: true, tokenizer_type: NullTokenizer, vocab_size: {VOCABULARY}, padded_vocab_size: 1024,
  split: "98,1,1"}}
training: {{micro_batch_size: 1, global_batch_size: 2, train_iters: 3, lr: 1.0e-2, lr_decay_style: constant,
  eval_iters: 0, log_interval: 1, save_interval: 3}}
lengthgen: {{placement: vpad, p: 0.1, attention: {{window: 16, pattern: WWFW, rope: windowed}}}}
"""


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(11))


def forward(model: Any) -> torch.Tensor:
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        return model(tokens(), positions, None).float()


# ------------------------------------------------------------------------------------------ what the ranks run


def saving(directory: Path) -> dict[str, Any]:
    return {"save": str(directory), "save_interval": 1, "no_save_optim": True, "no_save_rng": True}


def on_tensor_parallel_ranks(checkpoint: str, save: Path | None = None) -> torch.Tensor:
    from megatron.core import mpu
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.training.checkpointing import save_checkpoint

    from megatron_lengthgen.checkpoint.load import load_model

    model, _ = load_model(checkpoint, tensor_parallel=2, dtype="fp32", overrides=saving(save) if save else None)
    assert mpu.get_tensor_model_parallel_world_size() == 2
    if save:
        save_checkpoint(7, [model], None, None, 0)
    return gather_from_tensor_model_parallel_region(forward(model))


def on_pipeline_ranks(checkpoint: str, **more: Any) -> torch.Tensor | None:
    """By Megatron's own loading and its own --use-checkpoint-args, which is how anybody else would take it."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    from megatron_lengthgen import megatron_args
    from megatron_lengthgen.models.build import build_model, initialize

    args = megatron_args.parse(
        {
            "use_checkpoint_args": True,
            "load": checkpoint,
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "use_tokenizer_model_from_checkpoint_args": False,
            "tokenizer_type": "NullTokenizer",
            "vocab_size": VOCABULARY,
            # The one value of this model that Megatron does not take from a checkpoint.
            "norm_epsilon": EPSILON,
            **more,
        }
    )
    initialize(args)
    chunks = build_model(args)
    load_checkpoint(chunks, None, None)
    if args.save:
        save_checkpoint(7, chunks, None, None, 0)
    model = unwrap_model(chunks)[0].eval()
    if mpu.is_pipeline_first_stage():
        dist.send(forward(model).contiguous(), 1)
        return None
    hidden = torch.empty(LENGTH, 2, args.hidden_size)
    dist.recv(hidden, 0)
    model.set_input_tensor(hidden)
    return forward(model)


def ranks(imported: str, trained: str, out: str) -> None:
    from megatron_lengthgen.checkpoint.common import prepare_saving

    prepare_saving()
    results = {
        "imported_tp2": on_tensor_parallel_ranks(imported, Path(out) / "saved_tp2"),
        "trained_tp2": on_tensor_parallel_ranks(trained),
        "imported_pp2": on_pipeline_ranks(imported, **saving(Path(out) / "saved_pp2")),
        "trained_pp2": on_pipeline_ranks(trained, finetune=True, **WINDOWS),
    }
    for name, logits in results.items():
        if logits is not None and torch.distributed.get_rank() == (1 if name.endswith("pp2") else 0):
            torch.save(logits, Path(out) / f"{name}.pt")


# -------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, megatron_single: Any) -> Path:
    from launch import torchrun
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_lengthgen.checkpoint.importing import import_model

    out = tmp_path_factory.mktemp("convert")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        initializer_range=0.2,
    )
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(out / "hf")
    with torch.no_grad():
        torch.save(reference(tokens()).logits, out / "reference.pt")
    import_model(out / "hf", out / "imported")

    (out / "conf.yaml").write_text(CONF)
    torchrun(
        2,
        ROOT / "tools" / "continual_pretrain.py",
        out / "conf.yaml",
        f"pretrained_checkpoint={out / 'imported'}",
        f"save={out / 'trained'}",
        "pipeline_model_parallel_size=2",
        "use_distributed_optimizer=true",
    )
    torchrun(2, Path(__file__), out / "imported", out / "trained", out)
    return out


def result(runs: Path, name: str) -> torch.Tensor:
    return torch.load(runs / f"{name}.pt")[..., :VOCABULARY]


def alone(checkpoint: Path, **options: Any) -> torch.Tensor:
    from megatron_lengthgen.checkpoint.load import load_model

    model, _ = load_model(checkpoint, dtype="fp32", **options)
    return forward(model)[..., :VOCABULARY]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
def test_an_imported_checkpoint_gives_transformers_logits(runs: Path, layout: str) -> None:
    found = alone(runs / "imported") if layout == "tp1" else result(runs, f"imported_{layout}")
    torch.testing.assert_close(found, result(runs, "reference"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_a_trained_checkpoint_gives_the_logits_of_megatrons_own_loading(runs: Path, layout: str) -> None:
    found = alone(runs / "trained") if layout == "tp1" else result(runs, f"trained_{layout}")
    torch.testing.assert_close(found, result(runs, "trained_pp2"), rtol=0, atol=1e-4)


def test_training_windows_and_the_stored_section_make_a_difference(runs: Path) -> None:
    """The comparison above would hold for two loaders that both ignored them."""
    trained = alone(runs / "trained")
    assert (trained - result(runs, "reference")).abs().max() > 0.1
    without = {"window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None}
    assert (trained - alone(runs / "trained", overrides=without)).abs().max() > 0.1


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_checkpoint_saved_on_any_layout_exports_the_bits_that_were_imported(
    runs: Path, layout: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from megatron_lengthgen.checkpoint.exporting import export_model
    from megatron_lengthgen.checkpoint.info import describe

    saved_on = describe(runs / f"saved_{layout}")["saved_on"]
    assert saved_on["tensor_model_parallel_size"] * saved_on["pipeline_model_parallel_size"] == 2
    export_model(runs / f"saved_{layout}", tmp_path / "out")
    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "out", runs / "hf"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_trained_checkpoint_with_optimizer_is_exported_with_its_windows(runs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_lengthgen.checkpoint.exporting import export_model

    config = export_model(runs / "trained", tmp_path / "out")
    assert config["architectures"] == ["SmolLM3ForCausalLM"] and config["vocab_size"] == VOCABULARY
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        found = model(tokens()).logits
    torch.testing.assert_close(found, result(runs, "trained_pp2"), rtol=0, atol=1e-4)


def test_info_tells_where_a_trained_checkpoint_comes_from(runs: Path) -> None:
    from megatron_lengthgen.checkpoint.info import describe

    described = describe(runs / "trained")
    assert described["iteration"] == 3 and described["optimizer_state"]
    assert described["saved_on"]["pipeline_model_parallel_size"] == 2
    assert described["lengthgen"]["placement"] == "vpad"
    assert described["architecture"]["window_size"] == [15, 0]
    assert described["parameters"] == describe(runs / "imported")["parameters"]


if __name__ == "__main__":
    ranks(*sys.argv[1:])
