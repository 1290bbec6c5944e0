#!/usr/bin/env python
"""Continual pretraining on Megatron's own engine.

torchrun --nproc-per-node N tools/continual_pretrain.py CONF [key=value ...]
python tools/continual_pretrain.py CONF [key=value ...]
python tools/continual_pretrain.py CONF [key=value ...] --dry-run
python tools/continual_pretrain.py CONF [key=value ...] --plan --nodes 8 --gpus-per-node 8

tools/launch has scripts for Slurm, several nodes without it, and NeMo-Run.
"""

import argparse
import sys
import warnings
from typing import Any

from megatron_lengthgen import errors


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continual pretraining on Megatron's own engine.")
    parser.add_argument("conf", help="YAML with Megatron's argument names and a lengthgen section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="wins over the file, e.g. lengthgen.p=0.2")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, the parameter count and the layer table, and exit",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="check the layout, show memory, tokens, operations and checkpoints on a number of GPUs, and exit",
    )
    where = parser.add_argument_group("with --plan")
    where.add_argument("--world-size", type=int, help="GPUs in all; default: those of one node")
    where.add_argument("--nodes", type=int, help="nodes; default: as many as --world-size fills")
    where.add_argument("--gpus-per-node", type=int, default=8, help="default: %(default)s")
    where.add_argument("--gpu-memory", type=float, metavar="GB", help="refuse a run that needs more")
    return parser.parse_intermixed_args()


def _cluster(options: argparse.Namespace) -> Any:
    from megatron_lengthgen.training.plan import Cluster

    per_node = options.gpus_per_node
    if options.world_size is None:
        nodes = 1 if options.nodes is None else options.nodes
    elif options.nodes is not None:
        raise errors.UserError("--world-size and --nodes say the same thing twice: give one of them")
    elif options.world_size <= per_node:
        nodes, per_node = 1, options.world_size
    elif options.world_size % per_node:
        raise errors.UserError(
            f"--world-size {options.world_size} is no multiple of --gpus-per-node {per_node}: change one of them"
        )
    else:
        nodes = options.world_size // per_node
    return Cluster(nodes, per_node, options.gpu_memory and options.gpu_memory * 1e9)


def main() -> None:
    options = _arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from megatron_lengthgen.training import config

    run = config.load(options.conf, options.overrides)
    from megatron_lengthgen.training.run import dry_run, train

    if options.plan:
        from megatron_lengthgen.training.plan import plan

        plan(run, _cluster(options))
    elif options.dry_run:
        dry_run(run)
    else:
        train(run)


if __name__ == "__main__":
    sys.exit(errors.run(main))
