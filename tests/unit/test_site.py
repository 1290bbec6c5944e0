"""One dropout site: which part of the whole it holds, which p and mask it uses, what it hands on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_lengthgen.dropout.functional import pre_linear_dropout
from megatron_lengthgen.dropout.masks import quantize
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import SITES, Regularization
from megatron_lengthgen.specs import step_key
from megatron_lengthgen.specs.site import AfterNorm, BeforeExperts, BeforeLinear, Extent, SiteDropout
from megatron_lengthgen.specs.step_key import StepKey

pytestmark = pytest.mark.usefixtures("megatron_single")


def make_site(name: str = "mlp", p: float = 0.3, number: int | None = None, **choices: Any) -> SiteDropout:
    config = SimpleNamespace(sequence_parallel=False, context_parallel_size=1, layernorm_zero_centered_gamma=False)
    regularization = Regularization(**{"placement": "pre_linear", "sites": (name,), **choices})
    dropout = SiteDropout(name, regularization, p, config)
    dropout.number = number
    return dropout


@pytest.fixture
def at_key():
    """``at_key(...)`` sets the key that sites read; it is removed after the test."""
    yield lambda key=1234, step=0, microbatch=0: step_key.write(StepKey(key, step, microbatch))
    step_key.clear()


def rows_of(extent: Extent, rows: int) -> list[int]:
    return [position for first, count in extent.positions(rows) for position in range(first, first + count)]


def megatrons_rows(seq_length: int, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that Megatron deals to a context-parallel rank, from its own slicing."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
        patch.setattr(torch.distributed, "get_rank", lambda group: rank)
        batch = {"tokens": torch.arange(seq_length).view(1, -1)}
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=object())["tokens"][0].tolist()  # type: ignore[arg-type]


def test_one_rank_holds_all_positions():
    assert Extent().positions(7) == ((0, 7),)


def test_sequence_parallel_ranks_hold_one_run_each():
    assert [Extent(token_rank=rank, token_parts=4).positions(5) for rank in range(4)] == [
        ((0, 5),),
        ((5, 5),),
        ((10, 5),),
        ((15, 5),),
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_context_parallel_positions_are_those_that_megatron_deals(monkeypatch, ranks, parts):
    """Alone and with sequence parallelism, which splits what a context-parallel rank got."""
    rows = 2 * parts
    seen = []
    for rank in range(ranks):
        dealt = megatrons_rows(ranks * parts * rows, rank, ranks, monkeypatch)
        assert len(dealt) == parts * rows
        for part in range(parts):
            mine = rows_of(Extent(part, parts, rank, ranks), rows)
            assert mine == dealt[part * rows : (part + 1) * rows]
            seen += mine
    assert sorted(seen) == list(range(ranks * parts * rows))


@given(ranks=st.integers(1, 5), parts=st.integers(1, 5), rows=st.integers(1, 9))
def test_ranks_cover_every_position_once(ranks, parts, rows):
    if ranks > 1 and parts * rows % 2:
        with pytest.raises(UserError, match=rf"holds {parts * rows} tokens: make seq_length divisible by {2 * ranks}"):
            Extent(0, parts, 0, ranks).positions(rows)
        return
    extents = [Extent(part, parts, rank, ranks) for rank in range(ranks) for part in range(parts)]
    assert sorted(p for extent in extents for p in rows_of(extent, rows)) == list(range(ranks * parts * rows))
    assert all(sum(count for _, count in extent.positions(rows)) == rows for extent in extents)


@settings(deadline=None, max_examples=25)
@given(parts=st.sampled_from([1, 2, 4]), ranks=st.sampled_from([1, 2]), split=st.sampled_from(["tokens", "channels"]))
def test_parts_of_a_tensor_get_the_parts_of_its_mask(parts, ranks, split):
    """Whatever the layout, a token meets the same mask at the same site."""
    name = "linear_fc2" if split == "channels" else "mlp"
    torch.manual_seed(1)
    x = torch.randn(16, 2, 24)
    step_key.write(StepKey(2**63 + 5, 3, 4))
    try:
        whole = make_site(name, number=70)(x)
        for rank in range(ranks):
            for part in range(parts):
                dropout = make_site(name, number=70)
                if split == "tokens":
                    dropout.extent = Extent(part, parts, rank, ranks)
                    rows, channels = rows_of(dropout.extent, 16 // parts // ranks), slice(None)
                else:
                    dropout.extent = Extent(context_rank=rank, context_parts=ranks, channel_rank=part)
                    width = 24 // parts
                    rows = rows_of(dropout.extent, 16 // ranks)
                    channels = slice(part * width, (part + 1) * width)
                assert torch.equal(dropout(x[rows][..., channels]), whole[rows][..., channels])
    finally:
        step_key.clear()


def test_samples_are_numbered_over_microbatches(at_key):
    """Two microbatches of one sample are one of two."""
    x = torch.randn(8, 2, 16)
    at_key(microbatch=3)
    whole = make_site(number=70)(x)
    for sample in range(2):
        at_key(microbatch=6 + sample)
        assert torch.equal(make_site(number=70)(x[:, sample : sample + 1]), whole[:, sample : sample + 1])


def test_masks_follow_key_microbatch_and_number(at_key):
    x = torch.ones(16, 2, 64)
    outputs = []
    for key, microbatch, number in [(1, 0, 33), (2, 0, 33), (1, 1, 33), (1, 0, 34)]:
        at_key(key=key, microbatch=microbatch)
        outputs.append(make_site(number=number)(x))
        assert torch.equal(make_site(number=number)(x), outputs[-1])
    assert len({tuple(y.flatten().tolist()) for y in outputs}) == 4


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bound_site_draws_nothing(megatron_single, at_key, name, sequence_parallel):
    dropout = make_site(name, number=70, placement="vpad", statistics="batch")
    at_key()
    megatron_single(3)
    at_key()
    default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    dropout.sequence_parallel = sequence_parallel
    assert not torch.equal(dropout(x := torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(1))), x)
    assert torch.equal(torch.get_rng_state(), default)
    assert get_cuda_rng_tracker().get_states() == tracked


@pytest.mark.parametrize("name", ["mlp", "output", "linear_proj", "linear_fc2", "out_proj", "mtp"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_unbound_site_draws_from_the_stream_of_its_place(megatron_single, name, sequence_parallel):
    """Features split over ranks, or tokens after the block: the tracked stream; else whatever is current."""
    dropout = make_site(name)
    dropout.sequence_parallel = sequence_parallel
    x = torch.ones(64, 2, 16)
    megatron_single(3)
    with get_cuda_rng_tracker().fork():
        tracked = pre_linear_dropout(x, 0.3)
    megatron_single(3)
    current = pre_linear_dropout(x, 0.3)
    assert not torch.equal(tracked, current)
    forks = sequence_parallel if name == "output" else "_" in name and not sequence_parallel
    megatron_single(3)
    assert torch.equal(dropout(x), tracked if forks else current)


@pytest.mark.parametrize(
    ("start", "ramp", "factors"),
    [
        (0, 0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (2, 0, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        (0, 3, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (2, 1, [0.0, 0.0, 0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_p_starts_and_rises_as_scheduled(at_key, start, ramp, factors):
    dropout = make_site(p=0.4, number=70, start_step=start, ramp_steps=ramp)
    x = torch.ones(64, 4, 64)
    for step, factor in enumerate(factors):
        at_key(step=step)
        y = dropout(x)
        if factor == 0.0:
            assert y is x
            continue
        p = quantize(0.4 * factor)
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
        assert abs((y == 0).double().mean().item() - p) < 0.02


def test_a_ramp_only_ever_drops_more(at_key):
    """While p rises with one key, what was dropped stays dropped."""
    dropout, x = make_site(p=0.5, number=70, ramp_steps=9), torch.ones(16, 2, 64)
    at_key(step=0)
    before = dropout(x) == 0
    for step in range(1, 10):
        at_key(step=step)
        now = dropout(x) == 0
        assert (now | ~before).all()
        before = now


def test_a_schedule_without_a_key_is_refused():
    with pytest.raises(UserError, match=r"start_step and ramp_steps need to know the training step.*binding.bind"):
        make_site(start_step=5)(torch.randn(4, 1, 8))


def test_a_bound_site_without_a_key_is_refused():
    with pytest.raises(UserError, match="site 'mlp' was reached without a forward of the whole model"):
        make_site(number=70)(torch.randn(4, 1, 8))


def test_the_residual_of_a_fused_norm_passes_untouched(megatron_single):
    x, residual = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    norm, hook = torch.nn.Identity(), AfterNorm(make_site())
    megatron_single(4)
    dropped, passed = hook(norm, (x,), (x, residual))
    megatron_single(4)
    assert torch.equal(dropped, hook(norm, (x,), x))
    assert passed is residual
    assert hook(norm.eval(), (x,), (x, residual)) is None


def test_only_the_first_argument_of_a_linear_is_dropped():
    x, other = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    linear, hook = torch.nn.Identity(), BeforeLinear(make_site("linear_fc2"))
    dropped, passed = hook(linear, (x, other))
    assert (dropped == 0).any()
    assert passed is other
    assert hook(linear.eval(), (x, other)) is None


class Experts(torch.nn.Module):
    """Hands one input to its router and to its experts, as ``MoELayer`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.fails = torch.nn.Identity(), False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fails:
            raise RuntimeError("out of memory")
        return x, self.router(x)


def test_the_router_is_given_the_undropped_input():
    layer, hook = Experts(), BeforeExperts(make_site())
    layer.register_forward_pre_hook(hook)
    layer.router.register_forward_pre_hook(hook.for_router)
    x = torch.randn(8, 2, 16)
    experts, router = layer(x)
    assert (experts == 0).any()
    assert router is x
    # A forward that failed leaves nothing behind for the next one.
    layer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        layer(torch.randn(8, 2, 16))
    layer.fails = False
    assert layer.eval()(x) == (x, x)
