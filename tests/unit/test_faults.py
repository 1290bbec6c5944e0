"""Which errors mean that another rank is gone, however deep they are."""

import socket

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lengthgen import errors
from megatron_lengthgen.training.faults import RESTART, lost_contact

# As gloo and NCCL have said it, the paths shortened.
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.3]:47182"
TIMED_OUT = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 12000ms for recv"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error, NCCL version 2.27"


@pytest.mark.parametrize("text", [CLOSED, TIMED_OUT, NCCL])
def test_a_peer_that_is_gone_is_told_with_the_way_on(text: str) -> None:
    lost = lost_contact(RuntimeError(text), 3, "runs/a")
    assert str(lost).startswith(f"rank 3 on host {socket.gethostname()} lost contact with another rank (")
    assert str(lost).endswith("the same command goes on from the last checkpoint in runs/a")
    assert lost is not None and lost.exit_status == RESTART


def test_it_is_found_inside_what_a_save_raises() -> None:
    outer = CheckpointException("all-gather", {2: (RuntimeError(CLOSED), None)})
    assert "Connection closed by peer" in str(lost_contact(outer, 0, None))
    chained = OSError("cannot write")
    chained.__cause__ = torch.distributed.DistNetworkError("failed to recv, got 0 bytes")
    assert "got 0 bytes" in str(lost_contact(chained, 0, None))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory"),
        OSError(28, "No space left on device"),
        CheckpointException("write", {0: (OSError(28, "No space left on device"), None)}),
        ValueError(CLOSED[:20]),
    ],
)
def test_other_errors_are_not_the_networks(error: BaseException) -> None:
    assert lost_contact(error, 0, "runs/a") is None


def test_its_exit_status_is_not_that_of_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise lost_contact(RuntimeError(CLOSED), 1, None) or AssertionError

    def refuse() -> None:
        raise errors.UserError("no")

    assert (errors.run(fail), errors.run(refuse)) == (RESTART, 2)
    assert "lost contact" in capsys.readouterr().err
