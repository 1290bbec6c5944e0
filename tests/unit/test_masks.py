"""Masks computed from coordinates: the published generator, pinned bits, and what a slice of a tensor sees."""

import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lengthgen.dropout import functional, masks
from megatron_lengthgen.dropout.functional import pre_linear_dropout, vpad
from megatron_lengthgen.dropout.masks import MASK_VERSION, MaskCoordinates, counter_keep_mask, philox4x32, quantize

PINNED_ROWS = [
    "11101100011111111010",
    "01110110010111010110",
    "11011011111101101111",
    "11101111111111010111",
    "11001001111111011101",
    "11011101010101101101",
]
PINNED_DIGEST = "a1c5e86797de28a29e75d56a58f161472eebf80871869fd5b722b20e4d158251"
WORD = 0xFFFFFFFF
words = st.integers(0, WORD)


def scalar_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers, after the paper (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def tensor_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    return tuple(word.item() for word in philox4x32([torch.tensor(c) for c in counter], key))


def mask_of(shape: tuple[int, int, int], p: float = 0.3, **where: object) -> torch.Tensor:
    coordinates = {"key": 0x0123456789ABCDEF, "stream": 33, "positions": ((0, shape[0]),), **where}
    return counter_keep_mask(shape, p, MaskCoordinates(**coordinates))  # type: ignore[arg-type]


@pytest.mark.parametrize("philox", [tensor_philox, scalar_philox])
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_philox4x32_10(philox, counter, key, expected):
    """From the ``kat_vectors`` of the authors' Random123."""
    parse = lambda text: tuple(int(word, 16) for word in text.split())  # noqa: E731
    assert philox(parse(counter), parse(key)) == parse(expected)


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_equals_the_scalar_reference(counter, key):
    assert tensor_philox(counter, key) == scalar_philox(counter, key)


@settings(deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    stream=words,
    position=st.integers(0, WORD - 1),
    sample=st.integers(0, WORD - 1),
    channel=st.integers(0, 2**32 - 64),
    p=st.floats(1e-6, 1 - 1e-6),
)
def test_a_bit_is_the_documented_function_of_its_coordinates(key, stream, position, sample, channel, p):
    where = MaskCoordinates(key=key, stream=stream, positions=((position, 2),), sample=sample, channel=channel)
    mask = counter_keep_mask((2, 2, 11), p, where)
    first = round(65536 * quantize(p)) - 32768
    for row, column, lane in itertools.product(range(2), range(2), (0, 5, 10)):
        group, half = divmod(channel + lane, 8)
        drawn = scalar_philox((position + row, sample + column, group, stream), (key & WORD, key >> 32))
        draw = drawn[half // 2] >> 16 * (half % 2) & 0xFFFF
        signed = draw - 65536 if draw >= 32768 else draw
        assert mask[row, column, lane].item() == (signed >= first)


def test_bits_are_pinned_to_the_version():
    """Other bits need another ``MASK_VERSION``: checkpoints record it, and a resumed run must meet equal masks."""
    assert MASK_VERSION == 1
    mask = mask_of((3, 2, 20), sample=5, channel=3, positions=((7, 2), (100, 1)))
    rows = ["".join(str(int(bit)) for bit in row) for row in mask.flatten(0, 1)]
    assert rows == PINNED_ROWS
    large = mask_of((64, 4, 96), 0.1, key=2**64 - 3, stream=2**31 + 5)
    assert hashlib.sha256(large.numpy().tobytes()).hexdigest() == PINNED_DIGEST


WHOLE = mask_of((12, 5, 61), positions=((3, 12),), sample=2, channel=0)


@settings(deadline=None)
@given(st.data())
def test_a_slice_sees_the_bits_of_the_whole(data):
    (t0, t1), (b0, b1), (h0, h1) = (
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in (12, 5, 61)
    )
    part = mask_of((t1 - t0, b1 - b0, h1 - h0), positions=((3 + t0, t1 - t0),), sample=2 + b0, channel=h0)
    assert torch.equal(part, WHOLE[t0:t1, b0:b1, h0:h1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=4))
def test_runs_of_positions_are_put_one_after_the_other(runs):
    rows = [position for first, count in runs for position in range(first, first + count)]
    part = mask_of((len(rows), 5, 61), positions=tuple((3 + first, count) for first, count in runs), sample=2)
    assert torch.equal(part, WHOLE[rows])


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 30])
def test_the_size_of_a_block_does_not_show(monkeypatch, block):
    monkeypatch.setattr(masks, "_BLOCK", block)
    assert torch.equal(mask_of((12, 5, 61), positions=((3, 12),), sample=2), WHOLE)


def test_rows_across_the_default_block_are_those_of_single_rows():
    shape = (40, 3, 8000)
    assert 1 < masks._BLOCK // (3 * 1000) < 40
    whole = mask_of(shape)
    for row in (0, 20, 21, 22, 39):
        assert torch.equal(mask_of((1, 3, 8000), positions=((row, 1),)), whole[row : row + 1])


def test_positions_that_do_not_cover_the_rows_are_refused():
    with pytest.raises(ValueError, match="positions cover 5 rows, and the tensor has 4"):
        mask_of((4, 1, 8), positions=((0, 2), (8, 3)))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.2, 0.5, 0.9])
def test_the_share_that_is_kept(p):
    mask = mask_of((256, 4, 512), p)
    spread = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(1 - mask.double().mean().item() - quantize(p)) < 5 * spread
    # And in every lane of the generator's eight.
    lanes = mask.view(-1, 8).double().mean(0)
    assert ((1 - lanes - quantize(p)).abs() < 5 * spread * math.sqrt(8)).all()


def test_masks_of_other_coordinates_are_independent():
    """Layers and sites (stream), steps (key), samples, positions, channels: no pair of masks is correlated."""
    shape, key = (128, 2, 256), 0x0123456789ABCDEF
    others = [
        {"stream": 34},
        {"stream": 33 + 32},
        {"key": key + 1},
        {"key": key ^ 1 << 40},
        {"sample": 2},
        {"positions": ((128, 128),)},
        {"channel": 256},
        {"positions": ((1, 128),)},
        {"channel": 1},
    ]
    drops = [(~mask_of(shape, 0.3, **where)).double().flatten() for where in [{}, *others]]
    standard = torch.stack([(drop - 0.3) / math.sqrt(0.21) for drop in drops])
    correlation = standard @ standard.T / standard.shape[1]
    off = correlation[~torch.eye(len(drops), dtype=torch.bool)]
    assert off.abs().max() < 5 / math.sqrt(standard.shape[1])


def test_neighbours_are_independent():
    drop = ((~mask_of((256, 4, 256), 0.3)).double() - 0.3) / math.sqrt(0.21)
    for dim in range(3):
        for lag in (1, 2):
            size = drop.shape[dim]
            product = drop.narrow(dim, lag, size - lag) * drop.narrow(dim, 0, size - lag)
            assert abs(product.mean().item()) < 5 / math.sqrt(product.numel())


def test_what_is_kept_at_one_p_is_kept_at_all_smaller_ones():
    kept = [mask_of((32, 2, 64), p) for p in (1e-9, 0.05, 0.1, 0.5, 0.99, 1 - 1e-9)]
    for more, fewer in itertools.pairwise(kept):
        assert not (fewer & ~more).any()
        assert more.sum() > fewer.sum()


def test_p_is_rounded_to_the_generators_levels():
    assert quantize(0.1) == 6554 / 65536
    assert torch.equal(mask_of((64, 2, 64), 0.1), mask_of((64, 2, 64), 6554.4 / 65536))
    assert not torch.equal(mask_of((256, 4, 512), 0.1), mask_of((256, 4, 512), 6556 / 65536))


MEAN, VARIANCE = torch.linspace(-3, 3, 24), torch.linspace(0, 2, 24)
METHODS = {
    "pre_linear": lambda x, p, mask: pre_linear_dropout(x, p, mask=mask),
    "vpad zero": lambda x, p, mask: vpad(x, p, MEAN.to(x.device), VARIANCE.to(x.device), mask=mask),
    "vpad mean": lambda x, p, mask: vpad(x, p, MEAN.to(x.device), VARIANCE.to(x.device), fill="mean", mask=mask),
}
WHERE = MaskCoordinates(key=77, stream=5, positions=((4, 6),), sample=1, channel=3)


def run(name: str, p: float, mask: object, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Output, gradient, and how many bytes of tensors were kept for backward."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, 24, generator=generator).to(dtype).requires_grad_()
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = METHODS[name](x, p, mask)
    y.backward(torch.randn(6, 2, 24, generator=generator).to(dtype))
    assert x.grad is not None
    return y.detach(), x.grad, sum(kept)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_coordinates_stand_for_the_mask_that_they_give(monkeypatch, name, dtype, recomputed):
    """Forward and backward, with the rounded p; also where the mask is computed twice and not kept, as on a GPU."""
    expected = run(name, quantize(0.3), counter_keep_mask((6, 2, 24), 0.3, WHERE), dtype)
    if recomputed:
        monkeypatch.setattr(functional._Mask, "is_recomputed", True)
    y, grad, kept = run(name, 0.3, WHERE, dtype)
    assert torch.equal(y, expected[0])
    assert torch.equal(grad, expected[1])
    assert not torch.equal(y, run(name, 0.3, None, dtype)[0])
    assert (kept, expected[2]) == (0 if recomputed else 6 * 2 * 24, 6 * 2 * 24)


@pytest.mark.parametrize(
    ("device", "mask", "is_recomputed"),
    [("cpu", WHERE, False), ("meta", WHERE, True), ("meta", None, False), ("cpu", None, False)],
)
def test_a_mask_is_computed_again_where_it_can_be_and_memory_is_scarce(device, mask, is_recomputed):
    x = torch.empty(6, 2, 24, device=device, requires_grad=True)
    kept: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pre_linear_dropout(x, 0.3, mask=mask).sum().backward()
    assert kept == ([] if is_recomputed else [torch.bool])
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_a_drawn_mask_is_scaled_by_the_rounded_p():
    x = torch.ones(64, 2, 64)
    y = pre_linear_dropout(x, 0.1)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - 6554 / 65536)).item()}
