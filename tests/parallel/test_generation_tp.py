"""Generation on two tensor parallel ranks: what transformers generates, in lock-step.

The file is also the script that the ranks run: torchrun test_generation_tp.py CHECKPOINT OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator

VOCABULARY = 1003
LENGTHS, NEW = (70, 12, 45, 44, 1, 30), (15, 30, 1, 22, 9, 18)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()) for n in LENGTHS]
    return [Request(prompt, new, frozenset(range(0, VOCABULARY, 40))) for prompt, new in zip(prompts, NEW, strict=True)]


# ------------------------------------------------------------------------------------------ what the ranks run


def ranks(checkpoint: str, out: str) -> None:
    engine = MegatronGenerator.from_checkpoint(
        checkpoint, tensor_parallel=2, dtype="fp32", max_length=90, max_batch_tokens=150, prefill_chunk=16
    )
    rank = torch.distributed.get_rank()
    result = {
        "answers": list(engine.generate(requests())),
        "first": engine.is_first_tensor_rank,
        "data_parallel": [engine.data_parallel_rank, engine.data_parallel_size],
        "argmax": argmax(rank),
    }
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(result))


def argmax(rank: int) -> list[list[int]]:
    from megatron_lengthgen.evaluation.generation.cached_forward import vocab_parallel_argmax

    return [
        vocab_parallel_argmax(logits.chunk(2, dim=1)[rank], vocab_size, torch.distributed.group.WORLD).tolist()
        for logits, vocab_size in argmax_cases()
    ]


def argmax_cases() -> list[tuple[torch.Tensor, int]]:
    """Logits of the whole vocabulary and how much of it is real; few distinct values, so that many are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (50, 32), generator=generator).to(torch.bfloat16)
    return [(logits, 32), (logits, 20), (logits, 16), (logits, 9)]


# -------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, megatron_single: Any) -> Path:
    from launch import torchrun
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_lengthgen.checkpoint.importing import import_model
    from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator

    out = tmp_path_factory.mktemp("generation")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(out / "hf")
    (out / "transformers.json").write_text(json.dumps(list(HuggingFaceGenerator(model).generate(requests()))))
    import_model(out / "hf", out / "imported")
    torchrun(2, Path(__file__), out / "imported", out)
    return out


def result(runs: Path, rank: int) -> dict[str, Any]:
    return json.loads((runs / f"rank{rank}.json").read_text())


def test_ranks_answer_as_transformers_does(runs: Path) -> None:
    expected = dict(json.loads((runs / "transformers.json").read_text()))
    assert len({len(answer) for answer in expected.values()}) > 2, "the stop tokens should end some answers early"
    assert dict(result(runs, 0)["answers"]) == expected


def test_one_process_answers_the_same(runs: Path) -> None:
    engine = MegatronGenerator.from_checkpoint(str(runs / "imported"), dtype="fp32", max_length=90)
    assert dict(engine.generate(requests())) == dict(result(runs, 0)["answers"])


def test_ranks_keep_step(runs: Path) -> None:
    first, second = result(runs, 0), result(runs, 1)
    assert first["answers"] == second["answers"], "same answers, finished in the same order"
    assert (first["first"], second["first"]) == (True, False)
    assert first["data_parallel"] == second["data_parallel"] == [0, 1]


def test_argmax_over_ranks_is_the_argmax_of_the_gathered_logits(runs: Path) -> None:
    expected = []
    for logits, vocab_size in argmax_cases():
        real = logits[:, :vocab_size]
        # The first position of the maximum, by definition rather than by what torch.argmax does with equals.
        expected.append([row.index(max(row)) for row in real.tolist()])
    assert result(runs, 0)["argmax"] == result(runs, 1)["argmax"] == expected


if __name__ == "__main__":
    ranks(*sys.argv[1:])
