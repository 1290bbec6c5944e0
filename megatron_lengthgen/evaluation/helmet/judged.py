"""Verdicts of a judge on long answers and on summaries.

The judge's instructions are HELMET's own, read as texts from its repository (nothing there is run).
Source of the scores: princeton-nlp/HELMET ``scripts/eval_gpt4_longqa.py`` and ``scripts/eval_gpt4_summ.py``.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .examples import Example
from .files import Archive, JsonLines
from .text_metrics import flat, parse_answer

__all__ = ["Judge", "NoVerdict", "read_verdict"]

Ask = Callable[[str, int], str]

_SCRIPTS = {"narrativeqa": "scripts/eval_gpt4_longqa.py"}
_SUMMARIES = "scripts/eval_gpt4_summ.py"
#: File below the data directory, and its field, with the facts that a summary should hold.
_KEY_POINTS = {
    "infbench_sum_eng": ("infbench/longbook_sum_eng_keypoints.jsonl", "keypoints"),
    "multi_lexsum": ("multi_lexsum/multi_lexsum_val.jsonl", "summary/short_keypoints"),
}
_ANSWER_TOKENS, _SUMMARY_TOKENS = 2048, 4096


class NoVerdict(Exception):
    """The judge said nothing that can be read; it may be asked again."""


class Judge:
    """Scores the answers of one judged data set.

    Args:
        archive: where HELMET's repository and the key points are.
        ask: sends a text to the judge; from it and a limit of tokens to the answer.

    Raises:
        UserError: when the instructions or the key points are not there.
    """

    def __init__(self, archive: Archive, dataset: Dataset, ask: Ask) -> None:
        self._ask = ask
        script = _SCRIPTS.get(dataset.name, _SUMMARIES)
        texts = _texts(archive, script)
        if dataset.name == "narrativeqa":
            self._templates = _pick(script, texts, ("judge_prompt",))
            return
        ending = "_book" if dataset.name == "infbench_sum_eng" else ""
        self._templates = _pick(script, texts, tuple(f"{kind}_prompt{ending}" for kind in _KINDS))
        file, field = _KEY_POINTS[dataset.name]
        self._points = dict(JsonLines(archive.file(file)).scan(("id", field), lambda row: (row["id"], row[field])))

    def score(self, example: Example, output: str) -> tuple[float, dict[str, Any]]:
        """A score in [0, 1], and what it is made of.

        Raises:
            NoVerdict: when the judge's answer holds no verdict.
            UserError: when there are no key points for the example, or the judge cannot be reached.
        """
        if len(self._templates) == 1:
            return self._answer(example, output)
        return self._summary(example, output.strip())

    def _answer(self, example: Example, output: str) -> tuple[float, dict[str, Any]]:
        message = self._templates[0].format(
            question=example.question,
            correct_answers=list(example.gold),
            parsed_output=parse_answer(output.replace("\n", " ")),
        )
        verdict = read_verdict(self._ask(message, _ANSWER_TOKENS), ("fluency", "correctness"))
        _check(verdict, {"fluency": 1, "correctness": 3})
        return verdict["fluency"] * verdict["correctness"] / 3, verdict

    def _summary(self, example: Example, output: str) -> tuple[float, dict[str, Any]]:
        id_ = example.kept["id"]
        if id_ not in self._points:
            raise UserError(f"the key points of HELMET's archive have no entry for {id_!r}: is it another version?")
        points = self._points[id_]
        numbered = "\n".join(f"{number}. {point}" for number, point in enumerate(points, 1))
        expert = example.kept.get("summary/long") or flat(example.gold)[0]
        fluency, recall, precision = (
            template.format(text=output, keypoints=numbered, summary=output, expert_summary=expert)
            for template in self._templates
        )
        verdict = read_verdict(self._ask(fluency, _SUMMARY_TOKENS), ("fluency",))
        verdict |= read_verdict(self._ask(recall, _SUMMARY_TOKENS), ("recall",))
        verdict |= read_verdict(self._ask(precision, _SUMMARY_TOKENS), ("precision", "sentence_count"))
        _check(verdict, {"fluency": 1, "recall": len(points), "precision": verdict["sentence_count"]})
        found = verdict["recall"] / len(points) if points else 0.0
        supported = verdict["precision"] / verdict["sentence_count"] if verdict["sentence_count"] else 0.0
        f1 = 2 * found * supported / (found + supported) if found + supported else 0.0
        return verdict["fluency"] * f1, verdict | {"key_points": len(points)}


_KINDS = ("fluency", "recall", "precision")


def _texts(archive: Archive, script: str) -> dict[str, str]:
    """The texts that a script of HELMET's gives names to."""
    path = archive.from_repository(script)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise UserError(f"{path} cannot be read ({error.msg}); clone HELMET again") from error
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _pick(script: str, texts: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, ...]:
    if missing := [name for name in names if name not in texts]:
        raise UserError(f"{script} of HELMET's repository has no {missing[0]}: is it another version?")
    return tuple(texts[name] for name in names)


def read_verdict(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """The numbers ``names`` of the last JSON object in a judge's answer, or else of a fenced one.

    Raises:
        NoVerdict: when there is none, or it lacks one of them.
    """
    objects, fenced = (re.findall(pattern, text, re.DOTALL) for pattern in (r"\{.*?\}", r"```json(.+)```"))
    for candidate in [*objects[-1:], *fenced[-1:]]:
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(value, dict) and all(type(value.get(name)) in (int, float) for name in names):
            return {name: value[name] for name in names}
    raise NoVerdict


def _check(verdict: Mapping[str, float], most: Mapping[str, float]) -> None:
    """A judge that counts more than there is has not understood."""
    if any(not 0 <= verdict[name] <= top for name, top in most.items()):
        raise NoVerdict
