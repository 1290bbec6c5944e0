"""The benchmark's texts, byte for byte.

Source: NVIDIA/RULER (Apache-2.0), ``scripts/data/synthetic/constants.py`` and ``scripts/data/synthetic/niah.py``.
They are data: a changed letter is another benchmark.
"""

__all__ = ["NEEDLE", "NIAH", "NIAH_PREFIX", "NOISE", "singular"]

NIAH = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic {type_needle_v} for {query} mentioned in the provided text are"

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def singular(template: str) -> str:
    """The wording that RULER uses when one value is asked for.

    RULER edits the template after the chat template has been wrapped around it, and so rewrites words of the chat
    template too; here only the task's own text passes through.
    """
    for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(plural, single)
    return template
