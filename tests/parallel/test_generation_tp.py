"""Generation over tensor and pipeline parallel ranks: what transformers generates, in lock-step.

The file is also the script that the ranks run: torchrun test_generation_tp.py CHECKPOINT OUT
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator

VOCABULARY = 1003
LENGTHS, NEW = (70, 12, 45, 44, 1, 30), (15, 30, 1, 22, 9, 18)
RANKS, LAYOUTS = 4, ((2, 1), (1, 2), (2, 2), (1, 4))


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()) for n in LENGTHS]
    prompts[3] = prompts[0][:40] + prompts[3][40:]
    return [Request(prompt, new, frozenset(range(0, VOCABULARY, 40))) for prompt, new in zip(prompts, NEW, strict=True)]


# ------------------------------------------------------------------------------------------ what the ranks run


def ranks(checkpoint: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    results = {}
    for tensor, pipeline in LAYOUTS:
        engine = MegatronGenerator.from_checkpoint(
            checkpoint,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            dtype="fp32",
            max_length=90,
            max_batch_tokens=250,
            prefill_chunk=16,
        )
        answers = list(engine.generate(requests()))
        results[f"{tensor}x{pipeline}"] = {
            "answers": answers,
            "shared": engine.shared_tokens,
            "first": engine.is_first_model_rank,
            "data_parallel": [engine.data_parallel_rank, engine.data_parallel_size],
            "layers": len(engine._run.model.decoder.layers),
        }
    results["argmax"] = argmax(rank)
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(results))


def argmax(rank: int) -> list[list[int]]:
    from megatron_lengthgen.evaluation.generation.cached_forward import vocab_parallel_argmax

    return [
        vocab_parallel_argmax(logits.chunk(RANKS, dim=1)[rank], vocab_size, torch.distributed.group.WORLD).tolist()
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
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(out / "hf")
    (out / "transformers.json").write_text(json.dumps(list(HuggingFaceGenerator(model).generate(requests()))))
    import_model(out / "hf", out / "imported")
    torchrun(RANKS, Path(__file__), out / "imported", out)
    return out


def results(runs: Path, layout: str) -> list[dict[str, Any]]:
    return [json.loads((runs / f"rank{rank}.json").read_text())[layout] for rank in range(RANKS)]


def test_one_process_answers_as_transformers_does(runs: Path) -> None:
    expected = dict(json.loads((runs / "transformers.json").read_text()))
    assert len({len(answer) for answer in expected.values()}) > 2, "the stop tokens should end some answers early"
    engine = MegatronGenerator.from_checkpoint(str(runs / "imported"), dtype="fp32", max_length=90)
    assert dict(engine.generate(requests())) == expected


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_every_layout_answers_as_transformers_does(runs: Path, tensor: int, pipeline: int) -> None:
    expected = dict(json.loads((runs / "transformers.json").read_text()))
    ranks = results(runs, f"{tensor}x{pipeline}")
    copies = RANKS // (tensor * pipeline)
    assert {rank["layers"] for rank in ranks} == {4 // pipeline}
    assert all(dict(rank["answers"]) == expected for rank in ranks)
    assert all(rank["answers"] == ranks[0]["answers"] for rank in ranks), "finished in the same order"
    assert all(rank["shared"] == 32 for rank in ranks), "two prompts share 40 tokens, so 2 chunks of 16"
    # One rank of each copy of the model records.
    assert sorted(rank["data_parallel"][0] for rank in ranks if rank["first"]) == list(range(copies))
    assert {rank["data_parallel"][1] for rank in ranks} == {copies}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(pipeline_parallel=3), "pipeline parallel size 3 does not divide num_layers=4"),
        (dict(pipeline_parallel=0), "pipeline parallel size must be at least 1, got 0"),
        (dict(pipeline_parallel=2), "with pipeline parallel size 2 does not fit 1 process.*--nproc-per-node 2"),
        (dict(tensor_parallel=2, pipeline_parallel=2), "size 2 does not fit 1 process.*--nproc-per-node 4"),
    ],
)
def test_layouts_that_do_not_fit(runs: Path, arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        MegatronGenerator.from_checkpoint(str(runs / "imported"), max_length=90, **arguments)


def test_argmax_over_ranks_is_the_argmax_of_the_gathered_logits(runs: Path) -> None:
    expected = []
    for logits, vocab_size in argmax_cases():
        real = logits[:, :vocab_size]
        # The first position of the maximum, by definition rather than by what torch.argmax does with equals.
        expected.append([row.index(max(row)) for row in real.tolist()])
    assert results(runs, "argmax") == [expected] * RANKS


if __name__ == "__main__":
    ranks(*sys.argv[1:])
