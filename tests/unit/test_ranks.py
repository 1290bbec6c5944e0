"""What the ranks of a launch agree on before torch.distributed connects them: here threads with a store each."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import ranks as ranks_module
from megatron_lengthgen.training.preflight import check_clocks, check_shared
from megatron_lengthgen.training.ranks import Ranks, connect

HOST = socket.gethostname()


@pytest.fixture
def launch() -> Iterator[Callable[..., list[Any]]]:
    """``launch(world_size, act)``: what ``act(ranks)`` returned or raised on every rank."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def launch(world_size: int, act: Callable[[Ranks], Any], absent: tuple[int, ...] = (), timeout: float = 20) -> Any:
        def rank(number: int) -> Any:
            if number in absent:
                return None
            mine = torch.distributed.TCPStore(
                "127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
            )
            try:
                return act(Ranks(mine, number, world_size, timeout, f"127.0.0.1:{store.port}"))
            except (UserError, SystemExit) as error:
                return error

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(rank, range(world_size)))

    yield launch


def test_values_come_from_the_first_rank_and_go_to_it(launch) -> None:
    assert launch(3, lambda ranks: ranks.from_first(lambda: [ranks.rank, "x"])) == [[0, "x"]] * 3
    assert launch(3, lambda ranks: ranks.gather(10 * ranks.rank)) == [[0, 10, 20], [], []]


def test_all_go_on_with_what_they_found(launch) -> None:
    assert launch(3, lambda ranks: ranks.agree(lambda: 2 * ranks.rank)) == [0, 2, 4]


def test_one_rank_that_refuses_ends_all_and_is_named(launch) -> None:
    def check(ranks: Ranks) -> None:
        if ranks.rank == 2:
            raise UserError("no file data.bin")

    first, other, refused = launch(3, lambda ranks: ranks.agree(lambda: check(ranks)))
    assert str(first) == f"no file data.bin (on rank 2 alone, the first on host {HOST})"
    assert isinstance(other, SystemExit) and other.code == 2
    assert isinstance(refused, UserError) and str(refused) == "no file data.bin"


def test_what_all_refuse_is_said_as_it_is(launch) -> None:
    def refuse() -> None:
        raise UserError("p must be less than 1")

    assert [str(error) for error in launch(3, lambda ranks: ranks.agree(refuse))] == ["p must be less than 1"] * 3


def test_ranks_that_never_come_are_named(launch) -> None:
    first, second, _, _ = launch(4, lambda ranks: ranks.agree(lambda: None), absent=(2, 3), timeout=1)
    assert "ranks 2, 3 of 4 did not report to rank 0 at 127.0.0.1:" in str(first)
    assert "within 1 s" in str(first)
    assert "said nothing to rank 1 within 1 s" in str(second)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(ranks_module, "_stores", {})
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    yield monkeypatch


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A program that holds a port and answers nobody."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held


def test_a_port_that_is_taken_is_named(environment: pytest.MonkeyPatch, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    environment.setenv("RANK", "0")
    environment.setenv("MASTER_PORT", str(port))
    with pytest.raises(UserError, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port}, since another process holds"):
        connect(1)


def test_a_rank_0_that_is_not_there_is_told_from_one_that_is_slow(environment: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment.setenv("RANK", "1")
    environment.setenv("MASTER_PORT", str(port))
    with pytest.raises(UserError, match=rf"rank 1 on host {HOST} found no rank 0 at 127\.0\.0\.1:{port} within 1 s"):
        connect(1)


def test_another_programs_port_is_no_rank_0(environment: pytest.MonkeyPatch, listener: socket.socket) -> None:
    environment.setattr(ranks_module, "_GRACE", 1)
    environment.setenv("RANK", "1")
    environment.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    with pytest.raises(UserError, match="something that is no rank 0 holds"):
        connect(1).agree(lambda: None)


def test_half_an_environment_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE is 2 and RANK is not set"):
        connect(1)


def test_a_process_alone_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = connect(1)
    assert alone.agree(lambda: 3) == alone.from_first(lambda: 3) == 3
    with pytest.raises(UserError, match="wrong"):
        alone.agree(refuse)


def refuse() -> None:
    raise UserError("wrong")


def test_a_folder_that_is_not_shared_is_refused(launch, tmp_path: Path) -> None:
    def look(ranks: Ranks) -> None:
        own = tmp_path / ("local" if ranks.rank == 1 else "shared")
        check_shared(ranks, own, "save", patience=0.3)

    first, apart, other = launch(3, look)
    assert str(apart) == (
        f"save {tmp_path / 'local'} is not the folder that rank 0 sees on host {HOST}: choose one on a file system "
        "that all nodes share"
    )
    assert str(first) == f"{apart} (on rank 1 alone, the first on host {HOST})"
    assert isinstance(other, SystemExit)


def test_a_shared_folder_is_taken_and_left_as_it_was(launch, tmp_path: Path) -> None:
    assert launch(3, lambda ranks: check_shared(ranks, tmp_path / "run", "save")) == [None] * 3
    assert list((tmp_path / "run").iterdir()) == []


def test_a_listing_that_comes_late_is_waited_for(launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists, looks = Path.exists, threading.local()

    def late(self: Path) -> bool:
        looks.count = getattr(looks, "count", 0) + 1
        return looks.count > 3 and exists(self)

    monkeypatch.setattr(Path, "exists", late)
    assert launch(2, lambda ranks: check_shared(ranks, tmp_path / "run", "save", patience=10)) == [None] * 2


@pytest.mark.parametrize(("offset", "words"), [(40.0, "40 s ahead of"), (-90.0, "90 s behind")])
def test_a_clock_that_is_off_is_told_by_how_much(launch, offset: float, words: str) -> None:
    def compare(ranks: Ranks) -> str | None:
        return check_clocks(ranks, clock=lambda: 1000.0 + (offset if ranks.rank == 2 else 0.0))

    warning, *others = launch(3, compare)
    assert f"the clock of rank 2 on host {HOST} is {words} that of rank 0" in warning
    assert others == [None, None]


def test_clocks_that_agree_are_no_news(launch) -> None:
    assert launch(3, check_clocks) == [None] * 3
