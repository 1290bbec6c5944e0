"""Turn text into a Megatron indexed dataset.

    python tools/prepare_data.py books/ web.jsonl.gz --output data/train --tokenizer HuggingFaceTB/SmolLM2-135M

writes data/train.bin and data/train.idx (Megatron: `--data-path data/train`) and data/train.report.json.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from megatron_lengthgen import errors
from megatron_lengthgen.training import corpus

SHOWN = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text file (one document), JSONL file (plain or .gz), directory of these, or `datasets` path or hub id",
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="prefix of .bin, .idx and .report.json")
    parser.add_argument("--tokenizer", required=True, metavar="DIR_OR_ID", help="Hugging Face fast tokenizer")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="JSON key or column of the text (%(default)s)"
    )
    parser.add_argument("--split", metavar="NAME", help="split of a `datasets` input (train)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (all cores)")
    parser.add_argument(
        "--on-bad-line",
        choices=("skip", "fail"),
        default="skip",
        help="skip (default): report a record without usable text and go on, because one broken line should not cost "
        "the hours of a long run; fail: stop at the first, for input that is known to be clean",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document (the tokenizer's eos token)")
    parser.add_argument(
        "--special-tokens",
        choices=("text", "token"),
        default="text",
        help="what a special token's string inside a text becomes: text (default), so that no text can forge the end "
        "of a document, or token, for text with rendered chat templates",
    )
    parser.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="let the tokenizer add what it adds around a text, such as BOS",
    )
    parser.add_argument("--force", action="store_true", help="replace an output that is there")
    return parser.parse_args()


@contextlib.contextmanager
def progress_display() -> Iterator[Callable[[corpus.Progress], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere."""
    first: tuple[float, corpus.Progress] | None = None

    def rate_and_left(state: corpus.Progress) -> tuple[float, float]:
        """Tokens per second and seconds left, both since the first report: what came before was loading."""
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now, state
        seconds, done = max(now - first[0], 1e-9), state.done - first[1].done
        return (state.tokens - first[1].tokens) / seconds, seconds * (state.total - state.done) / max(done, 1)

    def words(state: corpus.Progress) -> str:
        rate, _ = rate_and_left(state)
        bad = f", {state.bad} bad" if state.bad else ""
        return f"{state.documents:,} documents, {state.tokens:,} tokens{bad}, {rate:,.0f} tokens/s"

    if not sys.stderr.isatty():
        last: float | None = None

        def line(state: corpus.Progress) -> None:
            nonlocal last
            now, (_, left) = time.monotonic(), rate_and_left(state)
            last = now if last is None else last
            if now - last >= 10:
                last = now
                share = 100 * state.done / max(state.total, 1)
                print(f"{share:3.0f}% {words(state)}, {left:,.0f} s left", file=sys.stderr, flush=True)

        yield line
        return

    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda state: bar.update(task, total=state.total, completed=state.done, description=words(state))


def show(report: corpus.Report, prefix: str) -> None:
    for note in report.notes:
        print(f"note: {note}.")
    for record in report.bad_records[:SHOWN]:
        where = f"{record['file']}:{record['line']}" if record["line"] else record["file"]
        print(f"skipped {where}: {record['kind']}: {record['detail']}")
    if report.bad > SHOWN:
        print(f"skipped {report.bad - SHOWN:,} more, all of them listed in {prefix}.report.json")
    if report.counts:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(report.counts.items()))
        print(f"records without a document: {kinds}")
    if report.ignored_files:
        print(
            f"not taken from the directories: {len(report.ignored_files):,} files such as {report.ignored_files[0]} "
            "(.txt, .text, .jsonl and .ndjson are; name others one by one)"
        )
    if report.documents_with_special_tokens:
        kept = "as text" if report.options["special_tokens"] == "text" else "as special tokens"
        print(f"{report.documents_with_special_tokens:,} documents contain special tokens' strings, kept {kept}")
    done = "already complete, nothing to do" if report.reused else f"{report.tokens_per_second:,.0f} tokens/s"
    print(
        f"{report.documents:,} documents, {report.tokens:,} tokens ({report.dtype}, "
        f"EOD {report.tokenizer['eod_token']} = {report.tokenizer['eod_id']}): {done}\n"
        f"dataset: {prefix} (.bin, .idx)\nreport: {prefix}.report.json"
    )


def main() -> None:
    chosen = arguments()
    # Megatron mentions optional kernels that are missing; none of them matters to text.
    warnings.filterwarnings("ignore", message=".*(Apex|transformer-engine).*")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"writing {chosen.output}.bin, .idx and .report.json", file=sys.stderr, flush=True)
    with progress_display() as progress:
        report = corpus.prepare(
            chosen.inputs,
            chosen.output,
            tokenizer=chosen.tokenizer,
            text_key=chosen.text_key,
            split=chosen.split,
            workers=chosen.workers if chosen.workers is not None else len(os.sched_getaffinity(0)),
            on_bad_line=chosen.on_bad_line,
            eod_token=chosen.eod_token,
            special_tokens=chosen.special_tokens,
            add_special_tokens=chosen.add_special_tokens,
            force=chosen.force,
            progress=progress,
        )
    show(report, chosen.output)


if __name__ == "__main__":
    try:
        sys.exit(errors.run(main))
    except KeyboardInterrupt:
        print("interrupted; nothing was written.", file=sys.stderr)
        sys.exit(130)
