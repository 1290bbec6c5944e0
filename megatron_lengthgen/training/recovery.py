"""Which checkpoint of its own a run goes on from: the newest whole one.

Megatron names the checkpoint to go on from in a tracker file, which it writes once a checkpoint is on the disk. Three
things can still go wrong: the tracker itself is not written in one piece, a file of the checkpoint is lost or cut short
later, and a run that goes on from an older checkpoint writes into the folders of the newer ones.
"""

import os
import re
from pathlib import Path

from megatron_lengthgen import files
from megatron_lengthgen.checkpoint.load import TRACKER, checkpoint_args
from megatron_lengthgen.errors import UserError

__all__ = ["recover"]

_ITERATION = re.compile(r"iter_(\d{7,})")
#: What Megatron writes last into a checkpoint.
_END = "metadata.json"
_INTEGRITY = "integrity.json"


def recover(folder: str | os.PathLike[str], *, verify: bool = False) -> list[str]:
    """Make the tracker of ``folder`` name the newest checkpoint that is whole, where it does not already.

    Damaged ones are moved aside, to ``iter_0000100.damaged``: a start that writes into such a folder and is killed
    would leave files of two saves behind the marks of a complete one. Checkpoints newer than the tracker says are left
    alone: their save did not end, or somebody set the tracker back. Call it on one process that has the run's lock.

    Args:
        folder: a run's ``save``.
        verify: also compare the files with the hashes that ``verify_integrity`` had Megatron write.

    Returns:
        What was done, in sentences that a user must see; nothing where all was well.

    Raises:
        UserError: where there are checkpoints and none is whole.
    """
    folder = Path(folder)
    tracker = folder / TRACKER
    if not folder.is_dir():
        return []
    written = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else None
    if written == "release":
        return []
    latest = int(written) if written is not None and written.isascii() and written.isdigit() else None
    candidates = {
        int(match[1]): path for path in folder.iterdir() if path.is_dir() and (match := _ITERATION.fullmatch(path.name))
    }
    damaged: list[tuple[Path, str]] = []
    if latest is not None and latest not in candidates:
        damaged.append((folder / f"iter_{latest:07d}", "it is not there"))
    trusted = [
        iteration
        for iteration, path in candidates.items()
        if (iteration <= latest if latest is not None else (path / _END).is_file())
    ]
    for iteration in sorted(trusted, reverse=True):
        fault = _fault(candidates[iteration], verify)
        if fault is None:
            if iteration == latest:
                return []
            remarks = [_set_aside(path, fault) for path, fault in damaged]
            if latest is None:
                what = "is missing" if written is None else f"holds {written!r}, no iteration"
                remarks.insert(0, f"{tracker} {what}")
            files.write_text(tracker, str(iteration))
            return [*remarks, f"the run goes on from {candidates[iteration].name}, the newest checkpoint that is whole"]
        damaged.append((candidates[iteration], fault))
    if written is None:
        return []  # a first start that was killed within its first save
    if not damaged:
        raise UserError(f"{tracker} holds {written!r}, and there is no checkpoint beside it: remove it to start anew")
    path, fault = damaged[0]
    raise UserError(
        f"no checkpoint in {folder} is whole, the newest, {path.name}, because {fault}: copy one back, or choose "
        "another save to start anew"
    )


def _fault(checkpoint: Path, verify: bool) -> str | None:
    """Why a checkpoint cannot be gone on from; None where it can."""
    try:
        checkpoint_args(checkpoint)
    except UserError as error:
        return str(error).partition(";")[0]
    if verify and (checkpoint / _INTEGRITY).is_file():
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.validation import verify_integrity_manifest

        try:
            verify_integrity_manifest(str(checkpoint))
        except (CheckpointingException, ValueError, KeyError) as error:
            return " ".join(str(error).split())
    return None


def _set_aside(path: Path, fault: str) -> str:
    if not path.is_dir():
        return f"{path.name} is named by {TRACKER}, but {fault}"
    names = (path.with_name(f"{path.name}.damaged{number}") for number in ("", *range(1, 1000)))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    return f"{path.name} is damaged: {fault}; it was moved to {aside.name}"
