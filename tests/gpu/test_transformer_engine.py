"""Transformer Engine's norms with the kernel in place of their forward, against themselves and the plain path."""

from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
te = pytest.importorskip("transformer_engine.pytorch")

from megatron_lengthgen.regularization import Regularization  # noqa: E402
from megatron_lengthgen.specs import fused_norm, step_key  # noqa: E402
from megatron_lengthgen.specs.site import AfterNorm, SiteDropout  # noqa: E402

pytestmark = pytest.mark.usefixtures("megatron_single")


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(
    "choices", [{"placement": "pre_linear"}, {"statistics": "norm"}, {"statistics": "batch", "fill": "mean"}]
)
def test_output_and_gradients_are_those_of_the_plain_path(monkeypatch, normalization, zero_centred, choices):
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centred,
        sequence_parallel=False,
        context_parallel_size=1,
    )
    dropout = SiteDropout("mlp", Regularization(**choices, sites=("mlp",)), 0.3, config)
    dropout.number = 70
    norm_class = getattr(te, normalization)
    norm = norm_class(2048, eps=1e-5, zero_centered_gamma=zero_centred, params_dtype=torch.bfloat16, device="cuda")
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if zero_centred else 0.8, std=0.3)
    x = torch.randn(64, 2, 2048, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(64, 2, 2048, device="cuda").bfloat16()
    leaves = [x, *norm.parameters()]

    def step() -> list[torch.Tensor]:
        step_key.write(step_key.StepKey(1, 2, 3))
        try:
            y = norm(x)
        finally:
            step_key.clear()
        return [y, *torch.autograd.grad(y, leaves, dy)]

    hook = norm.register_forward_hook(AfterNorm(dropout))
    expected = step()
    hook.remove()
    monkeypatch.setenv(fused_norm.SWITCH, "fused")
    assert fused_norm.fuse(norm, dropout, config, 1e-5)
    found = step()
    assert torch.equal(found[0] == 0, expected[0] == 0)
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want.double()).norm() < 2**-7 * want.double().norm()
    # Evaluation is Transformer Engine's own.
    assert torch.equal(norm.eval()(x), norm_class.forward(norm, x))
