"""The gated norm as a part of Megatron's ``MambaMixer``: its gain is split over tensor-parallel ranks."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from megatron_lengthgen.ssm.gated_norm import GatedRMSNorm

__all__ = ["ShardedGatedRMSNorm"]


class ShardedGatedRMSNorm(GatedRMSNorm):
    """Stands where ``megatron.core.ssm.mamba_mixer.ExtendedRMSNorm`` does, which derives from ``mamba_ssm``'s norm."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """``weight``, split along axis 0 over ``tp_group`` (the mixer sets it; else the model's)."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tp_group = getattr(self, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
