"""Run under torchrun on two ranks: the masks that sites draw from Megatron's own streams when nobody binds them.

torchrun --nproc-per-node 2 bare_streams.py OUT

Writes OUT, JSON: case -> {"equal": {site: bool}, "gradients": [one list per rank]}. A case is a block (``gpt``,
``hybrid``, ``stock_hybrid``), with (``_sp``) or without sequence parallelism, and with (``_recompute``) or without full
recompute. ``equal`` tells whether both ranks drew the same mask. A case starts from the same seeds and weights as any
other of its block.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_lengthgen import backends

backends.prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402

from megatron_lengthgen.regularization import Regularization  # noqa: E402
from megatron_lengthgen.specs import gpt, hybrid, site  # noqa: E402

_TOKENS, _BATCH, _HIDDEN = 16, 2, 32


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    results = {}
    for block in ("gpt", "hybrid", "stock_hybrid"):
        for sequence_parallel in (False, True):
            for recompute in (False, True):
                name = block + "_sp" * sequence_parallel + "_recompute" * recompute
                results[name] = _case(block, sequence_parallel, recompute)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


def _case(block: str, sequence_parallel: bool, recompute: bool) -> dict[str, Any]:
    config = TransformerConfig(
        num_layers=2 if block == "gpt" else 4,
        hidden_size=_HIDDEN,
        ffn_hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    model = _build(block, config)
    masks: dict[str, list[torch.Tensor]] = {}
    call = site.SiteDropout.__call__

    def recorded(self: site.SiteDropout, x: torch.Tensor, *args: Any) -> torch.Tensor:
        y = call(self, x, *args)
        masks.setdefault(self.site, []).append((y == 0).detach())
        return y

    x = torch.randn(_TOKENS, _BATCH, _HIDDEN, generator=torch.Generator().manual_seed(3))
    if sequence_parallel:
        x = x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()
    x.requires_grad_()
    with mock.patch.object(site.SiteDropout, "__call__", recorded):
        output = model(hidden_states=x, attention_mask=None)
        drawn = {name: torch.stack(drawn) for name, drawn in masks.items()}
        output.square().sum().backward()
    gradients = [p.grad.double().norm().item() for p in model.parameters()] + [x.grad.double().norm().item()]
    return {"equal": {name: _equal_on_all_ranks(mask) for name, mask in drawn.items()}, "gradients": _all(gradients)}


def _build(block: str, config: TransformerConfig) -> torch.nn.Module:
    sites = ("attention", "mlp", "output", "linear_proj", "linear_fc2")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if block == "gpt":
        return TransformerBlock(config, gpt.block_spec(config, Regularization("pre_linear", p=0.3, sites=sites)))
    sites = ("attention", "mlp", "linear_proj")
    if block == "hybrid":
        sites += ("output",)
    spec = hybrid.stack_spec("local", Regularization("pre_linear", p=0.3, sites=sites))
    arguments = {"layer_type_list": list("*-*-"), "pg_collection": groups}
    if block == "stock_hybrid":
        spec.module = HybridStack
        spec.submodules = HybridStackSubmodules(
            **{field.name: getattr(spec.submodules, field.name) for field in fields(HybridStackSubmodules)}
        )
        arguments["post_layer_norm"] = False  # Transformer Engine's, whatever the spec says
    return build_module(spec, config, **arguments)


def _equal_on_all_ranks(mask: torch.Tensor) -> bool:
    return len({tuple(mask) for mask in _all(mask.flatten().tolist())}) == 1


def _all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main()
