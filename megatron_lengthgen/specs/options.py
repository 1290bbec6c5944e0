"""What a user can choose: where dropout goes, how much, and how it is corrected."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from megatron_lengthgen.dropout.masks import check_probability
from megatron_lengthgen.errors import UserError

__all__ = ["Fill", "Placement", "Regularization", "Statistics", "check_choice", "check_keys"]

Placement = Literal["none", "pre_norm", "pre_linear", "vpad"]
Fill = Literal["zero", "mean"]
Statistics = Literal["batch", "norm"]

_SITES = ("attention", "mlp", "output")


def _suggest(value: object, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Raise :class:`UserError` naming the nearest known names unless ``value`` is one of ``known``."""
    names = tuple(known)
    if value not in names:
        raise UserError(f"unknown {what} {value!r}: {_suggest(value, names)}")


def check_keys(what: str, mapping: object, known: Iterable[str]) -> Mapping[str, Any]:
    """Return ``mapping`` when it is one with known keys only, else raise :class:`UserError`."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{what} must be a mapping of names to values, got {mapping!r}")
    names = tuple(known)
    for key in mapping:
        check_choice(f"{what} key", key, names)
    return mapping


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
        sites: For ``pre_linear`` and ``vpad``: which linears' inputs: ``attention`` (QKV), ``mlp`` (fc1), ``output``
            (output layer).
    """

    placement: Placement = "vpad"
    p: float | None = None
    fill: Fill = "zero"
    statistics: Statistics = "batch"
    sites: tuple[str, ...] = ("attention", "mlp")

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
            check_choice("site", site, _SITES)
        if len(set(self.sites)) != len(self.sites):
            raise UserError(f"sites names a site twice: {', '.join(self.sites)}")
        if not self.sites and self.placement in ("pre_linear", "vpad"):
            raise UserError(f"placement {self.placement!r} has no sites: name some, or choose placement 'none'")
        if self.placement == "pre_norm" and set(self.sites) != {"attention", "mlp"}:
            raise UserError(
                f"placement 'pre_norm' is Megatron's hidden_dropout, which acts on attention and mlp together; "
                f"sites [{', '.join(self.sites)}] cannot be chosen for it: leave sites out"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Regularization":
        """From a configuration section; a missing key takes its default, an unknown one raises :class:`UserError`."""
        return cls(**check_keys("regularization", mapping, (field.name for field in dataclasses.fields(cls))))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or YAML; :meth:`from_mapping` takes them back."""
        return {**dataclasses.asdict(self), "sites": list(self.sites)}
