"""What reports need to know of a benchmark."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lengthgen.choices import check_choice

from .helmet import datasets as helmet
from .ruler.tasks import ALL_TASKS

__all__ = ["BENCHMARKS", "Benchmark", "find_benchmark"]


@dataclass(frozen=True)
class Benchmark:
    """Name, and what its published figures are over.

    Args:
        tasks: the tasks that its mean is taken over; a mean over fewer is labelled so.
        lengths: the lengths, in tokens, that its averages over lengths are taken over; empty where it has none.
        threshold: per cent that the mean at a length must exceed for the model to count as effective there; None where
            the benchmark knows no such length.
        categories: the tasks of each category, where the mean is that of categories and theirs that of their tasks.
        derived: tasks that score answers of other tasks once more.
    """

    name: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    threshold: float | None = None
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()

    @property
    def of(self) -> int:
        """Number of tasks, or of categories, that the whole mean is over."""
        return len(self.categories or self.tasks)

    def groups(self, tasks: Collection[str]) -> dict[str, list[str]]:
        """What the mean is taken over, of these tasks: each task by itself, or the tasks of each category."""
        if not self.categories:
            return {task: [task] for task in tasks}
        groups = {name: [task for task in members if task in tasks] for name, members in self.categories.items()}
        return {name: members for name, members in groups.items() if members}

    def weights(self, tasks: Sequence[str]) -> list[float]:
        """The weight of each task in the mean over these; 0 for one that does not count."""
        groups = self.groups(tasks)
        weights = {task: 1 / len(groups) / len(members) for members in groups.values() for task in members}
        return [weights.get(task, 0.0) for task in tasks]

    def mean_label(self, tasks: Collection[str]) -> str:
        """``mean (3 of 13 tasks)``, or ``mean`` where it is the benchmark's own mean."""
        groups = self.groups(tasks)
        partly = [name for name in groups if len(groups[name]) < len(self.categories.get(name, ()))]
        if len(groups) == self.of and not partly:
            return "mean"
        unit = "categories" if self.categories else "tasks"
        which = f", partly {', '.join(partly)}" if partly else ""
        return f"mean ({len(groups)} of {self.of} {unit}{which})"


#: By the name that a run's settings hold.
BENCHMARKS = {
    # README.md of NVIDIA/RULER: lengths 4K to 128K; the threshold is what Llama2-7B reaches at 4K.
    "ruler": Benchmark("RULER", ALL_TASKS, lengths=tuple(4096 << i for i in range(6)), threshold=85.6),
    "helmet": Benchmark(
        "HELMET",
        tuple(key for keys in helmet.CATEGORIES.values() for key in keys),
        categories=helmet.CATEGORIES,
        derived=frozenset(
            helmet.measure_key(name, measure) for name, d in helmet.DATASETS.items() for measure in d.later
        ),
    ),
}


def find_benchmark(key: str) -> Benchmark:
    """The benchmark with this key.

    Raises:
        UserError: when there is none.
    """
    check_choice("benchmark", key, BENCHMARKS)
    return BENCHMARKS[key]
