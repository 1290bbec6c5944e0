"""Errors that are the user's to fix, and how a command line shows them."""

import os
import sys
from collections.abc import Callable

__all__ = ["UserError", "run"]


class UserError(Exception):
    """Bad input. The message is one sentence that names the value and the way out."""

    exit_status = 2


def run(main: Callable[[], None]) -> int:
    """Run a command line; turn a :class:`UserError` into one line on stderr and its exit status.

    Under torchrun the line of every rank but the first names its rank.
    """
    try:
        main()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(f"{'' if rank == '0' else f'[rank {rank}] '}error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    return 0
