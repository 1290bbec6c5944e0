"""Sources with weights and budgets, and what they come to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import blend, config

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 128,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "lr": 1e-3,
}


def resolve(sources: Any, **values: Any) -> dict[str, Any]:
    return config.resolve({**MODEL, "sources": sources, **values}, {}).megatron


def test_weights_are_shares() -> None:
    values = resolve([{"path": "a", "weight": 3}, {"path": "b", "weight": 1}], train_iters=5)
    assert values["data_path"] == [0.75, "a", 0.25, "b"]
    assert "sources" not in values


def test_budgets_make_the_length_of_the_run() -> None:
    values = resolve([{"path": "a", "tokens": 3e4}, {"path": "b", "tokens": 1e4}])
    assert values["data_path"] == [0.75, "a", 0.25, "b"]
    assert values["train_iters"] == -(-40000 // 128)


def test_a_weight_beside_budgets_takes_what_is_left() -> None:
    sources = [{"path": "a", "weight": 1}, {"path": "b", "tokens": 2e4}, {"path": "c", "weight": 3}]
    values = resolve(sources, train_tokens=1e5)
    assert values["data_path"] == pytest.approx([0.2, "a", 0.2, "b", 0.6, "c"])
    by_steps = resolve(sources, train_iters=1000)
    assert by_steps["data_path"][2] == pytest.approx(2e4 / 128000)


def test_budgets_may_repeat_the_length_of_the_run() -> None:
    sources = [{"path": "a", "tokens": 3e4}, {"path": "b", "tokens": 1e4}]
    assert resolve(sources, train_tokens=4e4)["data_path"] == [0.75, "a", 0.25, "b"]
    assert resolve(sources, train_iters=313)["data_path"] == [0.75, "a", 0.25, "b"]


@pytest.mark.parametrize("source", [{"path": "a"}, {"path": "a", "weight": 0.3}])
def test_one_source_is_all_there_is(source: dict[str, Any]) -> None:
    assert resolve([source], train_iters=5)["data_path"] == ["a"]


@pytest.mark.parametrize(
    ("sources", "values", "message"),
    [
        ("a", {}, "sources must be a list such as"),
        ([{"weight": 1}], {}, "a source needs a path"),
        ([{"path": "a", "wieght": 1}], {}, r"source key 'wieght' \(did you mean 'weight'"),
        ([{"path": "a", "weight": 1, "tokens": 5}], {}, "the source a has a weight and tokens: keep one"),
        ([{"path": "a"}, {"path": "b", "weight": 1}], {}, "the source a says nothing of its share"),
        ([{"path": "a", "weight": 1}] * 2, {}, "the source a is listed twice"),
        ([{"path": "a", "weight": 0}, {"path": "b", "weight": 1}], {}, "the source a has weight 0: leave it out"),
        ([{"path": "a", "weight": -1}], {}, "weight of the source a must be a number of 0 or more"),
        ([{"path": "a", "weight": 1}], {"data_path": ["b"]}, "sources and data_path both say what to train on"),
        ([{"path": "a", "weight": 1}], {"mock_data": True}, "sources and mock_data both say"),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "tokens": 1e4}],
            {},
            "a part of what 10,000 tokens leave of the run: set train_tokens",
        ),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "tokens": 1e4}],
            {"train_tokens": 1e4},
            "add up to 10,000, which leaves nothing of the run's 10,000",
        ),
        ([{"path": "a", "tokens": 2e4}], {"train_tokens": 1e4}, "add up to 20,000 and the run trains on 10,000"),
        ([{"path": "a", "tokens": 1e4}], {"train_iters": 100}, "add up to 10,000 and the run trains on 12,800"),
    ],
)
def test_sources_that_do_not_add_up_are_refused(sources: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(sources, **values)


@pytest.fixture
def corpus(tmp_path: Path):
    def make(name: str, documents: int, tokens: int) -> str:
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for _ in range(documents):
            builder.add_document(torch.arange(tokens) % 100, [tokens])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return str(tmp_path / name)

    return make


def parse(sources: Any, section: dict[str, Any] | None = None, **values: Any) -> Any:
    values = {**MODEL, "sources": sources, "split": "90,10,0", "eval_iters": 1, **values}
    run = config.resolve(values, section or {})
    return config.parse(run)


def test_a_run_says_how_often_it_repeats_its_sources(corpus) -> None:
    books, web = corpus("books", 10, 100), corpus("web", 100, 100)
    args = parse([{"path": books, "weight": 1}, {"path": web, "tokens": 9000}], train_tokens=128 * 100)
    assert blend.describe(args) == [
        "data: 12,800 tokens from 2 sources",
        f"  {books}: 29.7%, 3,800 tokens, 4.22 epochs of the 900 that its training split has",
        f"  {web}: 70.3%, 9,000 tokens, 1.00 epochs of the 9,000 that its training split has",
    ]


def test_megatron_draws_the_shares(corpus, megatron_single) -> None:
    """Over its own blended dataset of the run."""
    from megatron_lengthgen.training.data import train_valid_test_datasets

    args = parse(
        [{"path": corpus("a", 40, 100), "weight": 1}, {"path": corpus("b", 40, 100), "tokens": 9600}],
        train_tokens=128 * 100,
    )
    train, _, _ = train_valid_test_datasets([args.train_iters * 2, 2, 2])
    drawn = np.bincount(train.dataset_index[:200], minlength=2)
    assert drawn.tolist() == [50, 150]


def test_a_split_is_counted_as_megatron_splits(corpus, megatron_single) -> None:
    from megatron_lengthgen.training.data import validation_dataset

    prefix = corpus("c", 37, 100)
    args = parse([{"path": prefix}], train_iters=1)
    (source,) = blend.validation_sources(args)
    built = validation_dataset(32, 2)
    assert source.tokens == 100 * len(built.indices)
    assert sum(item.tokens for item in blend.training_sources(args)) + source.tokens == 3700
