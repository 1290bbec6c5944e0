"""The loss in blocks of tokens against Megatron's own and PyTorch's, on one rank and over a split vocabulary."""

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("s", "b", "v"), [(1, 1, 7), (64, 1, 33), (65, 2, 50), (150, 3, 128)])
def test_equals_megatrons_and_pytorchs(megatron_single, dtype: torch.dtype, s: int, b: int, v: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    from megatron_lengthgen.training.loss import vocab_parallel_cross_entropy

    torch.manual_seed(s)
    logits = (torch.randn(s, b, v) * 5).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (s, b))
    weights = torch.rand(s, b)
    group = parallel_state.get_tensor_model_parallel_group()
    ours = vocab_parallel_cross_entropy(logits, labels, group)
    (our_gradient,) = torch.autograd.grad((ours * weights).sum(), logits)
    pytorchs = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(s, b)
    # Megatron overwrites float32 logits, which ours leave alone.
    megatrons = tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), labels, tp_group=group)
    (megatrons_gradient,) = torch.autograd.grad((megatrons * weights).sum(), logits)
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, megatrons, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, pytorchs, rtol=1e-6, atol=1e-6)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(our_gradient, megatrons_gradient, rtol=tolerance, atol=1e-6)


def test_large_logits_do_not_overflow(megatron_single) -> None:
    from megatron.core import parallel_state

    from megatron_lengthgen.training.loss import vocab_parallel_cross_entropy

    logits = torch.tensor([[[3e4, -3e4, 0.0]]], requires_grad=True)
    group = parallel_state.get_tensor_model_parallel_group()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]), group)
    assert loss.item() == 6e4
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.tolist() == [[[1.0, -1.0, 0.0]]]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0, None])
def test_tokens_that_do_not_count_cost_no_logits(megatron_single, share: float | None) -> None:
    """Losses and gradients are those of all logits and a mask afterwards."""
    from megatron_lengthgen.training.loss import language_model_loss

    torch.manual_seed(0)
    s, b, h, v = 37, 3, 8, 50
    weight = torch.randn(v, h, requires_grad=True)
    hidden = torch.randn(s, b, h, requires_grad=True)
    labels = torch.randint(0, v, (b, s))
    mask = None if share is None else (torch.rand(b, s) < share).float() * torch.rand(b, s)
    factors = torch.ones(b, s) if mask is None else mask
    seen = []

    def output_layer(states: torch.Tensor, weight: torch.Tensor, runtime_gather_output: bool | None):
        seen.append(states.numel() // h)
        return states @ weight.t(), None

    ours = language_model_loss(
        hidden_states=hidden,
        output_layer=output_layer,
        output_weight=weight,
        labels=labels,
        loss_mask=mask,
        scale_logits=lambda logits: logits,
        runtime_gather_output=None,
    )
    our_gradients = torch.autograd.grad((ours * factors).sum(), [hidden, weight])
    logits = (hidden @ weight.t()).transpose(0, 1)
    reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)
    gradients = torch.autograd.grad((reference * factors).sum(), [hidden, weight])
    assert seen == [int((factors != 0).sum())]
    assert ours.shape == (b, s)
    torch.testing.assert_close(ours, reference * (factors != 0), rtol=1e-5, atol=1e-5)
    for found, wanted in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
