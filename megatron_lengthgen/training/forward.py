"""The forward step handed to ``megatron.training.pretrain``: one microbatch in, its loss out."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_lengthgen import backends
from megatron_lengthgen.training.loss import language_model_loss
from megatron_lengthgen.training.progress import TrainingProgress

__all__ = ["forward_step"]

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def _batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> dict[str, Any]:
    """This rank's share of the next microbatch: tokens [b, s] on the first pipeline stage, labels on the last."""
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_KEYS)
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        batch = next(data_iterator)
        for key in _KEYS:
            batch[key] = batch[key].cuda(non_blocking=True) if batch.get(key) is not None else None
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=args.mtp_num_layers is not None,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def _loss(loss_mask: torch.Tensor, progress: TrainingProgress, losses: torch.Tensor) -> Loss:
    """Sum the masked per-token losses [b, s]; Megatron divides by the token count and reduces over ranks."""
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([total.detach().view(1), num_tokens.view(1)])
    progress.observe(report)
    return total, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None,
    model: torch.nn.Module,
    progress: TrainingProgress,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """Megatron's forward-step protocol (``megatron/core/pipeline_parallel/schedules.py::forward_step``).

    Args:
        data_iterator: microbatches of ``GPTDataset``; ``None`` on ranks that load no data.
        model: this rank's model chunk.
        progress: follows the microbatches.
    """
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args

    progress.microbatch()
    vp_stage = get_attr_wrapped_model(model, "vp_stage", allow_none=True)
    batch = _batch(data_iterator, vp_stage)
    # On a GPU Megatron's own loss, with the fusion that its arguments choose; HybridModel takes no other one.
    is_ours = backends.prepare() == "cpu" and not get_args().hybrid_layer_pattern
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],  # multi-token prediction masks its own losses by it
        **({"output_processor": language_model_loss} if is_ours else {}),
    )
    return output, partial(_loss, batch["loss_mask"], progress)
