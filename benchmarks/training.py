"""Tokens per second of continual pretraining on CPUs, against transformers' training step on the same machine.

python benchmarks/training.py [--steps N]

Both train a model of SmolLM2-135M's shape in bfloat16 with AdamW on random tokens, 8 sequences of 1,024 tokens a step.
Ours: `tools/continual_pretrain.py` with conf/quickstart_smollm2_135m.yaml (pipeline of two processes, one thread each,
windows, VPAD, float32 master weights). The peer: transformers' LlamaForCausalLM, two threads, full attention, no
dropout, bfloat16 weights and moments. Run it on an otherwise idle machine; the two take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf" / "quickstart_smollm2_135m.yaml"
SEQUENCES, LENGTH = 8, 1024


def ours(steps: int) -> list[float]:
    """Tokens per second of each step but the first, from the run's own log."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"save={folder}",
            "pretrained_checkpoint=null",
            "data_path=null",
            "mock_data=true",
            "tokenizer_type=NullTokenizer",
            "tokenizer_model=null",
            "vocab_size=49152",
            "padded_vocab_size=49152",
            "split='100,0,0'",
            "eval_iters=0",
            f"train_iters={steps}",
            f"global_batch_size={SEQUENCES}",
            "no_save_optim=true",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(ROOT / "tools" / "continual_pretrain.py"), str(CONF), *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORK": folder}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "progress.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens_per_second"] for line in lines][1:]


def peer(steps: int) -> list[float]:
    """Tokens per second of each step but the first."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rates = []
    for _ in range(steps):
        began = time.perf_counter()
        for _ in range(SEQUENCES):
            tokens = torch.randint(0, config.vocab_size, (1, LENGTH))
            (model(tokens, labels=tokens).loss / SEQUENCES).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(SEQUENCES * LENGTH / (time.perf_counter() - began))
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn, the first of which is not counted")
    steps = parser.parse_args().steps
    first = peer(steps)
    mine = ours(steps)
    theirs = statistics.median([*first, *peer(steps)])
    ratio = statistics.median(mine) / theirs
    print(
        json.dumps(
            {
                "claim": "training tokens/s, 135M parameters, 1K tokens, 2 CPU cores, against transformers",
                "ours": round(statistics.median(mine), 1),
                "peer": round(theirs, 1),
                "ratio": round(ratio, 3),
                "goal": 1.0,
                "holds": ratio >= 1.0,
            }
        )
    )


if __name__ == "__main__":
    main()
