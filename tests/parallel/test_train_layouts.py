"""The same run under other layouts: same weights, same data, same losses."""

from pathlib import Path

import pytest
from launch import losses, torchrun

HERE = Path(__file__).parent
SCRIPT = HERE / "train_layouts.py"
CONF = HERE / "tiny.yaml"
TP2 = "tensor_model_parallel_size=2"
PP2 = "pipeline_model_parallel_size=2"
SP = "sequence_parallel=true"
DISTRIBUTED = "use_distributed_optimizer=true"
# Long enough for the ends of some documents.
LONG = "seq_length=512,max_position_embeddings=512"
APART = "reset_attention_mask=true"
FULL_RECOMPUTE = "recompute_granularity=full,recompute_method=uniform,recompute_num_layers=1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two launches: one process for the reference and what needs no second, two processes for all the layouts."""
    out = tmp_path_factory.mktemp("layouts")
    start = f"pretrained_checkpoint={out / 'start'}"
    torchrun(
        1,
        SCRIPT,
        CONF,
        out,
        "start:train_iters=1,no_save_optim=true",
        f"tp1:{start}",
        f"recompute:{start},{FULL_RECOMPUTE}",
        f"stock_attention:{start},lengthgen.core_attention=megatron",
        f"bf16:{start},bf16=true",
        f"resumed:{start},exit_interval=5,save_interval=5",
        f"resumed:{start},save_interval=5",
        f"joined:{start},{LONG}",
        f"documents:{start},{LONG},{APART}",
        f"vpad:{start},lengthgen.placement=vpad,lengthgen.p=0.2",
        f"vpad_recompute:{start},lengthgen.placement=vpad,lengthgen.p=0.2,{FULL_RECOMPUTE}",
    )
    resharded = f"{DISTRIBUTED},dist_ckpt_optim_fully_reshardable=true"
    torchrun(
        2,
        SCRIPT,
        CONF,
        out,
        f"tp2:{start},{TP2}",
        f"pp2:{start},{PP2}",
        f"pp2_uneven:{start},{PP2},decoder_first_pipeline_num_layers=3",
        f"tp2_sp:{start},{TP2},{SP}",
        f"tp2_sp_recompute:{start},{TP2},{SP},{FULL_RECOMPUTE}",
        f"dp2:{start}",
        f"dp2_distributed_optimizer:{start},{DISTRIBUTED}",
        f"bf16_tp2_sp:{start},bf16=true,{TP2},{SP}",
        f"bf16_dp2_distributed_optimizer:{start},bf16=true,{DISTRIBUTED}",
        f"documents_tp2_sp:{start},{LONG},{APART},{TP2},{SP}",
        f"documents_pp2:{start},{LONG},{APART},{PP2}",
        f"resumed_distributed_optimizer:{start},exit_interval=5,save_interval=5,{DISTRIBUTED}",
        f"resumed_distributed_optimizer:{start},save_interval=5,{DISTRIBUTED}",
        f"moved:{start},{PP2},exit_interval=5,save_interval=5,{resharded}",
        f"moved:{start},{TP2},save_interval=5,{resharded}",
        timeout=900,
    )
    return out


def relative(run: list[float], reference: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(run, reference, strict=True)]


def test_the_reference_learns(runs: Path) -> None:
    reference = losses(runs / "tp1")
    assert len(reference) == 10
    assert reference[-1] < 0.9 * reference[0]


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        "pp2",
        "pp2_uneven",
        "tp2_sp",
        "tp2_sp_recompute",
        "dp2",
        "dp2_distributed_optimizer",
        "recompute",
        "stock_attention",
        "resumed",
        "resumed_distributed_optimizer",
        "moved",
    ],
)
def test_layouts_train_alike(runs: Path, layout: str) -> None:
    difference = relative(losses(runs / layout), losses(runs / "tp1"))
    assert difference[0] < 1e-5
    assert max(difference) < 1e-4


@pytest.mark.parametrize("layout", ["documents_tp2_sp", "documents_pp2"])
def test_documents_are_kept_apart_on_every_layout(runs: Path, layout: str) -> None:
    apart = losses(runs / "documents")
    assert max(relative(losses(runs / layout), apart)) < 1e-4
    assert max(relative(losses(runs / "joined"), apart)) > 1e-3


@pytest.mark.parametrize("layout", ["bf16", "bf16_tp2_sp", "bf16_dp2_distributed_optimizer"])
def test_bf16_with_float32_master_weights_follows_float32(runs: Path, layout: str) -> None:
    assert max(relative(losses(runs / layout), losses(runs / "tp1"))) < 0.03


def test_recomputation_replays_the_dropout_masks(runs: Path) -> None:
    with_dropout = losses(runs / "vpad")
    assert max(relative(losses(runs / "vpad_recompute"), with_dropout)) < 1e-5
    assert max(relative(with_dropout, losses(runs / "tp1"))) > 1e-3
