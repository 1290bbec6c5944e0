"""Nodes that are killed, cut off and stopped, and runs that do not notice: four network namespaces, gloo over TCP."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import cluster
import pytest
import torch
from cluster import Cluster, losses, weights

from megatron_lengthgen.training.faults import RESTART

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

NODES = 4
STEPS = 20
PP2 = "pipeline_model_parallel_size=2"
TP2_PP2 = f"tensor_model_parallel_size=2 sequence_parallel=true {PP2}"
RESHARDABLE = "use_distributed_optimizer=true dist_ckpt_optim_fully_reshardable=true"
# Warm-up and decay, so that a schedule that begins again would show; a save on most steps, so that a kill may meet one.
DP2_PP2 = f"{PP2} {RESHARDABLE} train_iters={STEPS} lr_decay_style=cosine lr_warmup_iters=4 save_interval=3"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.cluster(NODES, tmp_path_factory.mktemp("nodes")) as made:
        # A first run, so that no other one makes the mock data's helpers.
        yield made


@pytest.fixture(scope="module")
def undisturbed(nodes: Cluster) -> Path:
    return nodes.run("undisturbed", *DP2_PP2.split())


def assert_same(run: Path, reference: Path, step: int = STEPS) -> None:
    """Every loss, every weight and every moment, bit for bit."""
    assert losses(run) == losses(reference)
    one, other = (weights(folder / f"iter_{step:07d}") for folder in (run, reference))
    assert one.keys() == other.keys()
    assert any("exp_avg" in key for key in one)
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def kill_and_restart(nodes: Cluster, name: str, overrides: list[str], kills: int, seed: int) -> Path:
    """Run to the end, killing a node at a random moment of each of the first ``kills`` starts."""
    draw = random.Random(seed)
    for _ in range(kills):
        job = nodes.start(name, *overrides)
        done = cluster.steps_done(job.save)
        # Within reach, but not always past the next save.
        job.reach(min(done + draw.randint(1, 3), STEPS - 1))
        time.sleep(draw.random() * 0.3)
        victim = draw.randrange(NODES)
        job.kill(victim)
        statuses = job.wait(60)
        assert statuses[victim] == -signal.SIGKILL
        others = [status for node, status in enumerate(statuses) if node != victim]
        assert set(others) <= {RESTART, 0}, job.output()
    return nodes.run(name, *overrides)


def test_two_kills_leave_no_trace(nodes: Cluster, undisturbed: Path) -> None:
    assert sorted(losses(undisturbed)) == list(range(1, STEPS + 1))
    assert losses(undisturbed)[STEPS] < 0.9 * losses(undisturbed)[1]
    assert_same(kill_and_restart(nodes, "killed", DP2_PP2.split(), kills=2, seed=1), undisturbed)
