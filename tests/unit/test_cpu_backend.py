"""Megatron-Core without CUDA: what is redirected, and what must not change."""

import subprocess
import sys

import pytest
import torch

from megatron_lengthgen.backends import cpu

pytestmark = pytest.mark.skipif(not cpu.is_installed(), reason="CUDA is present, the CPU backend is not installed")


def test_factories_and_moves_end_on_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.empty(3, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.to("cuda").device.type == "cpu"
    assert x.to(torch.float64).dtype is torch.float64
    assert x.to(device="cuda", dtype=torch.bfloat16).dtype is torch.bfloat16
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_tensor_types_are_named_as_megatron_compares_them() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype is torch.float16


def test_a_second_call_changes_nothing() -> None:
    before = torch.empty, torch.Tensor.to, torch.cuda.Stream
    cpu.install()
    assert (torch.empty, torch.Tensor.to, torch.cuda.Stream) == before


def test_forks_of_the_tracker_draw_from_their_own_streams(megatron_single) -> None:
    from megatron.core import tensor_parallel

    megatron_single(7)
    outside = torch.rand(4)
    megatron_single(7)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        first = torch.rand(4)
    assert torch.equal(torch.rand(4), outside)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        second = torch.rand(4)
    megatron_single(7)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, outside)


def test_recomputation_in_backward_replays_random_numbers_on_the_cpu(megatron_single) -> None:
    from megatron.core import tensor_parallel

    def noisy(x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((8,), 2.0, device="cuda")
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x * scale, 0.5)

    gradients = []
    for recompute in (False, True):
        megatron_single(3)
        x = torch.ones(8, requires_grad=True)
        y = tensor_parallel.checkpoint(noisy, False, x) if recompute else noisy(x)
        torch.rand(5)
        y.sum().backward()
        gradients.append((y.detach(), x.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_transformers_builds_the_same_model_beside_it(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(16)[None]
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_it_is_refused_where_cuda_is_present() -> None:
    code = (
        "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2\n"
        "empty = torch.empty\n"
        "from megatron_lengthgen.backends import cpu, prepare\n"
        "assert prepare() == 'cuda'\n"
        "try: cpu.install()\n"
        "except RuntimeError as error: print(error)\n"
        "assert torch.empty is empty and not cpu.is_installed()\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert "2 CUDA device" in result.stdout
