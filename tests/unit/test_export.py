"""Megatron -> Hugging Face: the same tensors and logits, what transformers reads, and what is refused."""

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import add_tokenizer, edit_config, logits, make_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_lengthgen.checkpoint import exporting, importing, load
from megatron_lengthgen.checkpoint.exporting import export_model
from megatron_lengthgen.checkpoint.tensors import StoredModel
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models import hugging_face, llama

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_weights(found: Path, expected: Path) -> None:
    one, other = weights(found), weights(expected)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def smollm3(tmp_path_factory: pytest.TempPathFactory, megatron_single: Any) -> Path:
    """``hf``: a SmolLM3 with windows, NoPE and a tokenizer; ``mg``: its import."""
    root = tmp_path_factory.mktemp("smollm3")
    make_model(root / "hf", family="smollm3")
    add_tokenizer(root / "hf")
    importing.import_model(root / "hf", root / "mg")
    return root


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "stored"),
    [
        ("llama", {}, torch.bfloat16, "bf16"),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}, torch.bfloat16, "fp32"),
        ("llama", {"num_key_value_heads": 6, "head_dim": 16, "vocab_size": 1024}, torch.float32, "fp32"),
        ("llama", {"rope_parameters": LLAMA3, "head_dim": 64}, torch.float16, "fp32"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            torch.float32,
            "fp32",
        ),
        ("smollm3", {}, torch.bfloat16, "bf16"),
        ("smollm3", {"tie_word_embeddings": False, "head_dim": 12}, torch.float32, "fp32"),
        ("mamba2", {"vocab_size": 1024}, torch.bfloat16, "bf16"),
        ("mamba2", {"tie_word_embeddings": False, "expand": 4, "num_heads": 12}, torch.float32, "fp32"),
    ],
    ids=[
        "bf16",
        "tied-mqa",
        "mha-head_dim",
        "llama3-fp16",
        "linear",
        "smollm3-bf16",
        "smollm3-untied-head_dim",
        "mamba2-bf16",
        "mamba2-untied-wide",
    ],
)
def test_export_gives_back_what_import_took(
    family: str, changes: dict[str, Any], dtype: torch.dtype, stored: str, tmp_path: Path, megatron_single: Any
) -> None:
    reference = make_model(tmp_path / "hf", dtype, family=family, **changes)
    importing.import_model(tmp_path / "hf", tmp_path / "mg", dtype=stored)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    config = export_model(tmp_path / "mg", tmp_path / "out", dtype=name, max_shard_size="40KB")
    assert_same_weights(tmp_path / "out", tmp_path / "hf")
    assert config["architectures"] == [type(reference).__name__]

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(exported) is type(reference)
    old, new = reference.config.to_dict(), exported.config.to_dict()
    ours = {"head_dim", "rope_theta", "rope_scaling", "_name_or_path", "dtype", "transformers_version"}
    assert {key: new[key] for key in old.keys() - ours} == {key: old[key] for key in old.keys() - ours}
    tokens = torch.randint(0, 1003, (2, 150))
    with torch.no_grad():
        expected, found = reference(tokens).logits, exported(tokens).logits
    assert torch.equal(found, expected)
    model, _ = load.load_model(tmp_path / "mg", dtype="fp32")
    torch.testing.assert_close(logits(model, tokens)[..., : found.shape[-1]], found, rtol=0, atol=1e-4)


def test_a_window_that_import_put_is_exported(tmp_path: Path, megatron_single: Any) -> None:
    make_model(tmp_path / "hf")
    importing.import_model(tmp_path / "hf", tmp_path / "mg", window=20, pattern="WWF", rope="windowed")
    config = export_model(tmp_path / "mg", tmp_path / "out")
    assert config["architectures"] == ["SmolLM3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (config["no_rope_layers"], config["sliding_window"]) == ([1, 1, 0], 20)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 1003, (1, 100))
    with torch.no_grad():
        expected = exported(tokens).logits
    found = logits(load.load_model(tmp_path / "mg", dtype="fp32")[0], tokens)
    torch.testing.assert_close(found[..., :1003], expected, rtol=0, atol=1e-4)
    again = tmp_path / "again"
    importing.import_model(tmp_path / "out", again)
    one, other = load.checkpoint_args(tmp_path / "mg"), load.checkpoint_args(again)
    for name in ("window_size", "window_attn_skip_freq", "no_rope_freq", "rotary_base", "kv_channels"):
        assert getattr(one, name) == getattr(other, name)


def test_shards_their_index_and_the_files_beside_them(smollm3: Path, tmp_path: Path) -> None:
    limit = 100_000
    done: list[tuple[int, int]] = []
    export_model(smollm3 / "mg", tmp_path / "out", max_shard_size="100KB", progress=lambda *now: done.append(now))
    out = tmp_path / "out"
    shards = sorted(out.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    sizes = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert {name for name, where in index["weight_map"].items() if where == shard.name} == set(file.keys())
            sizes[shard.name] = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert stat.S_IMODE(shard.stat().st_mode) == stat.S_IMODE((out / "config.json").stat().st_mode)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert len(shards) > 3 and all(sum(size) <= limit or len(size) == 1 for size in sizes.values())
    assert done[-1][0] == done[-1][1] == len(done)

    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (smollm3 / "hf" / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 3)
    assert AutoTokenizer.from_pretrained(out).encode("w5") == [5]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 2


def test_without_tokenizer_and_source_configuration(smollm3: Path, tmp_path: Path) -> None:
    """As from somebody else's trainer: SmolLM3Config's own pad_token_id would lie outside of the vocabulary."""
    shutil.copytree(smollm3 / "mg", tmp_path / "mg", ignore=shutil.ignore_patterns("hf"))
    edit_args(tmp_path / "mg", tokenizer_type="NullTokenizer")
    export_model(tmp_path / "mg", tmp_path / "out")
    assert_same_weights(tmp_path / "out", smollm3 / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.pad_token_id is None and exported.generation_config.eos_token_id is None


def test_the_vocabulary_of_a_run_that_stores_the_padded_one(smollm3: Path, tmp_path: Path) -> None:
    shutil.copytree(smollm3 / "mg", tmp_path / "mg")
    edit_args(tmp_path / "mg", vocab_size=None)
    assert export_model(tmp_path / "mg", tmp_path / "out")["vocab_size"] == 1003
    edit_config(tmp_path / "mg" / "hf", vocab_size=5000)
    assert export_model(tmp_path / "mg", tmp_path / "other")["vocab_size"] == 1024


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weights_are_rounded_to_the_dtype_that_is_asked_for(smollm3: Path, tmp_path: Path, dtype: str) -> None:
    export_model(smollm3 / "mg", tmp_path / "out", dtype=dtype)
    found = weights(tmp_path / "out")
    for name, tensor in weights(smollm3 / "hf").items():
        assert torch.equal(found[name], tensor.to(exporting.DTYPES[dtype]))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == exporting.DTYPES[dtype]


# ------------------------------------------------------------------------------------------- how it is stored


def edit_args(checkpoint: Path, **changes: Any) -> None:
    """Change the arguments stored in a checkpoint, in whichever of its two places they are."""
    from torch.distributed.checkpoint import FileSystemReader

    release = checkpoint / "release"
    if (release / "common.pt").is_file():
        common = torch.load(release / "common.pt", weights_only=False)
    else:
        from megatron.core import dist_checkpointing

        common = dist_checkpointing.load_common_state_dict(release)
        metadata = FileSystemReader(release).read_metadata()
        for key in [key for key in metadata.state_dict_metadata if key.startswith("common_state")]:
            del metadata.state_dict_metadata[key]
        (release / ".metadata").write_bytes(pickle.dumps(metadata))
    vars(common["args"]).update(changes)
    torch.save(common, release / "common.pt")


def resave(checkpoint: Path, change: Any) -> None:
    """Write the model's tensors of ``checkpoint`` anew, as ``change`` makes them: keys and tensors in, and out."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    release = checkpoint / "release"
    edit_args(checkpoint)
    metadata = FileSystemReader(release).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(stored.size)
        for key, stored in metadata.items()
        if load.is_model_key(key) and hasattr(stored, "size")
    }
    dcp.load(state, storage_reader=FileSystemReader(release), no_dist=True)
    for file in (*release.glob("*.distcp"), release / ".metadata"):
        file.unlink()
    # A key as find_checkpoint looks for it stands in common.pt.
    dcp.save(change(state), storage_writer=dcp.FileSystemWriter(release), no_dist=True)


def per_layer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a model of unlike layers is stored: no stack, and norms under their own names."""
    own = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    result = {}
    for key, tensor in state.items():
        if not key.startswith("decoder.layers."):
            result[key] = tensor
            continue
        for long, short in own.items():
            key = key.replace(long, short)
        for layer, part in enumerate(tensor):
            result[key.replace("layers.", f"layers.{layer}.")] = part.clone()
    return result


def test_layers_stored_one_by_one_with_norms_under_their_own_names(smollm3: Path, tmp_path: Path) -> None:
    shutil.copytree(smollm3 / "mg", tmp_path / "mg")
    resave(tmp_path / "mg", per_layer)
    export_model(tmp_path / "mg", tmp_path / "out")
    assert_same_weights(tmp_path / "out", smollm3 / "hf")


def test_zero_centred_gains_become_plain_ones(smollm3: Path, tmp_path: Path) -> None:
    shutil.copytree(smollm3 / "mg", tmp_path / "mg")
    resave(tmp_path / "mg", lambda state: {k: t - 1 if "norm" in k else t for k, t in state.items()})
    edit_args(tmp_path / "mg", layernorm_zero_centered_gamma=True)
    export_model(tmp_path / "mg", tmp_path / "out")
    found, expected = weights(tmp_path / "out"), weights(smollm3 / "hf")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6 if "norm" in name else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"decoder.layers.mlp.linear_fc1.bias": torch.ones(5, 160)}, "linear_fc1.bias, for which no"),
        (lambda s: s | {"decoder.layers.mlp.linear_fc2.weight": torch.ones(5, 48, 8)}, r"shape \[48, 8\], but"),
        (lambda s: {k: t for k, t in s.items() if "fc2" not in k}, "lacks decoder.layers.0.mlp.linear_fc2.weight"),
        (lambda s: {k: t[:3] if "fc2" in k else t for k, t in s.items()}, "lacks decoder.layers.3.mlp.linear_fc2"),
        (lambda s: {k: torch.cat([t, t]) if "fc2" in k else t for k, t in s.items()}, "has 10 layers, but"),
        (lambda s: {k: t.double() if "fc2" in k else t for k, t in s.items()}, "stores float32, float64: choose one"),
    ],
    ids=["bias", "shape", "missing", "fewer-layers", "more-layers", "mixed"],
)
def test_tensors_that_transformers_has_no_place_for(
    smollm3: Path, tmp_path: Path, change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(smollm3 / "mg", tmp_path / "mg")
    resave(tmp_path / "mg", change)
    monkeypatch.setattr(StoredModel, "read", lambda self, name: pytest.fail("weights were read"))
    refuse(tmp_path / "mg", message)


# ------------------------------------------------------------------------------------------- what is refused


def refuse(checkpoint: Path, message: str, **options: Any) -> None:
    target = checkpoint.parent / "never"
    with pytest.raises(UserError, match=message):
        export_model(checkpoint, target, **options)
    assert not target.exists() and not list(target.parent.glob(".never*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": "*-*-"}, r"hybrid_layer_pattern='\*-\*-'"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"multi_latent_attention": True}, "multi_latent_attention=True"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm', .* only normalization='RMSNorm'"),
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"add_qkv_bias": True}, "add_qkv_bias=True"),
        ({"swiglu": False}, "swiglu=False"),
        ({"qk_layernorm": True}, "qk_layernorm=True"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute'"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type='yarn'"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "scales RoPE twice"),
        ({"window_size": (23, 8)}, r"window_size \(23, 8\) does not end at the query"),
        ({"window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq lists 2 layers, and the model has 5"),
        ({"spec": ["somebody.specs", "gpt"]}, "--spec somebody.specs gpt, whose layers are unknown"),
    ],
)
def test_what_transformers_cannot_express_is_refused(smollm3: Path, changes: dict[str, Any], message: str) -> None:
    args = load.checkpoint_args(smollm3 / "mg")
    hugging_face.config_json(args)
    vars(args).update(changes)
    with pytest.raises(UserError, match=message):
        hugging_face.config_json(args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "unknown dtype 'int4'; choose from fp32, bf16, fp16"),
        ({"max_shard_size": "5"}, "'5' is no size: write it like 500MB"),
        ({"max_shard_size": "0GB"}, "'0GB' is no size"),
    ],
)
def test_options_that_mean_nothing(smollm3: Path, options: dict[str, Any], message: str) -> None:
    refuse(smollm3 / "mg", message, **options)
    refuse(smollm3 / "nothing", "no checkpoint directory")


def test_values_beyond_fp16_are_refused_and_leave_nothing(smollm3: Path, tmp_path: Path) -> None:
    shutil.copytree(smollm3 / "mg", tmp_path / "mg")
    resave(tmp_path / "mg", lambda state: {k: t + 1e5 if "final" in k else t for k, t in state.items()})
    refuse(tmp_path / "mg", "model.norm.weight has values beyond fp16's range.*export it as bf16", dtype="fp16")


def test_what_stands_in_the_destination(smollm3: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("keep me")
    for force in (False, True):
        with pytest.raises(UserError, match="holds something that is no Hugging Face model"):
            export_model(smollm3 / "mg", mine, force=force)
    with pytest.raises(UserError, match="is a file or link"):
        export_model(smollm3 / "mg", mine / "thesis.txt", force=True)
    (mine / "thesis.txt").unlink()
    export_model(smollm3 / "mg", mine, max_shard_size="100KB")
    with pytest.raises(UserError, match="holds a model already; use --force"):
        export_model(smollm3 / "mg", mine)
    export_model(smollm3 / "mg", mine, force=True)
    assert [file.name for file in mine.glob("model*")] == ["model.safetensors"]
    assert_same_weights(mine, smollm3 / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_that_is_too_small_is_noticed_first(
    smollm3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs 1 MB, but .* has 0 MB free"):
        export_model(smollm3 / "mg", tmp_path / "new" / "hf")
    assert not (tmp_path / "new").exists()


def test_the_command_line_goes_both_ways(smollm3: Path, tmp_path: Path) -> None:
    def run(*command: Any) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, TOOL, *map(str, command)], capture_output=True, text=True, env=environment
        )

    done = run("export", smollm3 / "mg", tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "1MB")
    assert done.returncode == 0, done.stderr
    assert "(SmolLM3ForCausalLM, bfloat16)" in done.stdout
    refused = run("import", tmp_path / "out", tmp_path / "mg", "--set-window", 0)
    assert refused.returncode == 2
    assert refused.stderr.strip().splitlines()[-1] == "error: window must be a positive number of tokens, got 0"


def test_reading_takes_no_more_than_the_parameter(smollm3: Path) -> None:
    stored = StoredModel(load.find_checkpoint(smollm3 / "mg"))
    args = load.checkpoint_args(smollm3 / "mg")
    for entry in llama.key_map(vars(args)):
        tensor = stored.read(entry.megatron)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
