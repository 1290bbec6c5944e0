"""Variable tracking: a chain of assignments in noise, after one worked example.

Source: NVIDIA/RULER ``scripts/data/synthetic/variable_tracking.py``: one chain, its assignments in order at random
places between lines of noise. The example's haystack is the same in every sample, of the largest size whose prompt has
at most 500 tokens; its names and value are drawn for each sample.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from .fit import largest
from .question import Rendering, around
from .streams import Distinct, stream
from .tasks import VariableTracking
from .templates import NOISE, VARIABLE_TRACKING, VARIABLE_TRACKING_PREFIX

__all__ = ["Chain", "Example", "draw", "example"]

_EXAMPLE_TOKENS = 500
_LETTERS, _EXAMPLE_LETTERS = 5, 3


@dataclass(frozen=True)
class Chain:
    """A drawn question.

    Args:
        places: stream key of the places of the assignments.
        names: the variables in the order in which they are assigned.
        value: the first one's value.
        before: the worked example.
    """

    places: tuple[str | int, ...]
    names: tuple[str, ...]
    value: str
    before: tuple[str, ...] = ()

    @property
    def minimum(self) -> int:
        """Lines of noise: one for each assignment."""
        return len(self.names)

    def render(self, size: int) -> Rendering:
        chosen = sorted(stream(*self.places).sample(range(size), len(self.names)))
        lines = [NOISE] * size
        for inserted, (place, assignment) in enumerate(zip(chosen, self._assignments(), strict=True)):
            lines.insert(place + inserted, assignment)
        pieces = around(VARIABLE_TRACKING, [line + "\n" for line in lines[:-1]] + lines[-1:], query=self.value)
        prefix = VARIABLE_TRACKING_PREFIX.format(num_v=len(self.names), query=self.value)
        return Rendering([*self.before, *pieces], prefix, self.names)

    def _assignments(self) -> list[str]:
        first, *others = self.names
        # The space at the end is RULER's.
        return [f"VAR {first} = {self.value}"] + [
            f"VAR {name} = VAR {source} " for name, source in zip(others, self.names, strict=False)
        ]


@dataclass(frozen=True)
class Example:
    """Where the worked example has its assignments, and how much noise around them."""

    places: tuple[str | int, ...]
    size: int


def _names(count: int, letters: int, rng: random.Random) -> tuple[str, ...]:
    # Never the word that declares a variable.
    one = Distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), ("VAR",))
    return tuple(one.first(count))


def _value(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 99_999))


def example(task: VariableTracking, key: tuple[str | int, ...], count: Callable[[str], int]) -> Example:
    """The worked example of all samples with this seed.

    Args:
        key: stream key that all samples share.
        count: number of tokens of a text.
    """
    places = (*key, "example places")
    rng = stream(*key, "example")
    chain = Chain(places, _names(task.hops + 1, _EXAMPLE_LETTERS, rng), _value(rng))

    def tokens(size: int) -> int:
        rendering = chain.render(size)
        return count(rendering.body + rendering.answer_prefix)

    return Example(places, largest(tokens, chain.minimum, _EXAMPLE_TOKENS).size)


def draw(task: VariableTracking, shown: Example, key: tuple[str | int, ...]) -> Chain:
    """The question of the sample with this stream key."""
    rng = stream(*key, "names")
    worked = Chain(shown.places, _names(task.hops + 1, _EXAMPLE_LETTERS, rng), _value(rng))
    rendering = worked.render(shown.size)
    *pieces, last = rendering.pieces
    last += f"{rendering.answer_prefix} {' '.join(worked.names)}\n\n"
    return Chain(
        (*key, "places"), _names(task.hops + 1, _LETTERS, rng), _value(rng), before=("".join([*pieces, last]),)
    )
