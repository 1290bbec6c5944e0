"""The processes of one launch, before torch.distributed connects them: what one of them finds out, all must know.

A rank that refuses its configuration ends, and the others would wait for it in a collective until that times out. Here
all ranks look at their own machine, report to rank 0 through a key-value store, and go on together or not at all.
"""

import itertools
import json
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.faults import TryAgain

__all__ = ["Ranks", "connect"]

_TIMEOUTS = (torch.distributed.DistStoreError, torch.distributed.DistNetworkError)
#: Seconds that rank 0 stays for the others to read why it ends: the store ends with it.
_FAREWELL = 10
#: Seconds for which the data loaders of a rank 0 that was killed may still hold its port.
_CLOSING = 20
#: Seconds beyond its own timeout that the store is waited for.
_GRACE = 5
_IN_USE = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_stores: dict[tuple[str, int, bool], torch.distributed.TCPStore] = {}
_launches = itertools.count()


class Ranks:
    """The ranks of a launch; every method is called by all of them, in the same order.

    Args:
        store: what they share; ``None`` for a process that was started alone.
        rank: number of this process.
        world_size: how many they are.
        timeout: seconds that one waits for the others.
        where: address of the store, for messages.
    """

    def __init__(
        self, store: torch.distributed.Store | None, rank: int, world_size: int, timeout: float, where: str = ""
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout, self._where = store, timedelta(seconds=timeout), where
        self._calls = itertools.count()

    def from_first[T](self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0 (a value that JSON carries), on every rank."""
        if self._store is None:
            return make()
        key = f"{next(self._calls)}/first"
        if self.rank == 0:
            value = make()
            self._store.set(key, json.dumps(value))
            return value
        return self._read([key])[0]

    def gather[T](self, value: T) -> list[T]:
        """The value of every rank (one that JSON carries), in order, on rank 0; an empty list elsewhere."""
        if self._store is None:
            return [value]
        call = next(self._calls)
        if self.rank:
            self._store.set(f"{call}/{self.rank}", json.dumps(value))
            return []
        return [value, *self._read([f"{call}/{rank}" for rank in range(1, self.world_size)])]

    def agree[T](self, check: Callable[[], T]) -> T:
        """What ``check`` returns on this rank, once it has raised no :class:`UserError` on any.

        Raises:
            UserError: on rank 0 and on the ranks where ``check`` raised one; rank 0 names those. All others end
                quietly, with the same exit status.
        """
        value, error = None, None
        try:
            value = check()
        except UserError as raised:
            error = raised
        reports = self.gather((socket.gethostname(), None if error is None else str(error)))
        verdict = self.from_first(lambda: _verdict(reports))
        if verdict is None:
            return value  # type: ignore[return-value]
        self._farewell()
        if self.rank == 0:
            raise UserError(verdict)
        if error is not None:
            raise error
        sys.exit(2)

    def _read(self, keys: Sequence[str]) -> list[Any]:
        assert self._store is not None
        try:
            self._store.wait(list(keys), self._timeout)
            return [json.loads(self._store.get(key)) for key in keys]
        except _TIMEOUTS as error:
            raise TryAgain(self._silence(keys)) from error

    def _silence(self, keys: Sequence[str]) -> str:
        waited = f"within {self._timeout.total_seconds():g} s"
        if self.rank:
            return (
                f"rank 0 at {self._where} said nothing to rank {self.rank} {waited}: see whether it ended with an "
                "error, or whether another run holds that port"
            )
        assert self._store is not None
        missing = [int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])]
        return (
            f"{_named(missing)} of {self.world_size} did not report to rank 0 at {self._where} {waited}: see whether "
            "they were started, and whether their MASTER_ADDR and MASTER_PORT are the same"
        )

    def _farewell(self) -> None:
        if self._store is None:
            return
        read = f"{next(self._calls)}/read"
        if self.rank:
            self._store.set(f"{read}/{self.rank}", "")
        elif self.world_size > 1:
            try:
                others = [f"{read}/{rank}" for rank in range(1, self.world_size)]
                self._store.wait(others, timedelta(seconds=_FAREWELL))
            except _TIMEOUTS:
                pass  # they have ended already


def _verdict(reports: Sequence[Sequence[Any]]) -> str | None:
    """The first error among ``(host, error)`` of each rank; where not all have one, with the ranks that do."""
    failed = [rank for rank, (_, error) in enumerate(reports) if error is not None]
    if not failed:
        return None
    host, error = reports[failed[0]]
    return error if len(failed) == len(reports) else f"{error} (on {_named(failed)} alone, the first on host {host})"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def connect(timeout: float) -> Ranks:
    """The ranks that torchrun or Slurm started together, by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.

    Args:
        timeout: seconds that one waits for the others.

    Raises:
        TryAgain: where rank 0 cannot listen at its port, or another rank does not reach it.
        UserError: for variables that are not set.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Ranks(None, 0, 1, timeout)
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if absent:
        raise UserError(
            f"WORLD_SIZE is {world_size} and {absent[0]} is not set: start the run with torchrun or a script of "
            "tools/launch, which set both"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    where = f"{address}:{port}"
    # torchrun's agent keeps the store; elsewhere rank 0 does, and torch.distributed will share it.
    shares_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not shares_agents
    key = (address, port, is_master)
    if key not in _stores:
        _stores[key] = _store(address, port, is_master, rank, timeout)
    # As torch.distributed tells the restarts apart whose ranks share the agents' store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shares_agents else "0"
    launch = f"lengthgen/{attempt}/{next(_launches)}"
    return Ranks(torch.distributed.PrefixStore(launch, _stores[key]), rank, world_size, timeout, where)


def _store(address: str, port: int, is_master: bool, rank: int, timeout: float) -> torch.distributed.TCPStore:
    def make() -> torch.distributed.TCPStore:
        return torch.distributed.TCPStore(
            address,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            multi_tenant=True,
        )

    end = time.monotonic() + min(timeout, _CLOSING)
    while True:
        try:
            return _within(timeout + _GRACE, make)
        except TimeoutError:
            raise TryAgain(
                f"something that is no rank 0 holds {address}:{port}: end it, or choose another MASTER_PORT"
            ) from None
        except _TIMEOUTS as error:
            if is_master and _IN_USE.search(str(error)) and time.monotonic() < end:
                time.sleep(0.5)
                continue
            raise TryAgain(_unreachable(rank, f"{address}:{port}", timeout, str(error))) from error


def _within[T](seconds: float, make: Callable[[], T]) -> T:
    """What ``make`` returns; TimeoutError where it does not, for a store waits for ever for a greeting."""
    results: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(make())
        except BaseException as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        result = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, BaseException):
        raise result
    return result


def _unreachable(rank: int, where: str, timeout: float, error: str) -> str:
    if rank == 0 and _IN_USE.search(error):
        return (
            f"rank 0 cannot listen at {where}, since another process holds that port, perhaps of a run that was "
            "killed: end it, or choose another MASTER_PORT"
        )
    if rank == 0:
        return f"rank 0 cannot listen at {where} ({error.splitlines()[0]}): MASTER_ADDR must be an address of its node"
    return (
        f"rank {rank} on host {socket.gethostname()} found no rank 0 at {where} within {timeout:g} s: see whether "
        "rank 0 was started, whether MASTER_ADDR is the address of its node, and whether a firewall is between them"
    )
