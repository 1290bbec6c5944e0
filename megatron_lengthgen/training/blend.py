"""Which share of a run's tokens comes from which data, and how often each source is repeated."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lengthgen.choices import check_keys
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.schedule import positive_number, tokens_per_step

__all__ = ["SOURCES", "Source", "describe", "resolve", "split_tokens", "training_sources", "validation_sources"]

#: The key of a run's YAML, unknown to Megatron.
SOURCES = "sources"
_RIVALS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data")


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``sources`` into Megatron's blend, ``data_path: [share, prefix, share, prefix, ...]``.

    A source has a ``weight``, its part of what the others leave, or ``tokens``, its budget. Where all have budgets and
    the run's length is not given, it is their sum.

    Args:
        values: Megatron's argument names to values, the token budgets of :mod:`.schedule`, and ``sources``.

    Raises:
        UserError: for sources that do not add up to the run.
    """
    rest = {name: value for name, value in values.items() if name != SOURCES}
    if values.get(SOURCES) is None:
        return rest
    sources = _read(values[SOURCES])
    for rival in _RIVALS:
        if values.get(rival):
            raise UserError(f"{SOURCES} and {rival} both say what to train on: keep one")
    if len(sources) == 1 and sources[0].keys() == {"path"}:
        return {**rest, "data_path": [sources[0]["path"]]}
    for source in sources:
        if len(source) == 1:
            raise UserError(f"the source {source['path']} says nothing of its share: give it a weight, or tokens")
    budget = math.fsum(source.get("tokens", 0) for source in sources)
    weight = math.fsum(source.get("weight", 0) for source in sources)
    total = _total(values) if budget else None
    if budget and total is None:
        if weight:
            raise UserError(
                f"a weight beside tokens is a part of what {budget:,.0f} tokens leave of the run: set train_tokens"
            )
        total = rest["train_tokens"] = budget
    if total is not None:
        _check_sum(budget, weight, total, values)
    shares = [
        source["tokens"] / (total if weight else budget)
        if "tokens" in source
        else source["weight"] / weight * (1 - budget / (total or 1))
        for source in sources
    ]
    if len(sources) == 1:
        return {**rest, "data_path": [sources[0]["path"]]}
    return {
        **rest,
        "data_path": [item for share, source in zip(shares, sources, strict=True) for item in (share, source["path"])],
    }


def _read(written: Any) -> list[dict[str, Any]]:
    if not isinstance(written, list) or not written:
        raise UserError(f"{SOURCES} must be a list such as [{{path: data/books, weight: 0.7}}], got {written!r}")
    sources = []
    for item in written:
        source = dict(check_keys("source", item, ("path", "weight", "tokens")))
        if not isinstance(source.get("path"), str):
            raise UserError(f"a source needs a path, the prefix of its .idx and .bin, got {item!r}")
        if "weight" in source and "tokens" in source:
            raise UserError(f"the source {source['path']} has a weight and tokens: keep one")
        for name in source.keys() - {"path"}:
            if not positive_number(f"{name} of the source {source['path']}", source[name]):
                raise UserError(f"the source {source['path']} has {name} 0: leave it out")
        sources.append(source)
    paths = [source["path"] for source in sources]
    repeated = [path for path in dict.fromkeys(paths) if paths.count(path) > 1]
    if repeated:
        raise UserError(f"the source {repeated[0]} is listed twice: add its shares up")
    return sources


def _total(values: Mapping[str, Any]) -> float | None:
    """Tokens of the whole run, where it says how long it is."""
    if values.get("train_tokens") is not None:
        return positive_number("train_tokens", values["train_tokens"], 1)
    if isinstance(values.get("train_samples"), int) and isinstance(values.get("seq_length"), int):
        return values["train_samples"] * values["seq_length"]
    if isinstance(values.get("train_iters"), int):
        return values["train_iters"] * tokens_per_step(values, "tokens of a source")
    return None


def _check_sum(budget: float, weight: float, total: float, values: Mapping[str, Any]) -> None:
    if weight and budget >= total:
        raise UserError(
            f"the sources' tokens add up to {budget:,.0f}, which leaves nothing of the run's {total:,.0f} to the "
            "sources with a weight: lower them, or train longer"
        )
    # Steps were counted up to a whole one.
    by_steps = values.get("train_tokens") is None and values.get("train_samples") is None
    slack = tokens_per_step(values, "tokens of a source") if by_steps else 0.5
    if not weight and abs(budget - total) >= slack:
        raise UserError(
            f"the sources' tokens add up to {budget:,.0f} and the run trains on {total:,.0f}: leave the run's length "
            "out, or give one source a weight in place of tokens, which takes what is left"
        )


@dataclass(frozen=True)
class Source:
    """One of the data sets that a split is blended from.

    Attributes:
        path: prefix of its ``.idx`` and ``.bin``.
        share: of the split's samples; the shares of a split add up to 1.
        tokens: that the source has in this split.
    """

    path: str
    share: float
    tokens: int


def training_sources(args: argparse.Namespace) -> list[Source]:
    """What the training split of a run is blended from; empty for mock data."""
    return _sources(args, 0)


def validation_sources(args: argparse.Namespace) -> list[Source]:
    """What the validation split of a run is blended from; empty for mock data, and where there is none."""
    return _sources(args, 1)


def _sources(args: argparse.Namespace, split: int) -> list[Source]:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    bounds: tuple[float, float] | None = (0.0, 1.0)
    if blend is not None:
        bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))[split]
    elif per_split is not None:
        blend = per_split[split]
    if blend is None or bounds is None:
        return []
    paths, weights = blend
    tokens = [split_tokens(path, *bounds) for path in paths]
    parts: Sequence[float] = tokens if weights is None else weights
    return [Source(path, part / sum(parts), count) for path, part, count in zip(paths, parts, tokens, strict=True)]


def split_tokens(path: str, begin: float, end: float) -> int:
    """Tokens in the sequences of an indexed data set that Megatron gives to a split.

    Args:
        path: prefix of its ``.idx``.
        begin, end: the split's bounds, as shares of the number of sequences.

    Source: ``megatron/core/datasets/blended_megatron_dataset_builder.py::_build_megatron_dataset_splits``.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(path, mmap=True)  # whose end takes the memory behind its arrays with it
    first, last = (round(bound * float(len(data.sequence_lengths))) for bound in (begin, end))
    return int(data.sequence_lengths[first:last].sum(dtype="int64"))


def describe(args: argparse.Namespace) -> list[str]:
    """Lines that say what a run trains on: tokens of each source, its share, and how often it is repeated."""
    sources = training_sources(args)
    if not sources:
        return ["data: mock data"] if args.mock_data else []
    sequences = args.train_iters * args.global_batch_size if args.train_iters else args.train_samples
    total = sequences * args.seq_length
    lines = [f"data: {total:,} tokens from {len(sources)} source{'s' if len(sources) > 1 else ''}"]
    for source in sources:
        drawn = source.share * total
        epochs = f"{drawn / source.tokens:,.2f} epochs" if source.tokens else "an empty training split"
        lines.append(
            f"  {source.path}: {source.share:.1%}, {drawn:,.0f} tokens, {epochs} of the {source.tokens:,} that its "
            "training split has"
        )
    return lines
