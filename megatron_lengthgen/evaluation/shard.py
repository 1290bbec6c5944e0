"""A part of a run that is started on its own, as one task of a Slurm array."""

import re
from dataclasses import dataclass

from megatron_lengthgen.errors import UserError

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count``, from 1; the whole run is part 1 of 1.

    A sample belongs to one part by its index alone. Parts that start at different times, and so see different samples
    finished, still never take the same one.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """A shard from ``3/8``.

        Raises:
            UserError: for anything else.
        """
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard takes a part and the number of parts, from 1/8 to 8/8 for eight, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_label(cls, label: str) -> "Shard":
        """The inverse of :attr:`label`."""
        number, count = label.split("-of-")
        return cls(int(number), int(count))

    @property
    def whole(self) -> bool:
        return self.count == 1

    @property
    def label(self) -> str:
        """For file names: ``3-of-8``."""
        return f"{self.number}-of-{self.count}"

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, index: int) -> bool:
        """Whether the sample with this index is this part's."""
        return index % self.count == self.number - 1
