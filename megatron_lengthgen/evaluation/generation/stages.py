"""What passes between the stages of a pipeline in generation: hidden states onwards, next tokens back to all."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Stages"]


class Stages:
    """This rank's place in its pipeline.

    Sends do not wait for the receiver, so that a stage reads the next chunk of a prompt while the one behind it reads
    this one. One send is in flight at most, and its hidden states are all that a stage keeps for it.

    Args:
        model: this rank's ``GPTModel``.
    """

    def __init__(self, model: Any):
        self._group = model.pg_collection.pp
        self._rank = self._group.rank()
        self._width = model.config.hidden_size
        self._dtype = torch.float32 if model.config.fp32_residual_connection else model.config.params_dtype
        self._sending: Any = None
        self.is_first = self._rank == 0
        self.is_last = self._rank == self._group.size() - 1

    def receive(self, length: int, rows: int, device: torch.device) -> Tensor:
        """Hidden states [length, rows, hidden_size] from the stage before."""
        hidden = torch.empty(length, rows, self._width, dtype=self._dtype, device=device)
        torch.distributed.recv(hidden, group=self._group, group_src=self._rank - 1)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Hand hidden states to the stage behind."""
        self._finish_sending()
        hidden = hidden.contiguous()
        # The tensor must live until it has been sent.
        self._sending = torch.distributed.isend(hidden, group=self._group, group_dst=self._rank + 1), hidden

    def share(self, tokens: Tensor) -> Tensor:
        """The last stage's tokens on all stages; the others give a tensor to be filled."""
        self._finish_sending()
        if self._group.size() > 1:
            torch.distributed.broadcast(tokens, group=self._group, group_src=self._group.size() - 1)
        return tokens

    def _finish_sending(self) -> None:
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None
