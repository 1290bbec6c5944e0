"""Run under torchrun: train one configuration under several layouts, one after the other, in the same processes.

torchrun --nproc-per-node N train_layouts.py CONF OUT NAME[:override,override...] ...
"""

import sys
from pathlib import Path

from megatron_lengthgen import backends

backends.prepare()

from megatron_lengthgen.training import config  # noqa: E402
from megatron_lengthgen.training.run import train  # noqa: E402


def forget_run() -> None:
    """Bring Megatron's process-wide state back to where a fresh process has it, but for torch.distributed."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()


def main() -> None:
    conf, out, *layouts = sys.argv[1:]
    for layout in layouts:
        name, _, overrides = layout.partition(":")
        run = config.load(conf, [f"save={Path(out) / name}", *filter(None, overrides.split(","))])
        try:
            train(run)
        except SystemExit as stop:  # Megatron leaves so at exit_interval
            if stop.code:
                raise
        forget_run()


if __name__ == "__main__":
    main()
