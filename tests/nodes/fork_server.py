"""Starts a run's ranks on their nodes by forking, since importing torch and Megatron takes longer than a small run.

Reads commands from stdin, a line of JSON each, and answers with one: ``{"start": {...}}`` with the ranks' process
numbers, ``{"wait": numbers, "seconds": n}`` with their exit statuses (None: still running; negative: killed by that
signal).
"""

import gc
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from megatron_lengthgen import backends, errors

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what is imported may print
backends.prepare()

import megatron.training.training  # noqa: E402, F401

from megatron_lengthgen.training import config, run  # noqa: E402


def _short_timeout(seconds: float) -> None:
    """Megatron counts in whole minutes."""
    parse = config.parse

    def parse_with_timeout(*arguments: Any) -> Any:
        args = parse(*arguments)
        args.distributed_timeout_minutes = seconds / 60
        return args

    config.parse = parse_with_timeout


def _rank(rank: int, job: dict[str, Any]) -> None:
    """Be one rank; a node is a rank's namespace and process group."""
    os.setsid()
    log = os.open(os.path.join(job["logs"], f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    namespace = job["namespaces"][rank]
    if namespace is not None:
        file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        os.setns(file, os.CLONE_NEWNET)
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname(f"node{rank}")
    environment = {"RANK": rank, "WORLD_SIZE": len(job["namespaces"]), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in {**environment, **job["environment"]}.items()})
    if job.get("timeout"):
        _short_timeout(job["timeout"])
    overrides = [*job["overrides"], *job["own"].get(str(rank), [])]
    sys.exit(errors.run(lambda: run.train(config.load(job["conf"], overrides))))


def _start(job: dict[str, Any]) -> list[int]:
    processes = []
    for rank in range(len(job["namespaces"])):
        process = os.fork()
        if process == 0:
            _rank(rank, job)
        processes.append(process)
    return processes


def _wait(processes: list[int], statuses: dict[int, int], seconds: float) -> list[int | None]:
    end = time.monotonic() + seconds
    while True:
        for process in [process for process in processes if process not in statuses]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                statuses[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end or all(process in statuses for process in processes):
            return [statuses.get(process) for process in processes]
        time.sleep(0.02)


def main() -> None:
    started: set[int] = set()
    statuses: dict[int, int] = {}
    config.parse(config.load(sys.argv[1]))  # imports a tokenizer, and all of transformers with it
    gc.freeze()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            answer: Any = _start(command["start"])
            started.update(answer)
        else:
            answer = _wait(command["wait"], statuses, command["seconds"])
        print(json.dumps(answer), file=answers, flush=True)
    for process in started - statuses.keys():
        os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
