"""Hugging Face and GGUF -> Megatron: key map, import, loading, and every bad input on the way."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import TINY, add_tokenizer, edit_config, logits, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from megatron_lengthgen.checkpoint import huggingface, importing, info, load
from megatron_lengthgen.checkpoint.gguf import gguf_to_hugging_face
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models import hugging_face

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    make_model(directory, shard="60KB")
    add_tokenizer(directory)
    return directory


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture(scope="module")
def imported(tiny: Path, tmp_path_factory: pytest.TempPathFactory, megatron_single: Callable[[int], None]) -> Path:
    directory = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert importing.import_model(tiny, directory)
    return directory


@pytest.fixture
def damaged(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "damaged"))


# ------------------------------------------------------------------------------------------------ key map


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 4),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 40),
    multiple=st.integers(1, 16),
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_pack_then_unpack_gives_every_tensor_back(
    groups: int, per_group: int, head_dim: int, hidden: int, vocab: int, multiple: int, tied: bool, dtype: torch.dtype
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 5,
        "num_hidden_layers": 2,
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }
    args = hugging_face.megatron_args(config, make_vocab_size_divisible_by=multiple)
    assert args["padded_vocab_size"] % multiple == 0 and 0 <= args["padded_vocab_size"] - vocab < multiple
    for entry in hugging_face.key_map(args):
        tensors = [torch.randn(shape).to(dtype) for shape in entry.shapes]
        back = entry.unpack(entry.pack(tensors))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, back, strict=True))


def test_the_key_map_names_exactly_the_tensors_that_transformers_saves(tiny: Path) -> None:
    source = huggingface.open_source(tiny)
    entries = hugging_face.key_map(hugging_face.megatron_args(source.config))
    assert {name for entry in entries for name in entry.hugging_face} == set(source.headers)
    assert len(set(source.files.values())) > 3, "the fixture is meant to have several shards"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    make_model(tmp_path / "hf")
    path, name = tmp_path / "hf" / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(path)
    tensors[name][3, :5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} in .* has 5 of 768 values that are NaN or infinite"):
        importing.import_model(tmp_path / "hf", tmp_path / "mg")
    assert not (tmp_path / "mg").exists()
    assert importing.import_model(tmp_path / "hf", tmp_path / "mg", allow_nonfinite=True)


def test_rope_is_read_as_transformers_4_wrote_it_too() -> None:
    new = LlamaConfig(**TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}).to_dict()
    new["architectures"] = ["LlamaForCausalLM"]
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rope_theta": 12345.0, "rope_scaling": None}
    assert hugging_face.megatron_args(old) == hugging_face.megatron_args(new)
    assert hugging_face.megatron_args(old)["rotary_base"] == 12345


@pytest.mark.parametrize("outside", [{}, {"rope_theta": 70000.0}])
@pytest.mark.parametrize("added", [{}, {"rope_theta": 20000.0}])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_an_added_rope_scaling_wins_as_in_transformers(outside: dict, added: dict, kind: str) -> None:
    config = LlamaConfig(**TINY).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config |= outside | {"rope_scaling": {kind: "linear", "factor": 4.0, **added}}
    theirs = LlamaConfig.from_dict(dict(config)).rope_parameters
    ours = hugging_face.megatron_args(config)
    assert ours["rotary_seq_len_interpolation_factor"] == theirs["factor"] == 4
    assert ours["rotary_base"] == theirs["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            "MistralForCausalLM; supported: LlamaForCausalLM, SmolLM3ForCausalLM",
        ),
        ({"architectures": None}, "none named"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads=4"),
        ({"hidden_size": 50, "head_dim": None}, "hidden_size=50 is not a multiple"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "'llama3'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta=10000.5"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta=None"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta=None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            r"per kind of layer \(full_attention, sliding_attention\)",
        ),
    ],
)
def test_what_megatron_cannot_express_is_refused(changes: dict[str, Any], message: str) -> None:
    config = LlamaConfig(**TINY).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(UserError, match=message):
        hugging_face.megatron_args(config | changes)


# ------------------------------------------------------------------------------------------------- import

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "dtype", "target"),
    [
        ({}, torch.float32, "fp32"),
        ({"tie_word_embeddings": True}, torch.float32, "fp32"),
        ({}, torch.bfloat16, "bf16"),
        ({"tie_word_embeddings": True}, torch.bfloat16, "fp32"),
        ({"num_key_value_heads": 6, "head_dim": 16}, torch.float32, "fp32"),
        ({"num_key_value_heads": 1, "vocab_size": 1024}, torch.float16, "fp32"),
        ({"rope_parameters": LLAMA3 | {"factor": 8.0}, "head_dim": 64}, torch.float32, "fp32"),
        ({"rope_parameters": LLAMA3 | {"factor": 32.0}, "head_dim": 64}, torch.float32, "fp32"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, torch.float32, "fp32"),
    ],
    ids=["untied", "tied", "bf16", "bf16-as-fp32", "mha-head_dim", "mqa-fp16", "llama3-8", "llama3-32", "linear"],
)
def test_logits_equal_transformers(
    changes: dict[str, Any], dtype: torch.dtype, target: str, tmp_path: Path, megatron_single: Callable[[int], None]
) -> None:
    reference = make_model(tmp_path / "hf", dtype, "100KB", **changes)
    assert importing.import_model(tmp_path / "hf", tmp_path / "mg", dtype=target)
    model, args = load.load_model(tmp_path / "mg", dtype="fp32")
    assert not model.training and args.lengthgen == {}
    tokens = torch.randint(0, reference.config.vocab_size, (2, 200))
    with torch.no_grad():
        expected = reference(tokens).logits
    found = logits(model, tokens)
    assert found.shape[-1] == args.padded_vocab_size == 1024
    assert expected.std() > 0.1
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=0, atol=1e-4)
    assert not found[..., expected.shape[-1] :].any()


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "window", "windowed", "no_rope"),
    [
        ({}, (23, 0), [1, 0, 1, 0, 0], [0, 1, 0, 0, 1]),
        ({"use_sliding_window": False, "sliding_window": None, "layer_types": None}, None, None, [0, 1, 0, 0, 1]),
        (
            {"no_rope_layers": None, "layer_types": None, "sliding_window": 300},
            (299, 0),
            [0, 0, 0, 1, 0],
            [0, 0, 0, 1, 0],
        ),
        ({"num_key_value_heads": 6, "head_dim": 12, "no_rope_layers": [1] * 5}, (23, 0), [1, 0, 1, 0, 0], None),
    ],
    ids=["published-kind", "no-windows", "transformers-defaults", "mha-head_dim-rope"],
)
def test_smollm3_gives_transformers_logits_beyond_its_window(
    changes: dict[str, Any], window: Any, windowed: Any, no_rope: Any, tmp_path: Path, megatron_single: Any
) -> None:
    reference = make_model(tmp_path / "hf", family="smollm3", **changes)
    importing.import_model(tmp_path / "hf", tmp_path / "mg")
    model, args = load.load_model(tmp_path / "mg", dtype="fp32")
    assert (args.window_size, args.window_attn_skip_freq, args.no_rope_freq) == (window, windowed, no_rope)
    assert args.rotary_base == 2_000_000 and not args.untie_embeddings_and_output_weights
    tokens = torch.randint(0, 1003, (2, 200))
    with torch.no_grad():
        expected = reference(tokens).logits
    torch.testing.assert_close(logits(model, tokens)[..., :1003], expected, rtol=0, atol=1e-4)


def test_windows_and_nope_of_smollm3_make_a_difference(tmp_path: Path, megatron_single: Any) -> None:
    """The comparison above would hold for two models that both ignored them."""
    reference = make_model(tmp_path / "hf", family="smollm3")
    tokens = torch.randint(0, 1003, (1, 200))
    with torch.no_grad():
        expected = reference(tokens).logits
        for name, value in (("layer_types", [FULL] * 5), ("no_rope_layers", [1] * 5)):
            make_model(tmp_path / name, family="smollm3", **{name: value})
            other = type(reference).from_pretrained(tmp_path / name).eval()
            assert (other(tokens).logits - expected)[:, 150:].abs().max() > 0.1, name


def test_what_a_smollm3_config_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    config = {
        "architectures": ["SmolLM3ForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    full = SmolLM3Config(**config)
    assert hugging_face.megatron_args(config) == hugging_face.megatron_args(full.to_dict() | config)
    assert hugging_face.megatron_args(config)["num_query_groups"] == full.num_key_value_heads == 4
    assert hugging_face.megatron_args(config)["no_rope_freq"] == [0, 0, 0, 1] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [SLIDING] * 4}, "layer_types lists 4 layers, and the model has 5"),
        ({"no_rope_layers": [1] * 4}, "lists 4 layers, and the model has 5"),
        ({"layer_types": ["chunked_attention"] * 5}, "unknown kind in layer_types 'chunked_attention'"),
        ({"sliding_window": None}, "sliding_window None, so that their window is unknown"),
        ({"sliding_window": 0}, "window must be a positive number of tokens, got 0"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
    ],
)
def test_a_smollm3_that_cannot_be_imported_is_refused_first(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "hf", family="smollm3")
    edit_config(tmp_path / "hf", **changes)
    refuse(tmp_path / "hf", message)


def pattern_of(checkpoint: Path) -> tuple[Any, Any, Any]:
    args = load.checkpoint_args(checkpoint)
    return args.window_size, args.window_attn_skip_freq, args.no_rope_freq


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": 32}, ((31, 0), [1, 0, 1, 1, 0], [0, 1, 0, 0, 1])),
        ({"window": 32, "pattern": "WWF"}, ((31, 0), [1, 1, 0, 1, 1], [0, 1, 0, 0, 1])),
        ({"window": 32, "pattern": "WWF", "rope": "windowed"}, ((31, 0), [1, 1, 0, 1, 1], [0, 0, 1, 0, 0])),
        ({"window": 10_000}, ((9999, 0), [1, 0, 1, 1, 0], [0, 1, 0, 0, 1])),
    ],
    ids=["rope-layers", "pattern", "pattern-rope", "longer-than-the-model"],
)
def test_a_window_can_be_put_on_an_imported_model(
    options: dict[str, Any], expected: Any, tmp_path: Path, megatron_single: Any
) -> None:
    make_model(tmp_path / "hf", family="smollm3")
    importing.import_model(tmp_path / "hf", tmp_path / "mg", **options)
    assert pattern_of(tmp_path / "mg") == expected
    assert not importing.import_model(tmp_path / "hf", tmp_path / "mg", **options)
    with pytest.raises(UserError, match="use --force"):
        importing.import_model(tmp_path / "hf", tmp_path / "mg", window=33)


def test_a_window_on_a_llama_is_the_window_of_transformers(tmp_path: Path, megatron_single: Any) -> None:
    """Its oracle is a SmolLM3 of the same weights: Llama's class has no windows."""
    llama_model = make_model(tmp_path / "hf")
    importing.import_model(tmp_path / "hf", tmp_path / "mg", window=20, pattern="WF")
    changes = {"layer_types": [SLIDING, FULL, SLIDING], "no_rope_layers": [1] * 3, "sliding_window": 20}
    reference = SmolLM3ForCausalLM(SmolLM3Config(**TINY | changes, use_sliding_window=True, pad_token_id=None)).eval()
    reference.load_state_dict(llama_model.state_dict())
    tokens = torch.randint(0, 1003, (1, 100))
    with torch.no_grad():
        expected = reference(tokens).logits
    found = logits(load.load_model(tmp_path / "mg", dtype="fp32")[0], tokens)
    torch.testing.assert_close(found[..., :1003], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a positive number of tokens, got 0"),
        ({"window": 8, "pattern": "WXF"}, "must consist of W .* got 'WXF'"),
        ({"window": 8, "pattern": "WWWF"}, "'WWWF' is 4 layers long, and the model has 3"),
        ({"window": 8, "pattern": "F"}, "no layer is windowed"),
        ({"window": 8, "rope": "none"}, "unknown rope 'none'"),
        ({"pattern": "WF"}, "set a window, too"),
    ],
)
def test_a_window_that_cannot_be_put_is_refused_first(copy: Path, options: dict[str, Any], message: str) -> None:
    refuse(copy, message, **options)


def test_vocabulary_padding_is_the_callers_and_no_layouts(tiny: Path, tmp_path: Path, megatron_single: Any) -> None:
    assert importing.import_model(tiny, tmp_path / "mg", make_vocab_size_divisible_by=6)
    args = load.checkpoint_args(tmp_path / "mg")
    assert (args.vocab_size, args.padded_vocab_size) == (1003, 1008)
    with pytest.raises(UserError, match="at least 1, got 0"):
        importing.import_model(tiny, tmp_path / "other", make_vocab_size_divisible_by=0)


def test_a_second_start_does_nothing_and_another_one_needs_force(
    tiny: Path, tmp_path: Path, megatron_single: Any
) -> None:
    target = tmp_path / "mg"
    assert importing.import_model(tiny, target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert not importing.import_model(tiny, target)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    with pytest.raises(UserError, match="as fp32; use --force"):
        importing.import_model(tiny, target, dtype="bf16")
    assert importing.import_model(tiny, target, dtype="bf16", force=True)
    assert info.describe(target)["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["mg"]


def test_what_is_no_checkpoint_is_never_replaced(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep me")
    with pytest.raises(UserError, match="holds something that is no checkpoint"):
        importing.import_model(tiny, tmp_path / "mine", force=True)
    with pytest.raises(UserError, match="is a file or link"):
        importing.import_model(tiny, tmp_path / "mine" / "thesis.txt", force=True)


def test_configuration_and_tokenizer_travel_with_the_checkpoint(imported: Path, tiny: Path) -> None:
    directory = load.tokenizer_dir(imported)
    assert directory == imported / "hf"
    assert (directory / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert (directory / "config.json").read_bytes() == (tiny / "config.json").read_bytes()
    stored = load.checkpoint_args(imported)
    assert (stored.tokenizer_type, stored.tokenizer_model) == ("HuggingFaceTokenizer", str(directory))


def test_info_says_what_the_checkpoint_holds(imported: Path, tiny: Path) -> None:
    described = json.loads(json.dumps(info.describe(imported)))
    with torch.device("meta"):
        reference = LlamaForCausalLM(LlamaConfig(**TINY))
    padding = 2 * (1024 - 1003) * TINY["hidden_size"]
    assert described["parameters"] == sum(p.numel() for p in reference.parameters()) + padding
    assert described["architecture"]["num_query_groups"] == 2
    assert described["iteration"] == 0 and described["lengthgen"] == {} and not described["optimizer_state"]


def test_killed_while_it_writes_leaves_nothing_under_the_name(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "mg"
    command = [sys.executable, str(TOOL), "import", str(tiny), str(target)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".mg.*.tmp/hf/config.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    load.find_checkpoint(target)


# -------------------------------------------------------------------------------------- bad Hugging Face input


def refuse(source: Path | str, message: str, **options: Any) -> None:
    target = Path(source).parent / "never" if isinstance(source, Path) else Path("/nonexistent/never")
    with pytest.raises(UserError, match=message):
        importing.import_model(source, target, **options)
    assert not target.exists()


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def test_a_missing_shard_is_named(copy: Path) -> None:
    shards(copy)[1].unlink()
    refuse(copy, f"names {shards(copy)[0].name.replace('00001', '00002')}, which .* does not hold")


def test_a_shard_cut_short_is_named(copy: Path) -> None:
    path = shards(copy)[0]
    path.write_bytes(path.read_bytes()[:-10])
    refuse(copy, f"{path.name} is damaged or cut short")


def test_an_index_that_disagrees_with_its_shards(copy: Path) -> None:
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shards(copy)[0].name
    path.write_text(json.dumps(index))
    refuse(copy, "places model.norm.weight in")


def test_a_tensor_in_two_shards(copy: Path) -> None:
    first, second = shards(copy)[:2]
    tensors = load_file(first)
    save_file(load_file(second) | {name: tensors[name] for name in list(tensors)[:1]}, second)
    refuse(copy, "is stored twice")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    make_model(tmp_path / "single", vocab_size=40)
    return tmp_path / "single"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight missing"),
        (lambda w: w.update(extra=torch.ones(2)), "extra in .* has no place"),
        (lambda w: w.update({"model.norm.weight": torch.ones(7)}), r"shape \[7\], but config.json asks for \[48\]"),
        (lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "dtype I8"),
        (lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.float64)}), "dtype F64"),
        (lambda w: [w.pop(name) for name in list(w) if "layers.1." in name], "and 8 more missing"),
    ],
    ids=["missing", "unknown", "shape", "int8", "float64", "layer"],
)
def test_tensors_that_do_not_fit_the_configuration(single: Path, change: Any, message: str) -> None:
    weights = load_file(single / "model.safetensors")
    change(weights)
    save_file(weights, single / "model.safetensors")
    refuse(single, message)


def test_tied_weights_stored_twice(tmp_path: Path) -> None:
    source = tmp_path / "tied"
    make_model(source, tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    opened = lambda: huggingface.open_source(source)  # noqa: E731
    entries = hugging_face.key_map(hugging_face.megatron_args(opened().config))
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    opened().check(entries, tied=True)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, source / "model.safetensors")
    refuse(source, "lm_head.weight differs")


def test_constants_of_old_checkpoints_are_passed_over(single: Path) -> None:
    weights = load_file(single / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, single / "model.safetensors")
    opened = huggingface.open_source(single)
    opened.check(hugging_face.key_map(hugging_face.megatron_args(opened.config)), tied=False)


def test_directories_that_hold_no_model(copy: Path, tmp_path: Path) -> None:
    (copy / "config.json").unlink()
    refuse(copy, "has no config.json")
    (copy / "config.json").write_text("{")
    refuse(copy, "config.json is not valid JSON")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(Path(copy).parent / "copy" / "config.json", empty)
    (empty / "config.json").write_text("{}")
    refuse(empty, "neither model.safetensors nor")
    (empty / "pytorch_model.bin").write_bytes(b"")
    refuse(empty, "save_pretrained")
    refuse(empty / "config.json", "is a file")
    refuse("no such thing", "not a hub id")


def test_another_architecture_is_refused_before_anything_is_read(copy: Path) -> None:
    edit_config(copy, architectures=["GemmaForCausalLM"])
    refuse(copy, "GemmaForCausalLM; supported")


def test_a_hub_id_without_network_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = (
        "from megatron_lengthgen.checkpoint.huggingface import open_source\n"
        "from megatron_lengthgen.errors import UserError\n"
        "try: open_source('nobody/nothing')\n"
        "except UserError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert "give a local directory" in result.stdout, result.stderr


def test_the_command_line_answers_in_one_line(copy: Path, tmp_path: Path) -> None:
    edit_config(copy, attention_bias=True)
    command = [sys.executable, str(TOOL), "import", str(copy), str(tmp_path / "mg")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: config.json sets attention_bias=true")


def test_a_disk_that_is_too_small_is_noticed_first(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs 1 MB, but .* has 0 MB free"):
        importing.import_model(tiny, tmp_path / "new" / "mg")
    assert not (tmp_path / "new").exists()


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04....")
    with pytest.raises(UserError, match="is no GGUF file"):
        gguf_to_hugging_face(tmp_path / "a.gguf", tmp_path / "out")
    with pytest.raises(UserError, match="cannot read"):
        gguf_to_hugging_face(tmp_path / "b.gguf", tmp_path / "out")
    (tmp_path / "c.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(UserError, match=r"is damaged .*download it again"):
        gguf_to_hugging_face(tmp_path / "c.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_gguf(file: Path, *, without: str = "", extra: str = "", **metadata: Any) -> None:
    """A Llama of two layers without a tokenizer; ``extra`` is one more tensor's name."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    for name, value in metadata.items():
        key = f"llama.{name.replace('__', '.')}"
        writer.add_string(key, value) if isinstance(value, str) else (
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
        )
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    names = ["token_embd.weight", "output_norm.weight", *(f"blk.{i}.{part}.weight" for i in range(2) for part in parts)]
    for name in [*names, *([extra] if extra else [])]:
        if name != without:
            writer.add_tensor(name, np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "blk.1.ffn_up.weight"}, r"lacks blk\.1\.ffn_up\.weight, which its 2 layers need"),
        ({"without": "output_norm.weight"}, r"lacks output_norm\.weight"),
        ({"extra": "blk.0.attn_q.bias"}, r"has blk\.0\.attn_q\.bias, which have no place"),
        ({"extra": "blk.0.attn_q_norm.weight"}, r"has blk\.0\.attn_q_norm\.weight"),
        ({"extra": "rope_freqs.weight"}, r"scales RoPE in rope_freqs\.weight, as Llama 3\.1 does"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, r"scales RoPE \(yarn, 4\)"),
        ({"rope__scaling__factor": 2.0}, r"scales RoPE \(none, 2\)"),
        ({"rope__scale_linear": 8.0}, r"scales RoPE \(none, 8\)"),
        ({"expert_count": 8}, "model of 8 experts"),
    ],
)
def test_what_a_gguf_file_would_lose_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "a.gguf", **changes)
    with pytest.raises(UserError, match=message):
        gguf_to_hugging_face(tmp_path / "a.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    whole = (tmp_path / "a.gguf").read_bytes()
    for size in (len(whole) - 40, 200, 30):
        (tmp_path / "b.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"b\.gguf is damaged"):
            gguf_to_hugging_face(tmp_path / "b.gguf", tmp_path / "out")


# ----------------------------------------------------------------------------------- incomplete checkpoints


def break_it(how: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        release = path / "release"
        data = next(release.glob("*.distcp"))
        match how:
            case "tracker":
                (path / load.TRACKER).unlink()
            case "tracker text":
                (path / load.TRACKER).write_text("latest\n")
            case "tracker iteration":
                (path / load.TRACKER).write_text("12")
            case "metadata.json":
                (release / "metadata.json").unlink()
            case ".metadata":
                (release / ".metadata").unlink()
            case ".metadata text":
                (release / ".metadata").write_bytes(b"not a pickle")
            case "data":
                data.unlink()
            case "short data":
                data.write_bytes(data.read_bytes()[:-1])
            case "legacy":
                (release / "metadata.json").unlink()
                (release / "mp_rank_00").mkdir()
            case "all":
                shutil.rmtree(path)

    return change


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tracker", f"has no {load.TRACKER}.*give a complete one by name: release"),
        ("tracker text", "holds 'latest', not an iteration"),
        ("tracker iteration", "names iter_0000012, which is not there"),
        ("metadata.json", "has no metadata.json: it was not saved to the end"),
        (".metadata", "has no .metadata"),
        (".metadata text", "cannot be read"),
        ("data", "distcp is missing"),
        ("short data", "was cut short"),
        ("legacy", "legacy format"),
        ("all", "no checkpoint directory"),
    ],
)
def test_an_incomplete_checkpoint_is_refused_before_the_model_is_built(
    damaged: Path, how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_lengthgen.models import build

    monkeypatch.setattr(build, "build_model", lambda args: pytest.fail("the model was built"))
    break_it(how)(damaged)
    for reader in (load.find_checkpoint, load.checkpoint_args, load.load_model, info.describe):
        with pytest.raises(UserError, match=message):
            reader(damaged)


def test_a_checkpoint_without_its_common_state_is_refused(damaged: Path) -> None:
    path = damaged / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith("common_state")]:
        del metadata.state_dict_metadata[key]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"has no common\.pt"):
        load.checkpoint_args(damaged)


def test_an_iteration_directory_can_be_given_by_itself(imported: Path) -> None:
    assert load.find_checkpoint(imported / "release") == load.find_checkpoint(imported)
    assert load.tokenizer_dir(imported / "release") == imported / "hf"


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "at least 1, got 0"),
        (4, "4 does not divide num_attention_heads=6"),
        (6, "6 does not divide num_query_groups=2"),
        (2, "does not fit 1 process"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(imported: Path, size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load.load_model(imported, tensor_parallel=size)


def test_a_tensor_parallel_size_that_does_not_divide_the_embedding(tmp_path: Path, megatron_single: Any) -> None:
    make_model(tmp_path / "hf", num_key_value_heads=3, intermediate_size=81)
    importing.import_model(tmp_path / "hf", tmp_path / "mg")
    with pytest.raises(UserError, match=r"does not divide padded_vocab_size=1024.*--make-vocab-size-divisible-by"):
        load.load_model(tmp_path / "mg", tensor_parallel=3)


@pytest.mark.parametrize("overrides", [{"num_layers": 4}, {"num_layers": 2}, {"qk_layernorm": True}])
def test_weights_that_are_not_this_models_are_refused(
    imported: Path, overrides: dict[str, Any], megatron_single: Any
) -> None:
    with pytest.raises(UserError, match=r"does not hold this model|do not fit the model"):
        load.load_model(imported, dtype="fp32", overrides=overrides)


def test_unknown_dtypes_are_refused(imported: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown dtype 'int4'"):
        load.load_model(imported, dtype="int4")
    with pytest.raises(UserError, match="unknown dtype 'int4'"):
        importing.import_model(tiny, tmp_path / "mg", dtype="int4")


def test_bf16_loading_rounds_the_stored_weights(imported: Path, tiny: Path, megatron_single: Any) -> None:
    model, args = load.load_model(imported, dtype="bf16")
    assert args.bf16
    source = huggingface.open_source(tiny)
    expected = source.tensor("model.layers.1.mlp.down_proj.weight").bfloat16()
    assert torch.equal(model.decoder.layers[1].mlp.linear_fc2.weight, expected)


# ------------------------------------------------------------------------------------------- the real model


@pytest.mark.slow
def test_smollm2_from_gguf_equals_transformers(tmp_path: Path, megatron_single: Any) -> None:
    """Set LENGTHGEN_SMOLLM2_GGUF to the path of SmolLM2-135M-Instruct.Q4_1.gguf."""
    file = os.environ.get("LENGTHGEN_SMOLLM2_GGUF")
    if not file:
        pytest.skip("LENGTHGEN_SMOLLM2_GGUF is not set")
    commands: list[list[Any]] = [["gguf", file, tmp_path / "hf"], ["import", tmp_path / "hf", tmp_path / "mg"]]
    for command in commands:
        subprocess.run([sys.executable, TOOL, *command], check=True)
    config = LlamaConfig.from_pretrained(tmp_path / "hf")
    reference = LlamaForCausalLM(config).eval()
    reference.load_state_dict(load_file(tmp_path / "hf" / "model.safetensors"), strict=False)
    reference.tie_weights()
    tokens = torch.randint(0, config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(3))
    model, _ = load.load_model(tmp_path / "mg", dtype="fp32")
    with torch.no_grad():
        expected = reference(tokens).logits
    found = logits(model, tokens)
    print(f"largest difference of logits: {(found - expected).abs().max().item():.3g}")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
