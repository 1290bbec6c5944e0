"""From a published SmolLM3 to one trained with windows and back, by the commands of docs/smollm3_3b.md in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import losses, torchrun
from transformers import AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from megatron_lengthgen.training import config, memory
from megatron_lengthgen.training.plan import pretended_world_size

ROOT = Path(__file__).parents[2]
TINY = ROOT / "conf" / "smollm3_tiny_swa_vpad.yaml"


def convert(*arguments: object) -> None:
    command = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert result.returncode == 0, result.stdout


def test_a_published_model_is_trained_with_windows_and_served_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RUN", str(tmp_path))
    run = config.load(TINY)
    model = run.megatron
    torch.manual_seed(0)
    published = SmolLM3Config(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_hidden_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_query_groups"],
        max_position_embeddings=model["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": float(model["rotary_base"])},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    SmolLM3ForCausalLM(published).save_pretrained(tmp_path / "hf")

    convert("import", tmp_path / "hf", tmp_path / "pretrained", "--dtype", "bf16", "--set-window", 16)
    # The last save comes after the last step, when Megatron has ended its writer.
    torchrun(4, ROOT / "tools" / "continual_pretrain.py", TINY, "async_save=true", "save_interval=4")
    trained = losses(tmp_path / "vpad")
    assert len(trained) == model["train_iters"] and trained[-1] < trained[0]

    with pretended_world_size(4):
        planned = memory.checkpoint_size(config.parse(run, logs=False))
    saved = sum(file.stat().st_size for file in (tmp_path / "vpad" / "iter_0000006").glob("*.distcp"))
    assert planned is not None and planned < saved < 1.3 * planned  # headers weigh, in a model this small

    convert("export", tmp_path / "vpad", tmp_path / "served", "--dtype", "fp32")
    written = json.loads((tmp_path / "served" / "config.json").read_text())
    assert written["architectures"] == ["SmolLM3ForCausalLM"]
    assert written["layer_types"] == (["sliding_attention"] * 3 + ["full_attention"]) * 2
    assert (written["sliding_window"], written["no_rope_layers"]) == (16, [1, 1, 1, 0] * 2)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float32).eval()

    tokens = torch.randint(0, model["vocab_size"], (1, 80), generator=torch.Generator().manual_seed(1))
    script = tmp_path / "logits.py"
    script.write_text(
        "import sys\n"
        "from megatron_lengthgen import backends\n"
        "backends.prepare()\n"
        "import torch\n"
        "from megatron_lengthgen.checkpoint.load import load_model\n"
        "model, _ = load_model(sys.argv[1], dtype='fp32')\n"
        "tokens = torch.load(sys.argv[2])\n"
        "with torch.no_grad():\n"
        "    torch.save(model(tokens, torch.arange(tokens.shape[1])[None], None), sys.argv[3])\n"
    )
    torch.save(tokens, tmp_path / "tokens.pt")
    command = [sys.executable, script, tmp_path / "vpad", tmp_path / "tokens.pt", tmp_path / "logits.pt"]
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ours = torch.load(tmp_path / "logits.pt")[..., : model["vocab_size"]]
    with torch.no_grad():
        theirs = served(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["smollm3_3b_swa_vpad", "smollm3_3b_swa_prelinear"])
def test_the_large_siblings_have_the_same_shape(name, monkeypatch) -> None:
    monkeypatch.delenv("RUN", raising=False)
    large, tiny = config.load(ROOT / "conf" / f"{name}.yaml"), config.load(TINY)
    pattern = large.megatron["window_attn_skip_freq"], large.megatron["no_rope_freq"]
    assert pattern == ([1, 1, 1, 0] * 9, [0, 0, 0, 1] * 9) and large.megatron["window_size"] == (1023, 0)
    assert tiny.megatron["window_attn_skip_freq"] == [1, 1, 1, 0] * 2
    layout = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
    )
    for key in (*layout, "weight_decay", "bf16"):
        assert large.megatron[key] == tiny.megatron[key], key
    assert large.lengthgen["sites"] == tiny.lengthgen["sites"]
    assert large.lengthgen["placement"] == ("vpad" if name.endswith("vpad") else "pre_linear")
