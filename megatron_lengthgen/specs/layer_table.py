"""What each layer of a built model does, as a table: kind, window, rotary positions, dropout."""

from itertools import groupby
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.regularization import SITES
from megatron_lengthgen.specs.site import SiteDropout, sites

__all__ = ["format_layer_table", "layer_table"]

_COLUMNS = ("layer", "kind", "window", "rope")


def layer_table(config: Any, model: torch.nn.Module) -> list[dict[str, Any]]:
    """One row per layer of a model or pipeline stage, in the order of the layers.

    Args:
        config: Megatron's ``GPTModelConfig`` or ``HybridModelConfig``, or the model's ``TransformerConfig``.
        model: The built model, on any device (``meta`` will do), read as it stands.

    Returns:
        Rows ``{"layer": 1, "kind": "attention, mlp", "window": 512 or "full", "rope": bool, site: text, ...}``, with
        the dropout of each site that the layer has (window and rope are None without attention), layers of multi-token
        prediction as ``"mtp 1"``; then rows of sites outside of the layers, ``{"layer": "output", "output": text}``.
    """
    transformer = getattr(config, "transformer", config)
    pattern = AttentionPattern.from_megatron(transformer)
    rotary = getattr(config, "position_embedding_type", "rope") in ("rope", "yarn", "mrope")
    found = list(sites(model))
    rows: list[dict[str, Any]] = []
    layers = {name: layer for name, layer in model.named_modules() if _is_layer(name)}
    for name, module in layers.items():
        number: int = module.layer_number
        # Multi-token prediction counts its layers from 1, and Megatron reads windows by that number.
        is_mtp = isinstance(module, MultiTokenPredictionLayer)
        layer: Any = module.mtp_model_layer if is_mtp else module
        kinds = _kinds(layer)
        row: dict[str, Any] = {"layer": f"mtp {number}" if is_mtp else number, "kind": ", ".join(kinds)}
        row |= {"window": None, "rope": None}
        if "attention" in kinds:
            row["window"] = pattern.window if pattern.windowed[number - 1] else "full"
            row["rope"] = rotary and pattern.rope[number - 1]
        row |= _residual_dropout(layer, kinds)
        row |= {d.site: _describe(d, "moe" in kinds) for n, _, d in found if n.startswith(f"{name}.")}
        rows.append(row)
    outside = {d.site: _describe(d) for n, _, d in found if not any(n.startswith(f"{name}.") for name in layers)}
    return rows + [{"layer": site, site: text} for site, text in outside.items()]


def _is_layer(name: str) -> bool:
    parts = name.split(".")
    return parts[-3:-1] in (["decoder", "layers"], ["mtp", "layers"])


def _kinds(layer: torch.nn.Module) -> list[str]:
    """The parts of a layer, of ``attention``, ``mlp``, ``moe`` and ``mamba``."""
    mlp = "moe" if getattr(layer, "is_moe_layer", False) else "mlp"
    parts = {"self_attention": "attention", "mlp": mlp, "mixer": "mamba"}
    return [kind for name, kind in parts.items() if not isinstance(getattr(layer, name, None), IdentityOp | None)]


def _residual_dropout(layer: torch.nn.Module, kinds: list[str]) -> dict[str, str]:
    """Megatron's own dropout on the residual branches, in the columns of the sites that it stands in for."""
    p = getattr(getattr(layer, "mamba_bda", None), "hidden_dropout", layer.hidden_dropout)
    if not p:
        return {}
    return {"mlp" if kind == "moe" else kind: f"pre_norm p={p:g}" for kind in kinds}


def _describe(dropout: SiteDropout, has_router: bool = False) -> str:
    """Dropout at one site in words, such as ``vpad p=0.1 fill=zero statistics=batch``."""
    regularization = dropout.regularization
    text = f"{regularization.placement} p={dropout.p:g}"
    if regularization.placement == "vpad":
        text += f" fill={regularization.fill} statistics={regularization.statistics}"
    if regularization.has_schedule:
        text += f" from step {regularization.start_step} over {regularization.ramp_steps}"
    return text + (" (experts; not the router)" if has_router and dropout.site == "mlp" else "")


def format_layer_table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text for a terminal; equal consecutive layers share a line."""
    layers = [row for row in rows if "kind" in row]
    # A column for each site that some layer has, `attention` and `mlp` always: that they are empty is worth seeing.
    names = [site for site in SITES if site in ("attention", "mlp") or any(site in row for row in layers)]
    lines: list[tuple[str, ...]] = [(*_COLUMNS, *names)]
    for (_, cells), group in groupby(layers, key=lambda row: (type(row["layer"]), _cells(row, names))):
        numbers = [row["layer"] for row in group]
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines.append((label, *cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"{row['layer']}: {row[row['layer']]}" for row in rows if "kind" not in row]
    return "\n".join(text)


def _cells(row: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    window = "-" if row["window"] is None else str(row["window"])
    rope = "-" if row["rope"] is None else "yes" if row["rope"] else "no"
    return (row["kind"], window, rope, *(row.get(site, "none") for site in names))
