"""Linears without autograd's function: the same bits as Megatron's, which they are while gradients are asked for."""

from collections.abc import Callable

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lengthgen.specs import linear
from megatron_lengthgen.specs.local_parts import replace_local_parts
from megatron_lengthgen.specs.torch_norm import TorchNorm


def build(kind: type, dtype: torch.dtype, *, bias: bool, skip_bias_add: bool) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=4, use_cpu_initialization=True, params_dtype=dtype
    )
    kinds = {"init_method": torch.nn.init.normal_, "config": config, "bias": bias, "skip_bias_add": skip_bias_add}
    if issubclass(kind, tensor_parallel.RowParallelLinear):
        return kind(48, 80, input_is_parallel=True, **kinds)
    return kind(48, 80, gather_output=False, **kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "skip_bias_add"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("name", ["ColumnParallelLinear", "RowParallelLinear"])
def test_same_bits_as_megatrons(
    megatron_single: Callable[[int], None], name: str, bias: bool, skip_bias_add: bool, dtype: torch.dtype
) -> None:
    megatron_single(3)
    stock, ours = (
        build(getattr(module, name), dtype, bias=bias, skip_bias_add=skip_bias_add)
        for module in (tensor_parallel, linear)
    )
    if bias:
        torch.nn.init.normal_(stock.bias)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(7, 3, 48, dtype=dtype)
    with torch.no_grad():
        (expected, expected_bias), (found, found_bias) = stock(x), ours(x)
    assert torch.equal(found, expected)
    assert (found_bias is None) == (expected_bias is None)
    grads = []
    for module in (stock, ours):
        output, _ = module(x)
        output.float().square().sum().backward()
        grads.append(module.weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_only_a_function_that_multiplies_is_left_out(
    megatron_single: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron_single(3)
    calls: list[str] = []
    for kind in (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear):
        monkeypatch.setattr(kind, "_forward_impl", lambda self, input, weight, **kwargs: calls.append("stock"))
    for kind in (linear.ColumnParallelLinear, linear.RowParallelLinear):
        module = build(kind, torch.float32, bias=False, skip_bias_add=True)
        x = torch.randn(2, 1, 48)
        settings = dict(bias=None, sequence_parallel=False, gtp_remat_size=1)
        with torch.no_grad():
            module._forward_impl(x, module.weight, **settings)
            assert calls == []
            module._forward_impl(x, module.weight, **settings | dict(sequence_parallel=True))
            module._forward_impl(x, module.weight, **settings | dict(gtp_remat_size=2))
        module._forward_impl(x, module.weight, **settings)
        assert calls == ["stock"] * 3
        calls.clear()


@pytest.mark.parametrize("experts", [None, 4])
def test_local_parts_are_found_everywhere(experts: int | None) -> None:
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=True)
    replace_local_parts(spec)
    parts = spec.submodules
    attention = parts.self_attention.submodules
    assert parts.input_layernorm is parts.pre_mlp_layernorm is attention.q_layernorm is TorchNorm
    assert attention.linear_qkv is linear.ColumnParallelLinear and attention.linear_proj is linear.RowParallelLinear
    mlp = parts.mlp.keywords["submodules"]
    if experts:
        mlp = mlp.experts.keywords["submodules"]
    assert mlp.linear_fc1 is linear.ColumnParallelLinear and mlp.linear_fc2 is linear.RowParallelLinear
    stock = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    assert stock.input_layernorm is WrappedTorchNorm
    assert stock.self_attention.submodules.linear_qkv is tensor_parallel.ColumnParallelLinear
