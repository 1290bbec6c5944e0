"""Samples from workers and from the cache are those that one process makes."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ruler_fixtures import make_ruler, sources, tokenizer

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.evaluation.ruler.data import Ruler
from megatron_lengthgen.evaluation.ruler.prepare import PreparedRuler
from megatron_lengthgen.evaluation.ruler.tasks import TASKS

NEEDLE, WORDS = TASKS["niah_multikey_1"], TASKS["cwe"]


def prepared(cache: Path | None = None, workers: int = 1, seed: int = 42, **kinds: Any) -> PreparedRuler:
    return PreparedRuler(PromptEncoder(tokenizer(**kinds)), sources(), seed=seed, workers=workers, cache=cache)


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_stored_sample_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make_ruler().sample(task, 2048, index) for task in (NEEDLE, WORDS) for index in (0, 5)]
    for _ in range(2):
        ruler = prepared(tmp_path)
        assert [ruler.sample(task, 2048, index) for task in (NEEDLE, WORDS) for index in (0, 5)] == made
        assert len(files(tmp_path)) == 4
        monkeypatch.setattr(Ruler, "sample", None)
    assert prepared(tmp_path).samples(WORDS, 2048, [5, 0]) == [made[3], made[2]]


def test_whatever_decides_a_sample_names_its_file(tmp_path: Path) -> None:
    paths = set()
    for ruler in (prepared(tmp_path), prepared(tmp_path, seed=7), prepared(tmp_path, bos=True)):
        for task, length, index in ((NEEDLE, 2048, 0), (NEEDLE, 2048, 1), (NEEDLE, 2049, 0), (WORDS, 2048, 0)):
            cache = ruler._cache(task)
            assert cache is not None
            paths.add(cache.path(task, length, index))
    assert len(paths) == 12


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_broken_file_is_made_again(tmp_path: Path, damage: str) -> None:
    made = prepared(tmp_path).sample(NEEDLE, 2048, 0)
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes({"cut": bytes(data[:200]), "flipped": bytes(data), "empty": b""}[damage])
    assert prepared(tmp_path).sample(NEEDLE, 2048, 0) == made
    assert prepared(tmp_path).sample(NEEDLE, 2048, 0) == made and len(files(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to --cache"):
        prepared(tmp_path / "file").sample(NEEDLE, 2048, 0)


def test_workers_make_the_same_samples(tmp_path: Path) -> None:
    ruler = prepared(tmp_path, workers=2)
    try:
        assert ruler.samples(NEEDLE, 2048, range(6)) == [make_ruler().sample(NEEDLE, 2048, i) for i in range(6)]
        assert len(files(tmp_path)) == 6
        with pytest.raises(UserError, match="length 100 is too small for niah_multikey_1"):
            ruler.samples(NEEDLE, 100, range(6))
    finally:
        ruler.close()


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_ruler_prepare import NEEDLE, prepared\n"
        "if __name__ == '__main__':\n"
        "    ruler = prepared(workers=2)\n"
        "    ruler.samples(NEEDLE, 2048, range(8))\n"
        "    print(*ruler._pool._processes, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(number) for number in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    end = time.monotonic() + 20
    while alive := [number for number in workers if Path(f"/proc/{number}").exists() and not _is_zombie(number)]:
        assert time.monotonic() < end, f"{alive} outlived their parent"
        time.sleep(0.1)


def _is_zombie(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
