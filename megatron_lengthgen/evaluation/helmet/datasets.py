"""HELMET's 21 data sets: files, demonstrations, tokens to generate and measures.

Source: princeton-nlp/HELMET ``scripts/generate_configs.py`` and ``configs/``; measures and averages from
``scripts/collect_results.py``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_lengthgen.choices import check_choice
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.lengths import length_name

__all__ = ["CATEGORIES", "DATASETS", "LENGTHS", "LONGEST", "Dataset", "measure_key", "measures", "parse_datasets"]

#: The lengths that HELMET has data for, in tokens of Llama 2.
LENGTHS = tuple(4096 << i for i in range(6))
LONGEST = LENGTHS[-1]


@dataclass(frozen=True)
class Dataset:
    """One data set.

    Args:
        name: HELMET's, without what it appends for the length.
        category: one of :data:`CATEGORIES`.
        new_tokens: tokens to generate.
        metric: the measure that is computed with each answer, in [0, 1].
        file: test file below the data directory; ``{}`` stands for the length or for what ``sizes`` has for it.
        demo_file: file of demonstrations; of ALCE one that lies in HELMET's repository.
        sizes: documents, pairs, or demonstrations at each of :data:`LENGTHS`; empty where the length itself counts.
        grows: lengths above the longest can be had: ``sizes`` then goes on in proportion.
        shots: demonstrations before the question.
        samples: questions to ask. A question may come back with its answer at several depths.
        chat: instruction-tuned models get it in their chat template.
        stop_at_newline: the answer ends with its first line.
        later: measures that need a judge or an entailment model, computed after all answers are there.
        counted: ``metric`` goes into HELMET's average; else only the ``later`` measures do.
    """

    name: str
    category: str
    new_tokens: int
    metric: str
    file: str = ""
    demo_file: str = ""
    sizes: tuple[int, ...] = ()
    grows: bool = False
    shots: int = 2
    samples: int = 100
    chat: bool = False
    stop_at_newline: bool = False
    later: tuple[str, ...] = field(default=())
    counted: bool = True

    def size(self, length: int) -> int:
        """What fills ``length`` tokens: documents, pairs, demonstrations, or else the length.

        Raises:
            UserError: when HELMET has no data of that length and it cannot be extended.
        """
        if length in LENGTHS:
            return self.sizes[LENGTHS.index(length)] if self.sizes else length
        if not self.grows or length < LONGEST:
            known = ", ".join(map(length_name, LENGTHS))
            more = " and above" if self.grows else ""
            raise UserError(f"{self.name} has no data for length {length}: HELMET's lengths are {known}{more}")
        return self.sizes[-1] * length // LONGEST if self.sizes else length

    def file_at(self, length: int) -> str:
        """The test file, below the data directory."""
        return self.file.format(self.size(length))


def _recall(name: str, folder: str, new_tokens: int) -> Dataset:
    file = f"ruler/{folder}/validation_{{}}.jsonl"
    return Dataset(name, "recall", new_tokens, "ruler_recall", file, grows=True, shots=0)


_DOCUMENTS = (20, 50, 105, 220, 440, 1000)


def _kilt(name: str, test: str, demo: str, depths: int) -> Dataset:
    return Dataset(
        f"kilt_{name}",
        "rag",
        20,
        "substring_exact_match",
        f"kilt/{test}_1000_k{{}}_dep{depths}.jsonl",
        f"kilt/{demo}_1000_k3_dep{depths}.jsonl",
        _DOCUMENTS,
        stop_at_newline=True,
    )


def _alce(name: str, metric: str) -> Dataset:
    return Dataset(
        f"alce_{name}",
        "cite",
        300,
        metric,
        f"alce/{name}_eval_gtr_top2000.json",
        f"prompts/{name}_revised.json",
        (8, 30, 75, 165, 345, 700),
        chat=True,
        later=("citation_rec", "citation_prec"),
    )


def _icl(name: str, sizes: tuple[int, ...]) -> Dataset:
    return Dataset(
        f"icl_{name}", "icl", 20, "exact_match", sizes=sizes, grows=True, shots=0, samples=500, stop_at_newline=True
    )


def _text(name: str, category: str, new_tokens: int, metric: str, judged: bool) -> Dataset:
    """A long text, cut to the length."""
    later = ("judge",) if judged else ()
    return Dataset(name, category, new_tokens, metric, chat=True, later=later, counted=not judged)


DATASETS: Mapping[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        _recall("ruler_niah_mk_2", "niah_multikey_2", 50),
        _recall("ruler_niah_mk_3", "niah_multikey_3", 100),
        _recall("ruler_niah_mv", "niah_multivalue", 50),
        Dataset(
            "json_kv",
            "recall",
            100,
            "substring_exact_match",
            "json_kv/test_k{}_dep6.jsonl",
            sizes=(50, 105, 220, 440, 900, 1800),
            grows=True,
        ),
        _kilt("nq", "nq-dev-multikilt", "nq-train-multikilt", 6),
        _kilt("triviaqa", "triviaqa-dev-multikilt", "triviaqa-train-multikilt", 6),
        _kilt("hotpotqa", "hotpotqa-dev-multikilt", "hotpotqa-train-multikilt", 3),
        _kilt("popqa", "popqa_test", "popqa_test", 6),
        Dataset(
            "msmarco_rerank_psg",
            "rerank",
            200,
            "NDCG@10",
            "msmarco/test_reranking_data_k{}_dep3.jsonl",
            "msmarco/test_reranking_data_k10_dep3.jsonl",
            (14, 50, 130, 285, 600, 1000),
            stop_at_newline=True,
        ),
        _alce("asqa", "str_em"),
        _alce("qampari", "qampari_rec_top5"),
        _text("narrativeqa", "longqa", 100, "rougeL_f1", judged=True),
        _text("infbench_qa_eng", "longqa", 10, "rougeL_f1", judged=False),
        _text("infbench_choice_eng", "longqa", 10, "exact_match", judged=False),
        _text("infbench_sum_eng", "summ", 1200, "rougeL_f1", judged=True),
        _text("multi_lexsum", "summ", 400, "rougeL_f1", judged=True),
        _icl("trec_coarse", (200, 400, 800, 1600, 3300, 6600)),
        _icl("trec_fine", (200, 400, 800, 1600, 3200, 6400)),
        _icl("banking77", (180, 360, 720, 1450, 2900, 5900)),
        _icl("clinic150", (220, 440, 880, 1750, 3525, 7050)),
        _icl("nlu", (250, 510, 1020, 2040, 4080, 8296)),
    )
}


def measure_key(dataset: str, measure: str) -> str:
    """Under which a measure that is computed later is kept and reported."""
    return f"{dataset}.{measure}"


def measures(dataset: Dataset) -> tuple[str, ...]:
    """The keys of what a data set adds to HELMET's average."""
    own = (dataset.name,) if dataset.counted else ()
    return own + tuple(measure_key(dataset.name, measure) for measure in dataset.later)


#: Category to the keys of the measures that its score is the mean of; HELMET's average is the mean of the seven.
CATEGORIES: Mapping[str, tuple[str, ...]] = {
    category: tuple(key for d in DATASETS.values() if d.category == category for key in measures(d))
    for category in dict.fromkeys(dataset.category for dataset in DATASETS.values())
}


def parse_datasets(names: Iterable[str]) -> list[Dataset]:
    """Data sets from names of data sets and categories, or ``all``; each once, in HELMET's order.

    Raises:
        UserError: for a name that is neither, and for none.
    """
    wanted: set[str] = set()
    for name in names:
        check_choice("HELMET category or data set", name, ("all", *CATEGORIES, *DATASETS))
        wanted.update(d.name for d in DATASETS.values() if name in ("all", d.category, d.name))
    if not wanted:
        raise UserError(f"--tasks names nothing; the categories are {', '.join(CATEGORIES)}")
    return [dataset for dataset in DATASETS.values() if dataset.name in wanted]
