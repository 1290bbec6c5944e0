"""A run in the form of HELMET's own result files, for its scripts to read.

Source: princeton-nlp/HELMET ``eval.py``: file names, fields, per cent and rounding.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.files import write_json

from .data import Helmet
from .datasets import Dataset, measure_key
from .draw import SEED
from .stories import text_limit

__all__ = ["helmet_name", "write_results"]

FOLDER = "helmet"
#: What HELMET calls the scores of a judge: in per cent nowhere, and of a long answer out of three.
_JUDGED = {"longqa": ("gpt-4-score", 3.0), "summ": ("gpt-4-f1", 1.0)}


def helmet_name(dataset: Dataset, length: int) -> str:
    """The data set as HELMET names it at a length."""
    if dataset.category == "icl":
        return f"{dataset.name}_{dataset.size(length)}shot_balance"
    if dataset.category == "cite":
        return f"{dataset.name}_{dataset.size(length)}"
    if dataset.category in ("longqa", "summ"):
        return f"{dataset.name}_{text_limit(dataset, length)}"
    return f"{dataset.name}_3" if dataset.name == "kilt_popqa" else dataset.name


def write_results(
    store: RunStore, data: Helmet, datasets: Sequence[Dataset], lengths: Sequence[int], tag: str = "v1"
) -> Path:
    """Write ``helmet/*.json`` and their ``.score`` for all data sets and lengths with answers; return the folder."""
    folder = store.directory / FOLDER
    for dataset in datasets:
        for length in lengths:
            records = store.records(dataset.name, length)
            if records:
                path = folder / f"{_stem(data, dataset, length, tag)}.json"
                result = _result(store, data, dataset, length, records)
                write_json(path, result)
                if dataset.category != "cite" or all(name in result["averaged_metrics"] for name in dataset.later):
                    # Where citations are not scored yet, HELMET's eval_alce.py can still do that.
                    write_json(path.with_name(f"{path.name}.score"), result["averaged_metrics"])
    return folder


def _stem(data: Helmet, dataset: Dataset, length: int, tag: str) -> str:
    test = Path(dataset.file_at(length)).stem
    # Shots and samples are those of the configuration, where all sets of a category have the same.
    shots = 2 if dataset.category == "recall" else dataset.shots
    return (
        f"{helmet_name(dataset, length)}_{tag}_{test}_in{length}_size{data.asked(dataset)}_shots{shots}_sampFalse"
        f"max{data.new_tokens(dataset)}min0t0.0p1.0_chat{data.chats(dataset)}_{SEED}"
    )


def _result(
    store: RunStore, data: Helmet, dataset: Dataset, length: int, records: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    rows = [_row(data, dataset, length, records[index]) for index in sorted(records)]
    names = list(next(iter(records.values()))["metrics"])
    metrics = {name: [records[index]["metrics"][name] for index in sorted(records)] for name in names}
    metrics["input_len"] = [records[index]["prompt_tokens"] for index in sorted(records)]
    metrics["output_len"] = [records[index]["generated_tokens"] for index in sorted(records)]
    averaged = {
        name: sum(values) / len(values) * (1 if name.endswith("_len") else 100) for name, values in metrics.items()
    }
    if dataset.category in _JUDGED and "judge" in dataset.later:
        name, top = _JUDGED[dataset.category]
        if judged := store.records(measure_key(dataset.name, "judge"), length):
            averaged[name] = top * sum(record["score"] for record in judged.values()) / len(judged)
    if dataset.category == "cite":
        for name in dataset.later:
            if cited := store.records(measure_key(dataset.name, name), length):
                averaged[name] = 100 * sum(record["score"] for record in cited.values()) / len(cited)
    seconds = sum(record["seconds"] for record in records.values())
    arguments = {
        "datasets": helmet_name(dataset, length),
        "test_files": f"data/{dataset.file_at(length)}" if dataset.file else "",
        "input_max_length": length,
        "generation_max_length": data.new_tokens(dataset),
        "max_test_samples": data.asked(dataset),
        "shots": dataset.shots,
        "use_chat_template": data.chats(dataset),
        "stop_newline": dataset.stop_at_newline,
        "do_sample": False,
        "temperature": 0.0,
        "seed": SEED,
    }
    return {
        "args": arguments,
        "data": rows,
        "metrics": metrics,
        "averaged_metrics": averaged,
        "throughput": len(records) / seconds if seconds else None,
    }


def _row(data: Helmet, dataset: Dataset, length: int, record: Mapping[str, Any]) -> dict[str, Any]:
    example = data.example(dataset, length, record["index"])
    parsed = record["parsed_output"]
    if isinstance(parsed, list):
        parsed = {document: len(parsed) - place for place, document in enumerate(parsed)}
    return {
        **{name: value for name, value in example.values.items() if name not in ("demos", "demo", "demo_text")},
        **example.kept,
        "question": example.question,
        "answer": example.gold,
        "output": record["output"],
        "input_len": record["prompt_tokens"],
        "output_len": record["generated_tokens"],
        "parsed_output": parsed,
        **record["metrics"],
    }
