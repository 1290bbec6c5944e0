"""Which layers attend through a window and which use rotary positions, and how Megatron spells that."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_lengthgen.choices import check_choice, check_keys
from megatron_lengthgen.errors import UserError

__all__ = ["AttentionPattern"]


@dataclasses.dataclass(frozen=True)
class AttentionPattern:
    """Attention of each layer, first layer first.

    Attributes:
        window: Number of keys that a query of a windowed layer sees, itself included; None where no layer has one.
        windowed: For each layer: does it attend through the window (True), or to the whole past?
        rope: For each layer: does it use rotary position embedding (True), or none (NoPE)?
    """

    window: int | None
    windowed: tuple[bool, ...]
    rope: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.windowed or len(self.windowed) != len(self.rope):
            raise UserError(f"windowed names {len(self.windowed)} layers and rope {len(self.rope)}: give one per layer")
        if self.window is None:
            if any(self.windowed):
                raise UserError("some layers are windowed, and no window is given: set window to a number of tokens")
            return
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise UserError(f"window must be a positive number of tokens, got {self.window!r}")
        if not any(self.windowed):
            raise UserError(
                f"window is {self.window}, and no layer is windowed: mark layers with W, or drop the window"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], num_layers: int) -> "AttentionPattern":
        """From a configuration section such as ``{window: 512, pattern: WWWF, rope: windowed}``.

        Args:
            mapping: ``window``: tokens that a query sees, itself included. ``pattern``: a string of ``W`` (windowed)
                and ``F`` (full), repeated over the layers and cut after the last, or a list of them, one per layer;
                by default all layers are windowed if there is a window. ``rope``: ``all`` (default), ``windowed``
                (full layers use no positions), or a list of 0 and 1, one per layer.
            num_layers: Number of layers of the model.

        Raises:
            UserError: an unknown key or value, or a list of another length.
        """
        check_keys("attention", mapping, ("window", "pattern", "rope"))
        window = mapping.get("window")
        default = "F" if window is None else "W"
        windowed = _windowed(mapping.get("pattern", default), num_layers)
        return cls(window=window, windowed=windowed, rope=_rope(mapping.get("rope", "all"), windowed))

    def to_megatron(self) -> dict[str, Any]:
        """The fields of ``TransformerConfig`` (and arguments of the same names) that mean this pattern.

        Whole lists, since Megatron counts global layers and reads an integer frequency differently for the two; a list
        that would say nothing is None. ``window_size`` is inclusive: (W - 1, 0) lets a query see W keys.

        Source: ``megatron/core/transformer/utils.py::is_layer_window_attention`` (1 = windowed) and
        ``megatron/core/transformer/transformer_config.py`` (``no_rope_freq``: 1 = *skip* RoPE).
        """
        return {
            "window_size": None if self.window is None else (self.window - 1, 0),
            "window_attn_skip_freq": None if self.window is None else [int(w) for w in self.windowed],
            "no_rope_freq": None if all(self.rope) else [int(not r) for r in self.rope],
        }

    @classmethod
    def from_megatron(cls, config: Any) -> "AttentionPattern":
        """The pattern that a ``TransformerConfig`` or parsed Megatron arguments describe.

        Raises:
            UserError: a window that also looks ahead, or a list of another length than ``config.num_layers``.
        """
        layers = range(1, config.num_layers + 1)
        window, windowed = None, (False,) * config.num_layers
        if config.window_size:
            left, right = config.window_size
            if right != 0:
                raise UserError(f"window_size {tuple(config.window_size)} does not end at the query: use (W - 1, 0)")
            frequency = config.window_attn_skip_freq
            if isinstance(frequency, list):
                windowed = tuple(bool(f) for f in _of_length(frequency, config.num_layers, "window_attn_skip_freq"))
            else:
                windowed = tuple(not frequency or layer % frequency != 0 for layer in layers)
            if left < 0:  # Megatron's spelling of an unlimited window
                windowed = (False,) * config.num_layers
            window = left + 1 if any(windowed) else None
        skip = config.no_rope_freq
        if isinstance(skip, list):
            rope = tuple(not s for s in _of_length(skip, config.num_layers, "no_rope_freq"))
        else:
            rope = tuple(not skip or layer % skip != 0 for layer in layers)
        return cls(window=window, windowed=windowed, rope=rope)


def _of_length(values: list[Any], num_layers: int, what: str) -> list[Any]:
    if len(values) != num_layers:
        raise UserError(f"{what} lists {len(values)} layers, and the model has {num_layers}")
    return values


def _windowed(pattern: Any, num_layers: int) -> tuple[bool, ...]:
    if isinstance(pattern, str):
        period = pattern.upper()
        if not period or set(period) - set("WF"):
            raise UserError(f"pattern must consist of W (windowed) and F (full attention), got {pattern!r}")
        if len(period) > num_layers:
            raise UserError(f"pattern {pattern!r} is {len(period)} layers long, and the model has {num_layers}")
        letters = list(period * -(-num_layers // len(period)))[:num_layers]
    elif isinstance(pattern, (list, tuple)):
        letters = [str(letter).upper() for letter in _of_length(list(pattern), num_layers, "pattern")]
        for letter in letters:
            check_choice("letter in pattern", letter, ("W", "F"))
    else:
        raise UserError(f"pattern must be a string such as WWWF or a list with one letter per layer, got {pattern!r}")
    return tuple(letter == "W" for letter in letters)


def _rope(rope: Any, windowed: tuple[bool, ...]) -> tuple[bool, ...]:
    if isinstance(rope, (list, tuple)):
        flags = _of_length(list(rope), len(windowed), "rope")
        for flag in flags:
            if flag not in (0, 1):
                raise UserError(f"rope must list 1 (uses RoPE) or 0 (does not) for each layer, got {flag!r}")
        return tuple(bool(flag) for flag in flags)
    check_choice("rope", rope, ("all", "windowed"))
    return windowed if rope == "windowed" else (True,) * len(windowed)
