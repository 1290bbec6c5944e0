"""The Mamba-2 path against transformers' Mamba-2 and Zamba-2, Megatron's kernels, and the recurrence as it is written.

Run as a script under ``TRITON_INTERPRET=1`` it compares with Megatron's kernels, which Triton then interprets.
"""

import contextlib
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, Mamba2Config, Zamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer, Zamba2RMSNormGated

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.ssm.convolution import causal_conv1d, causal_conv1d_update
from megatron_lengthgen.ssm.gated_norm import GatedRMSNorm
from megatron_lengthgen.ssm.mixer import split_conv1d_scan
from megatron_lengthgen.ssm.scan import chunk_scan, selective_state_update
from megatron_lengthgen.ssm.sharded_norm import ShardedGatedRMSNorm

HIDDEN, HEADS, HEAD_DIM, STATE, WIDTH, BATCH = 32, 8, 8, 16, 4, 2
DIM = HEADS * HEAD_DIM
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def mamba2(groups: int, **fields: Any) -> Mamba2Mixer:
    config = Mamba2Config(
        hidden_size=HIDDEN,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        state_size=STATE,
        n_groups=groups,
        conv_kernel=WIDTH,
        chunk_size=8,
        num_hidden_layers=1,
        **fields,
    )
    return randomised(Mamba2Mixer(config, layer_idx=0))


def zamba2(groups: int) -> Zamba2MambaMixer:
    config = Zamba2Config(
        hidden_size=HIDDEN,
        n_mamba_heads=HEADS,
        mamba_d_state=STATE,
        mamba_ngroups=groups,
        mamba_d_conv=WIDTH,
        # Its sum over earlier chunks runs over the wrong dimension (5.12), so that it is right for one chunk alone.
        chunk_size=256,
        time_step_min=0.02,
        add_bias_linear=False,
        use_mamba_kernels=False,
    )
    assert config.mamba_headdim == HEAD_DIM
    return randomised(Zamba2MambaMixer(config, layer_idx=0))


def randomised(mixer: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        mixer.A_log.uniform_(-2, 2)
        mixer.norm.weight.add_(1)
    return mixer


def limit(mixer: Any) -> tuple[float, float]:
    # Zamba-2 reads another field, and from below alone.
    return tuple(mixer.time_step_limit) if isinstance(mixer, Mamba2Mixer) else (mixer.time_step_min, math.inf)


def norm_group(mixer: Any) -> int:
    # transformers' Mamba-2 normalises over its whole width, as mamba_ssm does for one group only; Zamba-2 by group.
    return getattr(mixer.norm, "group_size", DIM)


def ours(mixer: Any, hidden: Tensor, chunk_size: int) -> Tensor:
    """The mixer with our functions, in the way of MambaMixer's training: the gate first, then a norm without one."""
    y = split_conv1d_scan(
        mixer.in_proj(hidden),
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        mixer.dt_bias.float(),
        -torch.exp(mixer.A_log.float()),
        D=mixer.D,
        chunk_size=chunk_size,
        activation="silu",
        headdim=HEAD_DIM,
        ngroups=mixer.n_groups,
        norm_before_gate=False,
        dt_limit=limit(mixer),
    )
    norm = GatedRMSNorm(DIM, norm_epsilon(mixer), norm_group(mixer), norm_before_gate=False)
    norm.weight = mixer.norm.weight
    return mixer.out_proj(norm(y))


def norm_epsilon(mixer: Any) -> float:
    return mixer.norm.variance_epsilon


def gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    towards = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).sin()
    return list(torch.autograd.grad(y, leaves, towards, allow_unused=True))


def assert_all_close(actual: list[Tensor], expected: list[Tensor], share: float = 1e-5) -> None:
    """Each within ``share`` of the largest number of what is expected."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=share * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("make", [mamba2, zamba2])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length, chunk_size", [(1, 8), (3, 8), (16, 8), (37, 5), (37, 64), (29, 1)])
def test_mixer_equals_transformers_forward_and_backward(make: Any, groups: int, length: int, chunk_size: int) -> None:
    mixer = make(groups)
    hidden = torch.randn(BATCH, length, HIDDEN, requires_grad=True)
    expected, actual = mixer.torch_forward(hidden), ours(mixer, hidden, chunk_size)
    assert_all_close([actual], [expected])
    leaves = [hidden, *mixer.parameters()]
    assert_all_close(gradients(actual, leaves), gradients(expected, leaves))


def test_time_step_limit_equals_transformers() -> None:
    mixer = mamba2(2, time_step_limit=(0.3, 0.9))
    hidden = torch.randn(BATCH, 19, HIDDEN, requires_grad=True)
    expected, actual = mixer.torch_forward(hidden), ours(mixer, hidden, 8)
    assert_all_close([actual], [expected])
    leaves = [hidden, *mixer.parameters()]
    assert_all_close(gradients(actual, leaves), gradients(expected, leaves))


class Cached:
    """A mixer that goes on from its states, called as MambaMixer calls these functions when it generates."""

    def __init__(self, mixer: Any):
        self.mixer = mixer
        self.norm = GatedRMSNorm(DIM, norm_epsilon(mixer), norm_group(mixer), norm_before_gate=False)
        self.norm.weight = mixer.norm.weight
        self.conv_state = torch.zeros(BATCH, mixer.conv_dim, WIDTH)
        self.state = torch.zeros(BATCH, HEADS, HEAD_DIM, STATE)

    def split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.mixer.in_proj(hidden).split([DIM, self.mixer.conv_dim, HEADS], dim=-1)

    def parts(self, xBC: Tensor) -> tuple[Tensor, ...]:
        groups = self.mixer.n_groups
        x, B, C = xBC.split([DIM, groups * STATE, groups * STATE], dim=-1)
        return x.unflatten(-1, (HEADS, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))

    def prefill(self, hidden: Tensor, chunk_size: int = 8) -> Tensor:
        mixer = self.mixer
        z, xBC, dt = self.split(hidden)
        xBC, past = causal_conv1d(
            x=xBC.mT.contiguous(),
            weight=mixer.conv1d.weight.squeeze(1),
            bias=mixer.conv1d.bias,
            activation="silu",
            initial_states=self.conv_state[..., 1:],
            return_final_states=True,
        )
        self.conv_state[..., 1:] = past
        x, B, C = self.parts(xBC.mT)
        y, self.state = chunk_scan(
            x,
            dt,
            -torch.exp(mixer.A_log),
            B,
            C,
            chunk_size,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
            return_final_states=True,
            initial_states=self.state,
        )
        return mixer.out_proj(self.norm(y.flatten(2), z))

    def decode(self, hidden: Tensor) -> Tensor:
        mixer = self.mixer
        z, xBC, dt = self.split(hidden)
        xBC = causal_conv1d_update(
            xBC,
            self.conv_state,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            "silu",
            conv_state_indices=None,
            intermediate_conv_states=None,
        )
        x, B, C = self.parts(xBC)
        y = selective_state_update(
            self.state,
            x,
            dt.unsqueeze(-1).expand(-1, -1, -1, HEAD_DIM),
            -torch.exp(mixer.A_log).view(-1, 1, 1).expand(-1, HEAD_DIM, STATE),
            B,
            C,
            mixer.D.unsqueeze(-1).expand(-1, HEAD_DIM),
            z=None,
            dt_bias=mixer.dt_bias.unsqueeze(-1).expand(-1, HEAD_DIM),
            dt_softplus=True,
            state_batch_indices=None,
            intermediate_ssm_states=None,
        )
        return mixer.out_proj(self.norm(y.flatten(2), z))


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("prompt", [2, 21])
def test_cached_decoding_equals_transformers(groups: int, prompt: int) -> None:
    mixer = mamba2(groups)
    cache = DynamicCache(config=mamba2_config(mixer))
    cached = Cached(mixer)
    hidden = torch.randn(BATCH, prompt + 5, HIDDEN)
    expected = [mixer.torch_forward(hidden[:, :prompt], cache_params=cache)]
    actual = [cached.prefill(hidden[:, :prompt])]
    for token in hidden[:, prompt:].split(1, dim=1):
        expected.append(mixer.torch_forward(token, cache_params=cache))
        actual.append(cached.decode(token))
    assert_all_close(actual, expected)
    assert_all_close([cached.state], [cache.layers[0].recurrent_states])
    torch.testing.assert_close(cached.conv_state, cache.layers[0].conv_states)


def mamba2_config(mixer: Mamba2Mixer) -> Mamba2Config:
    return Mamba2Config(hidden_size=HIDDEN, num_heads=HEADS, head_dim=HEAD_DIM, num_hidden_layers=1)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[41], [1, 2, 1, 37], [7, 13, 21], [40, 1], [3] * 13 + [2]])
def test_prefill_in_pieces_and_single_steps_equal_the_whole(sizes: list[int]) -> None:
    mixer = zamba2(2)
    mixer.time_step_min = 0.0
    hidden = torch.randn(BATCH, 41, HIDDEN)
    whole = mixer.torch_forward(hidden)
    cached = Cached(mixer)
    assert_all_close([torch.cat([cached.prefill(part) for part in hidden.split(sizes, 1)], 1)], [whole])
    stepped = Cached(mixer)
    assert_all_close([torch.cat([stepped.decode(token) for token in hidden.split(1, 1)], 1)], [whole])
    assert_all_close([stepped.decode(hidden[:, :3])], [cached.prefill(hidden[:, :3])])
    assert_all_close([stepped.state, stepped.conv_state[..., 1:]], [cached.state, cached.conv_state[..., 1:]])


def recurrence(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The state space model as its definition reads, one token after another."""
    x, dt, A, B, C, D, z, state = (arguments[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "initial_states"))
    repeats = x.size(2) // B.size(2)
    step = F.softplus(dt + arguments["dt_bias"])
    B, C = B.repeat_interleave(repeats, 2), C.repeat_interleave(repeats, 2)
    outputs = []
    for t in range(x.size(1)):
        decay = torch.exp(step[:, t] * A)[..., None, None]
        state = decay * state + torch.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], B[:, t])
        y = torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D.view(x.size(2), -1) * x[:, t]
        outputs.append(y * z[:, t] * torch.sigmoid(z[:, t]))
    return torch.stack(outputs, 1), state


def scan_arguments(
    length: int, groups: int = 1, repeats: int = 2, dim: int = 2, state: int = 3, wide_d: bool = False, **fields: Any
) -> dict[str, Tensor]:
    heads = groups * repeats
    sizes = {
        "x": (BATCH, length, heads, dim),
        "dt": (BATCH, length, heads),
        "A": (heads,),
        "B": (BATCH, length, groups, state),
        "C": (BATCH, length, groups, state),
        "D": (heads, dim) if wide_d else (heads,),
        "z": (BATCH, length, heads, dim),
        "dt_bias": (heads,),
        "initial_states": (BATCH, heads, dim, state),
    }
    tensors = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()} | fields
    return {
        name: (-tensor.abs() if name == "A" else tensor).detach().requires_grad_() for name, tensor in tensors.items()
    }


def scan(arguments: dict[str, Tensor], chunk_size: int) -> tuple[Tensor, Tensor]:
    return chunk_scan(**arguments, chunk_size=chunk_size, dt_softplus=True, return_final_states=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 20),
    chunk_size=st.integers(1, 24),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    dim=st.integers(1, 3),
    state=st.integers(1, 4),
    wide_d=st.booleans(),
)
def test_scan_equals_the_recurrence_with_all_gradients(chunk_size: int, **sizes: Any) -> None:
    torch.manual_seed(2)
    arguments = scan_arguments(**sizes)
    expected, actual = recurrence(arguments), scan(arguments, chunk_size)
    assert_all_close(list(actual), list(expected), 1e-12)
    leaves = list(arguments.values())
    assert_all_close(
        gradients(torch.cat([t.flatten() for t in actual]), leaves),
        gradients(torch.cat([t.flatten() for t in expected]), leaves),
        1e-11,
    )


def test_gradcheck() -> None:
    torch.manual_seed(3)
    arguments = scan_arguments(5, groups=2)
    names, tensors = list(arguments), tuple(arguments.values())
    assert torch.autograd.gradcheck(lambda *given: scan(dict(zip(names, given, strict=True)), 2), tensors)
    x, weight, bias, past = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 5), (3, 4), (3,), (2, 3, 3))
    )
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, past: causal_conv1d(x, weight, bias, None, past, True, "silu"), (x, weight, bias, past)
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_slow_and_fast_decay_in_float32_is_near_float64(scale: float) -> None:
    """With 30 a token decays by up to exp(-1000): masked exponents would overflow, sums that cancel be noise."""
    torch.manual_seed(4)
    exact = scan_arguments(200, groups=2, dim=8, state=8)
    with torch.no_grad():
        exact["A"].mul_(scale)
        exact["dt"].mul_(3)
    rounded = {name: tensor.detach().float().requires_grad_() for name, tensor in exact.items()}
    (expected, _), (actual, _) = recurrence(exact), scan(rounded, 64)
    assert_all_close([actual], [expected.float()])
    found, wanted = (gradients(y, list(given.values())) for y, given in ((actual, rounded), (expected, exact)))
    assert_all_close(found, [gradient.float() for gradient in wanted], 3e-5)


def test_bfloat16_is_rounded_at_its_ends_alone() -> None:
    torch.manual_seed(5)
    narrow = {name: tensor.detach().bfloat16() for name, tensor in scan_arguments(50, groups=2, dim=8).items()}
    narrow["z"], narrow["A"] = torch.zeros_like(narrow["z"]) + 1, narrow["A"].float()
    same = {name: tensor.float().requires_grad_() for name, tensor in narrow.items()}
    (y, state), (expected, expected_state) = (
        scan({name: tensor.requires_grad_() for name, tensor in given.items()}, 16) for given in (narrow, same)
    )
    assert y.dtype is torch.bfloat16 and state.dtype is torch.float32
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state, expected_state)
    found, wanted = (gradients(result, list(given.values())) for result, given in ((y, narrow), (expected, same)))
    assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in narrow.values()]
    assert_all_close([gradient.float() for gradient in found], wanted, 2**-6)


def test_backward_keeps_no_more_than_the_inputs() -> None:
    """Whatever the chunk size: the decays of all pairs in a chunk, or the states of chunks of 4, would be far more."""
    torch.manual_seed(6)
    kept = {}
    for chunk_size in (4, 256):
        arguments = scan_arguments(256, repeats=4, dim=4, state=16)
        del arguments["z"]
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            scan(arguments, chunk_size)
        kept[chunk_size] = sum(sizes)
        small = sum(arguments[name].nbytes for name in ("dt", "dt_bias", "A"))
        assert kept[chunk_size] <= sum(t.nbytes for t in arguments.values()) + 4 * small
    assert kept[4] == kept[256]


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_gated_norm_equals_transformers(norm_before_gate: bool) -> None:
    torch.manual_seed(7)
    x, z = (torch.randn(BATCH, 5, DIM, requires_grad=True) for _ in range(2))
    peer = Zamba2RMSNormGated(DIM, group_size=DIM // 4, eps=1e-5)
    norm = GatedRMSNorm(DIM, eps=1e-5, group_size=DIM // 4, norm_before_gate=norm_before_gate)
    weight = torch.randn(DIM)
    for module in (peer, norm):
        module.load_state_dict({"weight": weight})
    expected = peer(x) * F.silu(z) if norm_before_gate else peer(x, z)
    torch.testing.assert_close(norm(x, z), expected, **CLOSE)
    assert_all_close(gradients(norm(x, z), [x, z, norm.weight]), gradients(expected, [x, z, peer.weight]))
    torch.testing.assert_close(norm(x * F.silu(z)), peer(x, z), **CLOSE)


def test_norm_inside_the_call_equals_norm_behind_it() -> None:
    """With a gain, ``split_conv1d_scan`` normalises by group as mamba_ssm does: what Zamba-2's mixer holds."""
    mixer = zamba2(2)
    hidden = torch.randn(BATCH, 11, HIDDEN)
    y, state, conv_state = split_conv1d_scan(
        mixer.in_proj(hidden),
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        mixer.dt_bias,
        -torch.exp(mixer.A_log),
        mixer.D.unsqueeze(-1).expand(-1, HEAD_DIM),
        chunk_size=4,
        ngroups=2,
        dt_limit=limit(mixer),
        rmsnorm_weight=mixer.norm.weight,
        rmsnorm_eps=norm_epsilon(mixer),
        norm_before_gate=False,
        return_final_states=True,
    )
    assert_all_close([mixer.out_proj(y)], [mixer.torch_forward(hidden)])
    assert state.shape == (BATCH, HEADS, HEAD_DIM, STATE)
    torch.testing.assert_close(conv_state, mixer.in_proj(hidden)[:, -3:, DIM : DIM + mixer.conv_dim].mT)


def test_initial_states_continue_a_training_sequence_with_gradients() -> None:
    """Both states of the first half make the second half what it is in the whole, gradients through them included."""
    mixer = mamba2(2)
    hidden = torch.randn(BATCH, 22, HIDDEN, requires_grad=True)

    def run(part: Tensor, **states: Any) -> Any:
        weights = (mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.dt_bias, -torch.exp(mixer.A_log), mixer.D)
        fields = {"chunk_size": 8, "headdim": HEAD_DIM, "ngroups": 2, "return_final_states": True}
        return split_conv1d_scan(mixer.in_proj(part), *weights, **fields, **states)

    first, state, conv_state = run(hidden[:, :9])
    second, *last = run(hidden[:, 9:], initial_states=state, initial_conv_states=conv_state)
    whole, *last_of_whole = run(hidden)
    assert_all_close([torch.cat([first, second], 1), *last], [whole, *last_of_whole])
    leaves = [hidden, mixer.conv1d.weight, mixer.dt_bias, mixer.A_log, mixer.D]
    assert_all_close(gradients(torch.cat([first, second], 1), leaves), gradients(whole, leaves))


@torch.no_grad()
def test_step_with_a_decay_per_channel_equals_mamba_1() -> None:
    """A [h, p, n] that is no expanded view, a gate, several tokens, and a state in bfloat16."""
    torch.manual_seed(8)
    x, z, dt = (torch.randn(BATCH, 3, 4, 2) for _ in range(3))
    B, C = (torch.randn(BATCH, 3, 2, 5) for _ in range(2))
    A, D, bias = -torch.rand(4, 2, 5), torch.randn(4, 2), torch.randn(4, 2)
    start = torch.randn(BATCH, 4, 2, 5)
    state, expected = start.clone(), []
    wide_b, wide_c = (t.repeat_interleave(2, 2)[:, :, :, None] for t in (B, C))
    step = F.softplus(dt + bias)
    now = start
    for t in range(3):
        now = now * torch.exp(step[:, t, :, :, None] * A) + (step * x)[:, t, :, :, None] * wide_b[:, t]
        expected.append(((now * wide_c[:, t]).sum(-1) + D * x[:, t]) * F.silu(z[:, t]))
    y = selective_state_update(state, x, dt, A, B, C, D, z, bias, dt_softplus=True)
    torch.testing.assert_close(y, torch.stack(expected, 1), **CLOSE)
    torch.testing.assert_close(state, now, **CLOSE)
    narrow = start.bfloat16()
    single = selective_state_update(narrow, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, z[:, 0], bias, dt_softplus=True)
    torch.testing.assert_close(single, expected[0], rtol=0.1, atol=0.1)
    assert narrow.dtype is torch.bfloat16 and not torch.equal(narrow, start.bfloat16())


def test_sharded_norm_splits_its_gain(megatron_single: Any) -> None:
    norm = ShardedGatedRMSNorm(DIM, group_size=8)
    (tensor,) = norm.sharded_state_dict("mixer.norm.", ((0, 1, 3),)).values()
    assert (tensor.key, tensor.global_shape, tensor.global_offset) == ("mixer.norm.weight", (3, DIM), (1, 0))
    halves = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    norm.tp_group = halves
    (tensor,) = norm.sharded_state_dict("mixer.norm.").values()
    assert (tensor.global_shape, tensor.global_offset) == ((2 * DIM,), (DIM,))


def test_bad_input_is_refused_with_a_way_out() -> None:
    arguments = scan_arguments(4, groups=2, repeats=3)
    with pytest.raises(UserError, match="do not pack"):
        chunk_scan(**arguments, chunk_size=2, seq_idx=torch.zeros(BATCH, 4))
    with pytest.raises(UserError, match="chunk_size is 0"):
        chunk_scan(**arguments, chunk_size=0)
    four = {name: tensor[:, :, :1].expand(-1, -1, 4, -1) for name, tensor in arguments.items() if name in "BC"}
    with pytest.raises(UserError, match="6 Mamba heads cannot be shared out among 4 groups"):
        chunk_scan(**(arguments | four), chunk_size=2)
    x, weight = torch.randn(BATCH, 5, 6), torch.randn(5, 4)
    with pytest.raises(UserError, match="'gelu'"):
        causal_conv1d(x, weight, activation="gelu")
    with pytest.raises(UserError, match="do not pack"):
        causal_conv1d(x, weight, seq_idx=torch.zeros(BATCH, 6))
    with pytest.raises(UserError, match="static inference context"):
        causal_conv1d_update(x[..., 0], x, weight, conv_state_indices=torch.zeros(BATCH))
    with pytest.raises(UserError, match="static inference context"):
        selective_state_update(x, x, x, x, x, x, state_batch_indices=torch.zeros(BATCH))
    split = (torch.randn(BATCH, 6, 50), torch.randn(30, 4), None, torch.randn(4), torch.randn(4), torch.randn(4), 8)
    with pytest.raises(UserError, match="give headdim"):
        split_conv1d_scan(*split)
    with pytest.raises(UserError, match="4 Mamba heads of size 4 in 3 groups do not fit"):
        split_conv1d_scan(*split, headdim=4, ngroups=3)


@pytest.mark.slow
def test_megatron_kernels_agree() -> None:
    # Megatron's deterministic mode takes one configuration of each kernel, where tuning would want a device.
    variables = {**os.environ, "TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-W", "ignore", __file__], env=variables, check=True, timeout=300)


def compare_with_megatron_kernels() -> None:
    """Steps of both kinds with Megatron's decode kernels, and a scan from a state with its kernel for prompts."""
    from megatron.core.ssm.ops import causal_conv1d_triton, mamba_ssm, ssd_combined

    torch.manual_seed(9)
    start = torch.randn(BATCH, 4, 8, 16)
    x, z = (torch.randn(BATCH, 3, 4, 8) for _ in range(2))
    B, C = (torch.randn(BATCH, 3, 2, 16) for _ in range(2))
    dt = torch.randn(BATCH, 3, 4, 1).expand(-1, -1, -1, 8)
    A, D, dt_bias = -torch.rand(4, 1, 1).expand(-1, 8, 16), torch.randn(4, 8), torch.randn(4, 1).expand(-1, 8)
    for gate in (None, z):
        state, expected_state = start.clone(), start.clone()
        fields = {"z": gate, "dt_bias": dt_bias, "dt_softplus": True}
        y = selective_state_update(state, x, dt, A, B, C, D, **fields)
        # A copy: where no intermediate states are asked for, the kernel writes one over the first number of x.
        expected = mamba_ssm.selective_state_update(expected_state, x.clone(), dt, A, B, C, D, **fields)
        torch.testing.assert_close((y, state), (expected, expected_state), **CLOSE)
    for width, length in ((4, 4), (4, 6), (3, 3), (2, 4)):
        weight, bias, tokens = torch.randn(10, width), torch.randn(10), torch.randn(BATCH, 3, 10)
        state = torch.randn(BATCH, 10, length)
        expected_state = state.clone()
        y = causal_conv1d_update(tokens, state, weight, bias, "silu")
        expected = causal_conv1d_triton.causal_conv1d_update(tokens, expected_state, weight, bias, "silu", None)
        torch.testing.assert_close((y, state), (expected, expected_state), **CLOSE)
    exact = scan_arguments(37, groups=2, dim=8, state=16)
    rounded = {
        name: tensor.detach()[:1].float() if tensor.dim() > 1 else tensor.detach().float()
        for name, tensor in exact.items()
    }
    del rounded["z"]
    y, state = scan(rounded, 16)
    rounded |= {name: rounded[name][0] for name in ("x", "dt", "B", "C")}
    expected = torch.zeros_like(rounded["x"])
    expected_state = ssd_combined.mamba_chunk_scan_combined_varlen(
        **rounded,
        z=None,
        chunk_size=16,
        cu_chunk_seqlens=torch.tensor([0, 16, 32, 37], dtype=torch.int32),
        last_chunk_indices=torch.tensor([2], dtype=torch.int32),
        seq_idx=torch.zeros(3, dtype=torch.int32),
        out=expected,
        return_raw_states=False,
        dt_softplus=True,
        dt_limit=(0.0, math.inf),
        state_dtype=torch.float32,
    )
    assert_all_close([y[0], state], [expected, expected_state.view_as(state)])


if __name__ == "__main__":
    from megatron_lengthgen import backends

    backends.prepare()
    with mock.patch.object(torch.cuda, "device", contextlib.nullcontext):
        compare_with_megatron_kernels()
