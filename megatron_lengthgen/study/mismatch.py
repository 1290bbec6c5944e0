r"""How differently a linear that follows a norm is fed in training, with dropout, and in evaluation, without.

For a coordinate :math:`i` of a linear's inputs or of its outputs (the pre-activations), over all tokens of the data and
several draws of the masks,

.. math::

    \text{mean shift}_i = \frac{|\mathrm E_\text{train} z_i - \mathrm E_\text{eval} z_i|}{\sigma_\text{eval}(z_i)},
    \qquad
    \text{variance ratio}_i = \frac{\mathrm{Var}_\text{train}(z_i)}{\mathrm{Var}_\text{eval}(z_i)},

each averaged over the coordinates, with the extremes beside it. Coordinates that do not vary in evaluation are left
out, and so are rows that pad the vocabulary. Masks move a mean by chance as well: ``noise`` is the mean shift that
draws as different as these are from one another would show without any true one.

Measured in two ways. *One site at a time*: the only dropout is the one that acts last before the linear (``pre_linear``
and ``vpad``: between norm and linear; ``pre_norm``: on the residual branch that ends before the norm), and everything
earlier computes as in evaluation. *All at once*: the model as it trains.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lengthgen.dropout.moments import Moments, merge_moments, moments
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.specs import step_key
from megatron_lengthgen.specs.site import sites

__all__ = ["Coordinate", "Gap", "Row", "compare", "measure"]

#: Numbers of a tensor that are worked on at once.
_AT_ONCE = 1 << 22
_WORST = 3

Way = Literal["evaluation", "alone", "together"]
Part = Literal["inputs", "outputs"]


class Coordinate(NamedTuple):
    """One coordinate: its number, mean shift, variance ratio, and its mean and standard deviation in evaluation.

    Outputs that tensor-parallel ranks share are numbered rank after rank.
    """

    number: int
    shift: float
    ratio: float
    mean: float
    std: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """Mismatch of one tensor, summed up over its coordinates.

    Attributes:
        shift, max_shift: Mean shift in units of the evaluation's standard deviation: average and largest.
        noise: Average that chance alone would give.
        ratio, min_ratio, max_ratio: Variance ratio: average and extremes.
        constant: Coordinates left out because they do not vary in evaluation.
        worst_shift, worst_ratio: The coordinates that are farthest off, worst first.
    """

    shift: float
    max_shift: float
    noise: float
    ratio: float
    min_ratio: float
    max_ratio: float
    constant: int
    worst_shift: list[Coordinate]
    worst_ratio: list[Coordinate]


@dataclasses.dataclass(frozen=True)
class Row:
    """One linear.

    Attributes:
        linear: Its name in the model.
        alone: Mismatch of ``inputs`` and ``outputs`` with the last site alone; None where no dropout acts there.
        together: The same with all sites.
    """

    linear: str
    alone: dict[Part, Gap] | None
    together: dict[Part, Gap]


class _Normed(NamedTuple):
    """What the last norm did, and the residual branch that had ended before it."""

    norm: torch.nn.Module
    output: Tensor
    branch: "_Branch | None"


class _Branch(NamedTuple):
    layer: Any
    add: Callable[..., Callable[..., Tensor]]
    output: tuple[Tensor, Tensor | None]
    residual: Tensor

    def dropped(self) -> Tensor:
        """The residual stream after Megatron's own bias, dropout and addition in training mode."""
        add = self.add(True, self.layer.config.bias_dropout_fusion)
        return add(self.output, self.residual, self.layer.hidden_dropout)


class _Watch:
    """Follows forwards of a model through hooks, and collects moments.

    What a site does alone is computed aside, from the activations of a forward in evaluation mode: its mask is applied
    to the norm's output (or to the branch before the norm), the linear to that, and nothing of it enters the model.
    """

    def __init__(self, model: Any, *, draws: int, seed: int, drops_residual: bool) -> None:
        self.model, self.draws, self.seed, self.drops_residual = model, draws, seed, drops_residual
        self.found: dict[tuple[str, Part, Way, int], Moments] = {}
        self.split: set[str] = set()  # linears whose outputs are split over the tensor-parallel group
        self.step = self.draw = 0
        self.way: Way = "evaluation"
        self._dropouts = {module: dropout for _, module, dropout in sites(model)}
        self._normed: _Normed | None = None
        self._residual: Tensor | None = None
        self._branch: _Branch | None = None

    def __enter__(self) -> "_Watch":
        self._handles = list(self._hook())
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self) -> Iterator[Any]:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        block = self.model.decoder
        for norm in _children(block, ("final_layernorm", "final_norm")):
            yield norm.register_forward_hook(self._after_norm)
        for layer in block.layers:
            for norm in _children(layer, ("input_layernorm", "pre_mlp_layernorm", "norm")):
                yield norm.register_forward_hook(self._after_norm)
            for name, add in (("self_attention", "self_attn_bda"), ("mlp", "mlp_bda"), ("mixer", "mamba_bda")):
                for branch in _children(layer, (name,)):
                    yield branch.register_forward_hook(partial(self._after_branch, layer, getattr(layer, add)))
        for name, module in self.model.named_modules():
            if isinstance(module, ColumnParallelLinear):
                yield module.register_forward_hook(partial(self._after_linear, name), with_kwargs=True)

    def forward(self, tokens: Tensor, way: Way, draw: int = 0) -> None:
        """One forward of ``tokens`` ``[b, s]``: in evaluation mode, with all draws of each site alone; or all sites."""
        self.way, self.draw = way, draw
        self._normed = self._branch = None
        self.model.train(way == "together")
        self.model(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None)

    def _after_norm(self, norm: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._normed = _Normed(norm, output, self._branch)
        self._residual, self._branch = args[0], None

    def _after_branch(
        self, layer: torch.nn.Module, add: Any, branch: torch.nn.Module, args: Any, output: tuple[Tensor, Tensor | None]
    ) -> None:
        """A residual branch of ``layer`` has ended; ``add`` is what will join it to the residual stream."""
        if self.drops_residual and self.way == "evaluation":
            assert self._residual is not None
            # A copy: without gradients Megatron adds the residual in place.
            self._branch = _Branch(layer, add, (output[0].clone(), output[1]), self._residual)

    def _after_linear(
        self, name: str, linear: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: tuple[Tensor, Any]
    ) -> None:
        """A linear has run; it counts where its input is the last norm's output, the very tensor."""
        output = result[0]
        if self._normed is None or args[0] is not self._normed.output:
            return
        if output.shape[-1] != linear.output_size:
            self.split.add(name)
        rows = max(_AT_ONCE // max(output.shape[1] * output.shape[2], args[0].shape[1] * args[0].shape[2]), 1)
        for x, z in zip(args[0].split(rows), output.split(rows), strict=True):
            self._add(name, self.way, self.draw, x, z)
        if self.way == "evaluation":
            for draw in range(self.draws):
                dropped = self._dropped(self._normed, draw)
                for x in () if dropped is None else dropped.split(rows):
                    self._add(name, "alone", draw, x, linear.forward(x, *args[1:], **kwargs)[0])

    def _dropped(self, normed: _Normed, draw: int) -> Tensor | None:
        """The norm's output as the last site before its linear alone makes it, or None where there is no such site."""
        if dropout := self._dropouts.get(normed.norm):
            step = self.step + draw
            step_key.write(step_key.StepKey(step_key.derive(self.seed, step), step, 0))
            try:
                return dropout(normed.output, normed.norm)
            finally:
                step_key.clear()
        return None if normed.branch is None else normed.norm.forward(normed.branch.dropped())

    def _add(self, name: str, way: Way, draw: int, x: Tensor, z: Tensor) -> None:
        for part, tensor in (("inputs", x), ("outputs", z)):
            key: Any = (name, part, way, draw)
            # Two passes in float32 within a piece, float64 from piece to piece.
            piece = Moments(*(value.double() for value in moments(tensor)))
            self.found[key] = merge_moments([self.found[key], piece] if key in self.found else [piece])


def _children(module: torch.nn.Module, names: tuple[str, ...]) -> Iterator[torch.nn.Module]:
    """Those children of the given names that do something."""
    from megatron.core.transformer.identity_op import IdentityOp

    for name in names:
        child = getattr(module, name, None)
        if child is not None and not isinstance(child, IdentityOp):
            yield child


@torch.no_grad()
def measure(
    model: Any,
    args: Any,
    tokens: Tensor,
    *,
    draws: int = 4,
    progress: Callable[[int], None] = lambda sequences: None,
) -> list[Row]:
    """Mismatch at every linear that follows a norm of a layer, or the final one, in the order in which they run.

    Memory is that of a forward of one microbatch, and a few vectors for each linear and draw, however long the data.

    Args:
        model: ``GPTModel`` or ``HybridModel`` of the local backend with dropout, as
            :func:`megatron_lengthgen.checkpoint.load.load_model` builds it; this rank's part with TP > 1. It is left in
            evaluation mode.
        args: The arguments that it was built from. Each draw is a training step to them (``curr_iteration``).
        tokens: Token ids ``[sequences, length]``, the same on all ranks; they go through the model in microbatches of
            ``args.micro_batch_size``, which ``batch`` statistics depend on.
        draws: Mask draws per microbatch, at least 2.
        progress: Called after each microbatch with the sequences done.

    Returns:
        One row per linear, the same on all ranks. Linears within mixtures of experts are not among them: their inputs
        are not what a norm gave, but what the router chose of it.

    Raises:
        UserError: too few draws, or a model without dropout.
    """
    from megatron_lengthgen.models.build import regularization

    if draws < 2:
        raise UserError(f"chance is told from shift by comparing mask draws: take at least 2, not {draws}")
    drops_residual = regularization(args).placement == "pre_norm"
    if not drops_residual and not any(sites(model)):
        raise UserError("this model has no dropout at any site, so that training and evaluation are the same")
    torch.manual_seed(args.seed)  # for Megatron's own dropout; the masks of sites are computed
    device = next(model.parameters()).device
    with _Watch(model, draws=draws, seed=args.seed, drops_residual=drops_residual) as watch:
        try:
            for number, batch in enumerate(tokens.split(args.micro_batch_size)):
                batch = batch.to(device)
                watch.step = number * draws
                watch.forward(batch, "evaluation")
                for draw in range(draws):
                    args.curr_iteration = watch.step + draw
                    watch.forward(batch, "together", draw)
                progress(number * args.micro_batch_size + len(batch))
        finally:
            model.eval()
    found = {key: _whole(value) if _is_split(watch, key) else value for key, value in watch.found.items()}
    names = dict.fromkeys(name for name, *_ in found)
    return [_row(name, found, draws, args) for name in names]


def _is_split(watch: _Watch, key: tuple[str, Part, Way, int]) -> bool:
    return key[1] == "outputs" and key[0] in watch.split


def _whole(part: Moments) -> Moments:
    """Moments of all coordinates, of which each tensor-parallel rank holds some."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()

    def gather(mine: Tensor) -> Tensor:
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        return torch.cat(everyone)

    return Moments(part.tokens, gather(part.mean), gather(part.m2))


def _row(name: str, found: dict[tuple[str, Part, Way, int], Moments], draws: int, args: Any) -> Row:
    real = args.vocab_size if name == "output_layer" else None

    def gaps(way: Way) -> dict[Part, Gap]:
        return {
            part: compare(
                _first(found[name, part, "evaluation", 0], real if part == "outputs" else None),
                [_first(found[name, part, way, n], real if part == "outputs" else None) for n in range(draws)],
            )
            for part in ("inputs", "outputs")
        }

    alone = gaps("alone") if (name, "inputs", "alone", 0) in found else None
    return Row(name, alone, gaps("together"))


def _first(of: Moments, count: int | None) -> Moments:
    return Moments(of.tokens, of.mean[:count], of.m2[:count])


def compare(evaluation: Moments, draws: list[Moments]) -> Gap:
    """Mismatch of one tensor.

    Args:
        evaluation: Moments of each coordinate in evaluation.
        draws: The same of each draw of the masks, two or more, over the same tokens.
    """
    training = merge_moments(draws)
    means = torch.stack([draw.mean for draw in draws])
    # At a variance of 0, or of an underflow, neither quantity says anything.
    varies = evaluation.variance > torch.finfo(torch.float32).tiny
    variance = evaluation.variance[varies]
    if not len(variance):
        raise UserError("all coordinates are constant in evaluation: the data are too short, or the weights all zero")
    shift = (training.mean - evaluation.mean)[varies].abs() / variance.sqrt()
    ratio = training.variance[varies] / variance
    # Expectation of the absolute value of a normal variable: sqrt(2 / pi) times its standard deviation.
    chance = means.var(0)[varies] / len(draws) / variance
    numbers = varies.nonzero().flatten()

    def worst(badness: Tensor) -> list[Coordinate]:
        places = badness.topk(min(_WORST, len(badness))).indices
        columns = (shift, ratio, evaluation.mean[varies], variance.sqrt())
        return [Coordinate(int(numbers[place]), *(column[place].item() for column in columns)) for place in places]

    return Gap(
        shift=shift.mean().item(),
        max_shift=shift.max().item(),
        noise=math.sqrt(2 / math.pi * chance.mean().item()),
        ratio=ratio.mean().item(),
        min_ratio=ratio.min().item(),
        max_ratio=ratio.max().item(),
        constant=len(varies) - len(variance),
        worst_shift=worst(shift),
        worst_ratio=worst(ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log().abs()),
    )
