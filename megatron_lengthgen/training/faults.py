"""When another rank is gone: what the ranks that are left say, and with which exit status they end."""

import re
import socket

from megatron_lengthgen.errors import UserError

__all__ = ["RESTART", "LostContact", "lost_contact"]

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


class LostContact(UserError):
    """Another rank ended, or the network between them did. The same command goes on."""

    exit_status = RESTART


def lost_contact(error: BaseException, rank: int, save: str | None) -> LostContact | None:
    """The error to end with where ``error`` says that a collective got no answer; None for any other error.

    Args:
        error: what a collective, or anything else, raised.
        rank: of this process.
        save: where the run's checkpoints are.
    """
    if not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
        return None
    way = f"the same command goes on from the last checkpoint in {save}" if save else "start it again"
    return LostContact(
        f"rank {rank} on host {socket.gethostname()} lost contact with another rank ({_first_line(error)}): see "
        f"whether its node or the network failed; {way}"
    )


def _first_line(error: BaseException) -> str:
    # gloo begins with the file and line of its source.
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().splitlines()[0])[:200]
