"""Keys and numbers of a built model's sites: masks depend on step, sample, layer and site, and on nothing else."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from spec_models import assert_same, batch, build, build_hybrid, losses, make_config, stock_block, stock_layer
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import hybrid, step_key
from megatron_lengthgen.specs.binding import bind
from megatron_lengthgen.specs.site import Extent, sites
from megatron_lengthgen.specs.step_key import StepKey
from megatron_lengthgen.specs.substitution import apply, substitute

pytestmark = pytest.mark.usefixtures("megatron_single")
GPT_SITES = ("attention", "mlp", "output", "linear_proj", "linear_fc2")


@dataclasses.dataclass
class Run:
    """What a trainer tells the binding."""

    step: int = 0
    microbatches: int = 1

    def bind(self, *models: torch.nn.Module, seed: int = 1) -> None:
        bind(models, seed=seed, step=lambda: self.step, microbatches=lambda: self.microbatches)


def make_model(run: Run | None = None, seed: int = 1, config: Any = None, **choices: Any) -> Any:
    config = config or make_config()
    regularization = Regularization(**{"placement": "pre_linear", "p": 0.3, "sites": GPT_SITES, **choices})
    model = build(apply(stock_block(config), regularization), config).train()
    if run is not None:
        run.bind(model, seed=seed)
    return model


def distinct(tensors: list[Tensor]) -> bool:
    return all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def state_names() -> set[str]:
    return set(get_cuda_rng_tracker().get_states())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_key_is_read_as_it_was_written(key, step, microbatch):
    before = get_cuda_rng_tracker().get_states()
    step_key.write(StepKey(key, step, microbatch))
    assert step_key.read() == StepKey(key, step, microbatch)
    step_key.write(StepKey(key ^ 1, step, microbatch))
    assert step_key.read() == StepKey(key ^ 1, step, microbatch)
    step_key.clear()
    assert step_key.read() is None
    after = get_cuda_rng_tracker().get_states()
    assert after.keys() == before.keys()
    assert all(after[name] is state for name, state in before.items())


def test_keys_of_steps_and_seeds_are_64_bit_hashes():
    keys = [step_key.derive(seed, step) for seed in range(30) for step in range(30)]
    assert len(set(keys)) == 900
    assert all(0 <= key < 2**64 for key in keys)
    # Every bit is set in about half of them: within six standard deviations.
    assert all(abs(sum(key >> bit & 1 for key in keys) - 450) < 6 * 15 for bit in range(64))
    # A run that is resumed with a later version meets the same masks.
    assert step_key.derive(1234, 0) == 0xC297DF3EB1FED0BC


def test_sites_learn_number_and_extent():
    model = make_model()
    assert all(dropout.number is None for *_, dropout in sites(model))
    Run().bind(model)
    assert all(dropout.number is not None and dropout.extent == Extent() for *_, dropout in sites(model))


def test_every_site_has_a_number_of_its_own():
    config = make_config(mtp_num_layers=2)
    regularization = Regularization("pre_linear", p=0.3, sites=(*GPT_SITES, "mtp"))
    block = apply(stock_block(config), dataclasses.replace(regularization, sites=GPT_SITES))
    mtp = apply(get_gpt_mtp_block_spec(config, block, use_transformer_engine=False), regularization)
    model = build(block, config, mtp_block_spec=mtp)
    Run().bind(model)
    numbers = {name: dropout.number for name, _, dropout in sites(model)}
    # Four per layer, five layers; three final norms; enorm and hnorm, twice.
    assert len(numbers) == 4 * 5 + 3 + 2 * 2
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 2**32 for number in numbers.values())
    # Wrapped, as in Megatron's Float16Module, they are the same.
    Run().bind(wrapped := torch.nn.ModuleDict({"module": model}))
    assert {name.removeprefix("module."): d.number for name, _, d in sites(wrapped)} == numbers


def test_sites_of_a_hybrid_are_numbered_by_its_layers():
    config = make_config(num_layers=5, num_moe_experts=4, moe_router_topk=2, add_bias_linear=False)
    spec = hybrid.stack_spec(
        "local", Regularization("vpad", p=0.3, sites=("attention", "mlp", "output", "linear_proj"))
    )
    model = build_hybrid(spec, config, "*-*E*")
    Run().bind(model)
    numbers = [dropout.number for *_, dropout in sites(model)]
    assert len(numbers) == len(set(numbers)) == 3 * 2 + 2 + 1


def test_sites_that_cannot_be_told_apart_are_refused():
    """Two chunks of one pipeline stage count their layers on; two models do not."""
    with pytest.raises(UserError, match=r"decoder.layers.0.input_layernorm and .* cannot be told apart"):
        Run().bind(make_model(), make_model())


def test_a_site_outside_of_a_numbered_layer_is_refused():
    layer = make_model().decoder.layers[0]
    del layer.layer_number
    with pytest.raises(UserError, match=r"dropout site 0\.input_layernorm is in no layer with a number"):
        Run().bind(torch.nn.Sequential(layer))


def test_a_model_without_dropout_gets_no_keys():
    model = make_model(p=0.0)
    before = len(model._forward_pre_hooks)
    Run().bind(model)
    assert len(model._forward_pre_hooks) == before


def test_the_key_is_there_in_forward_and_in_recomputation_and_nowhere_else():
    """Forward, forward, backward, backward, as pipelines do: a recomputation reads the key of its own microbatch."""
    run = Run(step=7, microbatches=2)
    config = make_config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    model = make_model(run, config=config)
    seen: list[StepKey | None] = []
    model.decoder.layers[1].mlp.linear_fc1.register_forward_hook(lambda *_: seen.append(step_key.read()))
    names = state_names()
    outputs = []
    for _ in range(2):
        outputs.append(losses(model).mean())
        assert state_names() == names
    for output in outputs:
        output.backward()
        assert state_names() == names
    keys = [StepKey(step_key.derive(1, 7), 7, microbatch) for microbatch in range(2)]
    assert seen == keys + keys


def test_a_forward_that_fails_leaves_no_key():
    model, names = make_model(Run()), state_names()
    model.decoder.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses(model)
    assert state_names() == names


@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
)
def test_recomputation_gives_the_same_gradients(placement, recompute):
    def gradients(**fields: Any) -> Any:
        run = Run(microbatches=2)
        # Recomputing an MLP with biases never ends in Megatron 0.19.2: the bias is an output of the checkpoint.
        model = make_model(run, config=make_config(add_bias_linear=False, **fields), placement=placement)
        outputs = [losses(model).mean() for _ in range(2)]
        for output in outputs:
            output.backward()
        return torch.stack(outputs).detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    assert_same(gradients(**recompute), gradients())


def test_masks_differ_between_steps_microbatches_and_seeds_and_come_back():
    run = Run(microbatches=2)
    model = make_model(run)
    found = {}
    for step in (0, 1):
        run.step = step
        for microbatch in (0, 1):
            found[step, microbatch] = losses(model)
    other = losses(make_model(Run(microbatches=2), seed=2))
    assert distinct([*found.values(), other])
    # A new process that resumes at step 1, whatever its random streams are at.
    torch.manual_seed(99)
    resumed = make_model(Run(step=1, microbatches=2))
    assert torch.equal(losses(resumed), found[1, 0])
    assert torch.equal(losses(resumed), found[1, 1])


def test_a_step_that_is_run_again_meets_the_same_masks():
    """Megatron's rerun state machine repeats a step without moving its counter."""
    model = make_model(Run(microbatches=3))
    first = [losses(model) for _ in range(3)]
    again = [losses(model) for _ in range(3)]
    assert distinct(first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_evaluation_does_not_count():
    run = Run(microbatches=2)
    expected = [losses(model := make_model(run)), losses(model)]
    model = make_model(run)
    first = losses(model)
    with torch.no_grad():
        evaluated = losses(model.eval())
    assert torch.equal(evaluated, losses(make_model().eval()))
    assert torch.equal(first, expected[0])
    assert torch.equal(losses(model.train()), expected[1])


def one_by_one(model: Any) -> Tensor:
    tokens, positions, labels = batch()
    rows = [slice(row, row + 1) for row in range(2)]
    return torch.cat([model(tokens[row], positions[row], None, labels=labels[row]) for row in rows])


def test_the_micro_batch_size_does_not_show():
    whole = losses(make_model(Run(microbatches=1)))
    split = one_by_one(make_model(Run(microbatches=2)))
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
    assert (split - losses(make_model().eval())).abs().max() > 0.01


def test_data_parallel_ranks_hold_the_samples_that_megatron_deals_them(monkeypatch):
    """Two ranks with one microbatch each are one rank with two."""
    whole = one_by_one(make_model(Run(microbatches=2)))
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        model = make_model(Run(microbatches=1))
        tokens, positions, labels = (part[rank : rank + 1] for part in batch())
        assert torch.equal(model(tokens, positions, None, labels=labels), whole[rank : rank + 1])


def test_extents_follow_the_ranks(monkeypatch):
    for name, value in (("tensor_model", 1), ("context", 2)):
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_rank", lambda value=value: value)
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", lambda value=value: value + 1)
    model = make_model()
    found = list(sites(model))
    for *_, dropout in found[:2]:
        dropout.sequence_parallel = True
    Run().bind(model)
    channels = Extent(context_rank=2, context_parts=3, channel_rank=1)
    for index, (_, _, dropout) in enumerate(found):
        tokens = Extent(context_rank=2, context_parts=3)
        if index < 2 and dropout.place != "features":
            tokens = tokens._replace(token_rank=1, token_parts=2)
        assert dropout.extent == (channels if dropout.place == "features" else tokens)
    assert {dropout.extent.token_parts for *_, dropout in found} == {1, 2}


@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
@pytest.mark.parametrize("ramp_steps", [0, 4])
def test_nothing_is_dropped_before_the_start(placement, ramp_steps):
    """Bit for bit; then p is that of the ramp."""
    run = Run()
    model = make_model(run, placement=placement, start_step=2, ramp_steps=ramp_steps)
    without = losses(make_model(p=0.0))
    for step in range(2):
        run.step = step
        assert torch.equal(losses(model), without)
    for step in range(2, 8):
        run.step = step
        p = 0.3 * min((step - 1) / (ramp_steps + 1), 1.0)
        expected = losses(make_model(Run(step=step), placement=placement, p=p))
        assert torch.equal(losses(model), expected)
        assert not torch.equal(expected, without)


def test_a_bound_models_layers_cannot_be_called_one_by_one():
    model = make_model(Run())
    with pytest.raises(UserError, match="reached without a forward of the whole model"):
        model.decoder.layers[0](torch.randn(8, 1, 48), attention_mask=None)


def test_an_unbound_model_with_a_schedule_is_refused():
    with pytest.raises(UserError, match="need to know the training step"):
        losses(make_model(ramp_steps=2))


def test_layers_made_of_one_spec_drop_differently():
    config = make_config(num_layers=2)
    model = build(substitute(stock_layer(config), "pre_linear", p=0.3), config)
    Run().bind(model)
    dropped = []
    for layer in model.decoder.layers:
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            norm.register_forward_hook(lambda _, __, output: dropped.append(output == 0))
    losses(model)
    assert len(dropped) == 4
    assert distinct(dropped)
