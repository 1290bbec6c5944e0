#!/usr/bin/env python
"""A length-generalisation study: variants of dropout and weight decay, several seeds, accuracy against length.

    tools/length_study.py conf/study_quick.yaml --output runs/study_quick [--jobs 2] [key=value ...]
    tools/length_study.py CONF --output DIR --worker      # one more worker (a task of a Slurm array)
    tools/length_study.py CONF --output DIR --report      # the report of what is finished

Stopped at any time, the same command goes on. key=value wins over the file: seeds=[0] phase2.train_iters=200
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from megatron_lengthgen import errors


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conf", help="YAML of the study")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="wins over the file")
    parser.add_argument("--output", required=True, metavar="DIR", help="results; an existing study is continued")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.add_argument("--worker", action="store_true", help="do cells in this process, show nothing, make no report")
    parser.add_argument("--report", action="store_true", help="make the report of the finished cells, and exit")
    return parser.parse_intermixed_args()


def main() -> None:
    options = _arguments()
    warnings.filterwarnings("ignore")
    if options.jobs < 1:
        raise errors.UserError(f"--jobs must be positive, got {options.jobs}")
    from megatron_lengthgen.study import config, work

    study, out = config.load(options.conf, options.overrides), Path(options.output)
    _same_study(study, out)
    if options.worker:
        work.work(study, out)
        return
    if not options.report:
        _run_workers(study, out, options)
    _report(study, out)


def _same_study(study: Any, out: Path) -> None:
    """A directory belongs to one study: cells of two would be mixed otherwise."""
    import dataclasses
    import json

    from megatron_lengthgen.files import write_json

    path = out / "study.json"
    mine = json.loads(json.dumps(dataclasses.asdict(study)))
    # More seeds, variants or lengths are added to a study; what finished cells rest on may not change.
    fixed = [name for name in mine if name not in ("seeds", "variants")]
    if path.is_file():
        stored = json.loads(path.read_text())
        for name in fixed:
            if stored[name] != mine[name]:
                raise errors.UserError(
                    f"{out} holds a study with {name} {stored[name]}, not {mine[name]}: choose another --output"
                )
        for variant, settings in mine["variants"].items():
            if stored["variants"].get(variant, settings) != settings:
                raise errors.UserError(
                    f"{out} holds variant {variant} with {stored['variants'][variant]}, not {settings}: give it "
                    "another name, or choose another --output"
                )
        mine["variants"] = {**stored["variants"], **mine["variants"]}
        mine["seeds"] = sorted({*stored["seeds"], *mine["seeds"]})
        if mine == stored:
            return
    write_json(path, mine)


def _run_workers(study: Any, out: Path, options: argparse.Namespace) -> None:
    from megatron_lengthgen.study import work

    print(f"results: {out}", flush=True)
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, options.conf, *options.overrides, "--output", str(out), "--worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    workers = []
    for number in range(min(options.jobs, len(work.units(study)))):
        with (logs / f"worker{number}.log").open("w") as log:
            workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        failed = _follow(study, out, workers)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
    for number in failed:
        lines = (logs / f"worker{number}.log").read_text().strip().splitlines() or ["no output"]
        raise errors.UserError(
            f"worker {number} stopped ({lines[-1].removeprefix('error: ')}): see {logs / f'worker{number}.log'}; "
            "the same command goes on"
        )


def _follow(study: Any, out: Path, workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Show progress until no worker is left, or one has failed; returns the numbers of those that have."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from megatron_lengthgen.study import work

    everything = work.units(study)
    total = sum(study.steps(1 if isinstance(unit, int) else 2) for unit in everything)
    began, first = time.monotonic(), None
    console = Console()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)
        shown = 0
        while True:
            alive = [worker for worker in workers if worker.poll() is None]
            steps = sum(work.finished_steps(study, out, unit) for unit in everything)
            cells = sum(work.is_finished(study, out, unit) for unit in everything)
            first = steps if first is None else first
            elapsed = time.monotonic() - began
            left = "?" if steps == first else _clock((total - steps) * elapsed / (steps - first))
            text = f"{cells}/{len(everything)} runs, {steps:,}/{total:,} steps, about {left} left"
            bar.update(task, completed=steps, description=text)
            if not console.is_terminal and cells > shown:
                shown = cells
                print(text, flush=True)
            failed = [number for number, worker in enumerate(workers) if worker.returncode]
            if failed or not alive:
                return failed
            time.sleep(2)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def _report(study: Any, out: Path) -> None:
    from megatron_lengthgen.study import work
    from megatron_lengthgen.study.report import write_report

    cells = work.results(study, out)
    if not cells:
        raise errors.UserError(f"no cell of the study in {out} is finished yet: run it without --report first")
    command = shlex.join(["tools/length_study.py", *sys.argv[1:]])
    expected = [(cell.variant, cell.seed) for cell in study.cells]
    write_report(cells, out / "report", command=command, expected=expected)
    print((out / "report" / "report.md").read_text())
    print(f"report: {out / 'report'}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
