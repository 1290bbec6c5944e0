"""The nodes of a cluster on one machine: network namespaces, each with a cable to a switch that can be pulled."""

import itertools
import os
import subprocess
from types import TracebackType
from typing import Self

__all__ = ["Loopback", "Network", "make"]


_count = itertools.count()


def _ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True)


class Network:
    """``nodes`` namespaces joined by veth pairs to a bridge, which has a namespace of its own.

    Attributes:
        interface: what a node's end of its cable is called inside it.
        addresses: of the nodes.
        namespaces: their names, for ``setns``.
    """

    interface = "eth0"
    can_cut = True

    def __init__(self, nodes: int) -> None:
        name = f"lengthgen{os.getpid()}x{next(_count)}"
        self._switch = f"{name}s"
        self.namespaces: list[str | None] = [f"{name}n{node}" for node in range(nodes)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(nodes)]

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for node, (namespace, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
                _ip("netns", "add", namespace)
                _ip("link", "add", self.interface, "netns", namespace, "type", "veth", "peer", "name", f"port{node}",
                    "netns", self._switch)  # fmt: skip
                _ip("-n", self._switch, "link", "set", f"port{node}", "master", "switch")
                _ip("-n", self._switch, "link", "set", f"port{node}", "up")
                _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", self.interface)
                _ip("-n", namespace, "link", "set", self.interface, "up")
                _ip("-n", namespace, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for namespace in (*self.namespaces, self._switch):
            subprocess.run(["ip", "netns", "del", str(namespace)], capture_output=True, check=False)

    def cut(self, node: int) -> None:
        """Pull a node's cable."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "up")


class Loopback:
    """Where namespaces are not permitted: all nodes at one address, without cables."""

    interface = "lo"
    can_cut = False

    def __init__(self, nodes: int) -> None:
        self.namespaces: list[str | None] = [None] * nodes
        self.addresses = ["127.0.0.1"] * nodes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def make(nodes: int) -> Network | Loopback:
    """A network with cables where this machine lets one be made, and else without."""
    try:
        with Network(1):
            pass
    except (OSError, subprocess.CalledProcessError):
        return Loopback(nodes)
    return Network(nodes)
