"""HELMET's recall files for lengths that its archive does not have: the same rows in the same layout, drawn by us.

Needles are RULER's (:mod:`megatron_lengthgen.evaluation.ruler`), as in HELMET; the key-value pairs are those of "Lost
in the middle" (arXiv 2307.03172): an object of random UUIDs, its question at one of six depths.
"""

import json
import sys
import uuid
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.progress import track

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.engine import positive
from megatron_lengthgen.evaluation.lengths import parse_lengths
from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer
from megatron_lengthgen.evaluation.ruler.data import Ruler
from megatron_lengthgen.evaluation.ruler.sources import load_sources
from megatron_lengthgen.evaluation.ruler.streams import stream
from megatron_lengthgen.evaluation.ruler.tasks import Niah, parse_tasks
from megatron_lengthgen.files import atomic_file

from .datasets import DATASETS, LONGEST, Dataset
from .draw import SEED
from .templates import TEMPLATES

__all__ = ["helmet_extend", "json_kv_row", "needle_row"]

_DEPTHS = 6
_DEMOS = 10
_TASKS = {
    "ruler_niah_mk_2": "niah_multikey_2",
    "ruler_niah_mk_3": "niah_multikey_3",
    "ruler_niah_mv": "niah_multivalue",
}


def helmet_extend(arguments: Namespace) -> None:
    """Write the recall files of the lengths asked for; a file that is there already stays as it is.

    Raises:
        UserError: a length that HELMET has data for, essays that cannot be read, or a file that cannot be written.
    """
    positive("--rows", arguments.rows)
    lengths = parse_lengths(arguments.lengths)
    for length in lengths:
        if length <= LONGEST:
            raise UserError(f"--lengths has {length}, and HELMET's archive has files up to {LONGEST}: give longer ones")
    data = Path(arguments.data)
    tasks = [task for task in parse_tasks(_TASKS.values()) if isinstance(task, Niah)]
    sources, _, _ = load_sources(tasks, essays=arguments.essays)
    encoder = PromptEncoder(load_tokenizer(arguments.tokenizer))
    ruler = Ruler(encoder, sources, seed=SEED)
    for length in lengths:
        for name in (*_TASKS, "json_kv"):
            dataset = DATASETS[name]
            path = data / dataset.file_at(length)
            if path.is_file():
                print(f"kept {path}", file=sys.stderr, flush=True)
                continue
            if name == "json_kv":
                rows: Iterator[Mapping[str, Any]] = (json_kv_row(dataset, length, i) for i in range(arguments.rows))
            else:
                task = next(task for task in tasks if task.name == _TASKS[name])
                rows = (needle_row(ruler, task, dataset, length, i) for i in range(arguments.rows))
            try:
                _write(path, rows, arguments.rows)
            except OSError as error:
                raise UserError(
                    f"cannot write {path}: {error.strerror or error}; files that are whole stay, so mend that and "
                    "start the same command again"
                ) from error
            print(path, flush=True)


def needle_row(ruler: Ruler, task: Niah, dataset: Dataset, length: int, index: int) -> dict[str, Any]:
    """Row ``index`` of a ``validation_{length}.jsonl``; its context leaves room for HELMET's own question."""
    template = TEMPLATES[dataset.name]
    around = ruler.encoder.count([template.user.format(context="", query="", type_needle_v="")])[0]
    context, drawn = ruler.haystack(task, length - around, index)
    kind = str(task.value)
    return {
        "index": index,
        "query": drawn.query,
        "type_needle_v": kind if task.values > 1 else kind[:-1],
        "context": context,
        "answer": list(drawn.outputs),
        "length": length,
    }


def json_kv_row(dataset: Dataset, length: int, index: int) -> dict[str, Any]:
    """Row ``index`` of a ``test_k{pairs}_dep6.jsonl``: pairs in proportion to HELMET's 1,800 at 128K."""
    count = dataset.size(length)
    rng = stream("helmet", SEED, dataset.name, length, index)
    pairs = [(_uuid(rng), _uuid(rng)) for _ in range(count)]
    depth = index % _DEPTHS / (_DEPTHS - 1)
    asked = round(depth * (count - 1))
    others = [pair for at, pair in enumerate(pairs) if at != asked]
    return {
        "id": index,
        "num_kvs": count,
        "depth": depth,
        "context": "JSON data:\n" + json.dumps(dict(pairs), indent=0),
        "question": pairs[asked][0],
        "answer": pairs[asked][1],
        "demos": rng.sample(others, min(_DEMOS, len(others))),
    }


def _uuid(rng: Any) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _write(path: Path, rows: Iterable[Mapping[str, Any]], count: int) -> None:
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in track(rows, description=path.name, total=count):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
