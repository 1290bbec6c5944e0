"""Masks do not depend on the layout: with dropout at every site, all layouts train alike, as without dropout.

Every run starts from one checkpoint. A run is a name, and the overrides of each of its starts; a second start resumes.
"""

from pathlib import Path

import pytest
import torch
from launch import losses, torchrun

from megatron_lengthgen.checkpoint.load import find_checkpoint, is_model_key

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Runs = dict[str, tuple[str, ...]]

HERE = Path(__file__).parent
SCRIPT = HERE / "train_layouts.py"
GPT, HYBRID = HERE / "invariant.yaml", HERE / "invariant_hybrid.yaml"

TP2, TP4 = "tensor_model_parallel_size=2", "tensor_model_parallel_size=4"
PP2, PP4 = "pipeline_model_parallel_size=2", "pipeline_model_parallel_size=4"
TP2_SP = f"{TP2},sequence_parallel=true"
INTERLEAVED = f"{PP2},num_layers_per_virtual_pipeline_stage=1"
FULL = "recompute_granularity=full,recompute_method=uniform,recompute_num_layers=1"
FULL_BY_2 = "recompute_granularity=full,recompute_method=uniform,recompute_num_layers=2"
BLOCK = "recompute_granularity=full,recompute_method=block,recompute_num_layers=1"
SELECTIVE = "recompute_granularity=selective,recompute_modules=[core_attn,mlp]"
EVALUATE = "eval_interval=3,eval_iters=2"
DISTRIBUTED = "use_distributed_optimizer=true"
ANY_LAYOUT = f"{DISTRIBUTED},dist_ckpt_optim_fully_reshardable=true,save_interval=10"
STOP = "exit_interval=10"

SHORT = "train_iters=5"
ODD = f"{SHORT},seq_length=63"
PRE_LINEAR = f"{SHORT},lengthgen.placement=pre_linear"
MEAN_FILL = f"{SHORT},lengthgen.fill=mean"
TWO = "micro_batch_size=2"
# The weights move by -lr times the gradient: far enough for float32 to hold the gradient's digits.
GRADIENT = "train_iters=1,optimizer=sgd,sgd_momentum=0,lr=1.0e+4,weight_decay=0,clip_grad=0,no_save_optim=true"

LAYOUTS: dict[int, Runs] = {
    1: {"tp1_recompute": (FULL,)},
    2: {
        "tp2_selective_evaluate": (f"{TP2},{SELECTIVE},{EVALUATE}",),
        "tp2_sp": (TP2_SP,),
        "tp2_sp_recompute_other_streams": (f"{TP2_SP},{FULL},disturb=other_streams",),
        "pp2_uneven_recompute": (f"{PP2},decoder_first_pipeline_num_layers=3,{FULL}",),
        "interleaved_block_evaluate": (f"{INTERLEAVED},{BLOCK},{EVALUATE}",),
        "dp2_recompute": (FULL,),
        "moved": (f"{PP2},{ANY_LAYOUT},{STOP}", f"{TP2_SP},{ANY_LAYOUT}"),
    },
    4: {"tp2_sp_pp2_recompute": (f"{TP2_SP},{PP2},{FULL}",)},
}
MORE_LAYOUTS: dict[int, Runs] = {
    1: {
        "tp1_block": (BLOCK,),
        "tp1_selective": (SELECTIVE,),
        "tp1_evaluate_with_workers": (f"{EVALUATE},num_workers=2",),
        "tp1_other_streams": ("disturb=other_streams",),
        "tp1_resumed_without_rng": (f"{STOP},save_interval=10", "save_interval=10,no_load_rng=true"),
    },
    2: {
        "tp2": (TP2,),
        "tp2_recompute": (f"{TP2},{FULL}",),
        "tp2_distributed_activations": (f"{TP2},{FULL},distribute_saved_activations=true",),
        "tp2_sp_recompute_by_2": (f"{TP2_SP},{FULL_BY_2}",),
        "tp2_sp_block": (f"{TP2_SP},{BLOCK}",),
        "tp2_sp_selective": (f"{TP2_SP},{SELECTIVE}",),
        "tp2_sp_evaluate": (f"{TP2_SP},{EVALUATE}",),
        "pp2": (PP2,),
        "pp2_block": (f"{PP2},{BLOCK}",),
        "pp2_selective": (f"{PP2},{SELECTIVE}",),
        "pp2_uneven": (f"{PP2},decoder_first_pipeline_num_layers=1",),
        "interleaved": (INTERLEAVED,),
        "interleaved_recompute": (f"{INTERLEAVED},{FULL}",),
        "interleaved_selective": (f"{INTERLEAVED},{SELECTIVE}",),
        "dp2": ("",),
        "dp2_random_init": ("data_parallel_random_init=true",),
        "dp2_distributed": (f"{DISTRIBUTED},{SELECTIVE}",),
        "dp2_overlapped": (f"{DISTRIBUTED},overlap_grad_reduce=true,overlap_param_gather=true,{BLOCK}",),
        "moved_thrice": (
            f"{TP2},{ANY_LAYOUT},{STOP},exit_interval=5,save_interval=5",
            f"{ANY_LAYOUT},{STOP},{FULL}",
            f"{INTERLEAVED},{ANY_LAYOUT},{EVALUATE}",
        ),
    },
    4: {
        "tp2_pp2": (f"{TP2},{PP2}",),
        "tp2_sp_interleaved_block": (f"{TP2_SP},{INTERLEAVED},{BLOCK}",),
        "tp4_sp": (f"{TP4},sequence_parallel=true",),
        "tp4_recompute": (f"{TP4},{FULL}",),
        "pp4_recompute": (f"{PP4},{FULL}",),
        "tp2_sp_dp2_distributed": (f"{TP2_SP},{DISTRIBUTED}",),
        "pp2_dp2_recompute": (f"{PP2},{FULL}",),
        "dp4": ("",),
    },
}
HYBRID_LAYOUTS: dict[int, Runs] = {
    1: {"tp1_recompute": (FULL,)},
    2: {
        "tp2_sp_recompute": (f"{TP2_SP},{FULL}",),
        "pp2_uneven_recompute": (f"{PP2},hybrid_layer_pattern='M*-M|*-',{FULL}",),
    },
}
MORE_HYBRID_LAYOUTS: dict[int, Runs] = {
    1: {"tp1_selective": (SELECTIVE,), "tp1_block": (BLOCK,)},
    2: {
        "tp2": (TP2,),
        "tp2_sp": (TP2_SP,),
        "pp2": (PP2,),
        "interleaved": (f"{PP2},hybrid_layer_pattern='M|*-|M*|-'",),
        "interleaved_recompute": (f"{PP2},hybrid_layer_pattern='M|*-|M*|-',{FULL}",),
        "dp2_evaluate": (EVALUATE,),
        "moved": (f"{PP2},{ANY_LAYOUT},{STOP}", f"{TP2_SP},{ANY_LAYOUT}"),
    },
    4: {"tp2_sp_pp2_recompute": (f"{TP2_SP},{PP2},{FULL}",)},
}
# With a reference of their own: the odd length; the microbatch size, which batch statistics do depend on.
VARIANTS: dict[int, Runs] = {
    1: {"odd": (ODD,), "pre_linear": (PRE_LINEAR,), "mean_fill_of_2": (f"{MEAN_FILL},{TWO}",)},
    2: {
        "odd_tp2_recompute": (f"{ODD},{TP2},{FULL}",),
        "pre_linear_dp2_of_2": (f"{PRE_LINEAR},{TWO}",),
        "mean_fill_of_2_tp2_sp_recompute": (f"{MEAN_FILL},{TWO},{TP2_SP},{FULL}",),
    },
}
GRADIENTS: dict[int, Runs] = {
    1: {"gradient": (GRADIENT,), "gradient_recompute": (f"{GRADIENT},{FULL}",)},
    2: {
        "gradient_tp2_sp": (f"{GRADIENT},{TP2_SP}",),
        "gradient_tp2_recompute": (f"{GRADIENT},{TP2},{FULL}",),
        "gradient_pp2_recompute": (f"{GRADIENT},{PP2},{FULL}",),
        "gradient_dp2": (GRADIENT,),
    },
}
HYBRID_GRADIENTS: dict[int, Runs] = {
    1: {"gradient": (GRADIENT,)},
    2: {"gradient_tp2_sp": (f"{GRADIENT},{TP2_SP}",), "gradient_pp2_recompute": (f"{GRADIENT},{PP2},{FULL}",)},
}
# Wrong on purpose, see train_layouts.py.
WRONG: dict[int, Runs] = {
    1: {"unbound": (f"{GRADIENT},disturb=unbound",)},
    2: {
        "unbound_tp2_sp": (f"{GRADIENT},{TP2_SP},disturb=unbound",),
        "unbound_pp2": (f"{GRADIENT},{PP2},disturb=unbound",),
        "same_rank_tp2": (f"{GRADIENT},{TP2},disturb=same_rank",),
        "same_rank_tp2_sp": (f"{GRADIENT},{TP2_SP},disturb=same_rank",),
        "same_data_dp2": (f"{GRADIENT},disturb=same_data",),
        "latest_key_pp2_recompute": (f"{GRADIENT},{PP2},{FULL},disturb=latest_key",),
    },
}


def train(out: Path, processes: int, gpt: Runs, hybrid: Runs) -> None:
    """One launch for all runs of one number of processes; what it leaves is in ``out`` / ``gpt`` or ``hybrid``."""
    arguments: list[object] = [GPT, out]
    for kind, conf, runs in (("gpt", GPT, gpt), ("hybrid", HYBRID, hybrid)):
        arguments.append(conf)
        for name, starts in runs.items():
            begin = "" if name == "start" else f"pretrained_checkpoint={out / kind / 'start'},"
            arguments += [f"{kind}/{name}:{begin}{overrides}" for overrides in starts]
    torchrun(processes, SCRIPT, *arguments, timeout=1800)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("invariant")
    first: Runs = {"start": ("train_iters=1,no_save_optim=true",), "tp1": ("",)}
    bare: Runs = {"without_dropout": (f"{SHORT},lengthgen.placement=none",)}
    gpt = [LAYOUTS, VARIANTS, GRADIENTS]
    hybrid = [HYBRID_LAYOUTS, HYBRID_GRADIENTS]
    train(out, 1, {**first, **bare, **merge(gpt, 1)}, {**first, **bare, **merge(hybrid, 1)})
    for processes in (2, 4):
        train(out, processes, merge(gpt, processes), merge(hybrid, processes))
    return out


@pytest.fixture(scope="module")
def more_runs(runs: Path) -> Path:
    for processes in (1, 2, 4):
        train(runs, processes, merge([MORE_LAYOUTS, WRONG], processes), MORE_HYBRID_LAYOUTS[processes])
    return runs


def merge(tables: list[dict[int, Runs]], processes: int) -> Runs:
    return {name: starts for table in tables for name, starts in table.get(processes, {}).items()}


def names(table: dict[int, Runs]) -> list[str]:
    return [name for runs in table.values() for name in runs]


def assert_same_curve(run: Path, reference: Path, steps: int) -> None:
    one, other = losses(run), losses(reference)
    assert len(one) == len(other) == steps
    difference = [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]
    assert difference[0] < 1e-5
    assert max(difference) < 1e-4


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights in a run's last checkpoint, whatever layout wrote them."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(find_checkpoint(run))
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(value.size)
        for key, value in stored.items()
        if is_model_key(key) and isinstance(value, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def gradient_difference(run: Path, reference: Path) -> dict[str, float]:
    """Norm of the difference of two runs' gradients, relative to the second's, for each weight."""
    start, one, other = weights(run.parent / "start"), weights(run), weights(reference)
    assert start.keys() == one.keys() == other.keys()
    return {key: ((one[key] - other[key]).norm() / (other[key] - start[key]).norm()).item() for key in start}


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_the_reference_learns_and_feels_its_dropout(runs: Path, kind: str) -> None:
    reference = losses(runs / kind / "tp1")
    assert len(reference) == 20
    assert reference[-1] < 0.8 * reference[0]
    without = losses(runs / kind / "without_dropout")
    assert abs(reference[4] - without[4]) / without[4] > 1e-2


@pytest.mark.parametrize("layout", names(LAYOUTS))
def test_layouts_train_alike(runs: Path, layout: str) -> None:
    assert_same_curve(runs / "gpt" / layout, runs / "gpt" / "tp1", 20)


@pytest.mark.parametrize("layout", names(HYBRID_LAYOUTS))
def test_layouts_of_a_hybrid_train_alike(runs: Path, layout: str) -> None:
    assert_same_curve(runs / "hybrid" / layout, runs / "hybrid" / "tp1", 20)


@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ("odd_tp2_recompute", "odd"),
        ("pre_linear_dp2_of_2", "pre_linear"),
        ("mean_fill_of_2_tp2_sp_recompute", "mean_fill_of_2"),
    ],
)
def test_variants_train_alike(runs: Path, layout: str, reference: str) -> None:
    assert_same_curve(runs / "gpt" / layout, runs / "gpt" / reference, 5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", names(MORE_LAYOUTS))
def test_more_layouts_train_alike(more_runs: Path, layout: str) -> None:
    assert_same_curve(more_runs / "gpt" / layout, more_runs / "gpt" / "tp1", 20)


@pytest.mark.slow
@pytest.mark.parametrize("layout", names(MORE_HYBRID_LAYOUTS))
def test_more_layouts_of_a_hybrid_train_alike(more_runs: Path, layout: str) -> None:
    assert_same_curve(more_runs / "hybrid" / layout, more_runs / "hybrid" / "tp1", 20)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, name)
        for kind, table in (("gpt", GRADIENTS), ("hybrid", HYBRID_GRADIENTS))
        for name in names(table)
        if name != "gradient"
    ],
)
def test_gradients_agree(runs: Path, kind: str, layout: str) -> None:
    """Of every weight, after Megatron's reductions over ranks: norms too, which sequence-parallel ranks share."""
    difference = gradient_difference(runs / kind / layout, runs / kind / "gradient")
    assert any("layernorm" in key or "layer_norm" in key for key in difference)
    assert max(difference.values()) < 1e-5, difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ("unbound_tp2_sp", "unbound"),
        ("unbound_pp2", "unbound"),
        ("same_rank_tp2", "gradient"),
        ("same_rank_tp2_sp", "gradient"),
        ("same_data_dp2", "gradient"),
        ("latest_key_pp2_recompute", "gradient"),
    ],
)
def test_a_wrong_mask_shows(more_runs: Path, layout: str, reference: str) -> None:
    """Each is a mistake that the tests above would notice, by far."""
    difference = gradient_difference(more_runs / "gpt" / layout, more_runs / "gpt" / reference)
    assert max(difference.values()) > 1e-2
    if not layout.startswith("latest_key"):  # which is wrong in the backward pass alone
        one, other = losses(more_runs / "gpt" / layout)[0], losses(more_runs / "gpt" / reference)[0]
        assert abs(one - other) / other > 1e-5
