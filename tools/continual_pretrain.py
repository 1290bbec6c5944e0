#!/usr/bin/env python
"""Continual pretraining on Megatron's own engine.

torchrun --nproc-per-node N tools/continual_pretrain.py CONF [key=value ...]
python tools/continual_pretrain.py CONF [key=value ...] --dry-run
"""

import argparse
import sys
import warnings

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
    return parser.parse_intermixed_args()


def main() -> None:
    options = _arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from megatron_lengthgen.training import config

    run = config.load(options.conf, options.overrides)
    from megatron_lengthgen.training.run import dry_run, train

    if options.dry_run:
        dry_run(run)
    else:
        train(run)


if __name__ == "__main__":
    sys.exit(errors.run(main))
