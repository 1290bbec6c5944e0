#!/usr/bin/env python
"""Continual pretraining through NeMo-Run, on this machine or under Slurm.

python tools/launch/nemo.py CONF [key=value ...] --gpus 8
python tools/launch/nemo.py CONF [key=value ...] --account A --partition P --nodes 8 --gpus 8 [--container IMAGE]

Under Slurm, NeMo-Run starts torchrun on every node; its code is this folder, which the nodes must share.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megatron_lengthgen import errors

__all__ = ["executor", "task"]

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tools" / "continual_pretrain.py"


def task(conf: str, overrides: list[str]) -> Any:
    """``nemo_run.Script`` of a run."""
    import nemo_run

    return nemo_run.Script(path=str(TRAIN), entrypoint="python", args=[os.path.abspath(conf), *overrides])


def executor(options: argparse.Namespace) -> Any:
    """``nemo_run.LocalExecutor``, or with an account ``nemo_run.SlurmExecutor``."""
    import nemo_run

    environment = {"OMP_NUM_THREADS": "1"}
    if options.account is None:
        if options.nodes > 1:
            raise errors.UserError(f"{options.nodes} nodes need Slurm: give --account and --partition")
        return nemo_run.LocalExecutor(ntasks_per_node=options.gpus, launcher="torchrun", env_vars=environment)
    return nemo_run.SlurmExecutor(
        account=options.account,
        partition=options.partition,
        nodes=options.nodes,
        ntasks_per_node=options.gpus,
        gpus_per_node=options.gpus,
        time=options.time,
        container_image=options.container,
        launcher="torchrun",
        # SIGTERM ten minutes before the end: the run saves, torchrun gives it that long, and the job is requeued.
        env_vars={**environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"},
        retries=20,
        tunnel=nemo_run.LocalTunnel(job_dir=str(ROOT / "runs" / "nemo_run")),
        packager=nemo_run.Packager(),
        additional_parameters={"signal": "TERM@600", "requeue": True, "open_mode": "append"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Continual pretraining through NeMo-Run.")
    parser.add_argument("conf", help="as for tools/continual_pretrain.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--gpus", type=int, default=8, help="of a node; default: %(default)s")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--account", help="of Slurm; without: this machine")
    parser.add_argument("--partition")
    parser.add_argument("--time", default="24:00:00", help="default: %(default)s")
    parser.add_argument("--container", help="image with this package's dependencies")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    options = parser.parse_intermixed_args()
    try:
        import nemo_run
    except ImportError as error:
        raise errors.UserError(
            "nemo_run cannot be imported: pip install nemo-run, or use tools/launch/slurm.sbatch"
        ) from error
    with nemo_run.Experiment("lengthgen") as experiment:
        experiment.add(task(options.conf, options.overrides), executor=executor(options), name="pretrain")
        if options.dry_run:
            experiment.dryrun()
        else:
            experiment.run(detach=options.account is not None, tail_logs=options.account is None)


if __name__ == "__main__":
    sys.exit(errors.run(main))
