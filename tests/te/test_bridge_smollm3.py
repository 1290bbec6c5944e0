"""SmolLM3 through Megatron Bridge's own conversion, in and out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig, SmolLM3Config, SmolLM3ForCausalLM

from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron_single")
LAYERS = 4
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
}


@pytest.fixture(scope="module")
def auto_bridge() -> Any:
    pytest.importorskip("megatron.bridge", reason="no Megatron Bridge: run setup_env.sh with 'bridge'")
    from megatron.bridge import AutoBridge

    import megatron_lengthgen.bridge.smollm3  # noqa: F401 - registers

    return AutoBridge


def config(**fields: Any) -> SmolLM3Config:
    return SmolLM3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{**WINDOWED, **fields},
    )


def published(folder: Path, **fields: Any) -> SmolLM3ForCausalLM:
    torch.manual_seed(0)
    model = SmolLM3ForCausalLM(config(**fields))
    model.save_pretrained(folder)
    return model


def provider_of(bridge: Any) -> Any:
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}.items():
        setattr(provider, name, value)
    return provider


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None}],
    ids=["windowed", "as-published"],
)
def test_a_provider_has_the_models_windows_and_positions(auto_bridge, tmp_path, fields):
    published(tmp_path, **fields)
    provider = provider_of(auto_bridge.from_hf_pretrained(tmp_path))
    read = AutoConfig.from_pretrained(tmp_path)
    expected = AttentionPattern.from_hugging_face(read.to_dict(), LAYERS)
    assert AttentionPattern.from_megatron(provider) == expected
    assert provider.window_size == ((7, 0) if not fields else None) and provider.no_rope_freq == [0, 0, 0, 1]
    assert (provider.rotary_base, provider.num_query_groups) == (read.rope_parameters["rope_theta"], 2)
    assert provider.share_embeddings_and_output_weights and provider.gated_linear_unit

    written = type(auto_bridge.from_hf_pretrained(tmp_path)._model_bridge).megatron_to_hf_config(provider)
    again = SmolLM3Config(**{name: value for name, value in written.items() if name != "torch_dtype"})
    for name in ("layer_types", "no_rope_layers", "sliding_window", "use_sliding_window", "hidden_size", "vocab_size"):
        assert getattr(again, name) == getattr(read, name), name
    assert again.architectures == ["SmolLM3ForCausalLM"]


def test_weights_go_in_and_come_out_bit_for_bit(auto_bridge, tmp_path):
    source = published(tmp_path)
    bridge = auto_bridge.from_hf_pretrained(tmp_path)
    provider = provider_of(bridge)
    provider.finalize()
    model = provider.provide_distributed_model(
        wrap_with_ddp=False,
        use_cpu_initialization=True,
        mixed_precision_wrapper=None,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    bridge.load_hf_weights(model)
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    expected = {name: value for name, value in source.state_dict().items() if name != "lm_head.weight"}  # tied
    assert expected.keys() <= exported.keys()
    for name, value in expected.items():
        assert torch.equal(exported[name].float(), value), name


def test_windows_without_a_size_are_refused(auto_bridge, tmp_path):
    published(tmp_path, sliding_window=None, use_sliding_window=False)
    with pytest.raises(UserError, match="layer_types names sliding_attention"):
        provider_of(auto_bridge.from_hf_pretrained(tmp_path))
