#!/usr/bin/env python
"""Output layer and loss where few tokens count, forward and backward, against Megatron's own loss of every token.

    python benchmarks/sparse_loss.py [--share 0.1]

The shape is that of a language study's model: hidden size 64, 1,024 rows of vocabulary, 16 sequences of 512 tokens, one
thread. Both take turns on the same tensors. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

SEQUENCES, LENGTH, HIDDEN, VOCABULARY = 16, 512, 64, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1, help="of the tokens that count")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()

    import torch

    from megatron_lengthgen.models import build

    torch.set_num_threads(1)
    build.connect()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_lengthgen.training.loss import language_model_loss

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1)
    torch.manual_seed(0)
    hidden = torch.randn(LENGTH, SEQUENCES, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH))
    mask = (torch.rand(SEQUENCES, LENGTH) < options.share).float()

    def output_layer(states: torch.Tensor, weight: torch.Tensor, runtime_gather_output: bool | None = None):
        return torch.matmul(states, weight.t()), None

    def ours() -> torch.Tensor:
        return language_model_loss(
            hidden_states=hidden,
            output_layer=output_layer,
            output_weight=weight,
            labels=labels,
            loss_mask=mask,
            scale_logits=lambda logits: logits,
            runtime_gather_output=None,
        )

    def megatrons() -> torch.Tensor:
        logits, _ = output_layer(hidden, weight)
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()

    def seconds(losses: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        torch.autograd.grad((losses() * mask).sum(), [hidden, weight])
        return time.perf_counter() - began

    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.repeats):
        times["ours"].append(seconds(ours))
        times["peer"].append(seconds(megatrons))
    mine, theirs = (1e3 * statistics.median(times[name][2:]) for name in ("ours", "peer"))
    claim = f"milliseconds of output layer and loss, {options.share:g} of the tokens counted, against Megatron's of all"
    result = {"claim": claim, "ours": round(mine, 2), "peer": round(theirs, 2), "ratio": round(mine / theirs, 3)}
    print(json.dumps(result | {"goal": "<= 0.5", "holds": mine / theirs <= 0.5}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
