"""Tokens per second on two processes against one, for each kind of parallelism, and what checkpoints cost.

python benchmarks/scaling.py [--steps N] [--only layouts | checkpoints]

Two processes with a thread each share two cores over gloo, so that ideal is twice one process with one thread; a
pipeline of two stages and eight microbatches cannot do better than 8/9 of that. A checkpoint every five steps, written
synchronously or asynchronously, is held against the same run without any. One JSON line per claim:
``{"claim", "ours", "peer", "ratio", "goal", "holds"}``. Weights in float32, two layers of width 1536 (narrow ones would
measure the latency of gloo: what tensor parallelism sends grows with the width, what it computes with its square), 8
sequences of 256 tokens a step, through `tools/continual_pretrain.py`. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf" / "quickstart_smollm2_135m.yaml"
#: Ideal parts of twice one process's rate.
LAYOUTS = {
    "DP 2": ([], 1.0),
    "DP 2, distributed optimizer": (["use_distributed_optimizer=true"], 1.0),
    "TP 2": (["tensor_model_parallel_size=2", "sequence_parallel=true"], 1.0),
    "PP 2": (["pipeline_model_parallel_size=2"], 8 / 9),
}
MODEL = [
    "num_layers=2",
    "hidden_size=1536",
    "ffn_hidden_size=4096",
    "num_attention_heads=12",
    "num_query_groups=4",
    "kv_channels=128",
    "lengthgen.attention.pattern=FW",
    "pipeline_model_parallel_size=1",
    "decoder_first_pipeline_num_layers=null",
    "pretrained_checkpoint=null",
    "data_path=null",
    "mock_data=true",
    "tokenizer_type=NullTokenizer",
    "tokenizer_model=null",
    "vocab_size=2048",
    "padded_vocab_size=2048",
    "split='100,0,0'",
    "seq_length=256",
    "global_batch_size=8",
    "bf16=false",
    "eval_iters=0",
]
TOKENS = 8 * 256  # of a step
EVERY = 5
SAVES = {
    "none": [],
    "synchronous": [f"save_interval={EVERY}"],
    "asynchronous": [f"save_interval={EVERY}", "async_save=true"],
}


def seconds(processes: int, steps: int, overrides: list[str], save_interval: int = 10**6) -> list[float]:
    """Seconds of each step but the first two, of a fresh run."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*MODEL, f"save={folder}", f"train_iters={steps}", f"save_interval={save_interval}", *overrides]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [str(ROOT / "tools" / "continual_pretrain.py"), str(CONF), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORK": folder}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "progress.jsonl").read_text().splitlines()
    return [TOKENS / json.loads(line)["tokens_per_second"] for line in lines][2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each run of a layout; two are not counted")
    parser.add_argument("--only", choices=["layouts", "checkpoints"])
    options = parser.parse_args()
    if options.only != "checkpoints":
        layouts(options.steps)
    if options.only != "layouts":
        checkpoints()


def layouts(steps: int) -> None:
    alone = [statistics.median(seconds(1, steps, []))]
    for name, (overrides, ideal) in LAYOUTS.items():
        two = statistics.median(seconds(2, steps, overrides))
        # One process again beside each layout: the machine may not be as fast all the time.
        alone.append(statistics.median(seconds(1, steps, [])))
        one = statistics.mean(alone[-2:])
        what = f"training tokens/s, {name} (peer: ideal, {2 * ideal:.2f} times one process)"
        claim(what, 1 / two, 2 * ideal / one, 0.8)


def checkpoints() -> None:
    took = {name: statistics.mean(seconds(2, 2 + 4 * EVERY, overrides)) for name, overrides in SAVES.items()}
    for name, goal in (("synchronous", 0.5), ("asynchronous", 0.9)):
        what = f"training tokens/s, {name} checkpoints every {EVERY} steps (peer: none)"
        claim(what, 1 / took[name], 1 / took["none"], goal)


def claim(text: str, ours: float, peer: float, goal: float) -> None:
    """One line; rates are given in steps, and become tokens here."""
    ours, peer = TOKENS * ours, TOKENS * peer
    line = {"claim": text, "ours": round(ours, 1), "peer": round(peer, 1), "ratio": round(ours / peer, 3), "goal": goal}
    print(json.dumps({**line, "holds": ours / peer >= goal}), flush=True)


if __name__ == "__main__":
    main()
