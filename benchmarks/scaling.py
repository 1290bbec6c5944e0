"""Tokens per second on two processes against one, for each kind of parallelism, and what checkpoints cost.

python benchmarks/scaling.py [--steps N]

Two processes with a thread each share two cores over gloo, so that ideal is twice one process with one thread; a
pipeline of two stages and eight microbatches cannot do better than 8/9 of that. A checkpoint every five steps, written
synchronously or asynchronously, is held against the same run without any. Weights in float32, eight layers of width
512, 8 sequences of 512 tokens a step, through `tools/continual_pretrain.py`. Run it on an otherwise idle machine.
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
    "num_layers=8",
    "hidden_size=512",
    "ffn_hidden_size=1536",
    "num_attention_heads=8",
    "num_query_groups=4",
    "pipeline_model_parallel_size=1",
    "decoder_first_pipeline_num_layers=null",
    "pretrained_checkpoint=null",
    "data_path=null",
    "mock_data=true",
    "tokenizer_type=NullTokenizer",
    "tokenizer_model=null",
    "vocab_size=8192",
    "padded_vocab_size=8192",
    "split='100,0,0'",
    "seq_length=512",
    "global_batch_size=8",
    "bf16=false",
    "eval_iters=0",
]
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
    tokens = 8 * 512
    return [tokens / json.loads(line)["tokens_per_second"] for line in lines][2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each run; two are not counted")
    steps = parser.parse_args().steps
    alone = [statistics.median(seconds(1, steps, []))]
    scaling = {}
    for name, (overrides, ideal) in LAYOUTS.items():
        two = statistics.median(seconds(2, steps, overrides))
        # One process again beside each layout: the machine may not be as fast all the time.
        alone.append(statistics.median(seconds(1, steps, [])))
        one = statistics.mean(alone[-2:])
        scaling[name] = {
            "speed-up": round(one / two, 3),
            "ideal": round(2 * ideal, 3),
            "ratio": round(one / two / 2 / ideal, 3),
        }
    took = {name: statistics.mean(seconds(2, 2 + 4 * EVERY, overrides)) for name, overrides in SAVES.items()}
    overhead = {name: round(took[name] / took["none"] - 1, 3) for name in SAVES if name != "none"}
    print(
        json.dumps(
            {
                "claim": "training tokens/s on 2 processes against 1; checkpoints every 5 steps against none",
                "seconds a step, one process": round(statistics.median(alone), 3),
                "scaling": scaling,
                "overhead of checkpoints": overhead,
                "goal": "ratio 0.8 for each layout, asynchronous overhead 0.1",
                "holds": min(row["ratio"] for row in scaling.values()) >= 0.8 and overhead["asynchronous"] <= 0.1,
            }
        )
    )


if __name__ == "__main__":
    main()
