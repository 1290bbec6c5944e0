"""These tests need the real Transformer Engine, which few environments hold.

Where this interpreter has it they run like any others. Elsewhere one pytest in the interpreter that LENGTHGEN_TE_PYTHON
names, or in ``.venv-te`` (made by ``setup_env.sh`` beside this file), runs all that were chosen, and its reports count
here. Without either they are skipped, and the summary says so.
"""

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_REPORT_FILE = "LENGTHGEN_TE_REPORTS"
# The other pytest runs them in any case: where it lacks Transformer Engine after all, they fail.
_RUN_HERE = importlib.util.find_spec("transformer_engine") is not None or _REPORT_FILE in os.environ
_MISSING = "no Transformer Engine here: make .venv-te with 'bash tests/te/setup_env.sh WHEELS_DIR'"
_REPORTS = pytest.StashKey[dict[str, list[pytest.TestReport]]]()
_OUTPUT = pytest.StashKey[str]()


def _other_python() -> str | None:
    default = _ROOT / ".venv-te" / "bin" / "te-python"
    return os.environ.get("LENGTHGEN_TE_PYTHON") or (str(default) if default.is_file() else None)


def _are_ours(item: pytest.Item) -> bool:
    return _HERE in item.path.parents


@pytest.fixture(scope="module", autouse=True)
def modules_without_cuda() -> Iterator[None]:
    """Transformer Engine's modules can be built, though not run, on a CPU if they believe in CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _RUN_HERE and _other_python() is None:
        for item in filter(_are_ours, items):
            item.add_marker(pytest.mark.skip(reason=_MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if _MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests in tests/te skipped: {_MISSING}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the other pytest: hand over what happened."""
    if path := os.environ.get(_REPORT_FILE):
        with open(path, "a") as file:
            file.write(json.dumps(report._to_json(), default=str) + "\n")


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """In the first pytest: the other one's reports instead of a run."""
    if _RUN_HERE or not _are_ours(item) or _other_python() is None:
        return None
    stash = item.session.stash
    if _REPORTS not in stash:
        stash[_REPORTS], stash[_OUTPUT] = _run_elsewhere([one.nodeid for one in item.session.items if _are_ours(one)])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[_REPORTS].get(item.nodeid) or [_lost(item, stash[_OUTPUT])]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_elsewhere(nodes: list[str]) -> tuple[dict[str, list[pytest.TestReport]], str]:
    """Reports by test, and all that the other pytest printed."""
    reports: dict[str, list[pytest.TestReport]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports"
        path.touch()
        result = subprocess.run(
            [str(_other_python()), "-m", "pytest", "-p", "no:cacheprovider", *nodes],
            cwd=_ROOT,
            env={**os.environ, _REPORT_FILE: str(path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in path.read_text().splitlines():
            report = pytest.TestReport._from_json(json.loads(line))
            reports.setdefault(report.nodeid, []).append(report)
    return reports, result.stdout


def _lost(item: pytest.Item, output: str) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, {}, "failed", f"{_other_python()} did not report this test:\n{output}", "call"
    )
