"""Rotation by a table against Megatron's own."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_lengthgen.attention.rotary import Rotary, rotate


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_rotates_as_megatron_does(interleaved: bool, percent: float, dtype: torch.dtype, bound: float) -> None:
    length, rows, heads, width, scale = 50, 2, 3, 16, 1.3
    embedding = RotaryEmbedding(width, percent, rotary_interleaved=interleaved, use_cpu_initialization=True)
    angles = embedding(length)
    x = torch.randn(7, rows, heads, width).to(dtype)
    positions = torch.stack([torch.arange(7) + 40, torch.arange(7) + 3])
    expected = _apply_rotary_pos_emb_bshd(x, angles[positions.t(), 0], interleaved, mscale=scale)
    table = Rotary.table(angles[:, 0, 0], interleaved=interleaved, scale=scale, dtype=dtype)
    found = rotate(x.permute(1, 2, 0, 3), table.at(positions)).permute(2, 0, 1, 3)
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    # What is not rotated is kept, and the positions matter.
    assert torch.equal(found[..., int(width * percent) :], x[..., int(width * percent) :])
    assert (rotate(x.permute(1, 2, 0, 3), table.at(positions + 1)).permute(2, 0, 1, 3) - found).abs().max() > 0.05
