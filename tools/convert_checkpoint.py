#!/usr/bin/env python
"""Convert checkpoints: Hugging Face or GGUF to Megatron and back; and say what a Megatron checkpoint holds."""

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_lengthgen import errors


def main() -> None:
    arguments = _parser().parse_args()
    # Megatron and torch tell at length which optional kernels are absent; conversion uses none.
    warnings.filterwarnings("ignore")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    {"import": _import, "export": _export, "gguf": _gguf, "info": _info}[arguments.command](arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    importing = commands.add_parser("import", help="Hugging Face directory or hub id -> Megatron torch_dist checkpoint")
    importing.add_argument("source", help="local directory, or a hub id such as HuggingFaceTB/SmolLM2-135M")
    importing.add_argument(
        "destination", type=Path, help="checkpoint directory, as --load and --pretrained-checkpoint take"
    )
    importing.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype on disk (default: fp32)")
    importing.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="pad the embedding to a multiple of N, on every layout the same (default: 128)",
    )
    importing.add_argument(
        "--set-window",
        type=int,
        metavar="W",
        help="sliding windows of W tokens, the query's own included, in layers with RoPE; full attention in the others",
    )
    importing.add_argument(
        "--pattern", metavar="WWWF", help="with --set-window: windowed (W) and full (F) layers, repeated over the model"
    )
    importing.add_argument(
        "--rope",
        choices=("windowed",),
        help="with --set-window: full layers lose RoPE (default: each layer keeps what it was pretrained with)",
    )
    importing.add_argument(
        "--allow-nonfinite", action="store_true", help="take NaN and infinite weights as they are, to look into them"
    )
    importing.add_argument("--force", action="store_true", help="replace a checkpoint made from something else")

    exporting = commands.add_parser("export", help="Megatron torch_dist checkpoint -> Hugging Face directory")
    exporting.add_argument(
        "checkpoint", help="directory with latest_checkpointed_iteration.txt, or one iteration in it"
    )
    exporting.add_argument("destination", type=Path, help="directory that is new or empty")
    exporting.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: the checkpoint's own")
    exporting.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="size of a weights file, such as 500MB (default: 5GB)"
    )
    exporting.add_argument("--force", action="store_true", help="replace an earlier Hugging Face model")

    gguf = commands.add_parser("gguf", help="GGUF file -> Hugging Face directory, dequantised to float32")
    gguf.add_argument("file", type=Path)
    gguf.add_argument("destination", type=Path)

    info = commands.add_parser("info", help="what a Megatron checkpoint holds")
    info.add_argument("checkpoint", help="directory with latest_checkpointed_iteration.txt, or one iteration in it")
    info.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _import(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.checkpoint.importing import import_model

    print(f"importing {arguments.source} ({arguments.dtype}) into {arguments.destination}", flush=True)
    with _progress() as progress:
        made = import_model(
            arguments.source,
            arguments.destination,
            dtype=arguments.dtype,
            make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
            window=arguments.set_window,
            pattern=arguments.pattern,
            rope=arguments.rope,
            allow_nonfinite=arguments.allow_nonfinite,
            force=arguments.force,
            progress=progress,
        )
    print(f"complete: {arguments.destination}" if made else f"already complete, nothing to do: {arguments.destination}")


def _export(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.checkpoint.exporting import export_model

    print(f"exporting {arguments.checkpoint} into {arguments.destination}", flush=True)
    with _progress() as progress:
        config = export_model(
            arguments.checkpoint,
            arguments.destination,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            force=arguments.force,
            progress=progress,
        )
    tokenizer = any((arguments.destination / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    print(f"complete: {arguments.destination} ({config['architectures'][0]}, {config['dtype']})")
    if not tokenizer:
        print("it has no tokenizer, since none was found with the checkpoint: copy one into it")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar, moved by calls with (parameters done, parameters in all)."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("checking", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description="writing" if done == total else "weights")

        yield progress
        bar.update(task, visible=False)


def _gguf(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.checkpoint.gguf import gguf_to_hugging_face

    print(f"dequantising {arguments.file} into {arguments.destination}", flush=True)
    made = gguf_to_hugging_face(arguments.file, arguments.destination)
    print(f"complete: {arguments.destination}" if made else f"already complete, nothing to do: {arguments.destination}")


def _info(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.checkpoint.info import describe

    description = describe(arguments.checkpoint)
    if arguments.json:
        print(json.dumps(description, indent=2))
        return
    lines = []
    for section, content in description.items():
        if isinstance(content, dict):
            lines += [f"{section}:", *(f"  {name}: {_short(value)}" for name, value in content.items())]
        else:
            lines.append(f"{section}: {_short(content)}")
    print("\n".join(lines))


def _short(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(errors.run(main))
