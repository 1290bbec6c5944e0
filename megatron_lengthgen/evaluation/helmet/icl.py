"""Classification by many examples: each question has its own, balanced over labels that are only numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .draw import SEED, balanced, label_codes, order, parts, text_seed
from .examples import Example, Examples
from .files import Row
from .hub import HubSets

__all__ = ["load_icl"]


@dataclass(frozen=True)
class _Source:
    """Args:
    set_: name at :mod:`.hub`.
    label: field of the label; the text's is ``text``.
    labels: how many there are.
    test: split of the questions; None to hold back a tenth of the training split.
    """

    set_: str
    label: str
    labels: int
    test: str | None = "test"


_SOURCES = {
    "icl_trec_coarse": _Source("trec", "coarse_label", 6),
    "icl_trec_fine": _Source("trec", "fine_label", 50),
    "icl_banking77": _Source("banking77", "label", 77),
    "icl_clinic150": _Source("clinic150", "intent", 151, "validation"),
    "icl_nlu": _Source("nlu", "label", 68, None),
}


def load_icl(hub: HubSets, dataset: Dataset, length: int, samples: int) -> Examples:
    """Questions of a classification set, with as many examples as fill the length.

    Raises:
        UserError: when the set cannot be loaded or a label is not one of the set's numbers.
    """
    source, shots = _SOURCES[dataset.name], dataset.size(length)
    train = _labelled(hub, source, "train")
    if source.test is None:
        rest, held_back = parts(len(train), 0.1, SEED)
        train, test = [train[at] for at in rest], [train[at] for at in held_back]
    else:
        test = _labelled(hub, source, source.test)
    if len(test) > samples:
        test = [test[at] for at in order(len(test), SEED)]
        test = [test[at] for at in balanced([label for _, label in test], samples, SEED)]
    labels = [label for _, label in train]

    def make(at: int) -> Example:
        text, label = test[at]
        seed = text_seed(text, SEED)
        codes = label_codes(source.labels, seed)
        context = "\n\n".join(
            f"{shown}\nlabel: {codes[of]}" for shown, of in (train[row] for row in balanced(labels, shots, seed))
        )
        return Example(text, context, str(codes[label]), {"question": text}, {"text": text, source.label: label})

    return Examples(len(test), make)


def _labelled(hub: HubSets, source: _Source, split: str) -> list[tuple[str, int]]:
    rows: Sequence[Row] = hub.rows(source.set_, split, ("text", source.label))
    found = []
    for number, row in enumerate(rows):
        label = row[source.label]
        if not isinstance(label, int) or not 0 <= label < source.labels:
            raise UserError(
                f"{source.set_}, split {split}, row {number}: {source.label} is {label!r}, not a number from 0 to "
                f"{source.labels - 1} as in {source.set_}'s own data"
            )
        found.append((row["text"], label))
    return found
