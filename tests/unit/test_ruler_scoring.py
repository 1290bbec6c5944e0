"""The two metrics against an independent statement of them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lengthgen.evaluation.ruler.scoring import postprocess, string_match_all, string_match_part

# Few letters in both cases and control characters, so that references are often found.
TEXT = st.text(alphabet="abABä \n\t\x00\x1f1", max_size=12)
REFERENCES = st.lists(st.text(alphabet="abABä1", min_size=1, max_size=3), min_size=1, max_size=5)


def occurs(needle: str, hay: str) -> bool:
    """Substring search, ignoring case, by comparing every window."""
    hay, needle = hay.lower(), needle.lower()
    return any(hay[i : i + len(needle)] == needle for i in range(len(hay) - len(needle) + 1))


@settings(deadline=None)
@given(TEXT, REFERENCES)
def test_all_is_the_share_of_references_found(prediction: str, references: list[str]) -> None:
    hits = len([r for r in references if occurs(r, prediction)])
    assert string_match_all(prediction, references) == pytest.approx(hits / len(references))


@settings(deadline=None)
@given(TEXT, REFERENCES)
def test_part_is_one_if_any_reference_is_found(prediction: str, references: list[str]) -> None:
    assert string_match_part(prediction, references) == (1.0 if any(occurs(r, prediction) for r in references) else 0.0)


@settings(deadline=None)
@given(TEXT)
def test_postprocess_strips_and_replaces_control_characters(prediction: str) -> None:
    expected = re.sub("|".join(re.escape(chr(code)) for code in range(32)), "\n", prediction.strip())
    assert postprocess(prediction) == expected.strip()


def test_two_of_four_aliases() -> None:
    # One alias is enough for a question-answering task; a recall task counts them.
    assert string_match_part("Paris, France", ["paris", "Lutetia", "france", "Lyon"]) == 1.0
    assert string_match_all("Paris, France", ["paris", "Lutetia", "france", "Lyon"]) == 0.5


def test_no_references_is_an_error_not_a_score() -> None:
    with pytest.raises(ValueError, match="without references"):
        string_match_all("anything", [])
