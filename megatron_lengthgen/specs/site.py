"""One place in a model where dropout acts: what it does to the activations there."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lengthgen.dropout.functional import pre_linear_dropout, vpad
from megatron_lengthgen.dropout.masks import MaskCoordinates, check_probability
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import step_key
from megatron_lengthgen.specs.statistics import batch_statistics, norm_statistics, token_group
from megatron_lengthgen.specs.streams import Place, stream

__all__ = [
    "AfterNorm",
    "BeforeExperts",
    "BeforeLinear",
    "Extent",
    "Hook",
    "SiteDropout",
    "resolve_probability",
    "sites",
]

_FEATURE_SITES = ("linear_proj", "linear_fc2", "out_proj")


def resolve_probability(p: float | None, config: Any) -> float:
    """The drop probability that a spec gives a model: ``p``, or ``config.hidden_dropout`` where ``p`` is None."""
    try:
        return check_probability(config.hidden_dropout if p is None else p)
    except ValueError as error:
        raise UserError(f"{error} (from hidden_dropout)" if p is None else str(error)) from None


class Extent(NamedTuple):
    """Which part of a microbatch's sequence and of the channels this rank holds, see :mod:`.binding`.

    Attributes:
        token_rank, token_parts: The sequence is split over tensor-parallel ranks (sequence parallelism).
        context_rank, context_parts: And before that over context-parallel ranks, two chunks each.
        channel_rank: Channels are split over tensor-parallel ranks, and this is the rank; 0 where they are not.
    """

    token_rank: int = 0
    token_parts: int = 1
    context_rank: int = 0
    context_parts: int = 1
    channel_rank: int = 0

    def positions(self, rows: int) -> tuple[tuple[int, int], ...]:
        """``(first, count)`` runs of global sequence positions of this rank's ``rows`` rows.

        Source: ``megatron/core/utils.py::get_batch_on_this_cp_rank`` (rank r of C holds chunks r and 2C - 1 - r).
        """
        start = self.token_rank * rows
        if self.context_parts == 1:
            return ((start, rows),)
        local = rows * self.token_parts
        if local % 2:
            raise UserError(
                f"context parallelism splits a sequence in two chunks a rank, and this rank holds {local} tokens: make "
                f"seq_length divisible by {2 * self.context_parts}"
            )
        chunk = local // 2
        runs = []
        for first, number in ((0, self.context_rank), (chunk, 2 * self.context_parts - 1 - self.context_rank)):
            low, high = max(start, first), min(start + rows, first + chunk)
            if low < high:
                runs.append((number * chunk + low - first, high - low))
        return tuple(runs)


class SiteDropout:
    """Dropout on the activations of one site of a built model. Has no parameters, buffers or state.

    Attributes:
        site: Its name, of :data:`megatron_lengthgen.regularization.SITES`.
        number: Layer and site in one 32-bit number, once the site is bound (:mod:`.binding`): masks are then computed
            from it and the step's key, and do not depend on the parallel layout. Before, or with None, masks are drawn
            from Megatron's random streams.
        extent: What this rank holds, once bound.
    """

    def __init__(self, site: str, regularization: Regularization, p: float, config: Any) -> None:
        self.site = site
        self.place: Place = "block"
        if site == "output":
            self.place = "after_block"
        elif site in _FEATURE_SITES:
            self.place = "features"
        self.regularization = regularization
        self.p = p
        # Not the config itself: a deepcopy of the model would copy it once per site.
        self.sequence_parallel = bool(config.sequence_parallel)
        self.context_parallel = config.context_parallel_size > 1
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        self.number: int | None = None
        self.extent = Extent()

    def __call__(self, x: Tensor, norm: torch.nn.Module | None = None) -> Tensor:
        """Dropout on ``x``, ``[s, b, h]``; ``norm`` is the module that it comes from, if any."""
        p, mask = self.draw(x.shape)
        if p == 0.0:
            return x
        if self.regularization.placement == "pre_linear":
            with self._stream(mask):
                return pre_linear_dropout(x, p, mask=mask)
        mean, variance = self._statistics(x, norm)
        with self._stream(mask):
            return vpad(x, p, mean, variance, fill=self.regularization.fill, mask=mask)

    def draw(self, shape: torch.Size) -> tuple[float, MaskCoordinates | None]:
        """p in this training step, and where activations of ``shape`` ``[s, b, h]`` lie.

        The coordinates are None for a site that is not bound, which draws from Megatron's random streams.
        """
        key = None
        if self.number is not None:
            key = step_key.read()
            if key is None:
                raise UserError(
                    f"dropout site {self.site!r} was reached without a forward of the whole model, which sets the key "
                    "of its masks: switch off schedules that call layers one by one (overlap_moe_expert_parallel_comm)"
                )
        elif self.regularization.has_schedule:
            raise UserError(
                "start_step and ramp_steps need to know the training step: use this package's trainer, or "
                "specs.binding.bind on the built model"
            )
        if key is None:
            return self.p, None
        p = self.p * self.regularization.ramp(key.step)
        return p, self._coordinates(shape, key) if p > 0.0 else None

    def token_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold other tokens of the same microbatch, with the same channels; None where there are none."""
        split = self.sequence_parallel and self.place != "features"
        return token_group(sequence_parallel=split, context_parallel=self.context_parallel)

    def _coordinates(self, shape: torch.Size, key: step_key.StepKey) -> MaskCoordinates:
        assert self.number is not None
        s, b, h = shape
        return MaskCoordinates(
            key=key.key,
            stream=self.number,
            positions=self.extent.positions(s),
            sample=key.microbatch * b,
            channel=self.extent.channel_rank * h,
        )

    def _statistics(self, x: Tensor, norm: torch.nn.Module | None) -> tuple[Tensor, Tensor]:
        if self.regularization.statistics == "norm" and norm is not None:
            return norm_statistics(norm, zero_centered=self.zero_centered)
        return batch_statistics(x, self.token_group())

    def _stream(self, mask: MaskCoordinates | None) -> AbstractContextManager[None]:
        """A computed mask draws from no stream."""
        return stream(self.place, sequence_parallel=self.sequence_parallel) if mask is None else nullcontext()

    def __repr__(self) -> str:
        return f"SiteDropout({self.site}, p={self.p}, {self.regularization})"


class Hook:
    """A hook, and not a module around another: module names, parameter names, checkpoint keys and classes (which
    Megatron and its converters look at) stay the stock model's."""

    def __init__(self, dropout: SiteDropout) -> None:
        self.dropout = dropout


class AfterNorm(Hook):
    """Forward hook of a norm: in training its output goes through dropout."""

    def __call__(self, norm: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not norm.training:
            return None
        if isinstance(output, tuple):  # (normalised, residual), see TransformerLayer._forward_attention
            return self.dropout(output[0], norm), *output[1:]
        return self.dropout(output, norm)


class BeforeLinear(Hook):
    """Forward pre-hook of a linear: in training its input goes through dropout."""

    def __call__(self, linear: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        return (self.dropout(args[0]), *args[1:]) if linear.training else None


class BeforeExperts(Hook):
    """Forward pre-hook of an ``MoELayer``: in training the experts' input goes through dropout, the router's does not.

    The layer hands one tensor to both; :meth:`for_router` is the pre-hook that gives the router the one from before.
    """

    def __init__(self, dropout: SiteDropout) -> None:
        super().__init__(dropout)
        self._undropped: Tensor | None = None

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        self._undropped = args[0]
        return (self.dropout(args[0]), *args[1:]) if layer.training else None

    def for_router(self, router: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """Forward pre-hook of the layer's router."""
        undropped, self._undropped = self._undropped, None
        return None if undropped is None else (undropped, *args[1:])


def sites(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, SiteDropout]]:
    """Every dropout site of a built model: name of the hooked module, the module, the dropout."""
    for name, module in model.named_modules():
        replaced = module.__dict__.get("forward")  # by .fused_norm
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values(), replaced):
            if isinstance(hook, Hook):
                yield name, module, hook.dropout
