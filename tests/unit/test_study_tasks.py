"""What a sample is, for all tasks and lengths."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.study.dataset import TaskDataset
from megatron_lengthgen.study.tasks import Counting, Recall, Sample, Split, from_mapping, sample

SPLITS: tuple[Split, ...] = ("training", "validation", "evaluation")

recalls = st.builds(
    lambda needles, extra, values, states, successors, distractors: Recall(
        needles, needles + extra, values, states, min(successors, states), distractors
    ),
    st.integers(1, 8),
    st.integers(0, 30),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(1, 6),
    st.floats(0, 0.99),
)
countings = st.builds(
    lambda max_count, states, successors: Counting(max_count, states, min(successors, states)),
    st.integers(1, 20),
    st.integers(1, 60),
    st.integers(1, 6),
)


def is_same(a: Sample, b: Sample) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.answers, b.answers)


@settings(deadline=None, max_examples=40)
@given(recalls, st.integers(0, 200), st.integers(0, 2**31), st.sampled_from(SPLITS))
def test_recall_asks_once_for_the_value_behind_each_needle(task: Recall, room: int, seed: int, split: Split) -> None:
    length = task.min_length - 1 + room
    tokens, answers = sample(task, length, seed=seed, split=split, index=3)
    assert tokens.shape == (length + 1,) and tokens.dtype == np.int64
    assert tokens.min() >= 0 and tokens.max() < task.vocab_size
    needle_mark, query_mark = task.vocab_size - 2, task.vocab_size - 1
    keys = range(task.states, task.states + task.keys)
    marks = np.flatnonzero(tokens == needle_mark)
    needles = {int(tokens[m + 1]): int(tokens[m + 2]) for m in marks}
    assert len(marks) == len(needles) == task.needles  # every needle once, keys distinct
    assert set(needles) <= set(keys) and set(needles.values()) <= set(task.candidates)
    # Queries fill the end, and nothing else carries their mark.
    assert np.flatnonzero(tokens == query_mark).tolist() == (answers - 2).tolist()
    assert answers.tolist() == list(range(length + 3 - 3 * task.needles, length + 1, 3))
    asked = {int(tokens[a - 1]): int(tokens[a]) for a in answers}
    assert asked == needles
    assert marks.max() + 2 < answers.min() - 2


@settings(deadline=None, max_examples=40)
@given(countings, st.integers(0, 200), st.integers(0, 2**31), st.sampled_from(SPLITS))
def test_counting_asks_for_how_many_were_seen(task: Counting, room: int, seed: int, split: Split) -> None:
    length = task.min_length + room
    tokens, answers = sample(task, length, seed=seed, split=split, index=5)
    assert tokens.shape == (length + 1,) and tokens.dtype == np.int64
    marked, question = task.vocab_size - 2, task.vocab_size - 1
    (answer,) = answers.tolist()
    # Asked at the end, and in training anywhere that all marked tokens fit before.
    assert answer == length if split == "evaluation" else task.min_length - 1 <= answer <= length
    assert np.flatnonzero(tokens == question).tolist() == [answer - 1]
    assert tokens[answer] == task.candidates[int((tokens == marked).sum())]
    assert not (tokens[answer:] == marked).any()
    rest = np.delete(tokens, [answer - 1, answer])
    rest = rest[rest != marked]
    assert rest.size == 0 or rest.max() < task.states


@pytest.mark.parametrize("task", [Recall(), Counting()], ids=["recall", "counting"])
def test_a_sample_fits_its_shortest_length_and_no_shorter_one(task: Recall | Counting) -> None:
    shortest = task.min_length - 1
    for index in range(200):
        drawn = sample(task, shortest, seed=0, split="training", index=index)
        assert len(drawn.tokens) == shortest + 1
    with pytest.raises(UserError, match=f"length {shortest - 1} does not hold the task, which needs {shortest} tokens"):
        sample(task, shortest - 1, seed=0, split="training", index=0)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([Recall(), Counting()]), st.integers(64, 300), st.integers(0, 2**31), st.integers(0, 10**6))
def test_a_sample_depends_on_its_arguments_alone(task: Recall | Counting, length: int, seed: int, index: int) -> None:
    drawn = sample(task, length, seed=seed, split="training", index=index)
    sample(task, length, seed=seed + 1, split="training", index=index)
    assert is_same(drawn, sample(task, length, seed=seed, split="training", index=index))
    others = [
        sample(task, length, seed=seed, split="validation", index=index),
        sample(task, length, seed=seed, split="evaluation", index=index),
        sample(task, length, seed=seed + 1, split="training", index=index),
        sample(task, length, seed=seed, split="training", index=index + 1),
    ]
    assert not any(is_same(drawn, other) for other in others)


@pytest.mark.parametrize("task", [Recall(), Counting()], ids=["recall", "counting"])
def test_splits_share_no_sequence(task: Recall | Counting) -> None:
    seen = {
        split: {sample(task, 64, seed=0, split=split, index=index).tokens.tobytes() for index in range(150)}
        for split in SPLITS
    }
    assert [len(found) for found in seen.values()] == [150] * 3
    assert len(set.union(*seen.values())) == 450


@pytest.mark.parametrize("share", [0.0, 0.15, 0.6])
def test_distractors_have_their_share_of_the_filler(share: float) -> None:
    task = Recall(distractors=share)
    tokens = np.concatenate([sample(task, 512, seed=1, split="training", index=i).tokens[:-18] for i in range(60)])
    bare = ((tokens >= task.states) & (tokens < task.vocab_size - 2)).sum() - 2 * 6 * 60
    filler = 60 * (513 - task.min_length)
    spread = (share * (1 - share) / filler) ** 0.5
    assert abs(bare / filler - share) <= 4 * spread


def test_keys_alone_do_not_tell_where_a_needle_is() -> None:
    """Distractors are keys and values alike, keys that are asked for among them."""
    task = Recall()
    unmarked = asked = values = 0
    for index in range(100):
        tokens, answers = sample(task, 512, seed=0, split="training", index=index)
        haystack = tokens[: answers[0] - 2]
        behind_mark = np.concatenate([[False], haystack[:-1] == task.vocab_size - 2])
        is_key = (haystack >= task.states) & (haystack < task.states + task.keys)
        unmarked += int((is_key & ~behind_mark).sum())
        asked += int(np.isin(haystack[is_key & ~behind_mark], tokens[answers - 1]).sum())
        values += int(np.isin(haystack, list(task.candidates)).sum()) - 6
    assert abs(unmarked / (unmarked + values) - 0.5) < 0.03
    assert abs(asked / unmarked - 6 / 32) < 0.03


def test_filler_walks_along_the_chain_and_no_other_way() -> None:
    task = Counting()
    walks = [sample(task, 400, seed=seed, split="training", index=0).tokens[:-2] for seed in range(30)]
    follows: dict[int, set[int]] = {}
    for walk in walks:
        walk = walk[walk < task.states]
        for before, after in itertools.pairwise(walk.tolist()):
            follows.setdefault(before, set()).add(after)
    # A state that follows no other is seen only where a walk starts.
    assert len(follows) >= task.states - 4
    assert {len(after) for after in follows.values()} == {task.successors}


def test_needles_lie_anywhere_and_counts_are_uniform_at_every_length() -> None:
    task, counting = Recall(), Counting(max_count=3)
    depth = []
    for index in range(150):
        tokens, answers = sample(task, 256, seed=0, split="evaluation", index=index)
        depth += (np.flatnonzero(tokens == task.vocab_size - 2) / (answers[0] - 2)).tolist()
    quarters = np.histogram(depth, bins=4, range=(0, 1))[0] / len(depth)
    assert np.abs(quarters - 0.25).max() < 0.06
    for length in (32, 512):
        asked = Counter(
            int(sample(counting, length, seed=0, split="evaluation", index=index).tokens[-1]) for index in range(250)
        )
        assert sorted(asked) == list(counting.candidates)
        assert all(abs(count / 250 - 0.25) < 0.1 for count in asked.values())


def test_a_dataset_masks_everything_but_the_answers() -> None:
    task = Recall(needles=2)
    data = TaskDataset(task, 40, seed=7, split="training", size=5)
    assert len(data) == 5
    item, drawn = data[4], sample(task, 40, seed=7, split="training", index=4)
    assert all(value.shape == (40,) for value in item.values())
    assert item["tokens"].tolist() == drawn.tokens[:-1].tolist()
    masked = item["loss_mask"].bool()
    assert item["labels"][masked].tolist() == drawn.tokens[drawn.answers].tolist()
    assert item["loss_mask"].sum() == 2
    assert item["position_ids"].tolist() == list(range(40))
    with pytest.raises(IndexError):
        data[5]


def test_a_task_comes_from_its_section() -> None:
    assert from_mapping({"name": "recall"}) == Recall()
    assert from_mapping({"name": "recall", "needles": 3, "distractors": 0}) == Recall(needles=3, distractors=0)
    assert from_mapping({"name": "counting", "max_count": 5}) == Counting(max_count=5)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "unknown task None"),
        ({"name": "recal"}, "unknown task 'recal' (did you mean 'recall'?)"),
        ({"name": "recall", "needle": 3}, "unknown task recall key 'needle' (did you mean 'needles'?)"),
        ({"name": "counting", "needles": 3}, "unknown task counting key 'needles'"),
        ({"name": "recall", "needles": 0}, "needles of task recall must be a positive whole number, got 0"),
        ({"name": "recall", "values": 2.5}, "values of task recall must be a positive whole number, got 2.5"),
        ({"name": "counting", "max_count": True}, "max_count of task counting must be a positive whole number"),
        ({"name": "recall", "needles": 33}, "33 needles and 32 keys"),
        ({"name": "recall", "distractors": 1.0}, "distractors must be a share in [0, 1), got 1.0"),
        ({"name": "counting", "states": 3}, "3 states, which cannot have 4 successors"),
    ],
)
def test_a_bad_section_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_mapping(section)
    assert message in str(caught.value)
