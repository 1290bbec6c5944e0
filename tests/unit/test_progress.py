"""What a progress display says, with a clock that the test turns."""

import pytest

from megatron_lengthgen.evaluation import progress
from megatron_lengthgen.evaluation.progress import Amount, Progress, duration


def test_rates_and_time_left_by_task_and_in_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    wanted = {"short": Amount(10, 10_000), "long": Amount(10, 80_000)}
    before = Amount(2, 2_000)  # done in an earlier start, and so of no use for a rate
    with Progress(wanted, {"short": before, "long": Amount(0, 0)}) as shown:
        shown.update("short", "short @ 1K", {"short": before, "long": Amount(0, 0)})
        now += 20
        shown.update("short", "short @ 1K", {"short": Amount(6, 6_000), "long": Amount(0, 0)})
        line = capsys.readouterr().out
        # 4,000 tokens in 20 s; 4,000 of this task and 84,000 in all are left.
        assert line == (
            "short @ 1K: 6/10 samples, 200 tokens/s, 0:20 left; "
            "all: 6/20 samples, 200 tokens/s, 0:20 elapsed, 7:00 left\n"
        )
        now += 20
        shown.update("long", "long @ 8K", {"short": Amount(10, 10_000), "long": Amount(0, 0)})
        capsys.readouterr()
        now += 40
        shown.update("long", "long @ 8K", {"short": Amount(10, 10_000), "long": Amount(5, 40_000)})
        # Its own 40 s make its rate; what ran before it does not.
        assert capsys.readouterr().out == (
            "long @ 8K: 5/10 samples, 1,000 tokens/s, 0:40 left; "
            "all: 15/20 samples, 600 tokens/s, 1:20 elapsed, 1:06 left\n"
        )
        now += 40
        shown.finish(wanted)
    assert capsys.readouterr().out == "all: 20/20 samples, 733 tokens/s, 2:00 elapsed, 0:00 left\n"


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress({"t": Amount(1, 10)}, {"t": Amount(0, 0)}, visible=False) as shown:
        now += 100
        shown.update("t", "t", {"t": Amount(1, 10)})
        shown.finish({"t": Amount(1, 10)})
    assert capsys.readouterr().out == ""


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.9, 61, 3600, 90_061)] == ["0:00", "0:59", "1:01", "1:00:00", "25:01:01"]
