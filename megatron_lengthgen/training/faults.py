"""When another rank is gone: what the ranks that are left say, and with which exit status they end."""

import re
import socket
from collections.abc import Iterator

import torch

from megatron_lengthgen.errors import UserError

__all__ = ["RESTART", "TryAgain", "lost_contact"]

RESTART = 75
"""Exit status of a run that did nothing wrong and should be started again (``EX_TEMPFAIL`` of sysexits.h)."""

#: What gloo and NCCL say when a peer is silent for the timeout, or closes its end (ProcessGroupGloo.cpp, gloo's
#: transport/tcp/pair.cc, ProcessGroupNCCL.cpp).
_LOST = re.compile(
    r"gloo.*(timed out|connection closed|connection reset|connection refused|broken pipe|read error|write error"
    r"|no route to host|unreachable|application timeout)"
    r"|nccl (communicator was aborted|error)|watchdog caught collective",
    re.IGNORECASE | re.DOTALL,
)


_DIST = (torch.distributed.DistStoreError, torch.distributed.DistNetworkError)


class TryAgain(UserError):
    """Another rank or the network failed, not the run: the same command goes on."""

    exit_status = RESTART


def lost_contact(error: BaseException, rank: int, save: str | None) -> TryAgain | None:
    """The error to end with where ``error`` says that a collective got no answer; None for any other error.

    Args:
        error: what a collective, or anything else, raised.
        rank: of this process.
        save: where the run's checkpoints are.
    """
    said = [cause for cause in _causes(error) if isinstance(cause, _DIST) or _LOST.search(str(cause))]
    if not said:
        return None
    way = f"the same command goes on from the last checkpoint in {save}" if save else "start it again"
    return TryAgain(
        f"rank {rank} on host {socket.gethostname()} lost contact with another rank ({_first_line(said[-1])}): see "
        f"whether its node or the network failed; {way}"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised for; torch.distributed.checkpoint collects those of all ranks."""
    seen: list[BaseException] = [error]
    while seen:
        one = seen.pop()
        yield one
        seen += [failure[0] for failure in getattr(one, "failures", {}).values()]
        seen += [one.__cause__] if one.__cause__ is not None else []


def _first_line(error: BaseException) -> str:
    # gloo begins with the file and line of its source.
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().splitlines()[0])[:200]
