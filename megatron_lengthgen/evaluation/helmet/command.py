"""The command ``helmet`` of ``tools/eval_longctx.py``, from checked arguments to files."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation import engine
from megatron_lengthgen.evaluation.commands import check_lengths, run_tasks, versions
from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer
from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.evaluation.runner import Form

from .chat import ChatClient
from .data import DATA_VERSION, Helmet
from .datasets import Dataset, measure_key, parse_datasets
from .draw import SEED
from .entailment import Seq2SeqEntailment
from .files import Archive, present
from .hub import HubSets
from .judged import Judge
from .later import judge_answers, score_citations
from .results import write_results

__all__ = ["helmet"]

#: What a run may have only later.
_GROWS = ("judge", "entailment", "cut_tokenizer")


def helmet(arguments: Namespace) -> None:
    """Run HELMET data sets, or what is left of them, and write the report and HELMET's own result files."""
    for name in ("samples", "limit", "max_new_tokens"):
        engine.positive("--" + name.replace("_", "-"), getattr(arguments, name))
    lengths = check_lengths(arguments)
    engine.check(arguments)
    datasets = parse_datasets(name.strip() for name in arguments.tasks.split(",") if name.strip())
    for dataset in datasets:
        for length in lengths:
            dataset.size(length)
    if bool(arguments.judge) != bool(arguments.judge_model):
        raise UserError("--judge (the server) and --judge-model (the model's name there) go together")
    client = ChatClient(arguments.judge, arguments.judge_model) if arguments.judge else None
    archive, hub = Archive.at(arguments.data, arguments.helmet), HubSets.parse(arguments.set)
    datasets, left_out = present(archive, datasets, lengths, arguments.skip_missing)
    where, digest = engine.locate(arguments)
    data, encoder, cut_tokenizer = _data(arguments, archive, hub, datasets, lengths)
    datasets, sizes, more = _sizes(data, datasets, lengths, arguments.skip_missing)
    for line in (*left_out, *more):
        print(f"left out: {line}", file=sys.stderr, flush=True)

    before = _identity_before(arguments.output)
    judge = arguments.judge_model or before.get("judge")
    entailment = arguments.entailment or before.get("entailment")
    judged = [d for d in datasets if judge and "judge" in d.later]
    cited = [d for d in datasets if entailment and "citation_rec" in d.later]
    # Whatever these lack is said before anything is generated.
    judges = {d.name: Judge(archive, d, client.ask) for d in judged if client}
    keys = {d.name: [measure_key(d.name, m) for m in d.later] if d in judged or d in cited else [] for d in datasets}
    identity = {
        "benchmark": "helmet",
        "data_version": DATA_VERSION,
        "seed": SEED,
        **engine.identity(arguments, encoder, digest),
        "max_new_tokens": arguments.max_new_tokens,
        "max_test_samples": arguments.samples,
        "cut": arguments.cut,
        "cut_tokenizer": cut_tokenizer,
        "judge": judge,
        "entailment": entailment,
    }
    scope = {
        "tasks": [key for d in datasets for key in (d.name, *keys[d.name])],
        "lengths": lengths,
        "samples": max(map(data.asked, datasets)),
        "sizes": {key: sizes[d.name] for d in datasets for key in (d.name, *keys[d.name])},
    }
    info = {
        "name": arguments.name or Path(where).resolve().name,
        "note": arguments.note,
        "train_length": arguments.train_length,
        **engine.info(arguments, where),
        "data_path": arguments.data,
        "sets": dict(hub.sources),
        "labels": _labels(datasets, keys, judge, entailment),
        "versions": versions(),
        "command": shlex.join(sys.argv),
    }

    def samples(task: str, length: int) -> int:
        size = sizes[task][str(length)]
        return min(size, arguments.limit or size)

    def finish(store: RunStore) -> None:
        for dataset in judged if client else ():
            judge_answers(store, data, dataset, lengths, judges[dataset.name], str(judge))
        if cited and arguments.entailment:
            model = Seq2SeqEntailment(arguments.entailment)
            for dataset in cited:
                score_citations(store, data, dataset, lengths, model)
        with store.writing():
            write_results(store, data, datasets, lengths)

    form = Form(Helmet.request, data.record)
    run_tasks(
        arguments,
        data,
        datasets,
        lengths,
        samples,
        identity=identity,
        scope=scope,
        info=info,
        grows=_GROWS,
        form=form,
        finish=finish,
    )


def _data(
    arguments: Namespace, archive: Archive, hub: HubSets, datasets: Sequence[Dataset], lengths: Sequence[int]
) -> tuple[Helmet, PromptEncoder, str | None]:
    """The questions, the encoder that a run is known by, and the digest of what cuts long texts."""
    plain = engine.make_encoder(arguments, chat=False)
    chatting = [
        d.name for d in datasets if arguments.chat_template == "on" or (arguments.chat_template == "helmet" and d.chat)
    ]
    chat = engine.make_encoder(arguments, chat=True) if chatting else None
    engine.check_vocabulary(arguments, chat or plain)
    tokenizer, digest = None, None
    if any(d.category in ("longqa", "summ") for d in datasets):
        tokenizer = load_tokenizer(arguments.cut_tokenizer) if arguments.cut_tokenizer else plain.tokenizer
        digest = PromptEncoder(tokenizer).digest
        if not arguments.cut_tokenizer:
            print(
                "long texts are cut by the model's own tokenizer; HELMET's figures are with Llama 2's: --cut-tokenizer",
                file=sys.stderr,
                flush=True,
            )
    data = Helmet(
        archive,
        hub,
        plain,
        chat=dict.fromkeys(chatting, chat) if chat else None,
        cut_tokenizer=tokenizer,
        lengths=lengths,
        max_new_tokens=arguments.max_new_tokens,
        samples=arguments.samples,
        place=arguments.cut,
    )
    return data, chat or plain, digest


def _sizes(
    data: Helmet, datasets: Sequence[Dataset], lengths: Sequence[int], skip_missing: bool
) -> tuple[list[Dataset], dict[str, dict[str, int]], list[str]]:
    """Questions of each data set at each length, of those that can be loaded, and a line for each other."""
    sizes: dict[str, dict[str, int]] = {}
    lacking: dict[str, str] = {}
    for dataset in datasets:
        try:
            sizes[dataset.name] = {str(length): data.size(dataset, length) for length in lengths}
            for length in lengths:
                # What is wrong with all of a file shows before a model is loaded.
                data.example(dataset, length, 0)
        except UserError as error:
            if not skip_missing:
                raise
            lacking[dataset.name] = str(error)
    kept = [dataset for dataset in datasets if dataset.name in sizes and dataset.name not in lacking]
    if not kept:
        raise UserError(f"no data set can be loaded: {next(iter(lacking.values()))}")
    return kept, sizes, [f"{name}: {why}" for name, why in lacking.items()]


def _identity_before(output: str) -> Mapping[str, Any]:
    """The settings of the run that is continued; a judge that has judged is not taken back by a start without it."""
    store = RunStore(output)
    return store.config()["identity"] if store.config_file.exists() else {}


def _labels(
    datasets: Sequence[Dataset], keys: Mapping[str, Sequence[str]], judge: str | None, entailment: str | None
) -> dict[str, str]:
    """What reports call each measure, with who judged."""
    labels = {}
    for dataset in datasets:
        counted = "" if dataset.counted else ", not in the mean"
        labels[dataset.name] = f"{dataset.name} ({dataset.metric}{counted})"
        for key in keys[dataset.name]:
            measure = key.removeprefix(f"{dataset.name}.")
            by = judge if measure == "judge" else entailment
            labels[key] = f"{dataset.name} ({'judged' if measure == 'judge' else measure} by {by})"
    return labels
