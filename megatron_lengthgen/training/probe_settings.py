"""What a run's YAML says of a probe, and which runs cannot have one."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lengthgen.choices import check_keys
from megatron_lengthgen.errors import UserError

__all__ = ["PROBES", "ProbeSettings", "check_run"]

#: Sections of a run's YAML, in ``lengthgen``.
PROBES = ("length_probe", "needle_probe")


@dataclass(frozen=True)
class ProbeSettings:
    """A probe that runs beside validation.

    Attributes:
        multiples: of the training length, ascending.
        samples: sequences, the same at every look.
        every: training steps between two looks, a multiple of ``eval_interval``; None for each validation.
        essays: for needles in essays, as ``tools/eval_longctx.py --essays``; None for needles in noise alone.
    """

    multiples: tuple[int, ...] = (1, 4, 16)
    samples: int = 8
    every: int | None = None
    essays: str | None = None

    @classmethod
    def from_mapping(cls, name: str, section: Any) -> "ProbeSettings":
        """Read a probe's section.

        Raises:
            UserError: for unknown keys and impossible values.
        """
        keys = ("multiples", "samples", "every", *(("essays",) if name == "needle_probe" else ()))
        written = {key: value for key, value in check_keys(name, section, keys).items() if value is not None}
        multiples = written.get("multiples", cls.multiples)
        if not isinstance(multiples, list | tuple) or not multiples or not all(map(_is_count, multiples)):
            raise UserError(
                f"{name}.multiples must list multiples of the training length, as [1, 4, 16]: {multiples!r}"
            )
        for key in ("samples", "every"):
            if key in written and not _is_count(written[key]):
                raise UserError(f"{name}.{key} must be a whole number of 1 or more, got {written[key]!r}")
        return cls(**{**written, "multiples": tuple(sorted(set(multiples)))})

    def to_mapping(self) -> dict[str, Any]:
        """What :meth:`from_mapping` reads."""
        values: Mapping[str, Any] = {**vars(self), "multiples": list(self.multiples)}
        return {key: value for key, value in values.items() if value is not None}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_run(name: str, settings: ProbeSettings, args: argparse.Namespace) -> None:
    """Refuse a probe that this run could not have, or would never come to.

    Args:
        args: Megatron's arguments of this run.

    Raises:
        UserError: naming the values.
    """
    longest = max(settings.multiples) * args.seq_length
    if not args.full_validation and not args.eval_iters:
        raise UserError(f"{name} runs beside validation, and eval_iters is 0: set it to 1 or more")
    if args.split is not None and not _validation_share(args.split):
        raise UserError(f"{name} runs beside validation, and split {args.split} leaves none: give its second part more")
    if settings.every is not None and settings.every % args.eval_interval:
        raise UserError(
            f"{name}.every {settings.every} is no multiple of eval_interval {args.eval_interval}, beside whose "
            "validations it runs: change one of them"
        )
    if args.position_embedding_type == "learned_absolute" and longest > args.max_position_embeddings:
        raise UserError(
            f"{name} looks at {longest:,} tokens, and the model has learned {args.max_position_embeddings:,} positions "
            "(position_embedding_type learned_absolute): lower multiples"
        )
    for option, harmless, way in (
        ("tp_comm_overlap", False, "set it to false"),
        ("cuda_graph_impl", "none", "set it to none"),
    ):
        if getattr(args, option) != harmless:
            raise UserError(
                f"{name} runs sequences of another length, and {option} fixes the training length: {way}, or leave "
                f"{name} out"
            )


def _validation_share(split: str) -> float:
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    return parse_and_normalize_split(split)[1]
