"""What a run would take on a number of GPUs, held against Megatron's refusals and a real model."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lengthgen import backends

backends.prepare()

from megatron_lengthgen.errors import UserError  # noqa: E402
from megatron_lengthgen.training import config, memory  # noqa: E402
from megatron_lengthgen.training.plan import Cluster, layout_faults, plan, pretended_world_size  # noqa: E402

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "parallel" / "tiny.yaml"
SMOLLM3: dict[str, Any] = {
    "num_layers": 36,
    "num_attention_heads": 16,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 11008,
    "padded_vocab_size": 128256,
    "seq_length": 4096,
    "max_position_embeddings": 65536,
    "micro_batch_size": 1,
    "global_batch_size": 256,
}


def faults(nodes: int = 1, per_node: int = 8, **changed: Any) -> list[str]:
    return layout_faults({**SMOLLM3, **changed}, Cluster(nodes, per_node))


def test_what_fits_has_no_fault() -> None:
    assert faults(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"tensor_model_parallel_size": 8}, "does not divide num_query_groups 4: nearest 4"),
        (
            {"tensor_model_parallel_size": 3, "nodes": 3},
            "does not divide num_attention_heads 16 and num_query_groups 4 and ffn_hidden_size 11,008: nearest 2 or 4",
        ),
        ({"pipeline_model_parallel_size": 8}, "does not divide num_layers 36: nearest 6 or 9"),
        ({"padded_vocab_size": 49153, "tensor_model_parallel_size": 2}, "padded_vocab_size 49,153: nearest 1"),
        (
            {"seq_length": 4098, "sequence_parallel": True, "tensor_model_parallel_size": 4},
            "seq_length 4,098 is no multiple of 4, which sequence_parallel",
        ),
        ({"seq_length": 4100, "context_parallel_size": 4}, "no multiple of 8, which .* need: nearest 4,096 or 4,104"),
        ({"seq_length": 131072}, "seq_length 131,072 is more than max_position_embeddings 65,536: nearest 65,536"),
        ({"num_experts": 10, "expert_model_parallel_size": 4}, "does not divide num_experts 10: nearest 2 or 5"),
        (
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 3, "nodes": 4},
            r"32 GPUs are no multiple of the 12 that .* \(TP 4 x PP 3 x CP 1\): nearest 24 or 36 GPUs, or 3 or 6 nodes",
        ),
        ({"global_batch_size": 100}, "global_batch_size 100 is no multiple of 8, .* nearest 96 or 104"),
        ({"global_batch_size": 4}, "nearest 8$"),
        ({"global_batch_size": 100, "micro_batch_size": 4, "tensor_model_parallel_size": 4}, "nearest 96 or 104"),
    ],
)
def test_each_fault_names_the_nearest_values(changed: dict[str, Any], fault: str) -> None:
    (found,) = faults(**changed)
    assert re.search(fault, found)


def test_what_is_called_nearest_is_valid() -> None:
    """Every value that a message offers, put in its place, takes that fault away."""
    wrong: list[dict[str, Any]] = [
        {"tensor_model_parallel_size": 3},
        {"pipeline_model_parallel_size": 7},
        {"seq_length": 4099, "sequence_parallel": True, "tensor_model_parallel_size": 2},
        {"global_batch_size": 100},
        {"num_experts": 12, "expert_model_parallel_size": 8},
    ]
    for changed in wrong:
        name = "seq_length" if "seq_length" in changed else list(changed)[-1]
        found = next(fault for fault in faults(**changed) if fault.startswith(name))
        offered = found.rpartition("nearest ")[2].replace(",", "").split(" or ")
        assert offered
        for value in offered:
            assert not [fault for fault in faults(**{**changed, name: int(value)}) if fault.startswith(name)]


def test_an_uneven_split_is_megatrons_to_check() -> None:
    assert faults(pipeline_model_parallel_size=8, decoder_first_pipeline_num_layers=1) == []


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (["tensor_model_parallel_size=4"], 1),
        (["pipeline_model_parallel_size=3", "global_batch_size=8"], 3),
        (["global_batch_size=12"], 1),
        (["context_parallel_size=3", "global_batch_size=8"], 3),
    ],
)
def test_what_has_a_fault_megatron_refuses_too(overrides: list[str], nodes: int) -> None:
    run, cluster = config.load(TINY, overrides), Cluster(nodes, 8)
    assert layout_faults(run.megatron, cluster)
    with pytest.raises(UserError, match="the run does not fit"):
        plan(run, cluster)
    with pretended_world_size(cluster.gpus), pytest.raises((UserError, ValueError)):
        from megatron_lengthgen.models import build

        build.model_config(config.parse(run))


def shown(run: config.RunConfig, cluster: Cluster) -> str:
    lines: list[str] = []
    plan(run, cluster, lines.append)
    return "\n".join(lines)


def test_a_plan_says_what_a_run_takes(tmp_path: Path) -> None:
    overrides = ["pipeline_model_parallel_size=2", "global_batch_size=32", f"save={tmp_path / 'run'}"]
    text = shown(config.load(TINY, overrides), Cluster(2, 8))
    assert "GPUs: 16 = 2 x 8\nlayout: TP 1 x PP 2 x CP 1 x DP 8\n" in text
    assert "attention heads: 4, 4 on each of 1 tensor-parallel ranks" in text
    assert "batch: 32 sequences = 8 data-parallel ranks x 4 microbatches of 1; a pipeline without interleaving" in text
    assert "idles 20% of the time" in text
    assert "steps: 10; tokens: 2,048 a step, 20,480 in all" in text
    assert "every 1,000 steps" in text and "all are kept" in text
    assert not (tmp_path / "run").exists()


def test_operations_are_megatrons(tmp_path: Path) -> None:
    """Six for each weight and token, and attention's, as in the formula of arXiv 2205.05198 and Megatron's log."""
    text = shown(config.load(TINY), Cluster(1, 4))
    layers, hidden, ffn, tokens, length, vocabulary, heads, groups = 4, 64, 128, 4 * 64, 64, 128, 4, 2
    linear = layers * (2 * hidden * hidden * (1 + groups / heads) + 3 * hidden * ffn) + hidden * vocabulary
    attention = layers * 6 * tokens * length * hidden  # causal: half of 12
    match = re.search(r"floating-point operations: (\S+) a step", text)
    assert match and float(match[1]) == pytest.approx(6 * tokens * linear + attention, rel=0.01)


def test_parameters_are_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_lengthgen.training.run import dry_run

    run = config.load(TINY)
    with pretended_world_size(2):
        count = memory.parameters(config.parse(run))
    dry_run(run)
    match = re.search(r"parameters: ([\d,]+)", capsys.readouterr().out)
    assert match and count == int(match[1].replace(",", ""))


def test_a_run_that_needs_more_memory_is_refused_with_what_saves_some() -> None:
    with pytest.raises(
        UserError, match=r"needs .* GB on each GPU, .* and a GPU has 0\.0 GB: .*use_distributed_optimizer"
    ):
        plan(config.load(TINY, ["global_batch_size=8"]), Cluster(1, 8, gpu_memory=1e5), lambda line: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "2", "--gpus-per-node", "3"], "global_batch_size 4 is no multiple of 6"),
        (["--world-size", "12"], "--world-size 12 is no multiple of --gpus-per-node 8"),
        (["--world-size", "8", "--nodes", "1"], "say the same thing twice"),
        (["--nodes", "0", "--gpus-per-node", "4"], "nodes must be 1 or more, got 0"),
    ],
)
def test_the_command_line_refuses_in_one_line(options: list[str], message: str, capfd) -> None:
    from importlib import util

    from megatron_lengthgen import errors

    spec = util.spec_from_file_location("continual_pretrain", ROOT / "tools" / "continual_pretrain.py")
    assert spec is not None and spec.loader is not None
    tool = util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    saved, sys.argv = sys.argv, ["continual_pretrain.py", str(TINY), "--plan", *options]
    try:
        assert errors.run(tool.main) == 2
    finally:
        sys.argv = saved
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
