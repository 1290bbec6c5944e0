"""What transformers' loading only warns of is refused: a model that is not what its configuration says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import edit_config, make_model
from safetensors.torch import load_file, save_file

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator

_DOWN = "model.layers.1.mlp.down_proj.weight"


def _edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "smollm3", "mamba2"])
def test_a_whole_model_is_loaded(tmp_path: Path, family: str) -> None:
    # SmolLM3's and Mamba-2's output weights are tied here: absent from the files and not missing.
    reference = make_model(tmp_path, family=family)
    loaded = HuggingFaceGenerator.from_pretrained(str(tmp_path), dtype="fp32").model
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].cpu(), tensor), name


def test_a_missing_tensor(tmp_path: Path) -> None:
    make_model(tmp_path)
    _edit(tmp_path, lambda tensors: tensors.pop(_DOWN))
    with pytest.raises(UserError, match=rf"asks for {_DOWN}, which the files do not hold"):
        HuggingFaceGenerator.from_pretrained(str(tmp_path))


def test_tensors_without_a_place(tmp_path: Path) -> None:
    make_model(tmp_path)
    edit_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"files hold model\.layers\.2\..* and \d+ more, for which config\.json has no"):
        HuggingFaceGenerator.from_pretrained(str(tmp_path))


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    make_model(tmp_path)
    _edit(tmp_path, lambda tensors: tensors.update({_DOWN: tensors[_DOWN][:, :-2].contiguous()}))
    with pytest.raises(UserError, match="cannot load a model"):
        HuggingFaceGenerator.from_pretrained(str(tmp_path))


def test_rotary_frequencies_of_old_files_are_no_fault(tmp_path: Path) -> None:
    make_model(tmp_path)
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    _edit(tmp_path, lambda tensors: tensors.update(extra))
    HuggingFaceGenerator.from_pretrained(str(tmp_path))
