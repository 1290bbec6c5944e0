"""Probes while training: Megatron's own loss, the same on every layout, and nothing that training notices."""

import json
import re
from pathlib import Path

import pytest
from launch import alone, losses, scalars, torchrun

from megatron_lengthgen.evaluation.ruler.templates import NEEDLE, NIAH, NIAH_PREFIX, NOISE

HERE = Path(__file__).parent
SCRIPT = HERE / "train_layouts.py"
CONF = HERE / "tiny.yaml"
TP2_SP = "tensor_model_parallel_size=2,sequence_parallel=true"
PP2 = "pipeline_model_parallel_size=2"
EVAL = "eval_iters=1,eval_interval=5"
PROBE = "lengthgen.length_probe.multiples=[1,4],lengthgen.length_probe.samples=3"
# Its masks come from Megatron's random streams, which a probe could disturb.
DROPOUT = "lengthgen.placement=pre_norm,lengthgen.p=0.1"
STILL = "lr=0,min_lr=0,train_iters=2,eval_iters=1,eval_interval=1"


def save_tokenizer(folder: Path) -> int:
    """A tokenizer for the needles' words, small enough for a tiny model; returns its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=["</s>"], initial_alphabet=alphabet)
    inner.train_from_iterator([NIAH, NIAH_PREFIX, NEEDLE, NOISE], trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(folder)
    return inner.get_vocab_size()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("probe")
    start = f"pretrained_checkpoint={out / 'start'}"
    vocabulary = save_tokenizer(out / "hf")
    words = (
        f"tokenizer_type=HuggingFaceTokenizer,tokenizer_model={out / 'hf'},vocab_size=null,"
        f"padded_vocab_size={vocabulary + vocabulary % 2},seq_length=256,max_position_embeddings=256"
    )
    # No long words in the tokenizer, so that the shortest question is longer than the training length.
    needles = f"train_iters=1,eval_iters=1,{words},lengthgen.needle_probe.multiples=[2,3]"
    needles += f",lengthgen.needle_probe.samples=3,pretrained_checkpoint={out / 'words'}"
    output = torchrun(
        2,
        SCRIPT,
        CONF,
        out,
        "start:train_iters=1,no_save_optim=true",
        f"dp2:{start},{EVAL},{PROBE}",
        f"tp2_sp:{start},{EVAL},{PROBE},{TP2_SP}",
        f"pp2:{start},{EVAL},{PROBE},{PP2}",
        f"interleaved:{start},{EVAL},{PROBE},{PP2},num_layers_per_virtual_pipeline_stage=1",
        f"plain:{start},{EVAL},{DROPOUT}",
        f"probed:{start},{EVAL},{DROPOUT},{PROBE}",
        f"resumed:{start},{EVAL},{PROBE},exit_interval=5,save_interval=5",
        f"resumed:{start},{EVAL},{PROBE},save_interval=5",
        # Four sequences of 256 as the probe takes them, and as validation of a run at that length does.
        f"still:{start},{STILL},lengthgen.length_probe.multiples=[4],lengthgen.length_probe.samples=4",
        f"long:{start},{STILL},seq_length=256,max_position_embeddings=256",
        f"words:train_iters=1,no_save_optim=true,{words}",
        f"needles_dp2:{needles}",
        f"needles_tp2_sp:{needles},{TP2_SP}",
        f"needles_pp2:{needles},{PP2}",
    )
    (out / "output").write_text(output)
    return out


def curve(run: Path, file: str = "length_curve.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def test_the_loss_is_that_of_megatrons_validation_at_that_length(out: Path) -> None:
    # The last step is validated twice, on other sequences.
    loss = scalars(out / "long", "lm loss validation")[1]
    assert curve(out / "still")[0]["loss 4x"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "interleaved"])
def test_layouts_agree(out: Path, layout: str) -> None:
    for found, wanted in zip(curve(out / layout), curve(out / "dp2"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("layout", ["needles_tp2_sp", "needles_pp2"])
def test_layouts_agree_on_needles(out: Path, layout: str) -> None:
    (found,), (wanted,) = (curve(out / run, "needle_curve.jsonl") for run in (layout, "needles_dp2"))
    assert list(found) == ["step", "tokens", "niah_single_1 2x", "niah_single_1 3x"]
    # The answer's losses add up to some 50 nats, so that a probability differs by more than they do.
    assert found == pytest.approx(wanted, rel=1e-3, abs=0)
    assert all(0 < found[name] < 1 for name in ("niah_single_1 2x", "niah_single_1 3x"))


def test_buckets_and_multiples_are_means_of_the_same_losses(out: Path) -> None:
    for record in curve(out / "dp2"):
        buckets = {name: loss for name, loss in record.items() if name.startswith("loss at")}
        assert list(buckets) == ["loss at 0-31", "loss at 32-63", "loss at 64-127", "loss at 128-255"]
        near, far = list(buckets.values())[:2], list(buckets.values())
        assert record["loss 1x"] == pytest.approx(sum(near) / 2)
        assert record["loss 4x"] == pytest.approx((far[0] + far[1] + 2 * far[2] + 4 * far[3]) / 8)
    first, last = curve(out / "dp2")
    assert (first["step"], last["step"], last["tokens"]) == (5, 10, 10 * 4 * 64)
    assert last["loss 1x"] != first["loss 1x"]


def test_training_does_not_notice(out: Path) -> None:
    assert losses(out / "probed") == losses(out / "plain")


def test_a_resumed_run_goes_on_with_the_curve(out: Path) -> None:
    records = curve(out / "resumed")
    assert [record["step"] for record in records] == [5, 10]
    for found, wanted in zip(records, curve(out / "dp2"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    for name in ("loss 1x", "loss 4x", "loss at 128-255"):
        logged = scalars(out / "resumed", f"length probe/{name}")
        assert logged == pytest.approx({int(record["step"]): record[name] for record in records})


def test_every_layout_counts_the_same_parameters_under_weight_decay(out: Path) -> None:
    # Another rank's output may follow on the same line.
    said = r"weight decay: [^()\n]+\([^()\n]+\); never on [^()\n]+\(norms \d+\)"
    lines = re.findall(said, (out / "output").read_text())
    norms = 9 * 64
    each = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    matrices, embeddings = 4 * each + 128 * 64, 128 * 64
    assert lines[0] == (
        f"weight decay: 0.1, on {matrices + embeddings:,} parameters (weight matrices {matrices:,}, embeddings "
        f"{embeddings:,}); never on {norms} parameters (norms {norms})"
    )
    assert len(lines) > 10 and len(set(lines)) == 2, lines  # one for the runs with another tokenizer


@pytest.mark.parametrize("name", ["lm loss", "learning-rate", "grad-norm", "throughput", "iteration-time"])
def test_what_one_wants_to_watch_is_in_tensorboard(out: Path, name: str) -> None:
    logged = scalars(out / "plain", name)
    # Megatron takes no time of the first step; the learning rate ends at 0.
    assert list(logged) == list(range(2 if name == "iteration-time" else 1, 11))
    assert all(value > 0 for step, value in logged.items() if step < 10)


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    probe = ["lengthgen.length_probe.multiples=[1,4]", "lengthgen.length_probe.samples=3"]
    once = ["train_iters=2", "eval_iters=1", "eval_interval=2"]
    tool = HERE.parents[1] / "tools" / "continual_pretrain.py"
    alone(tool, CONF, f"save={tmp_path / 'run'}", "wandb_project=lengths", *once, *probe)
    (log,) = tmp_path.glob("run/wandb/wandb/offline-run-*/run-*.wandb")
    records = log.read_bytes()  # protocol buffers, with names as they are
    for name in ("lm loss", "grad-norm", "learning-rate", "throughput", "lm loss validation", "length probe/loss 4x"):
        assert name.encode() in records, name
