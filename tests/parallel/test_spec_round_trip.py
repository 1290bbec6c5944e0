"""Megatron's stock local spec -> ours -> stock through Megatron's own checkpointing, bit for bit, optimizer included.

The file is also the script that two ranks run: torchrun test_spec_round_trip.py OUT
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lengthgen import backends
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import optimizer_state
from megatron_lengthgen.training.optimizer_state import check_optimizer_state

SITES = ["attention", "mlp", "output", "linear_proj", "linear_fc2"]
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
Tensors = dict[tuple[str, ...], torch.Tensor]


class Training:
    """A model and its optimizer on this rank, under Megatron's global arguments."""

    def __init__(self, *, ours: bool, sites: list[str] = SITES, **options: Any) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.argument_utils import gpt_config_from_args

        from megatron_lengthgen.models.build import model_config

        self.options = options
        self.lengthgen = {"placement": "vpad", "p": 0.1, "sites": sites} if ours else {}
        self.use()
        config = model_config(self.args) if ours else gpt_config_from_args(self.args)
        self.models = config.get_builder_cls()(config).build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
        )
        precision = {"bf16": True, "params_dtype": torch.bfloat16}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, **precision), self.models
        )

    def use(self, **attributes: Any) -> None:
        """Make this training's arguments Megatron's global ones, and its layout the processes' one."""
        from megatron_lengthgen import megatron_args
        from megatron_lengthgen.models.build import initialize

        self.args = megatron_args.parse(
            {
                "num_layers": 4,
                "hidden_size": 48,
                "ffn_hidden_size": 80,
                "num_attention_heads": 4,
                "normalization": "LayerNorm",
                "swiglu": True,
                "untie_embeddings_and_output_weights": True,
                "position_embedding_type": "rope",
                "seq_length": 32,
                "max_position_embeddings": 32,
                "micro_batch_size": 1,
                "tokenizer_type": "NullTokenizer",
                "vocab_size": 255,
                "bf16": True,
                "use_distributed_optimizer": True,
                "dist_ckpt_optim_fully_reshardable": True,
                **self.options,
            },
            lengthgen=self.lengthgen,
        )
        initialize(self.args)
        vars(self.args).update(attributes)

    def disturb_norms(self) -> None:
        """And biases, which begin at zero; the same on all ranks, which share them."""
        torch.manual_seed(3)
        for model in self.models:
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    torch.nn.init.normal_(parameter, mean=0.8, std=0.3)
        self.optimizer.reload_model_params()

    def step(self, seed: int) -> None:
        """An update by gradients that are drawn; the same on all ranks, which share some of the parameters."""
        torch.manual_seed(seed)
        for model in self.models:
            for parameter in model.parameters():
                parameter.main_grad.normal_()
        assert self.optimizer.step()[0]

    def save(self, path: Path, **more: Any) -> None:
        from megatron.training.checkpointing import save_checkpoint

        self.use(save=str(path), **more)
        save_checkpoint(1, self.models, self.optimizer, None, 0)

    def load(self, path: Path) -> None:
        """Into a model and an optimizer that hold something else, without Megatron's leave to go without a key."""
        from megatron.training.checkpointing import load_checkpoint

        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    parameter.fill_(7)
        self.use(load=str(path), dist_ckpt_strictness="raise_unexpected")
        assert load_checkpoint(self.models, self.optimizer, None, strict=True)[0] == 1

    def tensors(self) -> Tensors:
        """Copies of all weights, main weights and moments that this rank holds, by the parameters' names."""
        found: Tensors = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                found["weight", name] = parameter.detach().clone()
                for part in self.optimizer.chained_optimizers:
                    if parameter in part.model_param_group_index_map:
                        state = part._get_main_param_and_optimizer_states(parameter)
                        found |= {(key, name): state[key].clone() for key in ("param", "exp_avg", "exp_avg_sq")}
        return found


def content(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by key: kind, and shape and dtype of tensors."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    pieces = load_sharded_metadata(str(checkpoint / "iter_0000001"))
    return {
        key: (type(piece), getattr(piece, "global_shape", None), getattr(piece, "dtype", None))
        for key, piece in pieces.items()
    }


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert {kind for kind, _ in expected} == {"weight", "param", "exp_avg", "exp_avg_sq"}
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ------------------------------------------------------------------------------------------ what the ranks run


def pair(**options: Any) -> tuple[Training, Training]:
    sites = ["attention", "mlp", "output"] if "num_experts" in options else SITES
    return Training(ours=False, **options), Training(ours=True, sites=sites, **options)


def train(stock: Training) -> None:
    stock.disturb_norms()
    stock.step(1)
    stock.step(2)


def round_trip(stock: Training, ours: Training, out: Path) -> None:
    """Stock -> ours -> stock; then both go on alike."""
    expected = stock.tensors()
    stock.save(out / "stock")
    ours.load(out / "stock")
    assert_equal(ours.tensors(), expected)
    ours.save(out / "ours")
    assert content(out / "ours") == content(out / "stock")
    stock.step(3)
    assert all(not torch.equal(tensor, expected[name]) for name, tensor in stock.tensors().items())
    stock.load(out / "ours")
    assert_equal(stock.tensors(), expected)
    stock.step(4)
    ours.step(4)
    assert_equal(ours.tensors(), stock.tensors())


def tensor_parallel(out: Path) -> None:
    stock, ours = pair(**TP2)
    train(stock)
    round_trip(stock, ours, out / "tp2")


def pipeline_parallel(out: Path) -> None:
    """From the checkpoints that the tensor-parallel ranks saved, each model from the other's."""
    stock, ours = pair(**PP2)
    stock.load(out / "tp2" / "ours")
    ours.load(out / "tp2" / "stock")
    assert_equal(ours.tensors(), stock.tensors())
    round_trip(stock, ours, out / "pp2")


def experts(out: Path) -> None:
    stock, ours = pair(**PP2, **MOE)
    train(stock)
    round_trip(stock, ours, out / "moe")


def by_position(out: Path) -> None:
    """Local layers have their norms in the same places with and without dropout."""
    stock, ours = pair(**TP2)
    train(stock)
    stock.save(out / "position", dist_ckpt_optim_fully_reshardable=False)
    ours.load(out / "position")
    assert_equal(ours.tensors(), stock.tensors())


CHECKS = (tensor_parallel, pipeline_parallel, experts, by_position)


def ranks(out: str) -> None:
    backends.prepare()
    for check in CHECKS:
        check(Path(out))
        print(f"{check.__name__} is whole", flush=True)


# -------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    from launch import torchrun

    out = tmp_path_factory.mktemp("round_trip")
    return out, torchrun(2, Path(__file__), out)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_checkpoints_go_from_the_stock_spec_to_ours_and_back(runs: tuple[Path, str], check: Any) -> None:
    assert runs[1].count(f"{check.__name__} is whole") == 2


@pytest.fixture
def resumed(runs: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Arguments of a run with this package's dropout that uses Transformer Engine, as did the one that it resumes."""
    stored = optimizer_state.checkpoint_args(runs[0] / "position")
    assert stored.lengthgen == {} and stored.transformer_impl == "local"
    stored.transformer_impl = "transformer_engine"
    monkeypatch.setattr(optimizer_state, "checkpoint_args", lambda path: stored)
    args = copy.copy(stored)
    args.lengthgen = {"placement": "vpad", "p": 0.1, "start_step": 1}
    return args


@pytest.mark.parametrize(
    "change",
    [
        {"lengthgen": {"placement": "pre_norm", "p": 0.1}},
        {"lengthgen": {"placement": "vpad", "p": 0.1, "sites": ["mlp", "output"]}},
        {"no_load_optim": True},
        {"use_distributed_optimizer": False},
    ],
    ids=str,
)
def test_optimizer_state_by_position_is_refused_where_positions_differ(
    runs: tuple[Path, str], resumed: argparse.Namespace, change: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=r"by position \(dp_reshardable\).* save once more with .* or .*no_load_optim: true"
    ):
        check_optimizer_state(resumed, runs[0] / "position")
    check_optimizer_state(resumed, runs[0] / "tp2" / "stock")
    vars(resumed).update(change)
    check_optimizer_state(resumed, runs[0] / "position")


def test_optimizer_state_by_position_is_kept_by_local_layers(runs: tuple[Path, str]) -> None:
    args = optimizer_state.checkpoint_args(runs[0] / "position")
    args.lengthgen = {"placement": "vpad", "p": 0.1, "start_step": 1}
    check_optimizer_state(args, runs[0] / "position")
    args.transformer_impl = "transformer_engine"
    with pytest.raises(UserError, match="norms in other positions"):
        check_optimizer_state(args, runs[0] / "position")


if __name__ == "__main__":
    ranks(sys.argv[1])
