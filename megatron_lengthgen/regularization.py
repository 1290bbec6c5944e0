"""What a user can choose: where dropout goes, how much, and how it is corrected."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from megatron_lengthgen.choices import check_choice, check_keys
from megatron_lengthgen.dropout.masks import check_probability
from megatron_lengthgen.errors import UserError

__all__ = ["SITES", "Fill", "Placement", "Regularization", "Statistics"]

Placement = Literal["none", "pre_norm", "pre_linear", "vpad"]
Fill = Literal["zero", "mean"]
Statistics = Literal["batch", "norm"]

#: Sites behind a norm, and what the norm feeds; then the inputs of linears that no norm precedes.
SITES = {
    "attention": "QKV projection (or in_proj of gated delta net), behind input_layernorm",
    "mlp": "linear_fc1 (or the experts), behind pre_mlp_layernorm",
    "mamba": "in_proj of a Mamba mixer, behind its norm",
    "output": "output layer, behind the final norm",
    "mtp": "eh_proj of multi-token prediction, behind enorm and hnorm",
    "linear_proj": "output projection of attention",
    "linear_fc2": "second linear of a dense MLP",
    "out_proj": "out_proj of a Mamba mixer",
}
_DEFAULT_SITES = ("attention", "mlp", "mamba")
_WITHOUT_NORM = ("linear_proj", "linear_fc2", "out_proj")


@dataclasses.dataclass(frozen=True)
class Regularization:
    """The dropout of a model.

    Attributes:
        placement: ``none``; ``pre_norm``, Megatron's own dropout on each residual branch; ``pre_linear``, dropout
            between a norm and its linear; ``vpad``, the same with mean and variance preserved (arXiv 2610.04518).
        p: Drop probability in [0, 1); None takes ``config.hidden_dropout`` when the model is built.
        fill: For ``vpad``: what stands in the place of a dropped value, ``zero`` or the coordinate's ``mean``.
        statistics: For ``vpad``: moments of the ``batch`` (all tokens of the microbatch), or those that the ``norm``'s
            own gain and bias imply.
        sites: For ``pre_linear`` and ``vpad``: which linears' inputs, names of :data:`SITES`. A model without the part
            that a default site names simply has no such site.
        start_step: Training steps without any dropout, before it starts.
        ramp_steps: Training steps over which p then rises linearly.
    """

    placement: Placement = "vpad"
    p: float | None = None
    fill: Fill = "zero"
    statistics: Statistics = "batch"
    sites: tuple[str, ...] = _DEFAULT_SITES
    start_step: int = 0
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        check_choice("placement", self.placement, get_args(Placement))
        check_choice("fill", self.fill, get_args(Fill))
        check_choice("statistics", self.statistics, get_args(Statistics))
        if self.p is not None:
            try:
                object.__setattr__(self, "p", check_probability(self.p))
            except ValueError as error:
                raise UserError(str(error)) from None
        if isinstance(self.sites, str) or not isinstance(self.sites, Iterable):
            raise UserError(f"sites must be a list of names such as [attention, mlp], got {self.sites!r}")
        object.__setattr__(self, "sites", tuple(self.sites))
        for site in self.sites:
            check_choice("site", site, SITES)
        if len(set(self.sites)) != len(self.sites):
            raise UserError(f"sites names a site twice: {', '.join(self.sites)}")
        for name in ("start_step", "ramp_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"{name} must be a number of training steps, got {value!r}")
        if self.placement == "pre_norm":
            self._check_pre_norm()
        elif self.is_active:
            self._check_sites()

    def _check_pre_norm(self) -> None:
        if not {"attention", "mlp"} <= set(self.sites) <= set(_DEFAULT_SITES):
            raise UserError(
                "placement 'pre_norm' is Megatron's hidden_dropout, which acts on all residual branches together; "
                f"sites [{', '.join(self.sites)}] cannot be chosen for it: leave sites out"
            )
        if self.has_schedule:
            raise UserError(
                "placement 'pre_norm' is Megatron's hidden_dropout, which is the same in all steps: leave out "
                "start_step and ramp_steps, or choose pre_linear or vpad"
            )

    def _check_sites(self) -> None:
        if not self.sites:
            raise UserError(f"placement {self.placement!r} has no sites: name some, or choose placement 'none'")
        bare = [site for site in self.sites if site in _WITHOUT_NORM]
        if bare and self.placement == "vpad" and self.statistics == "norm":
            raise UserError(
                f"statistics 'norm' reads a norm's gain and bias, and site {bare[0]!r} follows no norm: choose "
                "statistics 'batch', or leave the site out"
            )

    @property
    def is_active(self) -> bool:
        """Does it put this package's dropout in front of linears?"""
        return self.placement in ("pre_linear", "vpad")

    @property
    def has_schedule(self) -> bool:
        """Does p depend on the training step?"""
        return self.start_step > 0 or self.ramp_steps > 0

    def ramp(self, step: int) -> float:
        """The factor on p in the training step that follows ``step`` finished ones: 0 at first, 1 in the end."""
        return min(max(step - self.start_step + 1, 0) / (self.ramp_steps + 1), 1.0)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Regularization":
        """From a configuration section; a missing key takes its default, an unknown one raises :class:`UserError`."""
        return cls(**check_keys("regularization", mapping, (field.name for field in dataclasses.fields(cls))))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or YAML; :meth:`from_mapping` takes them back."""
        return {**dataclasses.asdict(self), "sites": list(self.sites)}
