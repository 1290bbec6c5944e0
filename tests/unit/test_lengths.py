"""Lengths as users write them, and the parts that a run is started in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.lengths import length_name, parse_length, parse_lengths, parse_multiples
from megatron_lengthgen.evaluation.shard import Shard


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("4096", 4096),
        ("4k", 4096),
        ("4K", 4096),
        (" 1m", 1048576),
        ("2M", 2097152),
        ("0128k", 131072),
        ("131072", 131072),
    ],
)
def test_a_length(text: str, length: int) -> None:
    assert parse_length("--lengths", text) == length


@pytest.mark.parametrize(
    "text",
    [
        "4kb",
        "4.5k",
        "-1",
        "-4k",
        "0",
        "0k",
        "k",
        "",
        "4 k",
        "1e5",
        "4k tokens",
        "4g",
        "0x10",
        "4_096",
        "\u00b2",
        "\u0664k",
    ],
)
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(UserError, match=r"--train-length takes whole numbers of tokens such as 4096, 4k .*, got "):
        parse_length("--train-length", text)


@given(st.integers(1, 1 << 22))
def test_a_name_reads_back_as_its_length(length: int) -> None:
    assert parse_length("--lengths", length_name(length)) == length


def test_names_are_the_usual_ones() -> None:
    assert [length_name(n) for n in (768, 4096, 131072, 1048576, 1536 * 1024)] == ["768", "4K", "128K", "1M", "1536K"]


def test_lists() -> None:
    assert parse_lengths("8k, 4096,1m,") == [4096, 8192, 1048576]
    assert parse_multiples("64,1,0.5,2", 4096) == [2048, 4096, 8192, 262144]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,...,64", r"each written out, got '...'"),
        ("2x", "got '2x'"),
        ("0", "got '0'"),
        ("-1", "got '-1'"),
        ("1,1.0", "names a length twice"),
        ("0.3", "0.3 of --train-length 4096 is not a whole number of tokens"),
        (",", "names no length"),
    ],
)
def test_what_are_no_multiples(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_multiples(text, 4096)


def test_shards_divide_the_samples() -> None:
    for count in (1, 2, 7):
        shards = [Shard.parse(f"{number}/{count}") for number in range(1, count + 1)]
        assert all(sum(shard.holds(index) for shard in shards) == 1 for index in range(50))
        assert [Shard.of_label(shard.label) for shard in shards] == shards
    assert Shard().whole and all(Shard().holds(index) for index in range(5))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3", ""])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(UserError, match="--shard takes a part and the number of parts"):
        Shard.parse(text)
