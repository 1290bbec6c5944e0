"""Run under torchrun: train configurations under several layouts, one after the other, in the same processes.

torchrun --nproc-per-node N train_layouts.py CONF OUT NAME[:override,override...] ... [CONF NAME... ...]

The pseudo-override ``disturb=NAME`` breaks the code on purpose for one run, see ``DISTURBANCES``.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_lengthgen import backends

backends.prepare()

from megatron_lengthgen.models import build  # noqa: E402
from megatron_lengthgen.specs import binding, step_key  # noqa: E402
from megatron_lengthgen.specs.site import Extent  # noqa: E402
from megatron_lengthgen.training import config  # noqa: E402
from megatron_lengthgen.training.run import train  # noqa: E402


def _unbound() -> Any:
    """Sites are not told who they are, so masks come from Megatron's own streams."""
    return mock.patch.object(binding, "bind")


def _same_rank() -> Any:
    """Every tensor-parallel rank takes itself for the first one: equal masks for other tokens and channels."""
    return mock.patch.object(binding, "_extent", lambda dropout, state: Extent())


def _same_data() -> Any:
    """Every data-parallel rank takes itself for the first one: equal masks for other samples."""
    build = binding._Keys.__init__

    def build_wrong(self: Any, *args: Any) -> None:
        build(self, *args)
        self.data_rank = 0

    return mock.patch.object(binding._Keys, "__init__", build_wrong)


@contextlib.contextmanager
def _latest_key() -> Iterator[None]:
    """The key lies in a plain variable: a recompute reads that of the microbatch that came last."""
    latest: list[step_key.StepKey] = []
    with (
        mock.patch.object(step_key, "write", lambda key: latest.__setitem__(slice(None), [key])),
        mock.patch.object(step_key, "read", lambda: latest[0]),
        mock.patch.object(step_key, "clear", lambda: None),
    ):
        yield


def _other_streams() -> Any:
    """Megatron's random streams start elsewhere. Not a fault: bound sites must not notice."""
    from megatron.training import initialize

    seed = initialize._set_random_seed
    return mock.patch.object(
        initialize, "_set_random_seed", lambda value, *args, **more: seed(value + 1, *args, **more)
    )


DISTURBANCES: dict[str, Callable[[], Any]] = {
    "unbound": _unbound,
    "same_rank": _same_rank,
    "same_data": _same_data,
    "latest_key": _latest_key,
    "other_streams": _other_streams,
}


_COMMA = r",(?![^\[]*\])"  # not those of a list


def main() -> None:
    conf, out, *layouts = sys.argv[1:]
    for layout in layouts:
        if layout.endswith(".yaml"):
            conf = layout
        else:
            train_one(Path(conf), Path(out), layout)


def train_one(conf: Path, out: Path, layout: str) -> None:
    """One run: ``layout`` is its name and its overrides, as on the command line."""
    name, _, text = layout.partition(":")
    overrides = [f"save={out / name}", *filter(None, re.split(_COMMA, text))]
    disturbed = [item.removeprefix("disturb=") for item in overrides if item.startswith("disturb=")]
    run = config.load(conf, [item for item in overrides if not item.startswith("disturb=")])
    with contextlib.ExitStack() as stack:
        for disturbance in disturbed:
            stack.enter_context(DISTURBANCES[disturbance]())
        try:
            train(run)
        except SystemExit as stop:  # Megatron leaves so at exit_interval
            if stop.code:
                raise
    build.forget()


if __name__ == "__main__":
    main()
