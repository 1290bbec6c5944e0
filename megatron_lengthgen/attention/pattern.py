"""Which layers attend through a window and which use rotary positions; how Megatron and Hugging Face spell that."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_lengthgen.choices import check_choice, check_keys
from megatron_lengthgen.errors import UserError

__all__ = ["AttentionPattern", "attention_layers"]

#: Of Megatron's symbols in ``hybrid_layer_pattern`` the one whose layers have windows and rotary positions
#: (``megatron/core/models/hybrid/hybrid_layer_allocation.py::Symbols``).
_ATTENTION_SYMBOL = "*"
_WINDOWED, _FULL = "sliding_attention", "full_attention"


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

    def __str__(self) -> str:
        layers, windowed, nope = len(self.rope), sum(self.windowed), self.rope.count(False)
        attention = (
            f"windows of {self.window} tokens in {windowed} of {layers} layers" if windowed else "full attention"
        )
        return f"{attention}, no RoPE in {nope} of {layers}" if nope else f"{attention}, RoPE in every layer"

    def to_mapping(self) -> dict[str, Any]:
        """The shortest section that :meth:`from_mapping` reads as this pattern."""
        letters = "".join("W" if windowed else "F" for windowed in self.windowed)
        lengths = range(1, len(letters) + 1)
        period = next(n for n in lengths if letters == (letters[:n] * len(letters))[: len(letters)])
        rope: Any = [int(rope) for rope in self.rope]
        if all(self.rope):
            rope = "all"
        elif self.rope == self.windowed:
            rope = "windowed"
        window = {} if self.window is None else {"window": self.window}
        return {**window, "pattern": letters[:period], "rope": rope}

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

    def to_hugging_face(self) -> dict[str, Any]:
        """The fields of transformers' ``SmolLM3Config`` that mean this pattern.

        All are written out: by default that class gives windows to the layers *without* rotary positions. Its
        ``no_rope_layers`` holds 1 where a layer *uses* them, its ``sliding_window`` counts as ``window`` does here.

        Source: ``transformers/models/smollm3/configuration_smollm3.py``.
        """
        return {
            "layer_types": [_WINDOWED if windowed else _FULL for windowed in self.windowed],
            "use_sliding_window": self.window is not None,
            "sliding_window": self.window,
            "no_rope_layers": [int(rope) for rope in self.rope],
        }

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], num_layers: int) -> "AttentionPattern":
        """The pattern that a SmolLM3 ``config.json`` describes; ``SmolLM3Config``'s defaults fill its gaps.

        Raises:
            UserError: a list of another length, an unknown kind of layer, windows without a size, or booleans in
                ``no_rope_layers``.
        """
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        rope = config.get("no_rope_layers")
        if rope is None:
            interval = config.get("no_rope_layer_interval", 4)
            rope = [int(layer % interval != 0) for layer in range(1, num_layers + 1)]
        elif any(isinstance(uses_rope, bool) for uses_rope in rope):
            raise UserError(
                f"config.json has no_rope_layers {list(rope)}: write 1 for a layer with RoPE and 0 for one without, "
                "since true can be read as either"
            )
        rope = _rope(list(rope)[:num_layers], (False,) * num_layers)  # transformers takes longer ones too
        types = config.get("layer_types")
        if types is None:
            windowed = tuple(window is not None and not uses_rope for uses_rope in rope)
        else:
            for kind in types:
                check_choice("kind in layer_types", kind, (_WINDOWED, _FULL))
            windowed = tuple(kind == _WINDOWED for kind in _of_length(list(types), num_layers, "layer_types"))
        if any(windowed) and window is None:
            raise UserError(
                f"layer_types names {_WINDOWED} with use_sliding_window {config.get('use_sliding_window', False)} and "
                f"sliding_window {config.get('sliding_window')}, so that their window is unknown: set both"
            )
        return cls(window=window if any(windowed) else None, windowed=windowed, rope=rope)

    def in_hybrid(self, hybrid_layer_pattern: str) -> "AttentionPattern":
        """This pattern, one entry per attention layer, in a hybrid's numbering: one entry per symbol.

        Args:
            hybrid_layer_pattern: Megatron's argument, with borders of stages or without; parts for multi-token
                prediction are left out.

        Raises:
            UserError: another number of attention layers.
        """
        layers = _hybrid_layers(hybrid_layer_pattern)
        count = layers.count(_ATTENTION_SYMBOL)
        if count != len(self.rope):
            raise UserError(
                f"hybrid_layer_pattern {hybrid_layer_pattern!r} has {count} attention layers ({_ATTENTION_SYMBOL}), "
                f"and the attention of {len(self.rope)} is given"
            )
        windowed, rope = iter(self.windowed), iter(self.rope)
        return dataclasses.replace(
            self,
            windowed=tuple(symbol == _ATTENTION_SYMBOL and next(windowed) for symbol in layers),
            rope=tuple(symbol != _ATTENTION_SYMBOL or next(rope) for symbol in layers),
        )

    def of_attention_layers(self, hybrid_layer_pattern: str) -> "AttentionPattern":
        """The inverse of :meth:`in_hybrid`: what a hybrid's lists say of its attention layers.

        Raises:
            UserError: another number of layers, or no attention among them.
        """
        layers = _hybrid_layers(hybrid_layer_pattern)
        _of_length(list(self.rope), len(layers), "the attention pattern")
        places = [place for place, symbol in enumerate(layers) if symbol == _ATTENTION_SYMBOL]
        if not places:
            raise UserError(
                f"hybrid_layer_pattern {hybrid_layer_pattern!r} has no attention layer ({_ATTENTION_SYMBOL})"
            )
        windowed = tuple(self.windowed[place] for place in places)
        return AttentionPattern(
            window=self.window if any(windowed) else None,
            windowed=windowed,
            rope=tuple(self.rope[place] for place in places),
        )


def attention_layers(hybrid_layer_pattern: str) -> int:
    """Number of attention layers of a hybrid model."""
    return _hybrid_layers(hybrid_layer_pattern).count(_ATTENTION_SYMBOL)


def _hybrid_layers(hybrid_layer_pattern: str) -> str:
    return hybrid_layer_pattern.split("/")[0].replace("|", "")


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
