"""Finished cells of a study, looked up by what was measured."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_lengthgen.choices import check_choice
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.study.evaluation import AttentionScale

__all__ = ["PLACEMENTS", "Results", "Scores", "Variant", "scale_order"]

#: Placements in the order that the paper claims for length generalisation, and its names for them.
PLACEMENTS = {"none": "none", "pre_norm": "Pre-Norm", "pre_linear": "Pre-Linear", "vpad": "VPAD"}
#: Options that make a difference at each placement, p apart.
_OPTIONS = {
    "none": (),
    "pre_norm": (),
    "pre_linear": ("sites", "start_step", "ramp_steps"),
    "vpad": ("sites", "start_step", "ramp_steps", "fill", "statistics"),
}
_DROPOUT_KEYS = {"placement", "p", *itertools.chain(*_OPTIONS.values())}

#: Per-sequence values ``[sequences]`` by seed.
Scores = dict[int, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant, without the settings that make no difference to it.

    Attributes:
        name: Its name in the study.
        placement: A key of :data:`PLACEMENTS`.
        p: Drop probability; None at placement ``none``.
        options: All other options of the dropout that matter at this placement.
        context: All settings that are not the dropout's, weight decay among them.
    """

    name: str
    placement: str
    p: float | None
    options: dict[str, Any]
    context: dict[str, Any]

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any]) -> "Variant":
        """From the settings in a cell."""
        placement = settings.get("placement")
        check_choice("placement", placement, PLACEMENTS)
        options = {key: settings[key] for key in _OPTIONS[str(placement)] if settings.get(key) is not None}
        if "sites" in options:
            options["sites"] = sorted(options["sites"])
        return cls(
            name=name,
            placement=str(placement),
            p=None if placement == "none" else settings.get("p"),
            options=options,
            context={key: settings[key] for key in sorted(settings.keys() - _DROPOUT_KEYS)},
        )

    @property
    def rank(self) -> int:
        """Place in the claimed order."""
        return list(PLACEMENTS).index(self.placement)

    @property
    def weight_decay(self) -> Any:
        return self.context.get("weight_decay")

    def without_decay(self) -> tuple[Any, ...]:
        """Equal for variants that differ in weight decay only."""
        rest = {key: value for key, value in self.context.items() if key != "weight_decay"}
        return self.placement, self.p, self.options, rest

    def is_below(self, other: "Variant") -> bool:
        """Is it the same run with an earlier placement, all that both placements have being equal?"""
        shared = self.options.keys() & other.options.keys()
        return (
            self.rank < other.rank
            and self.context == other.context
            and (self.placement == "none" or self.p == other.p)
            and all(self.options[key] == other.options[key] for key in shared)
        )


def scale_order(scale: AttentionScale) -> tuple[bool, float]:
    """Sorting key: numbers, and then those that have none."""
    return (True, 0.0) if isinstance(scale, str) else (False, scale)


class Results:
    """Finished cells, looked up by what was measured.

    Args:
        cells: Results of finished cells, any number of variants and seeds.

    Raises:
        UserError: no cells, a cell twice, or cells of different studies.
    """

    def __init__(self, cells: Sequence[Mapping[str, Any]]) -> None:
        if not cells:
            raise UserError("the study has no finished cell: run some before asking for a report")
        self.cells: dict[tuple[str, int], Mapping[str, Any]] = {}
        settings: dict[str, Any] = {}
        first = cells[0]
        for cell in cells:
            key = cell["variant"], cell["seed"]
            if key in self.cells:
                raise UserError(f"cell {key[0]}-seed{key[1]} is there twice: keep one of them")
            self.cells[key] = cell
            for name in ("task", "training_length"):
                if cell[name] != first[name]:
                    raise UserError(
                        f"the cells belong to different studies: {name} is {first[name]} in one, {cell[name]} in "
                        "another; report each study on its own"
                    )
            if settings.setdefault(cell["variant"], cell["settings"]) != cell["settings"]:
                raise UserError(
                    f"variant {cell['variant']} has different settings in different seeds: report its two versions "
                    "under two names"
                )
        self.task: Mapping[str, Any] = first["task"]
        self.training_length: int = first["training_length"]
        self.seeds = sorted({seed for _, seed in self.cells})
        unordered = [Variant.of(name, chosen) for name, chosen in settings.items()]
        # sorted() is stable: what is left keeps the study's own order.
        self.variants = sorted(unordered, key=lambda v: (-(v.weight_decay or 0), v.rank, v.p or 0))
        self._found: dict[tuple[str, int, AttentionScale, int], dict[int, Mapping[str, Any]]] = {}
        for (variant, seed), cell in self.cells.items():
            for entry in cell["evaluations"]:
                place = variant, entry["step"], entry["attention_scale"], entry["length"]
                self._found.setdefault(place, {})[seed] = entry
        self.last_step = max((step for _, step, _, _ in self._found), default=0)

    def scores(
        self,
        variant: Variant,
        multiple: float,
        *,
        step: int | None = None,
        scale: AttentionScale = 1.0,
        of: str = "accuracy",
    ) -> Scores:
        """Per-sequence values ``[sequences]`` by seed.

        Args:
            variant: Of which variant.
            multiple: Length, in multiples of the training length.
            step: Of the second phase; None for the last one.
            scale: On the attention logits of the layers without a window.
            of: ``accuracy``, ``error`` or ``loss``.
        """
        step = self.last_step if step is None else step
        found = self._found.get((variant.name, step, scale, round(multiple * self.training_length)), {})
        return {seed: np.asarray(entry[of], np.float64) for seed, entry in sorted(found.items()) if len(entry[of])}

    def multiples(self, variant: Variant) -> list[float]:
        """Lengths at which the variant was evaluated at the last step, in multiples of the training length."""
        return sorted(
            length / self.training_length
            for name, step, scale, length in self._found
            if (name, step, scale) == (variant.name, self.last_step, 1.0)
        )

    def steps(self, variant: Variant) -> list[int]:
        """Steps at which the variant was evaluated."""
        return sorted({step for name, step, scale, _ in self._found if (name, scale) == (variant.name, 1.0)})

    def scales(self, variant: Variant) -> list[AttentionScale]:
        """Attention scales at which the variant was evaluated at the last step, numbers first."""
        found = {s for name, step, s, _ in self._found if (name, step) == (variant.name, self.last_step)}
        return sorted(found, key=scale_order)
