#!/usr/bin/env python
"""How much dropout makes training differ from evaluation at every linear that follows a norm.

    tools/mismatch.py CHECKPOINT --task recall --output DIR
    tools/mismatch.py CHECKPOINT --data PREFIX --variants vpad:mean vpad:zero --p 0.2 --output DIR
    torchrun --nproc-per-node 2 tools/mismatch.py CHECKPOINT --text FILE --tensor-parallel 2 --output DIR

CHECKPOINT is any torch_dist checkpoint of a model that this package builds, saved on any layout: it is loaded with
pipeline size 1. Writes mismatch.md, mismatch.json and mismatch.png.
"""

import argparse
import functools
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError, run

VARIANTS = ("pre_norm", "pre_linear", "vpad:zero:norm", "vpad:mean", "vpad:zero")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mismatch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", metavar="PREFIX", help="indexed dataset of tools/prepare_data.py")
    data.add_argument("--text", metavar="FILE", help="text file, for the tokenizer that the checkpoint carries")
    data.add_argument("--task", help="task of a study: recall, or all of it as {name: recall, needles: 6}")
    parser.add_argument("--output", metavar="DIR", required=True)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        metavar="PLACEMENT[:FILL[:STATISTICS]]",
        help=f"dropouts to compare (default: {' '.join(VARIANTS)})",
    )
    parser.add_argument("--p", type=float, default=0.1, help="drop probability (default: 0.1)")
    parser.add_argument(
        "--sites",
        nargs="+",
        default=["attention", "mlp", "mamba", "output"],
        help="for pre_linear and vpad (default: all that a norm precedes: attention mlp mamba output)",
    )
    parser.add_argument("--tokens", type=int, default=16_384, metavar="N", help="tokens to use (default: 16384)")
    parser.add_argument("--length", type=int, metavar="N", help="of a sequence (default: the checkpoint's seq_length)")
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="sequences that VPAD takes its statistics over (default: the checkpoint's micro_batch_size)",
    )
    parser.add_argument("--draws", type=int, default=4, metavar="N", help="mask draws (default: 4)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: what the checkpoint was made with")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=1234, help="of masks, and of a task's data")
    return parser


def _regularization(variant: str, arguments: argparse.Namespace) -> Any:
    from megatron_lengthgen.regularization import Regularization

    placement, *details = variant.split(":")
    if len(details) > 2 or (details and placement != "vpad"):
        raise UserError(f"variant {variant!r} is not written as PLACEMENT, or vpad:FILL:STATISTICS")
    section = {"placement": placement, "p": arguments.p} | dict(zip(("fill", "statistics"), details, strict=False))
    if placement != "pre_norm":
        section["sites"] = arguments.sites
    chosen = Regularization.from_mapping(section)
    if placement == "none" or not chosen.p:
        raise UserError(
            f"variant {variant!r} with p {arguments.p:g} drops nothing, so that training and evaluation are the same: "
            "choose pre_norm, pre_linear or vpad, and a p above 0"
        )
    return chosen


def _label(chosen: Any, normalization: str) -> str:
    if chosen.placement != "vpad":
        return {"pre_norm": "Pre-Norm", "pre_linear": "Pre-Linear"}[chosen.placement]
    if chosen.statistics == "norm" and normalization == "RMSNorm":
        return "VPAD mu = 0"  # what the statistics of a norm without a bias are, with either fill
    return f"VPAD {chosen.fill} fill" + (", statistics of the norm" if chosen.statistics == "norm" else "")


def _check(arguments: argparse.Namespace) -> None:
    for name in ("tokens", "length", "micro_batch", "tensor_parallel"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be positive, got {value}")
    if arguments.draws < 2:
        raise UserError(f"--draws must be at least 2, to tell a shift from chance, got {arguments.draws}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != arguments.tensor_parallel:
        raise UserError(
            f"--tensor-parallel {arguments.tensor_parallel} does not fit {world} process(es): start with torchrun "
            f"--nproc-per-node {arguments.tensor_parallel}"
        )


def _tokens(arguments: argparse.Namespace, stored: Any) -> Any:
    from megatron_lengthgen.study import mismatch_data

    length = arguments.length or stored.seq_length
    if arguments.tokens < length:
        raise UserError(
            f"--tokens {arguments.tokens} is less than one sequence of {length} tokens: raise it, or lower --length"
        )
    sequences = arguments.tokens // length
    if arguments.data:
        tokens = mismatch_data.from_indexed(arguments.data, sequences, length)
    elif arguments.text:
        from megatron_lengthgen.checkpoint.load import tokenizer_dir

        tokenizer = tokenizer_dir(arguments.checkpoint)
        if tokenizer is None:
            raise UserError(f"{arguments.checkpoint} carries no tokenizer: make a dataset with tools/prepare_data.py")
        tokens = mismatch_data.from_text(arguments.text, tokenizer, sequences, length)
    else:
        tokens = mismatch_data.from_task(_task(arguments.task), sequences, length, seed=arguments.seed)
    mismatch_data.check_fit(tokens, stored)
    return tokens


def _task(text: str) -> Any:
    import yaml

    from megatron_lengthgen.study.tasks import from_mapping

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--task {text!r} is neither a name nor a mapping such as {{name: recall}}") from error
    return from_mapping(value if isinstance(value, dict) else {"name": value})


def main() -> None:
    arguments = _parser().parse_args()
    _check(arguments)
    chosen = [_regularization(variant, arguments) for variant in arguments.variants]

    from megatron_lengthgen import backends

    backends.prepare()
    from megatron_lengthgen.checkpoint.load import checkpoint_args, load_model

    stored = checkpoint_args(arguments.checkpoint)
    tokens = _tokens(arguments, stored)
    micro_batch = min(arguments.micro_batch or stored.micro_batch_size, len(tokens))
    dtype = arguments.dtype or ("bf16" if stored.bf16 else "fp16" if stored.fp16 else "fp32")
    leads = int(os.environ.get("RANK", 0)) == 0

    from megatron_lengthgen.evaluation.progress import Amount, Progress
    from megatron_lengthgen.study import mismatch, mismatch_report

    tables: dict[str, Any] = {}
    labels = [_label(regularization, stored.normalization) for regularization in chosen]
    wanted = dict.fromkeys(labels, Amount(len(tokens), tokens.numel()))
    done = dict.fromkeys(labels, Amount(0, 0))

    def progress(label: str, sequences: int) -> None:
        done[label] = Amount(sequences, sequences * tokens.shape[1])
        bar.update(label, label, done)

    with Progress(wanted, done, visible=leads) as bar:
        for label, regularization in zip(labels, chosen, strict=True):
            section = {name: stored.lengthgen[name] for name in ("core_attention",) if name in stored.lengthgen}
            model, args = load_model(
                arguments.checkpoint,
                tensor_parallel=arguments.tensor_parallel,
                dtype=dtype,
                overrides={
                    "lengthgen": section | regularization.to_dict(),
                    # The embedding's and the attention's own dropouts are no part of the comparison.
                    "hidden_dropout": 0.0,
                    "attention_dropout": 0.0,
                    "micro_batch_size": micro_batch,
                    "seed": arguments.seed,
                },
            )
            tables[label] = mismatch.measure(
                model,
                args,
                tokens,
                draws=arguments.draws,
                progress=functools.partial(progress, label),
            )
            del model
        bar.finish(done)
    if not leads:
        return
    settings = {
        "checkpoint": f"{arguments.checkpoint} (iteration {stored.iteration})",
        "data": arguments.data or arguments.text or f"task {arguments.task}",
        "tokens": f"{tokens.numel():,} in {len(tokens)} sequences of {tokens.shape[1]}, microbatches of {micro_batch}",
        "mask draws": arguments.draws,
        "p": arguments.p,
        "sites": f"{', '.join(arguments.sites)} (Pre-Norm: every residual branch)",
        "dtype": dtype,
        "tensor parallel": arguments.tensor_parallel,
        "command": shlex.join(sys.argv),
    }
    if stored.num_experts:
        settings["not measured"] = "linears within mixtures of experts, whose inputs the router chooses"
    files = mismatch_report.write(Path(arguments.output), tables, settings)
    text = mismatch_report.markdown(tables, settings)
    print(text[text.index("## Mean over linears") : text.index("![")].rstrip())
    for file in files:
        print(f"  {file.resolve()}")


if __name__ == "__main__":
    sys.exit(run(main))
