"""The sets that HELMET takes from the Hugging Face hub: by their ids, or from local copies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lengthgen.choices import check_choice
from megatron_lengthgen.errors import UserError

from .files import Row, check_fields, read_json_rows

__all__ = ["SETS", "HubSets"]

#: Name, as in ``--set NAME=...``, to id and configuration; from princeton-nlp/HELMET ``data.py``.
SETS: Mapping[str, tuple[str, str | None]] = {
    "trec": ("CogComp/trec", None),
    "banking77": ("PolyAI/banking77", None),
    "clinic150": ("clinc_oos", "plus"),
    "nlu": ("xingkunliuxtracta/nlu_evaluation_data", None),
    "narrativeqa": ("narrativeqa", None),
    "infinitebench": ("xinrongzhang2022/infinitebench", None),
    "multi_lexsum": ("allenai/multi_lexsum", "v20230518"),
}


@dataclass(frozen=True)
class HubSets:
    """Args:
    sources: local directories, or other ids, by name in :data:`SETS`.
    """

    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Sequence[str]) -> "HubSets":
        """From options ``NAME=PATH`` or ``NAME=ID``.

        Raises:
            UserError: for an unknown name, or an option without a value.
        """
        sources = {}
        for option in options:
            name, _, value = option.partition("=")
            check_choice("--set", name, SETS)
            if not value:
                raise UserError(f"--set takes NAME=PATH or NAME=ID, got {option!r}")
            sources[name] = value
        return cls(sources)

    def rows(self, name: str, split: str, fields: Sequence[str]) -> Sequence[Row]:
        """The rows of a split, in its own order.

        A local copy is a directory with a file for each split (``test.jsonl``, ``.json`` or ``.parquet``), one that
        ``save_to_disk`` wrote, or a clone of the hub's.

        Raises:
            UserError: when it cannot be loaded, or lacks one of ``fields``.
        """
        id_, config = SETS[name]
        source = self.sources.get(name, id_)
        where = f"{name} ({source}), split {split}"
        directory = Path(source)
        if not directory.is_dir() and (directory.is_absolute() or source.startswith(".")):
            raise UserError(f"--set {name}={source} is not a directory")
        found = _local(directory, split) if directory.is_dir() else None
        if isinstance(found, Path) and found.suffix != ".parquet":
            return read_json_rows(found, fields)
        try:
            rows = _load(source, None if name in self.sources else config, split, found)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"cannot load {where} ({reason}); give a local copy: --set {name}=DIR, with a file {split}.jsonl in it"
            ) from error
        if not len(rows):
            raise UserError(f"{where} holds no rows")
        check_fields(where, rows[0], fields)
        return rows


def _local(directory: Path, split: str) -> Path | None:
    """The file of a split, where there is one."""
    files = (directory / f"{split}{suffix}" for suffix in (".jsonl", ".json", ".parquet"))
    return next((file for file in files if file.is_file()), None)


def _load(source: str, config: str | None, split: str, file: Path | None) -> Any:
    import datasets

    if file is not None:
        return datasets.load_dataset("parquet", data_files={split: str(file)}, split=split)
    if (Path(source) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(source)[split]
    if "infinitebench" in source.lower():
        # Its files differ in what their columns hold when empty, so the types must be given.
        text = datasets.Value("string")
        types = datasets.Features(
            {
                "id": datasets.Value("int64"),
                "context": text,
                "input": text,
                "answer": datasets.List(text),
                "options": datasets.List(text),
            }
        )
        return datasets.load_dataset(source, config, features=types, split=split)
    return datasets.load_dataset(source, config, split=split)
