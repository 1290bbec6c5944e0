"""The mismatch between training and evaluation, against forwards with one site switched on by hand."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from spec_models import build, build_hybrid, hybrid_stack, make_config, stock_block
from torch import Tensor

from megatron_lengthgen.dropout.moments import moments
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.binding import bind
from megatron_lengthgen.specs.substitution import apply
from megatron_lengthgen.study import mismatch, mismatch_data, mismatch_report
from megatron_lengthgen.study.tasks import Recall

pytestmark = pytest.mark.usefixtures("megatron_single")
TOOL = Path(__file__).parents[2] / "tools" / "mismatch.py"
SITES = ("attention", "mlp", "output")
LINEARS = [
    *(f"decoder.layers.{n}.{name}" for n in range(3) for name in ("self_attention.linear_qkv", "mlp.linear_fc1")),
    "output_layer",
]
NORMS = [
    *(f"decoder.layers.{n}.{name}" for n in range(3) for name in ("input_layernorm", "pre_mlp_layernorm")),
    "decoder.final_layernorm",
]
VARIANTS: dict[str, dict[str, Any]] = {
    "pre_linear": {"placement": "pre_linear"},
    "vpad": {"placement": "vpad"},
    "vpad, mean fill": {"placement": "vpad", "fill": "mean"},
    "mu = 0": {"placement": "vpad", "statistics": "norm"},
}


def make_args(choices: dict[str, Any], **values: Any) -> argparse.Namespace:
    fields = {"seed": 3, "micro_batch_size": 2, "vocab_size": 90, "curr_iteration": 0, "lengthgen": choices}
    return argparse.Namespace(**(fields | values))


def make_model(args: argparse.Namespace, **fields: Any) -> Any:
    config = make_config(bias_dropout_fusion=False, **fields)
    model = build(apply(stock_block(config), Regularization.from_mapping(args.lengthgen)), config)
    bind([model], seed=args.seed, step=lambda: args.curr_iteration, microbatches=lambda: 1)
    return model.eval()


def choices(**values: Any) -> dict[str, Any]:
    return {"p": 0.2, "sites": SITES} | values


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(4))


Seen = dict[str, tuple[np.ndarray, np.ndarray]]


@torch.no_grad()
def forward(model: Any, tokens: Tensor) -> Seen:
    """Inputs and outputs ``[tokens, h]`` of the linears in one forward, as the model's modes are set."""
    seen: Seen = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            x, z = args[0].flatten(0, 1), output[0].flatten(0, 1)
            seen[name] = (x.double().numpy(), z.double().numpy()[:, : 90 if name == "output_layer" else None])

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in LINEARS]
    model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    for handle in handles:
        handle.remove()
    return seen


@contextmanager
def only(model: Any, module: torch.nn.Module) -> Iterator[None]:
    """One module in training mode, and the model as a whole, which gives the masks their key."""
    model.eval()
    model.training = module.training = True
    yield
    model.eval()


def check(gap: mismatch.Gap, evaluation: list[np.ndarray], training: list[np.ndarray]) -> None:
    """Against the definition: ``training`` of all draws and microbatches."""
    e, t = np.concatenate(evaluation), np.concatenate(training)
    shift = np.abs(t.mean(0) - e.mean(0)) / e.std(0)
    ratio = t.var(0) / e.var(0)
    assert gap.shift == pytest.approx(shift.mean(), rel=1e-4, abs=1e-6)
    assert gap.max_shift == pytest.approx(shift.max(), rel=1e-4, abs=1e-6)
    assert gap.worst_shift[0].number == shift.argmax()
    expected = (ratio.mean(), ratio.min(), ratio.max())
    assert (gap.ratio, gap.min_ratio, gap.max_ratio) == pytest.approx(expected, rel=1e-4)
    assert gap.worst_ratio[0].number == np.abs(np.log(ratio)).argmax()
    assert gap.constant == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_what_forwards_with_sites_switched_on_give(
    variant: str, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mismatch, "_AT_ONCE", 700)  # several pieces of each tensor
    args = make_args(choices(**VARIANTS[variant]))
    model = make_model(args)
    rows = mismatch.measure(model, args, tokens, draws=2)
    assert [row.linear for row in rows] == LINEARS
    assert not any(module.training for module in model.modules())
    batches = tokens.split(2)
    evaluation = [forward(model, batch) for batch in batches]
    steps = [(batch, 2 * number + draw) for number, batch in enumerate(batches) for draw in range(2)]

    def trained() -> list[Seen]:
        found = []
        for batch, step in steps:
            args.curr_iteration = step
            found.append(forward(model, batch))
        return found

    model.train()
    together = trained()
    for row, norm in zip(rows, NORMS, strict=True):
        assert row.alone is not None
        with only(model, model.get_submodule(norm)):
            alone = trained()
        for place, part in enumerate(("inputs", "outputs")):
            values = [seen[row.linear][place] for seen in evaluation]
            check(row.alone[part], values, [seen[row.linear][place] for seen in alone])
            check(row.together[part], values, [seen[row.linear][place] for seen in together])


@contextmanager
def only_branch(model: Any, layer: Any, branch: str) -> Iterator[None]:
    """Megatron's dropout on one branch: its flag is read after the attention, and again after the MLP."""
    model.eval()
    handles = []
    for norm, before in ((layer.input_layernorm, "attention"), (layer.pre_mlp_layernorm, "mlp")):

        def switch(*_: Any, before: str = before) -> None:
            layer.training = branch == before

        handles.append(norm.register_forward_pre_hook(switch))
    yield
    for handle in handles:
        handle.remove()
    model.eval()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_pre_norm_is_megatrons_dropout_on_the_branch_before_the_norm(tokens: Tensor, bias: bool) -> None:
    args = make_args({"placement": "pre_norm", "p": 0.2}, micro_batch_size=4)
    model = make_model(args, add_bias_linear=bias)
    rows = mismatch.measure(model, args, tokens, draws=2)
    assert [row.linear for row in rows] == LINEARS
    assert rows[0].alone is None, "no dropout acts before the first layer"
    assert rows[0].together["outputs"].max_shift == 0
    evaluation = forward(model, tokens)
    branches = [(layer, branch) for layer in model.decoder.layers for branch in ("attention", "mlp")]
    torch.manual_seed(args.seed)
    for row, (layer, branch) in zip(rows[1:], branches, strict=True):
        assert row.alone is not None
        with only_branch(model, layer, branch):
            draws = [forward(model, tokens) for _ in range(2)]
        for place, part in enumerate(("inputs", "outputs")):
            check(row.alone[part], [evaluation[row.linear][place]], [seen[row.linear][place] for seen in draws])
    model.train()
    together = [forward(model, tokens) for _ in range(2)]
    for row in rows[1:]:
        check(row.together["outputs"], [evaluation[row.linear][1]], [seen[row.linear][1] for seen in together])


def test_noise_is_the_shift_of_an_unbiased_dropout_and_less_than_a_true_one(tokens: Tensor) -> None:
    def first(variant: str) -> mismatch.Gap:
        args = make_args(choices(**VARIANTS[variant]))
        model = make_model(args)
        # Channels of different means, which mu = 0 takes for 0 and scales by sqrt(q).
        embedding = model.embedding.word_embeddings.weight
        embedding.data += torch.linspace(-2, 2, embedding.shape[1]) * embedding.std()
        row = mismatch.measure(model, args, tokens, draws=8)[0]
        assert row.alone is not None
        return row.alone["outputs"]

    for unbiased in ("pre_linear", "vpad"):
        gap = first(unbiased)
        assert gap.shift == pytest.approx(gap.noise, rel=0.3)
    gap = first("mu = 0")
    assert gap.shift > 3 * gap.noise


def test_a_site_that_is_left_out_acts_on_no_linear_alone(tokens: Tensor) -> None:
    args = make_args(choices(placement="vpad", sites=("mlp",)))
    rows = mismatch.measure(make_model(args), args, tokens, draws=2)
    assert [row.linear for row in rows if row.alone is not None] == LINEARS[1:6:2]
    assert rows[0].together["outputs"].max_shift == 0 < rows[2].together["outputs"].shift


@pytest.mark.parametrize("placement", ["pre_norm", "pre_linear"])
def test_a_hybrid_model(placement: str, tokens: Tensor) -> None:
    chosen = {"placement": placement, "p": 0.2}
    args, config = make_args(chosen), make_config(num_layers=4)
    model = build_hybrid(apply(hybrid_stack(), Regularization.from_mapping(chosen)), config, "*-*-")
    bind([model], seed=1, step=lambda: args.curr_iteration, microbatches=lambda: 1)
    rows = mismatch.measure(model, args, tokens, draws=2)
    layers = [f"decoder.layers.{n}" for n in range(4)]
    linears = ["self_attention.linear_qkv", "mlp.linear_fc1"] * 2
    expected = [f"{layer}.{linear}" for layer, linear in zip(layers, linears, strict=True)]
    assert [row.linear for row in rows] == [*expected, "output_layer"]
    without = {"pre_norm": [expected[0]], "pre_linear": ["output_layer"]}[placement]
    assert [row.linear for row in rows if row.alone is None] == without


@pytest.mark.parametrize("placement", ["pre_norm", "vpad"])
def test_mixtures_of_experts_are_passed_over(placement: str, tokens: Tensor) -> None:
    args = make_args({"placement": placement, "p": 0.2})
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False}
    rows = mismatch.measure(make_model(args, **experts), args, tokens, draws=2)
    assert [row.linear for row in rows] == [*LINEARS[:6:2], "output_layer"]
    without = {"pre_norm": LINEARS[:1], "vpad": ["output_layer"]}[placement]
    assert [row.linear for row in rows if row.alone is None] == without
    assert rows[1].together["outputs"].shift > 0


def test_progress_counts_sequences(tokens: Tensor) -> None:
    args, seen = make_args(choices(placement="pre_linear"), micro_batch_size=3), []
    mismatch.measure(make_model(args), args, tokens, draws=2, progress=seen.append)
    assert seen == [3, 4]


def test_figures_of_one_tensor() -> None:
    evaluation = moments(torch.tensor([[1.0, 10.0, 5.0], [3.0, 30.0, 5.0]]).double())  # means 2, 20, 5; std 1, 10, 0
    draws = [
        moments(torch.tensor([[2.0, 0.0, 9.0], [3.0, 40.0, 9.0]]).double()),  # means 2.5, 20
        moments(torch.tensor([[2.0, 0.0, 9.0], [5.0, 40.0, 9.0]]).double()),  # means 3.5, 20
    ]
    gap = mismatch.compare(evaluation, draws)
    assert (gap.shift, gap.max_shift, gap.constant) == (pytest.approx(0.5), pytest.approx(1.0), 1)
    assert (gap.ratio, gap.min_ratio, gap.max_ratio) == pytest.approx(((1.5 + 4) / 2, 1.5, 4))
    # Squared standard errors of the mean of the two draws, in units of the evaluation's variance: 0.25 and 0.
    assert gap.noise == pytest.approx((2 / np.pi * 0.125) ** 0.5)
    assert gap.worst_shift[0] == mismatch.Coordinate(0, 1.0, 1.5, 2.0, 1.0)
    assert gap.worst_ratio[0] == mismatch.Coordinate(1, 0.0, 4.0, 20.0, 10.0)


def test_a_tensor_without_variance_is_refused() -> None:
    constant = moments(torch.ones(4, 3).double())
    with pytest.raises(UserError, match="all coordinates are constant"):
        mismatch.compare(constant, [constant, constant])


def test_a_model_without_dropout_and_a_single_draw_are_refused(tokens: Tensor) -> None:
    args = make_args({"placement": "none"})
    with pytest.raises(UserError, match="no dropout at any site"):
        mismatch.measure(make_model(args), args, tokens)
    with pytest.raises(UserError, match="at least 2, not 1"):
        mismatch.measure(make_model(args), args, tokens, draws=1)


# ------------------------------------------------------------------------------------------------------- data


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids 0 to 99 in documents of 30, 1, 50 and 19."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("data") / "ids"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for start, stop in ((0, 30), (30, 31), (31, 81), (81, 100)):
        builder.add_document(np.arange(start, stop), [stop - start])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize(("sequences", "length"), [(3, 10), (4, 25), (1, 31)])
def test_an_indexed_dataset_is_read_in_order(dataset: Path, sequences: int, length: int) -> None:
    found = mismatch_data.from_indexed(dataset, sequences, length)
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.arange(sequences * length).view(sequences, length))


def test_data_that_do_not_fit_are_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds 100 tokens, fewer than the 104 of 4 sequences of 26"):
        mismatch_data.from_indexed(dataset, 4, 26)
    with pytest.raises(UserError, match=r"no file .*nothing\.idx"):
        mismatch_data.from_indexed(tmp_path / "nothing", 1, 1)
    with pytest.raises(UserError, match="cannot be read as text"):
        mismatch_data.from_text(dataset.with_suffix(".missing"), tmp_path, 1, 1)
    args = argparse.Namespace(padded_vocab_size=99, position_embedding_type="learned_absolute")
    args.max_position_embeddings = 8
    with pytest.raises(UserError, match="token id 99, and the model knows ids below 99"):
        mismatch_data.check_fit(torch.arange(100).view(10, 10), args)
    with pytest.raises(UserError, match="learned 8 positions"):
        mismatch_data.check_fit(torch.zeros(1, 9), args)


def test_a_task_gives_the_tokens_that_a_model_sees() -> None:
    found = mismatch_data.from_task(Recall(), 3, 64, seed=1)
    assert found.shape == (3, 64)
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[:2], mismatch_data.from_task(Recall(), 2, 64, seed=1))


# ------------------------------------------------------------------------------------------- the command line


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mismatch_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
    load_tool().main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variants", "none"), "drops nothing"),
        (("--p", "0"), "drops nothing"),
        (("--p", "1.5"), r"\[0, 1\)"),
        (("--variants", "vpad:zeros"), "unknown fill 'zeros'"),
        (("--variants", "pre_norm:zero"), "not written as PLACEMENT"),
        (("--draws", "1"), "--draws must be at least 2"),
        (("--tokens", "0"), "--tokens must be positive"),
        (("--tensor-parallel", "2"), "does not fit 1 process"),
        ((), "no checkpoint directory"),
    ],
)
def test_bad_input_gets_one_sentence(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(monkeypatch, tmp_path / "nothing", "--task", "recall", "--output", tmp_path / "out", *arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_lengthgen.checkpoint.importing import import_model

    out = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=114,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(out / "hf")
    import_model(out / "hf", out / "imported")
    return out / "imported"


def test_a_checkpoint_becomes_tables_and_a_picture(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(
        monkeypatch,
        checkpoint,
        "--task",
        "recall",
        "--output",
        tmp_path,
        "--tokens",
        256,
        "--draws",
        2,
        "--micro-batch",
        3,
    )
    result = json.loads((tmp_path / "mismatch.json").read_text())
    names = ["Pre-Norm", "Pre-Linear", "VPAD mu = 0", "VPAD mean fill", "VPAD zero fill"]
    assert list(result["variants"]) == list(result["summary"]) == names
    for name in names:
        rows = result["variants"][name]
        assert len(rows) == 5
        means = [row["alone"]["outputs"]["ratio"] for row in rows if row["alone"] is not None]
        assert result["summary"][name]["alone"]["outputs"]["ratio"] == pytest.approx(np.mean(means))
        assert set(rows[1]["alone"]["inputs"]["worst_shift"][0]) == {"number", "shift", "ratio", "mean", "std"}
    text = (tmp_path / "mismatch.md").read_text()
    assert all(f"\n## {name}\n" in text for name in names)
    assert text.count("| decoder.layers.1.mlp.linear_fc1 |") == 10
    assert (tmp_path / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    assert "| Pre-Linear |" in capsys.readouterr().out


def test_text_for_a_checkpoint_without_a_tokenizer_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="carries no tokenizer"):
        call(monkeypatch, checkpoint, "--text", TOOL, "--output", tmp_path)
    with pytest.raises(UserError, match="less than one sequence of 64"):
        call(monkeypatch, checkpoint, "--task", "recall", "--tokens", 63, "--output", tmp_path)


def test_the_report_says_which_coordinate_is_worst() -> None:
    def gap(number: int, shift: float) -> mismatch.Gap:
        worst = [mismatch.Coordinate(number, shift, 1.0, 0.0, 1.0)]
        return mismatch.Gap(shift / 2, shift, 0.0, 1.0, 1.0, 1.0, 0, worst, worst)

    rows = [
        mismatch.Row("first", None, {"inputs": gap(0, 9.0), "outputs": gap(0, 9.0)}),
        mismatch.Row("second", *[{"inputs": gap(3, 0.1), "outputs": gap(4, 0.5)}] * 2),
        mismatch.Row("third", *[{"inputs": gap(5, 0.2), "outputs": gap(6, 0.3)}] * 2),
    ]
    means = mismatch_report.summary({"name": rows})["name"]
    assert means["alone"]["outputs"] == {"shift": pytest.approx(0.2), "noise": 0.0, "ratio": 1.0}
    assert means["together"]["outputs"] == {"shift": pytest.approx(4.9 / 3), "noise": 0.0, "ratio": 1.0}
    text = mismatch_report.markdown({"name": rows}, {"p": 0.1})
    assert "worst mean shift of inputs: third coordinate 5 (shift 0.200" in text
    assert "worst mean shift of outputs: second coordinate 4 (shift 0.500" in text
    assert "| first | - | - | - | - | - | - |" in text
