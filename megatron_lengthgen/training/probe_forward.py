"""Losses of chosen sequences, longer than those trained on, through Megatron's own pipeline schedules.

A probe must not be felt by the training around it: no random number is drawn, nothing of a step is counted, and the
model is used as validation leaves it, without dropout.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lengthgen.training.loss import vocab_parallel_cross_entropy

__all__ = ["Measure", "ProbeSequence", "sum_over_samples"]

#: Positions whose logits exist at a time: at 16 times the training length all of them would not fit.
_ROWS = 2048


class ProbeSequence(NamedTuple):
    """One sequence, on the CPU.

    Attributes:
        tokens, labels: [s] ids.
        counted: [s], 1 where the loss counts, 0 elsewhere.
    """

    tokens: Tensor
    labels: Tensor
    counted: Tensor


#: From losses [s], counted [s] and positions [s] of a sample, and its number, to a tensor of one shape for all samples.
Measure = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def sum_over_samples(
    models: Sequence[torch.nn.Module],
    samples: Callable[[int], ProbeSequence],
    number: int,
    length: int,
    measure: Measure,
) -> Tensor | None:
    """Run ``number`` sequences forward and add up what ``measure`` makes of their losses; all ranks call it.

    Data-parallel ranks share the sequences out, context-parallel ranks share out each one. Attention is causal over the
    whole sequence, documents notwithstanding.

    Args:
        models: this rank's model chunks, in evaluation mode; call it under ``torch.no_grad``.
        samples: sequence ``i`` of length ``length``; asked on the first and the last pipeline stage only.
        number: of sequences.
        length: s, a multiple of the training length.
        measure: see :data:`Measure`. Under context parallelism it sees a part of each sample at a time.

    Returns:
        The sum, in float64, on all ranks of the last pipeline stage; None on the others.
    """
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    # Every rank does as many: experts may be spread over data-parallel ranks. Interleaved stages want full groups.
    group = _config(models).microbatch_group_size_per_vp_stage if len(models) > 1 else 1
    rounds = math.ceil(math.ceil(number / ranks) / group) * group
    mine = [round * ranks + rank for round in range(rounds)]

    def step(numbers: Iterator[int], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
        index = next(numbers)
        batch = _batch(samples, index, number, model)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **_processor(model))

        def loss(losses: Tensor, non_loss_data: bool) -> Tensor:
            counted, positions = batch["loss_mask"].view(-1), batch["position_ids"].view(-1)
            return measure(losses.view(-1).double(), counted.double(), positions, min(index, number - 1))

        return output, loss

    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(mine) for _ in models] if len(models) > 1 else iter(mine),
        model=list(models),
        num_microbatches=rounds,
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return None
    total = torch.stack(found).sum(0)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return total


def _config(models: Sequence[torch.nn.Module]) -> Any:
    from megatron.core.utils import get_model_config

    return get_model_config(models[0])


def _batch(samples: Callable[[int], ProbeSequence], index: int, number: int, model: torch.nn.Module) -> dict[str, Any]:
    """This rank's part of a sequence on its device, [1, s]; sequences beyond the last one count for nothing."""
    from megatron.core import mpu
    from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage", allow_none=True)):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
    sequence = samples(min(index, number - 1))
    counted = sequence.counted.float() * (index < number)
    batch = {
        "tokens": sequence.tokens,
        "labels": sequence.labels,
        "loss_mask": counted,
        "position_ids": torch.arange(len(counted)),
    }
    batch = {name: values[None].cuda(non_blocking=True) for name, values in batch.items()}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def _processor(model: torch.nn.Module) -> dict[str, Any]:
    """``GPTModel`` alone lets its logits be taken piece by piece."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model

    return {"output_processor": _losses} if isinstance(unwrap_model(model), GPTModel) else {}


def _losses(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels: Tensor,
    scale_logits: Callable[[Tensor], Tensor],
    runtime_gather_output: bool | None,
    **_: Any,
) -> Tensor:
    """Output processor of ``GPTModel.forward``, as :func:`.loss.language_model_loss`, ``_ROWS`` tokens at a time.

    Under sequence parallelism the output layer gathers a piece from every rank, so that its labels come from as many
    places.

    Returns:
        [b, s], float32.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = group.size() if output_layer.sequence_parallel else 1
    by_part = labels.view(len(labels), parts, -1)
    rows, pieces = max(_ROWS // parts, 1), []
    for begin in range(0, hidden_states.size(0), rows):
        hidden, wanted = hidden_states[begin : begin + rows], by_part[:, :, begin : begin + rows]
        logits, _bias = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
        losses = vocab_parallel_cross_entropy(scale_logits(logits), wanted.flatten(1).t().contiguous(), group)
        pieces.append(losses.t().reshape(wanted.shape))
    return torch.cat(pieces, -1).flatten(1)
