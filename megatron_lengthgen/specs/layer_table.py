"""What each layer of a model does, as a table: window, rotary positions, dropout."""

from itertools import groupby
from typing import Any

from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.norm import NormWithDropout, resolve_probability

__all__ = ["format_layer_table", "layer_table"]

_SITES = ("attention", "mlp")
_COLUMNS = ("layer", "window", "rope", *_SITES)


def layer_table(transformer_config: Any, block_or_regularization: Any, *, first_layer: int = 1) -> list[dict[str, Any]]:
    """One row per layer, in the order of the layers.

    Args:
        transformer_config: Megatron's ``TransformerConfig`` (or a ``GPTModelConfig``, which also says whether the model
            has rotary positions at all).
        block_or_regularization: A :class:`~megatron_lengthgen.regularization.Regularization`, for all layers; or the
            ``TransformerBlockSubmodules`` of a pipeline stage, read as it stands.
        first_layer: Global number of a block's first layer.

    Returns:
        Rows ``{"layer": 1, "window": 512 or "full", "rope": bool, "attention": text, "mlp": text}``; and, where the
        final norm has dropout, a last row ``{"layer": "output", "output": text}``.
    """
    config = getattr(transformer_config, "transformer", transformer_config)
    pattern = AttentionPattern.from_megatron(config)
    rotary = getattr(transformer_config, "position_embedding_type", "rope") in ("rope", "yarn", "mrope")
    if isinstance(block_or_regularization, Regularization):
        regularization = block_or_regularization
        layers = [{site: _describe(regularization, site, config) for site in _SITES}] * config.num_layers
        output = _describe(regularization, "output", config)
    else:
        layers = [_of_layer_spec(spec, config) for spec in block_or_regularization.layer_specs]
        norm = block_or_regularization.layer_norm
        output = _describe(norm.regularization, "output", config) if isinstance(norm, NormWithDropout) else "none"
    last = first_layer + len(layers) - 1
    if last > config.num_layers:
        raise UserError(f"layers {first_layer} to {last} do not fit a model of {config.num_layers} layers")
    rows: list[dict[str, Any]] = [
        {
            "layer": number,
            "window": pattern.window if pattern.windowed[number - 1] else "full",
            "rope": rotary and pattern.rope[number - 1],
            **dropouts,
        }
        for number, dropouts in enumerate(layers, start=first_layer)
    ]
    return rows if output == "none" else [*rows, {"layer": "output", "output": output}]


def _of_layer_spec(spec: Any, config: Any) -> dict[str, str]:
    from megatron_lengthgen.specs.substitution import LAYER_NORMS

    found = {}
    for site, field in LAYER_NORMS.items():
        builder = getattr(spec.submodules, field)
        if isinstance(builder, NormWithDropout):
            found[site] = _describe(builder.regularization, site, config)
        else:
            p = resolve_probability(spec.params.get("hidden_dropout"), config)
            found[site] = _describe(Regularization("pre_norm", p=p), site, config)
    return found


def _describe(regularization: Regularization, site: str, config: Any) -> str:
    """Dropout at one site in words, such as ``vpad p=0.1 fill=zero statistics=batch``; ``none`` where there is none."""
    if regularization.placement == "none" or site not in regularization.sites:
        return "none"
    p = resolve_probability(regularization.p, config)
    if p == 0.0:
        return "none"
    text = f"{regularization.placement} p={p:g}"
    if regularization.placement == "vpad":
        text += f" fill={regularization.fill} statistics={regularization.statistics}"
    return text


def format_layer_table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text for a terminal; equal consecutive layers share a line."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for cells, group in groupby((row for row in rows if "window" in row), key=_cells):
        numbers = [row["layer"] for row in group]
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines.append((label, *cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"{row['layer']}: {row['output']}" for row in rows if "output" in row]
    return "\n".join(text)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (str(row["window"]), "yes" if row["rope"] else "no", *(row[site] for site in _SITES))
