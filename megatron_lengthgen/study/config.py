"""A study: one model and task, one first phase per seed, and a grid of second phases that start from it."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_lengthgen.choices import check_choice, check_keys
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.study import tasks
from megatron_lengthgen.study.evaluation import AttentionScale
from megatron_lengthgen.training.config import RunConfig, resolve

__all__ = ["Cell", "Evaluation", "Study", "load"]

_KEYS = ("task", "model", "attention", "phase1", "phase2", "variants", "grid", "seeds", "evaluation")
_DROPOUT = tuple(option.name for option in dataclasses.fields(Regularization))
#: What a grid crosses, and how its values appear in a variant's name.
_GRID = {"placement": "{}", "p": "p{}", "weight_decay": "wd{}", "sites": "{}", "fill": "{}", "statistics": "{}"}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is measured, and when.

    Attributes:
        multiples: Lengths, in multiples of the training length.
        sequences: Samples per length.
        points: At how many points along phase 2, evenly spread and the last one its end; phase 2's start is one more.
        attention_scales: Factors on the attention logits of layers without a window, see
            :func:`megatron_lengthgen.study.evaluation.scaled_full_attention`; others than 1 at the end only.
    """

    multiples: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    sequences: int = 100
    points: int = 1
    attention_scales: tuple[AttentionScale, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name in ("multiples", "attention_scales"):
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str) or not list(values):
                raise UserError(f"evaluation.{name} must be a list of numbers, got {values!r}")
            object.__setattr__(self, name, tuple(values))
        for name, values in (
            ("multiples", self.multiples),
            ("sequences", (self.sequences,)),
            ("points", (self.points,)),
        ):
            if not all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values):
                raise UserError(f"evaluation.{name} must be positive whole numbers, got {getattr(self, name)!r}")
        if not all(s == "log" or (isinstance(s, int | float) and s > 0) for s in self.attention_scales):
            raise UserError(
                f"evaluation.attention_scales must be positive numbers or log, got {list(self.attention_scales)}"
            )


@dataclasses.dataclass(frozen=True)
class Cell:
    """One second phase.

    Attributes:
        variant: Its name.
        seed: Of weights, data and masks.
        settings: Keys of the ``lengthgen`` section and Megatron's arguments that make the variant.
    """

    variant: str
    seed: int
    settings: Mapping[str, Any] = dataclasses.field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
    """A study as its file describes it.

    Attributes:
        task: What the model learns.
        model: Megatron's arguments of the model, and all others that both phases share.
        attention: Windows and rotary positions, as ``lengthgen.attention`` of a run.
        phase1, phase2: Megatron's arguments of each phase.
        variants: Settings of each variant by its name.
        seeds: Seeds; each has a first phase of its own.
        evaluation: What is measured.
    """

    task: tasks.Recall | tasks.Counting
    model: Mapping[str, Any]
    attention: Mapping[str, Any] | None
    phase1: Mapping[str, Any]
    phase2: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    evaluation: Evaluation

    @property
    def training_length(self) -> int:
        """Tokens of a training sequence."""
        return int(self.model["seq_length"])

    @property
    def cells(self) -> list[Cell]:
        """All second phases, seed by seed, so that paired comparisons grow together."""
        return [Cell(name, seed, self.variants[name]) for seed in self.seeds for name in self.variants]

    def steps(self, phase: int) -> int:
        """Training steps of a phase, 1 or 2."""
        return int((self.phase1 if phase == 1 else self.phase2)["train_iters"])

    def run(
        self,
        phase: int,
        *,
        seed: int,
        save: Path,
        settings: Mapping[str, Any] | None = None,
        start: Path | None = None,
        ranks: int = 1,
    ) -> RunConfig:
        """The training run of a phase.

        Args:
            phase: 1 or 2.
            seed: Of weights and masks.
            save: Where its checkpoints go.
            settings: A variant's.
            start: Checkpoint to start from.
            ranks: Processes that share the model by tensor parallelism.
        """
        settings = settings or {}
        section = {name: settings[name] for name in _DROPOUT if name in settings}
        if self.attention:
            section["attention"] = dict(self.attention)
        rows = -(-self.task.vocab_size // 16) * 16
        steps = self.steps(phase)
        return resolve(
            {
                # Data comes from the task; Megatron wants to be told of some, and of a tokenizer.
                "mock_data": True,
                "split": "1,0,0",
                "tokenizer_type": "NullTokenizer",
                "vocab_size": self.task.vocab_size,
                "padded_vocab_size": rows,
                "max_position_embeddings": self.training_length,
                "eval_iters": 0,
                "num_workers": 0,
                "log_interval": max(steps // 20, 1),
                "tensorboard_log_interval": steps + 1,
                "save_interval": steps // self.evaluation.points if phase == 2 else steps,
                "rerun_mode": "disabled",
                "tensor_model_parallel_size": ranks,
                **self.model,
                **(self.phase1 if phase == 1 else self.phase2),
                **{name: value for name, value in settings.items() if name not in _DROPOUT},
                "seed": seed + 1,  # Megatron wants a positive one
                "save": str(save),
                "pretrained_checkpoint": None if start is None else str(start),
            },
            section,
        )


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Study:
    """Read a study's YAML.

    Args:
        path: The file.
        overrides: ``key=value`` items that win over it, such as ``seeds=[0,1]`` and ``phase2.train_iters=200``.

    Raises:
        UserError: a missing or malformed file, an unknown key, a variant that cannot run.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no study configuration at {path}")
    try:
        tree = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    except Exception as error:  # yaml's own errors share no public base with OmegaConf's
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    return from_mapping(plain)


def from_mapping(tree: Any) -> Study:
    """A study from plain values, see :func:`load`."""
    tree = dict(check_keys("study", tree, _KEYS))
    for name in ("task", "model", "phase1", "phase2", "seeds"):
        if not tree.get(name):
            raise UserError(f"the study has no {name}")
    for phase in ("phase1", "phase2"):
        steps = tree[phase].get("train_iters") if isinstance(tree[phase], dict) else None
        if not isinstance(steps, int) or steps < 1:
            raise UserError(f"{phase} needs train_iters, a number of training steps, got {steps!r}")
    if not isinstance(tree["model"].get("seq_length"), int):
        raise UserError("model needs seq_length, the training length in tokens")
    options = check_keys(
        "evaluation", tree.get("evaluation") or {}, [option.name for option in dataclasses.fields(Evaluation)]
    )
    seeds = tree["seeds"]
    if not isinstance(seeds, list) or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        raise UserError(f"seeds must be a list of whole numbers, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"seeds names a seed twice: {seeds}")
    study = Study(
        task=tasks.from_mapping(tree["task"]),
        model=tree["model"],
        attention=tree.get("attention"),
        phase1=tree["phase1"],
        phase2=tree["phase2"],
        variants=_variants(tree),
        seeds=tuple(seeds),
        evaluation=Evaluation(**options),
    )
    if study.steps(2) % study.evaluation.points:
        raise UserError(
            f"evaluation.points {study.evaluation.points} does not divide phase 2's {study.steps(2)} steps: choose "
            "one that does"
        )
    # A wrong key shows before anything is trained.
    study.run(1, seed=0, save=Path("."))
    for settings in study.variants.values():
        study.run(2, seed=0, save=Path("."), settings=settings)
    return study


def _variants(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The named variants, and those that a grid crosses."""
    variants: dict[str, dict[str, Any]] = {
        str(name): dict(settings or {}) for name, settings in (tree.get("variants") or {}).items()
    }
    axes = check_keys("grid", tree.get("grid") or {}, _GRID)
    for values in itertools.product(*axes.values()) if axes else ():
        settings = dict(zip(axes, values, strict=True))
        name = "-".join(_GRID[axis].format(_short(value)) for axis, value in settings.items())
        if settings.get("placement") == "none":
            # Without dropout the other options of dropout make no difference: one variant stands for all.
            settings = {axis: value for axis, value in settings.items() if axis in ("placement", "weight_decay")}
            name = "-".join(_GRID[axis].format(_short(value)) for axis, value in settings.items())
        variants.setdefault(name, settings)
    if not variants:
        raise UserError("the study has neither variants nor a grid: name some")
    for name in variants:
        if not name.replace("-", "").replace("_", "").replace(".", "").replace("+", "").isalnum():
            raise UserError(f"variant {name!r}: a name is made of letters, digits, '-', '_', '.' and '+'")
        check_choice("placement", variants[name].get("placement", "none"), ("none", "pre_norm", "pre_linear", "vpad"))
    return variants


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
