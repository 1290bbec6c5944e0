"""The command line: bad input, a run, its continuation and a comparison."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ruler_fixtures import ESSAY, save_model

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.fingerprint import fingerprint, megatron_iteration
from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator

TOOL = Path(__file__).parents[2] / "tools" / "eval_longctx.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def essay_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("essays") / "essay.txt"
    file.write_text(ESSAY, encoding="utf-8")
    return file


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("eval_longctx", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["eval_longctx.py", *map(str, arguments)])
    load_tool().main()


def ruler_arguments(model: Path, essay_file: Path, output: Path, *more: str) -> list[str | Path]:
    usual: list[str | Path] = ["ruler", "--hf", model, "--essays", essay_file, "--output", output, "--dtype", "fp32"]
    usual += [
        "--max-new-tokens",
        "4",
        "--tasks",
        "niah_single_1,niah_single_2",
        "--lengths",
        "768,1k",
        "--samples",
        "2",
    ]
    return [*usual, *more]


def test_a_run_its_continuation_and_a_comparison(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(
        monkeypatch, *ruler_arguments(model, essay_file, tmp_path / "a", "--name", "first", "--note", "Random weights.")
    )
    printed = capsys.readouterr().out
    assert f"Results will be in {tmp_path / 'a' / 'summary.md'}" in printed
    assert "0 of 8 samples are done, 8 to do" in printed and "mean (2 of 13 tasks)" in printed
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["complete"] and summary["lengths"] == [768, 1024] and summary["note"] == "Random weights."
    assert summary["identity"]["max_new_tokens"] == 4

    # A second start does nothing again: the engine is not even loaded.
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    call(monkeypatch, *ruler_arguments(model, essay_file, tmp_path / "a", "--name", "first"))
    assert "8 of 8 samples are done, 0 to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="seed = 42, this start has 7"):
        call(monkeypatch, *ruler_arguments(model, essay_file, tmp_path / "a", "--seed", "7"))
    monkeypatch.undo()

    call(monkeypatch, *ruler_arguments(model, essay_file, tmp_path / "b", "--name", "second"))
    call(
        monkeypatch, "compare", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "c", "--note", "Twice the same."
    )
    result = json.loads((tmp_path / "c" / "compare.json").read_text())
    [pair] = result["comparisons"]
    assert [row["difference"] for row in pair["rows"]] == [0.0] * 4 and pair["rows"][0]["pairs"] == 2
    # What the report says of the runs themselves is no difference between their settings.
    assert pair["differing_settings"] == []
    assert "Twice the same." in (tmp_path / "c" / "compare.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "4096.5"], "--lengths takes whole numbers"),
        (["--lengths", "4kb"], r"--lengths takes whole numbers of tokens such as 4096, 4k .*, got '4kb'"),
        (["--lengths", "-1"], "got '-1'"),
        (["--train-length", "4KiB"], "--train-length takes whole numbers of tokens"),
        (["--limit", "0"], "--limit must be positive, got 0"),
        (["--shard", "0/4"], r"--shard takes a part and the number of parts, from 1/8 to 8/8 for eight, got '0/4'"),
        (["--lengths", "1k,1024"], "names a length twice"),
        (
            ["--lengths", "4,5,1k"],
            r"^lengths 4, 5 are too small for niah_single_1: use at least \d+; "
            r"lengths 4, 5 are too small for niah_single_2: use at least \d+; or leave out what cannot be made$",
        ),
        (["--samples", "0"], "--samples must be positive, got 0"),
        (["--tasks", "vt2"], "'vt2' is not a RULER task"),
        (["--essays", "/nowhere"], "--essays /nowhere does not exist"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere does not exist"),
        (["--tensor-parallel", "2"], "--tensor-parallel is for --checkpoint"),
        (["--stop-token", "<nope>"], "'<nope>' is not in the tokenizer's vocabulary"),
    ],
)
def test_bad_arguments(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call(monkeypatch, *ruler_arguments(model, essay_file, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


def test_lengths_in_multiples_of_the_training_length(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ruler_arguments(model, essay_file, tmp_path / "run", "--limit", "1")
    at = arguments.index("--lengths")
    arguments[at : at + 2] = ["--multiples", "2,1.5"]
    with pytest.raises(UserError, match="--multiples needs --train-length"):
        call(monkeypatch, *arguments)
    with pytest.raises(UserError, match=r"--multiples 1\.5 of --train-length 511 is not a whole number of tokens"):
        call(monkeypatch, *arguments, "--train-length", "511")
    call(monkeypatch, *arguments, "--train-length", "512")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["lengths"], summary["train_length"]) == ([768, 1024], 512)


def test_shards_fill_one_run_and_a_report_is_written_without_a_model(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    call(monkeypatch, *ruler_arguments(model, essay_file, run, "--shard", "2/2", "--limit", "2", "--note", "In parts."))
    assert "0 of 4 samples of shard 2/2 are done, 4 to do" in (printed := capsys.readouterr().out)
    assert "Not complete" in printed
    assert not json.loads((run / "summary.json").read_text())["complete"]
    call(monkeypatch, *ruler_arguments(model, essay_file, run, "--shard", "1/2", "--note", "In parts."))
    assert "Not complete" not in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["complete"]
    assert {path.name for path in (run / "predictions" / "niah_single_1").iterdir()} == {
        f"{length}.{number}-of-2.0.jsonl" for length in (768, 1024) for number in (1, 2)
    }
    for name in ("summary.json", "summary.md", "score_vs_length.png"):
        (run / name).unlink()
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    call(monkeypatch, "report", run)
    assert json.loads((run / "summary.json").read_text()) == summary
    call(monkeypatch, "report", run, "--note", "Again.", "--train-length", "1k")
    again = json.loads((run / "summary.json").read_text())
    assert (again["note"], again["train_length"], again["cells"]) == ("Again.", 1024, summary["cells"])
    with pytest.raises(UserError, match="is not a run"):
        call(monkeypatch, "report", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def answers_of(run: Path) -> list[bytes]:
    """Lines of answers that are whole."""
    return [line for part in run.glob("predictions/*/*") for line in part.read_bytes().split(b"\n")[:-1]]


def check_it_goes_on(run: Path, total: int, start: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was stopped in the midst keeps its answers, and another start makes the others, each once."""
    kept = len(answers_of(run))
    assert 3 <= kept < total
    capsys.readouterr()
    start()
    assert f"{kept} of {total} samples are done, {total - kept} to do" in capsys.readouterr().out
    found = [json.loads(line) for line in answers_of(run)]
    assert len({(record["task"], record["max_length"], record["index"]) for record in found}) == len(found) == total


def test_a_killed_command_goes_on_where_it_was(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ruler_arguments(model, essay_file, run, "--samples", "60")
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    deadline = time.monotonic() + 300
    while len(answers_of(run)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    check_it_goes_on(run, 240, lambda: call(monkeypatch, *arguments), capsys)


def test_ctrl_c_before_a_run_opens(model: Path, essay_file: Path, tmp_path: Path) -> None:
    pipe, run = tmp_path / "words.json", tmp_path / "run"
    os.mkfifo(pipe)
    command = [
        sys.executable,
        str(TOOL),
        *map(str, ruler_arguments(model, essay_file, run, "--english-words", str(pipe))),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline, writer = time.monotonic() + 120, None
        # That it can be opened says that the command reads from it, and so waits.
        while writer is None:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        os.close(writer)
    assert (process.returncode, printed, errors) == (130, "", "\nstopped; the same command starts again\n")
    assert not run.exists()


@pytest.mark.slow
def test_ctrl_c_with_workers(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C reaches all processes of a terminal: when workers have just been started, when they are at work, and when
    the model is. None says anything, none stays, and the next start goes on."""
    run = tmp_path / "run"
    arguments = ruler_arguments(model, essay_file, run, "--samples", "40", "--workers", "2")

    def interrupted(answers: int, wait: float) -> None:
        command, before = [sys.executable, str(TOOL), *map(str, arguments)], len(answers_of(run))
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            deadline = time.monotonic() + 120
            # The process itself, multiprocessing's tracker, and two workers.
            while len(_group(process.pid)) < 4 or len(answers_of(run)) < before + answers:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(wait)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        stopped = f"\nstopped; finished samples are kept in {run}, the same command continues\n"
        assert (process.returncode, errors) == (130, stopped)
        while _group(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    for answers, wait in ((0, 0.0), (0, 0.5), (0, 2.0), (3, 0.0)):
        interrupted(answers, wait)
    check_it_goes_on(run, 160, lambda: call(monkeypatch, *arguments), capsys)


def _group(leader: int) -> list[int]:
    """Processes of a group that are alive."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            found += [int(file.parent.name)] * (int(group) == leader and state != "Z")
    return found


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
    ],
    ids=["CPU", "GPU", "Python"],
)
def test_short_memory_is_said_with_the_way_on(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    arguments = ruler_arguments(model, essay_file, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr("transformers.LlamaForCausalLM.generate", fail)
        with pytest.raises(
            UserError, match=r"^there is not enough memory for these lengths: finished samples are kept, "
        ):
            call(patched, *arguments)
        patched.setattr("transformers.LlamaForCausalLM.generate", _broken)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            call(patched, *arguments)
    call(monkeypatch, *arguments, "--limit", "1")
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["complete"]


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x2 and 3x2)")


def test_a_model_that_cannot_be_loaded(
    model: Path, essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "model"))

    def refused(message: str) -> None:
        with pytest.raises(
            UserError, match=rf"^cannot load a model from {broken} \(.*{message}.*\); give a complete dir"
        ):
            call(monkeypatch, *ruler_arguments(broken, essay_file, tmp_path / f"run of {message}"))

    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused("")
    weights.unlink()
    refused("model.safetensors")
    weights.write_bytes(whole)
    (broken / "config.json").write_text(json.dumps({"model_type": "nobody_knows", "vocab_size": 600}))
    refused("nobody_knows")
    (broken / "config.json").write_text("{")
    with pytest.raises(
        UserError, match=rf"^cannot load a tokenizer from {broken}: .*config\.json' is not a valid JSON"
    ):
        call(monkeypatch, *ruler_arguments(broken, essay_file, tmp_path / "run"))
    with pytest.raises(UserError, match="dtype must be one of bf16, fp16, fp32, got 'fp8'"):
        HuggingFaceGenerator.from_pretrained(str(model), dtype="fp8")


def test_a_directory_that_is_no_model(essay_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config.json"):
        call(monkeypatch, *ruler_arguments(tmp_path / "empty", essay_file, tmp_path / "run"))


def checkpoint(directory: Path, iteration: str = "iter_0000010", tracker: str | None = "10") -> Path:
    (directory / iteration).mkdir(parents=True)
    (directory / iteration / "metadata.json").write_text("{}")
    (directory / iteration / "__0_0.distcp").write_bytes(bytes(3_000_000))
    if tracker is not None:
        (directory / "latest_checkpointed_iteration.txt").write_text(tracker)
    return directory


def test_a_checkpoint_without_its_metadata_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    (checkpoint(tmp_path / "ckpt") / "iter_0000010" / "metadata.json").unlink()
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['x', 'ruler', '--checkpoint', {str(tmp_path / 'ckpt')!r}, '--tokenizer', 't', '--output', 'o',"
        " '--tasks', 'niah_single_1', '--lengths', '1k']\n"
        "try:\n"
        f"    runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print('torch' in sys.modules, end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "metadata.json is missing" in done.stderr and done.stdout.split() == ["False", "2"]


def test_tensor_parallel_must_divide_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    where = checkpoint(tmp_path / "ckpt")
    with pytest.raises(UserError, match="--tensor-parallel 2 does not divide the 3 processes"):
        call(
            monkeypatch,
            *("ruler", "--checkpoint", where, "--tokenizer", "t", "--output", tmp_path / "o"),
            *("--tasks", "niah_single_1", "--lengths", "1k", "--tensor-parallel", "2"),
        )


def test_the_newest_iteration_of_a_checkpoint(tmp_path: Path) -> None:
    assert megatron_iteration(str(checkpoint(tmp_path / "a"))).name == "iter_0000010"
    assert megatron_iteration(str(checkpoint(tmp_path / "b", "release", "release"))).name == "release"
    inner = checkpoint(tmp_path / "c", tracker=None) / "iter_0000010"
    assert megatron_iteration(str(inner)) == inner
    with pytest.raises(UserError, match="neither an iteration nor 'release'"):
        megatron_iteration(str(checkpoint(tmp_path / "d", tracker="ten")))


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_999])
def test_a_fingerprint_follows_the_weights_and_not_the_place(tmp_path: Path, place: int) -> None:
    one, two = (megatron_iteration(str(checkpoint(tmp_path / name))) for name in "ab")
    assert fingerprint(one) == fingerprint(two)
    with open(two / "__0_0.distcp", "r+b") as file:
        file.seek(place)
        file.write(b"\x01")
    assert fingerprint(one) != fingerprint(two)


def test_two_processes_share_a_run(model: Path, essay_file: Path, tmp_path: Path) -> None:
    def launch(*more: str) -> subprocess.CompletedProcess[str]:
        arguments = [str(a) for a in ruler_arguments(model, essay_file, tmp_path / "run", "--samples", "3", *more)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*launcher, str(TOOL), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)

    done = launch()
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"]
    parts = {path.name for path in (tmp_path / "run" / "predictions" / "niah_single_1").iterdir()}
    assert parts == {"768.0.jsonl", "768.1.jsonl", "1024.0.jsonl", "1024.1.jsonl"}
    assert done.stdout.count("Results will be in") == 1
    refused = launch("--seed", "7")
    assert refused.returncode != 0 and refused.stderr.count("seed = 42, this start has 7") == 1
    assert "Error" not in refused.stderr.split("seed = 42, this start has 7")[0]
