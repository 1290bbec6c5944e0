"""Mamba-2 models: transformers' logits, gradients and answers; hybrids in the generation engine; what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MAMBA2, add_tokenizer, edit_config, logits, make_model

from megatron_lengthgen.checkpoint import importing, load
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator
from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator
from megatron_lengthgen.models import hugging_face, mamba2
from megatron_lengthgen.ssm.gated_norm import gated_rms_norm
from megatron_lengthgen.training import config

HYBRID = Path(__file__).parents[2] / "conf" / "hybrid_tiny_vpad.yaml"
VOCAB = MAMBA2["vocab_size"]


def tokens(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def requests() -> list[Request]:
    lengths, news = [70, 1, 33, 3, 48], [12, 20, 1, 15, 9]
    prompts = [tuple(tokens(n, seed=n)[0].tolist()) for n in lengths]
    prompts[2] = prompts[0][:20] + prompts[2][20:]
    return [Request(prompt, new, frozenset(range(0, VOCAB, 60))) for prompt, new in zip(prompts, news, strict=True)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, megatron_single: Callable[[int], None]) -> tuple[Any, Path]:
    """A Mamba-2 of transformers and the checkpoint imported from it."""
    out = tmp_path_factory.mktemp("mamba2")
    reference = make_model(out / "hf", family="mamba2")
    add_tokenizer(out / "hf")
    assert importing.import_model(out / "hf", out / "mg")
    return reference, out / "mg"


# Shorter than the convolution; a chunk of Megatron's 128 tokens and a bit.
@pytest.mark.parametrize("length", [1, 3, 150])
def test_logits_are_those_of_transformers(pair: tuple[Any, Path], length: int) -> None:
    reference, checkpoint = pair
    model, _ = load.load_model(checkpoint, dtype="fp32")
    ids = tokens(length, rows=2)
    with torch.no_grad():
        expected = reference(ids).logits
    torch.testing.assert_close(logits(model, ids)[..., :VOCAB], expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_transformers(pair: tuple[Any, Path]) -> None:
    reference, checkpoint = pair
    model, args = load.load_model(checkpoint, dtype="fp32")
    ids, labels = tokens(45, rows=2), tokens(45, rows=2, seed=1)
    reference.zero_grad()
    torch.nn.functional.cross_entropy(reference(ids).logits.flatten(0, 1), labels.flatten()).backward()
    positions = torch.arange(ids.size(1)).expand_as(ids)
    found = model.train()(ids, positions, None)[..., :VOCAB]
    torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
    theirs, ours = dict(reference.named_parameters()), dict(model.named_parameters())
    for entry in mamba2.key_map(vars(args)):
        (gradient,) = entry.unpack(ours[entry.megatron].grad)
        expected = theirs[entry.hugging_face[0]].grad
        assert expected.abs().max() > 0, entry.megatron
        error = (gradient - expected).norm() / expected.norm()
        assert error < 1e-4, f"{entry.megatron}: {error}"


def test_several_groups_are_normalised_one_by_one(
    tmp_path: Path, megatron_single: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' plain path takes all channels together, its CUDA path and ``mamba_ssm`` each group by itself."""
    from transformers.models.mamba2 import modeling_mamba2

    reference = make_model(tmp_path / "hf", family="mamba2", n_groups=2)
    importing.import_model(tmp_path / "hf", tmp_path / "mg")
    model, _ = load.load_model(tmp_path / "mg", dtype="fp32")
    ids = tokens(40)

    def by_group(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        size = self.weight.numel() // 2
        return gated_rms_norm(hidden_states, self.weight, gate, self.variance_epsilon, size, norm_before_gate=False)

    found = logits(model, ids)[..., :VOCAB]
    with torch.no_grad():
        together = reference(ids).logits
        monkeypatch.setattr(modeling_mamba2.MambaRMSNormGated, "forward", by_group)
        torch.testing.assert_close(found, reference(ids).logits, rtol=1e-4, atol=1e-4)
    assert (found - together).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_greedy_answers_are_those_of_transformers(pair: tuple[Any, Path], chunk: int) -> None:
    reference, checkpoint = pair
    expected = dict(HuggingFaceGenerator(reference).generate(requests()))
    assert len({len(answer) for answer in expected.values()}) > 2, "the stop tokens should end some answers early"
    engine = MegatronGenerator.from_checkpoint(str(checkpoint), dtype="fp32", max_length=90, prefill_chunk=chunk)
    assert dict(engine.generate(requests())) == expected
    assert engine.shared_tokens == {1: 20, 2: 20, 7: 14, 64: 0}[chunk]


def test_a_mamba_layer_keeps_the_same_memory_at_any_length(pair: tuple[Any, Path]) -> None:
    from megatron_lengthgen.attention.cache import SequenceCache
    from megatron_lengthgen.evaluation.generation.cached_forward import CachedForward

    model, _ = load.load_model(pair[1], dtype="fp32")
    run = CachedForward(model, max_length=4096, prefill_chunk=64, vocab_size=VOCAB)
    sizes = []
    for length in (5, 500):
        cache = SequenceCache(length + 1)
        run.prefill(tokens(length)[0].tolist(), cache)
        run.decode([1], [length], [cache])
        sizes.append(cache.nbytes)
    heads, channels = 6, 6 * 16 + 2 * 16
    assert sizes == [3 * 4 * (heads * 16 * 16 + 3 * channels)] * 2


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "use_bias=True; Megatron's Mamba computes False"),
        ({"use_conv_bias": False}, "use_conv_bias=False"),
        ({"conv_kernel": 3}, "conv_kernel=3; Megatron's Mamba computes 4"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"rms_norm": False}, "rms_norm=False"),
        ({"time_step_limit": [0.0, 0.5]}, "time_step_limit"),
        ({"n_groups": 4}, "num_heads=6, not a multiple of n_groups=4"),
        ({"state_size": None}, "state_size=None"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(pair: tuple[Any, Path], changes: Any, message: str) -> None:
    config = {**pair[0].config.to_dict(), "architectures": ["Mamba2ForCausalLM"]}
    with pytest.raises(UserError, match=message):
        hugging_face.megatron_args(config | changes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hybrid_layer_pattern='M-M*-||M*-'"], "leaves a pipeline stage without layers"),
        (["hybrid_layer_pattern='M-X*-|M*-'"], "'X' is not a valid layer symbol"),
        (["num_layers=4"], r"hybrid_layer_pattern 'M-M\*-\|M-\*-M-' has 11 layers: leave num_layers 4 out"),
        (["mamba_num_groups=3"], "does not divide mamba_num_groups 3; this model can use 1"),
        (["mamba_num_heads=7"], "does not divide mamba_num_heads 7; this model can use 1"),
        (["lengthgen.attention.pattern=WFF"], "pattern 'WFF' is 3 layers long, and the model has 2"),
    ],
)
def test_configurations_that_cannot_run(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=message):
        config.parse(config.load(HYBRID, overrides))


def test_windows_for_a_model_without_attention(pair: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"window 16 is for attention.*leave window out"):
        importing.import_model(pair[1].parent / "hf", tmp_path / "mg", window=16)


def test_a_tied_copy_that_differs(tmp_path: Path) -> None:
    make_model(tmp_path / "hf", family="mamba2", tie_word_embeddings=False)
    edit_config(tmp_path / "hf", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"differs from backbone\.embeddings\.weight"):
        importing.import_model(tmp_path / "hf", tmp_path / "mg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel": 2}, "tensor parallel size 2 does not divide mamba_num_groups=1"),
        ({"tensor_parallel": 4}, "tensor parallel size 4 does not divide num_attention_heads=6"),
        ({"pipeline_parallel": 4}, "pipeline parallel size 4 is more than the 3 layers of pattern 'MMM'"),
    ],
)
def test_layouts_that_do_not_fit(pair: tuple[Any, Path], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load.load_model(pair[1], **arguments)
