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
from launch import losses as global_losses

from megatron_lengthgen.checkpoint.load import TRACKER
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


def kill_and_restart(
    nodes: Cluster, name: str, overrides: list[str], kills: int, seed: int, steps: int = STEPS
) -> Path:
    """Run to the end, killing a node at a random moment of each of the first ``kills`` starts."""
    draw = random.Random(seed)
    for _ in range(kills):
        job = nodes.start(name, *overrides)
        done = cluster.steps_done(job.save)
        # Within reach, but not always past the next save.
        job.reach(min(done + draw.randint(1, 3), steps - 1))
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


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["", "async_save=true"], ids=["synchronous", "asynchronous"])
def test_twenty_kills_leave_no_trace(nodes: Cluster, saves: str) -> None:
    steps = 60
    overrides = [*DP2_PP2.split(), f"train_iters={steps}", *saves.split()]
    reference = nodes.run(f"long{saves}", *overrides)
    killed = kill_and_restart(nodes, f"long-killed{saves}", overrides, kills=20, seed=2, steps=steps)
    assert_same(killed, reference, steps)


def test_a_short_cut_is_survived_and_a_long_one_ends_in_an_error(nodes: Cluster, undisturbed: Path) -> None:
    if not nodes.network.can_cut:
        pytest.skip("no network namespaces here: loopback addresses have no cable to pull")
    timeout, run = 12.0, [*DP2_PP2.split(), "save_interval=1000", "train_iters=1000", "lr_decay_iters=20"]
    job = nodes.start("cut", *run, timeout=timeout)
    job.reach(4)
    nodes.network.cut(2)
    time.sleep(3)
    before = cluster.steps_done(job.save)
    time.sleep(1)
    assert cluster.steps_done(job.save) == before < STEPS
    nodes.network.mend(2)
    job.reach(STEPS)
    short = losses(job.save)
    assert {step: short[step] for step in range(1, STEPS + 1)} == losses(undisturbed)

    nodes.network.cut(2)
    try:
        began = time.monotonic()
        statuses = job.wait(timeout + 30)
        assert time.monotonic() - began < timeout + 30
    finally:
        nodes.network.mend(2)
    assert set(statuses) == {RESTART}, job.output()
    output = job.output()
    for rank in range(NODES):
        assert f"rank {rank} on host node{rank} lost contact with another rank" in output
    assert f"the same command goes on from the last checkpoint in {job.save}" in output


def test_a_warning_saves_and_the_next_start_goes_on(nodes: Cluster, undisturbed: Path) -> None:
    """To all processes of one task, as Slurm sends it: helpers that save must not die of it."""
    run = [*DP2_PP2.split(), "save_interval=1000"]
    job = nodes.start("warned", *run)
    job.reach(5)
    job.kill(1, signal.SIGTERM)
    assert job.wait() == [0] * NODES, job.output()
    saved = int((job.save / TRACKER).read_text())
    assert 5 <= saved < STEPS
    assert_same(nodes.run("warned", *run), undisturbed)


@pytest.mark.slow
def test_a_warning_saves_asynchronously_too(nodes: Cluster, undisturbed: Path) -> None:
    run = [*DP2_PP2.split(), "async_save=true"]
    job = nodes.start("warned-async", *run)
    job.reach(5)
    job.kill(1, signal.SIGTERM)
    assert job.wait() == [0] * NODES, job.output()
    assert 5 <= int((job.save / TRACKER).read_text()) < STEPS
    assert_same(nodes.run("warned-async", *run), undisturbed)


@pytest.mark.slow
def test_a_restart_on_another_layout_stays_within_rounding(nodes: Cluster, undisturbed: Path) -> None:
    run = DP2_PP2.split()
    nodes.run("moved", *run, "exit_interval=9")
    # Over all data-parallel ranks, of which there is one now.
    moved = global_losses(nodes.run("moved", *run, *TP2_PP2.split()))
    reference = global_losses(undisturbed)
    assert len(moved) == len(reference) == STEPS
    assert max(abs(one - other) / other for one, other in zip(moved, reference, strict=True)) < 1e-5


def test_what_one_node_alone_lacks_is_named_before_anything_is_built(nodes: Cluster, undisturbed: Path) -> None:
    job = nodes.start("lacking", *DP2_PP2.split(), own={2: ["mock_data=false", "data_path=[/none/data]"]})
    assert job.wait(30) == [2] * NODES
    assert "data_path names /none/data, but there is no file /none/data.idx" in job.output()
    assert "(on rank 2 alone, the first on host node2)" in job.output()
    assert not (job.save / "run.lock").exists()


def test_a_second_job_in_a_runs_folder_is_refused(nodes: Cluster) -> None:
    run = [*DP2_PP2.split(), "train_iters=1000"]
    first = nodes.start("shared", *run)
    first.reach(1)
    second = nodes.start("shared", *run, port=29501)
    assert second.wait(60) == [2] * NODES
    assert f"{first.save} is in use by process {first.processes[0]} on host node0" in second.output()
    assert (first.save / "run.lock").is_file()
    first.kill(0)
    first.wait(60)
