"""Before a model is built: shared folders that are shared, clocks that agree."""

import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.ranks import Ranks

__all__ = ["check_clocks", "check_shared"]

#: Seconds for which a network file system may show a node an old listing.
_LISTING = 20.0
#: Seconds; a rank that waits for its processor looks as if its clock were that much ahead.
_TOLERANCE = 5.0


def check_shared(ranks: Ranks, folder: Path, name: str, *, patience: float = _LISTING) -> None:
    """Refuse a run whose ranks do not see one and the same ``folder``.

    Rank 0 leaves a file there, and all others look for it.

    Args:
        ranks: all call this.
        folder: made on rank 0 if absent.
        name: of the argument that names it, for the message.
        patience: seconds that a file may take to be seen.

    Raises:
        UserError: on the ranks that do not see the file, and on rank 0, which names them.
    """
    host, token = ranks.from_first(lambda: (socket.gethostname(), uuid.uuid4().hex))
    file = folder / f".shared.{token}"

    def write() -> None:
        if ranks.rank:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            raise UserError(f"{name} {folder} cannot be written ({error.strerror}): choose another folder") from error

    def look() -> None:
        end = time.monotonic() + patience
        while not file.exists():
            if time.monotonic() > end:
                raise UserError(
                    f"{name} {folder} is not the folder that rank 0 sees on host {host}: choose one on a file system "
                    "that all nodes share"
                )
            time.sleep(0.1)

    ranks.agree(write)
    try:
        ranks.agree(look)
    finally:
        if ranks.rank == 0:
            file.unlink(missing_ok=True)


def check_clocks(ranks: Ranks, *, clock: Callable[[], float] = time.time) -> str | None:
    """Compare the ranks' clocks with rank 0's.

    Args:
        ranks: all call this.
        clock: seconds since the epoch.

    Returns:
        On rank 0, a warning where one is more than 5 s off; None elsewhere, and where all agree.
    """
    ranks.agree(lambda: None)  # now all wait for rank 0
    sent = ranks.from_first(clock)
    return _clock_warning(ranks.gather((socket.gethostname(), clock() - sent)))


def _clock_warning(offsets: Sequence[tuple[str, float]]) -> str | None:
    if not offsets:
        return None
    rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank][1]))
    host, offset = offsets[rank]
    if abs(offset) <= _TOLERANCE:
        return None
    return (
        f"the clock of rank {rank} on host {host} is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} that "
        "of rank 0: logs and the times of files will not compare; synchronise the clocks"
    )
