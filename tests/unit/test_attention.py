"""The core attention against Megatron's DotProductAttention, a naive dense reference and SDPA's own kernels."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lengthgen.attention.cache import SequenceCache
from megatron_lengthgen.attention.core import SDPACoreAttention, layer_window
from megatron_lengthgen.attention.functional import block_length, causal_attention, masked_attention
from megatron_lengthgen.errors import UserError

HEADS, GROUPS, DIM = 6, 2, 8


def make_config(**changes) -> TransformerConfig:
    settings = dict(
        num_layers=8,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    return TransformerConfig(**(settings | changes))


def build(kind: type, config: TransformerConfig, layer_number: int = 1, **arguments):
    arguments = dict(attn_mask_type=AttnMaskType.causal, attention_type="self") | arguments
    return kind(config=config, layer_number=layer_number, **arguments)


def inputs(sq: int, sk: int, batch: int = 2, heads: int = HEADS, groups: int = GROUPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sq * 1000 + sk)
    shapes = (sq, batch, heads, DIM), (sk, batch, groups, DIM), (sk, batch, groups, DIM)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def naive(query: Tensor, key: Tensor, value: Tensor, window: int | None, keep: Tensor | None = None) -> Tensor:
    """Loops over queries in float64; [b, h, s, d]."""
    repeats = query.size(1) // key.size(1)
    q, k, v = query.double(), key.double().repeat_interleave(repeats, 1), value.double().repeat_interleave(repeats, 1)
    offset = k.size(2) - q.size(2)
    rows = []
    for i in range(q.size(2)):
        end = offset + i + 1
        start = 0 if window is None else max(0, end - window)
        scores = torch.einsum("bhd,bhkd->bhk", q[:, :, i], k[:, :, start:end]) / q.size(-1) ** 0.5
        if keep is not None:
            scores = scores.masked_fill(~keep[:, :, i, start:end], float("-inf"))
        rows.append(torch.einsum("bhk,bhkd->bhd", scores.softmax(-1), v[:, :, start:end]))
    return torch.stack(rows, dim=2).to(query.dtype)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    return list(torch.autograd.grad((out * weights).sum(), leaves))


@pytest.mark.parametrize("groups", [HEADS, GROUPS, 1])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100, 128, 300, 511, 512, 2000])
@pytest.mark.parametrize("scaling", [False, True])
def test_equals_megatron_forward_and_backward(
    megatron_single: Callable[[int], None], groups: int, window: int | None, scaling: bool
) -> None:
    config = make_config(
        num_query_groups=groups,
        window_size=None if window is None else (window - 1, 0),
        apply_query_key_layer_scaling=scaling,
        attention_softmax_in_fp32=True,
    )
    stock, ours = build(DotProductAttention, config, 3), build(SDPACoreAttention, config, 3)
    leaves = inputs(512, 512, groups=groups)
    expected, got = (module(*leaves, None, attn_mask_type=AttnMaskType.causal) for module in (stock, ours))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, a, b in zip("qkv", gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@given(
    sq=st.integers(1, 400),
    prefix=st.integers(0, 300),
    window=st.none() | st.integers(1, 500),
    groups=st.sampled_from([1, 2, 6]),
    batch=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_equals_naive_reference(sq: int, prefix: int, window: int | None, groups: int, batch: int) -> None:
    leaves = [x.permute(1, 2, 0, 3) for x in inputs(sq, sq + prefix, batch, groups=groups)]
    got, expected = causal_attention(*leaves, window=window), naive(*leaves, window=window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # a prefix takes another way where no gradient is wanted
        torch.testing.assert_close(causal_attention(*leaves, window=window), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [1, 5, 64, 200, 256])
@pytest.mark.parametrize("sq", [1, 50, 640])
def test_window_holds_exactly_w_keys(window: int, sq: int) -> None:
    """With equal scores the weight of each visible key is 1/W; values that are one-hot show which keys those are."""
    sk = 640
    query, key = torch.zeros(1, 1, sq, 8), torch.zeros(1, 1, sk, 8)
    out = causal_attention(query, key, torch.eye(sk)[None, None], window=window)[0, 0]
    for i in range(sq):
        position = sk - sq + i
        start = max(0, position - window + 1)
        assert out[i].nonzero().flatten().tolist() == list(range(start, position + 1))


@pytest.mark.parametrize("length", [block_length(w) for w in (1, 128, 300, 4096)])
def test_block_is_positive_and_aligned(length: int) -> None:
    assert length >= 64 and length % 64 == 0


def test_half_precision_stays_close(megatron_single: Callable[[int], None]) -> None:
    leaves = [x.permute(1, 2, 0, 3).detach() for x in inputs(300, 700)]
    for window in (None, 128):
        got = causal_attention(*(x.bfloat16() for x in leaves), window=window)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), causal_attention(*leaves, window=window), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 256])
def test_cpu_takes_the_flash_kernel_both_ways(dtype: torch.dtype, window: int | None) -> None:
    query = torch.randn(1, 9, 1024, 64, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, 3, 1024, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    with torch.autograd.profiler.profile() as profile:
        causal_attention(query, key, value, window=window).sum().backward()
    names = {event.name for event in profile.function_events}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    # With a window and in bfloat16 the gradient is faster as matrix products (attention/cpu_backward.py).
    by_products = window is not None and dtype is torch.bfloat16
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names) is not by_products
    assert ("WindowedAttentionBackward" in names) is by_products
    assert not any("_scaled_dot_product_attention_math" in name for name in names)


@pytest.mark.parametrize(("sq", "sk", "window"), [(300, 300, 50), (200, 333, 64), (257, 257, 129), (90, 90, 2)])
def test_the_gradient_by_matrix_products_is_as_exact_as_bfloat16(sq: int, sk: int, window: int) -> None:
    torch.manual_seed(sq)
    leaves = [torch.randn(2, n, s, 32).bfloat16().requires_grad_() for n, s in ((6, sq), (2, sk), (2, sk))]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    towards = torch.randn(2, 6, sq, 32).bfloat16()
    got = torch.autograd.grad(causal_attention(*leaves, window=window), leaves, towards)
    want = torch.autograd.grad(causal_attention(*exact, window=window), exact, towards.float())
    for mine, reference in zip(got, want, strict=True):
        assert mine.dtype is torch.bfloat16
        assert (mine.float() - reference).norm() < 0.01 * reference.norm()


def test_caller_mask_narrows_the_causal_mask() -> None:
    leaves = [x.permute(1, 2, 0, 3) for x in inputs(90, 90)]
    documents = torch.arange(90) // 40
    keep = (documents[:, None] == documents[None])[None, None].expand(2, HEADS, -1, -1)
    for window in (None, 20):
        got = masked_attention(*leaves, keep, window=window)
        torch.testing.assert_close(got, naive(*leaves, window, keep), rtol=1e-5, atol=1e-5)


def test_module_honours_a_document_mask_as_megatron_does(megatron_single: Callable[[int], None]) -> None:
    config = make_config()
    stock, ours = build(DotProductAttention, config), build(SDPACoreAttention, config)
    leaves = inputs(60, 60)
    documents = torch.arange(60) // 25
    hidden = (documents[:, None] != documents[None]) | torch.ones(60, 60, dtype=torch.bool).triu(1)
    mask = hidden[None, None].expand(2, 1, -1, -1)
    torch.testing.assert_close(ours(*leaves, mask), stock(*leaves, mask), rtol=1e-5, atol=1e-5)
    windowed = build(SDPACoreAttention, make_config(window_size=(9, 0)))
    assert not torch.allclose(windowed(*leaves, mask), windowed(*leaves, None))


@pytest.mark.parametrize("skip", [None, 4, [1, 1, 0, 1, 0, 0, 1, 0]])
def test_windowed_layers_are_megatrons(megatron_single: Callable[[int], None], skip: int | list[int] | None) -> None:
    config = make_config(window_size=(15, 0), window_attn_skip_freq=skip)
    leaves = inputs(64, 64, batch=1)
    for number in range(1, 9):
        stock, ours = build(DotProductAttention, config, number), build(SDPACoreAttention, config, number)
        assert ours.window == layer_window(config, number)
        assert (ours.window == 16) == (stock.scale_mask_softmax.window_size is not None)
        torch.testing.assert_close(ours(*leaves, None), stock(*leaves, None), rtol=1e-5, atol=1e-5)


def test_cached_prefix_ignores_megatrons_no_mask(megatron_single: Callable[[int], None]) -> None:
    attention = build(SDPACoreAttention, make_config())
    query, key, value = inputs(96, 96)
    whole = attention(query, key, value, None, attn_mask_type=AttnMaskType.causal)
    chunk = attention(query[40:], key, value, None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(chunk, whole[40:], rtol=1e-5, atol=1e-5)


def test_dropout_keeps_the_mean_and_follows_the_tracked_stream(megatron_single: Callable[[int], None]) -> None:
    config = make_config(attention_dropout=0.3)
    attention = build(SDPACoreAttention, config).train()
    query, key, _ = inputs(128, 128, batch=1)
    value = torch.ones(128, 1, GROUPS, DIM)
    before = torch.get_rng_state()
    megatron_single(7)
    first = attention(query, key, value, None)
    megatron_single(7)
    torch.testing.assert_close(attention(query, key, value, None), first, rtol=0, atol=0)
    assert not torch.equal(attention(query, key, value, None), first)
    # Every value is 1, so the output is the sum of the weights: 1 on average.
    assert abs(first.mean().item() - 1) < 0.05 and first.std() > 0.05
    megatron_single(7)
    default = torch.get_rng_state()
    attention(query, key, value, None)
    assert torch.equal(torch.get_rng_state(), default), "the draw must come from the tensor parallel stream"
    torch.testing.assert_close(attention.eval()(query, key, value, None), torch.ones_like(first))
    torch.set_rng_state(before)
    assert tensor_parallel.get_cuda_rng_tracker().is_initialized()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(softmax_type="off-by-two"), "softmax_type"),
        (dict(window_size=(-1, 0)), "window_size"),
        (dict(window_size=(7, 2)), "window_size"),
        (dict(qk_clip=True), "qk_clip"),
        (dict(context_parallel_size=2), "context_parallel_size"),
    ],
)
def test_refuses_what_it_does_not_compute(megatron_single: Callable[[int], None], changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(SDPACoreAttention, make_config(**changes))


def test_refuses_calls_it_cannot_honour(megatron_single: Callable[[int], None]) -> None:
    with pytest.raises(UserError, match="causal self-attention"):
        build(SDPACoreAttention, make_config(), attn_mask_type=AttnMaskType.padding)
    attention = build(SDPACoreAttention, make_config())
    leaves = inputs(4, 4)
    with pytest.raises(UserError, match="attention_bias"):
        attention(*leaves, None, attention_bias=torch.zeros(1))
    with pytest.raises(UserError, match="padding"):
        attention(*leaves, None, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ValueError, match="4 queries and 3 keys"):
        attention(leaves[0], leaves[1][:3], leaves[2][:3], None)


def test_has_no_checkpoint_keys(megatron_single: Callable[[int], None]) -> None:
    attention = build(SDPACoreAttention, make_config())
    assert not attention.state_dict() and not attention.sharded_state_dict("layer.")
    assert not [*attention.parameters(), *attention.buffers()]


@given(
    chunks=st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 200),
)
@settings(max_examples=40, deadline=None)
def test_cache_of_any_chunks_equals_one_call(chunks: list[int], window: int | None) -> None:
    total = sum(chunks)
    query, key, value = (x.permute(1, 2, 0, 3).detach() for x in inputs(total, total, batch=1, heads=2, groups=1))
    whole = causal_attention(query, key, value, window=window)
    cache, parts = SequenceCache(total), []
    for q, k, v in zip(*(x.split(chunks, dim=2) for x in (query, key, value)), strict=True):
        parts.append(causal_attention(q, *cache.append(1, k, v, window), window=window))
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5, atol=1e-5)
    if window is not None:
        assert cache.nbytes <= 2 * (2 * window + 1024) * DIM * key.element_size()
    with pytest.raises(ValueError, match="does not fit"):
        cache.append(1, key[:, :, :1], value[:, :, :1], window)
