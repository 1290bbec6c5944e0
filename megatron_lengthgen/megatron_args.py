"""Megatron's own arguments from a mapping of their names to values.

``megatron.training`` reads its configuration from ``sys.argv``. Here a mapping such as ``{"num_layers": 2,
"swiglu": True}`` becomes that command line, is checked, and is parsed once by Megatron's own parser.
"""

import argparse
import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from megatron_lengthgen import backends
from megatron_lengthgen.choices import suggest
from megatron_lengthgen.errors import UserError

__all__ = ["parse", "to_argv"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"Megatron does not take this configuration: {message}")


@functools.cache
def _parser() -> _Parser:
    backends.prepare()
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(prog="megatron", allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


@functools.cache
def _actions() -> dict[str, tuple[argparse.Action, str]]:
    """Name with underscores -> (action, its option string); both the option's name and the attribute's count."""
    names: dict[str, tuple[argparse.Action, str]] = {}
    for action in _parser()._actions:
        for option in action.option_strings:
            names.setdefault(option.removeprefix("--").replace("-", "_"), (action, option))
    for action in _parser()._actions:
        names.setdefault(action.dest, (action, action.option_strings[0]))
    return names


def _option(name: str, value: Any) -> list[str]:
    action, option = _actions()[name]
    if isinstance(action, argparse.BooleanOptionalAction):
        wanted = _boolean(name, value)
        is_negated = option.startswith("--no-") and not name.startswith(action.dest)
        return [action.option_strings[-1 if wanted == is_negated else 0]]
    if action.nargs == 0:
        wanted = _boolean(name, value)
        named_by_option = name in {text.removeprefix("--").replace("-", "_") for text in action.option_strings}
        # `no_rope_fusion: true` and `apply_rope_fusion: false` both give --no-rope-fusion.
        return [option] if (wanted if named_by_option else wanted == action.const) else []
    if (action.nargs in ("*", "+") or isinstance(action.nargs, int)) and isinstance(value, list | tuple):
        return [option, *(str(item) for item in value)] if value else []
    if isinstance(value, list | tuple):
        # Megatron evaluates its list arguments, which may hold no blanks.
        value = str(value).replace(" ", "")
    return [f"{option}={value}"]


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} is a switch: write {name}: true or {name}: false, not {value!r}")
    return value


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """The command line of Megatron that ``values`` stand for; ``None`` leaves an argument at Megatron's default.

    Args:
        values: Megatron's argument names, with underscores, to values. Both the option's name (``norm_epsilon``,
            ``no_rope_fusion: true``) and the attribute's (``layernorm_epsilon``, ``apply_rope_fusion: false``) count.

    Raises:
        UserError: for an unknown name (the nearest known ones are named), or a value of the wrong kind.
    """
    argv: list[str] = []
    for name, value in values.items():
        if name not in _actions():
            raise UserError(f"unknown key {name!r}{suggest(name, list(_actions()))}")
        if value is not None:
            argv += _option(name, value)
    _parser().parse_args(argv)
    return argv


@contextlib.contextmanager
def _command_line(argv: list[str]) -> Iterator[None]:
    saved = sys.argv
    sys.argv = [saved[0] if saved else "megatron", *argv]
    try:
        yield
    finally:
        sys.argv = saved


def parse(values: Mapping[str, Any], *, lengthgen: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Parse and validate ``values`` with Megatron's parser, and make the result Megatron's global arguments.

    A second call in one process replaces the first one's global state. Arguments that a machine without CUDA needs
    are filled in where ``values`` leaves them open (:func:`megatron_lengthgen.backends.argument_defaults`).

    Args:
        values: as for :func:`to_argv`.
        lengthgen: this package's own settings as plain values; kept as ``args.lengthgen``, so that checkpoints
            carry them.

    Returns:
        Megatron's namespace (``megatron/training/arguments.py``).

    Raises:
        UserError: with the name of the key, or with what Megatron's validation refused.
    """
    argv = to_argv({**backends.argument_defaults(), **values})
    from megatron.training import arguments, global_vars

    # Megatron asserts it for tensor and sequence parallelism on devices before Hopper; harmless elsewhere.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    global_vars.unset_global_variables()
    report = io.StringIO()
    try:
        with _command_line(argv), contextlib.redirect_stdout(report):
            args = arguments.parse_and_validate_args()
    except (AssertionError, ValueError, RuntimeError, FileNotFoundError, OSError) as error:
        raise UserError(f"Megatron refuses this configuration: {_reason(error)}") from error
    args.lengthgen = dict(lengthgen or {})
    return args


def _reason(error: BaseException) -> str:
    """The error's message, or the source line that raised it: many of Megatron's assertions carry no message."""
    text = " ".join(str(error).split())
    if text:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.line} ({os.path.basename(frame.filename)}:{frame.lineno})"
