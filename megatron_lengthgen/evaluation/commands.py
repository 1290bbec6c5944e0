"""The commands of ``tools/eval_longctx.py``, from checked arguments to files. Nothing imports torch before it must."""

import platform
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError

from . import engine, launch
from .lengths import parse_lengths, parse_multiples
from .ruler.data import DATA_VERSION
from .ruler.prepare import PreparedRuler
from .ruler.sources import load_sources
from .ruler.tasks import parse_tasks
from .run_store import RunStore
from .runner import RULER, Form, Plan, Share, evaluate, plan, verify_prompts
from .shard import Shard

__all__ = ["check_lengths", "compare", "report", "ruler", "run_tasks", "versions"]

#: Data that a run has only once one of its tasks needs it.
_GROWS = ("essays", "squad", "hotpotqa", "list_words")


def ruler(arguments: Namespace) -> None:
    """Run RULER tasks, or what is left of them, and write the report."""
    for name in ("samples", "limit", "max_new_tokens", "workers"):
        engine.positive("--" + name.replace("_", "-"), getattr(arguments, name))
    lengths = check_lengths(arguments)
    engine.check(arguments)
    tasks = parse_tasks(name.strip() for name in arguments.tasks.split(",") if name.strip())
    where, digest = engine.locate(arguments)
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
    encoder = engine.make_encoder(arguments)
    engine.check_vocabulary(arguments, encoder)
    data = PreparedRuler(
        encoder,
        sources,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        workers=arguments.workers,
        cache=arguments.cache,
    )
    samples = min(arguments.samples, arguments.limit or arguments.samples)
    # Of a quick look too: a run that is begun cannot take back samples that there are not.
    data.check_all(tasks, lengths, arguments.samples)

    identity = {
        "benchmark": "ruler",
        "data_version": DATA_VERSION,
        "seed": arguments.seed,
        **engine.identity(arguments, encoder, digest),
        "max_new_tokens": arguments.max_new_tokens,
        **sources.digests(tasks),
    }
    info = {
        "name": arguments.name or Path(where).resolve().name,
        "note": arguments.note,
        "train_length": arguments.train_length,
        **engine.info(arguments, where),
        "essays_path": arguments.essays if sources.essays else None,
        "versions": versions(),
        "command": shlex.join(sys.argv),
    }
    scope = {"tasks": [task.name for task in tasks], "lengths": lengths, "samples": arguments.samples}
    try:
        run_tasks(arguments, data, tasks, lengths, samples, identity=identity, scope=scope, info=info, grows=_GROWS)
    finally:
        data.close()


def run_tasks(
    arguments: Namespace,
    data: Any,
    tasks: Sequence[Any],
    lengths: Sequence[int],
    samples: int | Callable[[str, int], int],
    *,
    identity: Mapping[str, Any],
    scope: Mapping[str, Any],
    info: Mapping[str, Any],
    grows: Collection[str] = (),
    form: Form = RULER,
    finish: Callable[[RunStore], None] = lambda store: None,
) -> None:
    """Answer what is left of a benchmark's tasks, and write the report.

    Args:
        data: the benchmark's samples, see :class:`~.runner.Samples`.
        samples: of each task and length.
        identity, scope, info, grows: as :meth:`.RunStore.open` takes them.
        form: the benchmark's.
        finish: what the leading process does before the report.

    Raises:
        UserError: when the run cannot be opened or written, the engine fails, or memory is short.
    """
    shard = arguments.shard or Shard()
    store = RunStore(arguments.output, shard)

    def begin() -> Plan:
        nonlocal store
        store = RunStore.open(store.directory, identity=identity, scope=scope, info=info, shard=shard, grows=grows)
        print(f"Results will be in {store.directory.resolve() / 'summary.md'}", flush=True)
        if dropped := store.repair():
            print(f"{dropped} broken line(s) dropped; their samples run again", flush=True)
        verify_prompts(store, data, tasks, lengths)
        todo = plan(store, tasks, lengths, samples)
        total, missing = sum(todo.wanted.values()), sum(map(len, todo.pending.values()))
        part = "" if shard.whole else f" of shard {shard}"
        print(f"{total - missing} of {total} samples{part} are done, {missing} to do", flush=True)
        return todo

    try:
        launch.join(megatron=bool(arguments.checkpoint))
        todo = launch.from_leader(begin)
        if not todo.finished:
            generator = engine.make_generator(arguments, data.encoder, lengths[-1])
            share = Share(
                rank=generator.data_parallel_rank,
                size=generator.data_parallel_size,
                writes=generator.is_first_model_rank,
                leads=launch.leads(),
                processes=launch.world_size() // generator.data_parallel_size,
                device=engine.device(arguments),
            )
            try:
                evaluate(data, tasks, todo, store, generator, share, save_prompts=arguments.save_prompts, form=form)
            except (RuntimeError, MemoryError) as error:
                if not engine.out_of_memory(error):
                    raise
                raise UserError(engine.MORE_MEMORY) from error
            shared = getattr(generator, "shared_tokens", 0)
            if launch.leads() and shared:
                saved = f"{shared:,} of {generator.prompt_tokens:,}"
                print(f"{saved} prompt tokens of this process were read once for several samples", flush=True)
            # What finishes the run may need the memory.
            del generator
        if launch.leads():
            finish(store)
            _report(store, arguments)
    except KeyboardInterrupt:
        print(
            f"\nstopped; finished samples are kept in {arguments.output}, the same command continues", file=sys.stderr
        )
        sys.exit(130)
    finally:
        store.close()


def check_lengths(arguments: Namespace) -> list[int]:
    """The lengths that the arguments name, short ones first.

    Raises:
        UserError: when they name none.
    """
    if not arguments.multiples:
        return parse_lengths(arguments.lengths)
    if not arguments.train_length:
        raise UserError("--multiples needs --train-length: the length, in tokens, that they are multiples of")
    return parse_multiples(arguments.multiples, arguments.train_length)


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in ("megatron-lengthgen", "megatron-core", "torch", "transformers", "tokenizers", "wonderwords"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _report(store: RunStore, arguments: Namespace) -> None:
    from . import report as reports

    config = store.config()
    scope = config["scope"]
    try:
        # Alone: of shards that end together the one that reads last, and so has all samples, also writes last.
        with store.alone():
            if config["identity"].get("benchmark") == "ruler":
                store.write_ruler_files([(task, length) for task in scope["tasks"] for length in scope["lengths"]])
            summary = reports.write_report(store, arguments.note, arguments.train_length)
    except OSError as error:
        raise UserError(f"cannot write the report into {store.directory}: {error.strerror or error}") from error
    reports.print_table(summary)
    if not summary["complete"]:
        print("Not complete: start the same command (or the other shards) to go on; report RUN looks again.")
    for file in (*reports.REPORT_FILES, "predictions", "ruler", "helmet"):
        if (store.directory / file).exists():
            print(f"  {store.directory.resolve() / file}")


def report(arguments: Namespace) -> None:
    """Write the report of a run, finished or not."""
    _report(RunStore(arguments.run), arguments)


def compare(arguments: Namespace) -> None:
    """Compare runs with the first."""
    from . import compare as comparison

    result = comparison.compare([RunStore(run) for run in arguments.runs], arguments.note, arguments.train_length)
    output = Path(arguments.output)
    comparison.write_comparison(result, output)
    comparison.print_comparison(result)
    for file in comparison.COMPARISON_FILES:
        print(f"  {output.resolve() / file}")
