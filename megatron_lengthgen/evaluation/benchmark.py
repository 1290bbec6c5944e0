"""What reports need to know of a benchmark."""

from dataclasses import dataclass

from megatron_lengthgen.choices import check_choice

from .ruler.tasks import ALL_TASKS

__all__ = ["BENCHMARKS", "Benchmark", "find_benchmark"]


@dataclass(frozen=True)
class Benchmark:
    """Name, and what its published figures are over.

    Args:
        tasks: the tasks that its mean is taken over; a mean over fewer is labelled so.
        lengths: the lengths, in tokens, that its averages over lengths are taken over.
        threshold: per cent that the mean at a length must exceed for the model to count as effective there; None where
            the benchmark knows no such length.
    """

    name: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    threshold: float | None = None


#: By the name that a run's settings hold.
BENCHMARKS = {
    # README.md of NVIDIA/RULER: lengths 4K to 128K; the threshold is what Llama2-7B reaches at 4K.
    "ruler": Benchmark("RULER", ALL_TASKS, lengths=tuple(4096 << i for i in range(6)), threshold=85.6),
}


def find_benchmark(key: str) -> Benchmark:
    """The benchmark with this key.

    Raises:
        UserError: when there is none.
    """
    check_choice("benchmark", key, BENCHMARKS)
    return BENCHMARKS[key]
