"""What a run does when it is told to stop, when numbers, disks, ranks or launchers fail: through the command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sft import artifacts, batching, checkpoint, device, run_directory
from sft.dataset import Dataset
from sft.journal import read_metrics
from tests.conftest import ROOT, launch, must
from tests.test_checkpoint import adapter, numbers
from tools.torture import torture
from training.watchdog import name_missing


def wait_until(condition, start=None, timeout_s: float = 120.0) -> None:
    """Polls until something is so; the state of the processes is the only clock."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, start.output[-3000:] if start else "it did not happen"
        time.sleep(0.01)


def steps(run_dir: Path) -> int:
    return max((record["step"] for record in read_metrics(run_dir)), default=0)


def messages(output: str) -> list[str]:
    """What the product itself reported as an error, launchers and libraries aside."""
    return [line for line in output.splitlines() if line.startswith("error")]


def test_a_signal_to_one_rank_all_or_the_launcher_stops_all_ranks_together(warm, arguments, peace, tmp_path):
    run_dir = tmp_path / "run"
    for at_step, send in (
        (2, lambda start: os.kill(start.rank_pids()[1], signal.SIGHUP)),
        (7, lambda start: [os.kill(pid, signal.SIGINT) for pid in (*start.rank_pids(), start.pid)]),  # as Ctrl-C does
        (12, lambda start: os.kill(start.pid, signal.SIGTERM)),
    ):
        start = warm.start(*arguments(run_dir))
        wait_until(lambda: steps(run_dir) >= at_step, start)  # noqa: B023
        send(start)
        status = start.wait()
        stopped = checkpoint.directories(run_dir)[-1]
        step = int(stopped.name.split("-")[1])
        assert f"Stopped after step {step} of 20; everything is in {stopped}. The same command goes on" in start.output
        assert (status == 0) == (at_step == 2)  # torch's launcher calls a signal that it got itself a failure
        assert not messages(start.output)
        assert step == steps(run_dir) < 20
        assert checkpoint.problem(stopped) is None
    status, output = warm.run(*arguments(run_dir))
    assert status == 0, output
    assert numbers(run_dir) == numbers(peace)
    assert adapter(run_dir) == adapter(peace)


def test_a_second_signal_ends_a_rank_at_once_even_inside_a_collective(warm, arguments, tmp_path):
    start = warm.start(*arguments(tmp_path / "run", "--max_steps", "5000", "--save_steps", "5000"))
    wait_until(lambda: steps(tmp_path / "run") >= 1, start)
    waiting, frozen = start.rank_pids()
    os.kill(frozen, signal.SIGSTOP)

    def ended() -> bool:
        try:
            os.kill(waiting, signal.SIGTERM)  # within a second of the first it counts as the launcher's echo
        except ProcessLookupError:
            return True
        return waiting not in start.rank_pids()

    wait_until(ended, start, timeout_s=30)
    start.kill_group()
    start.wait()
    assert checkpoint.directories(tmp_path / "run") == []


def test_a_rank_that_dies_ends_the_others_and_the_launcher_within_a_minute(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    start = warm.start(*arguments(run_dir, "--max_steps", "5000"))
    wait_until(lambda: steps(run_dir) >= 6, start)
    os.kill(start.rank_pids()[1], signal.SIGKILL)
    died = time.monotonic()
    assert start.wait() != 0
    wait_until(lambda: not start.group_lives())
    assert time.monotonic() - died < 60
    saved = checkpoint.directories(run_dir)
    assert saved and not any(map(checkpoint.problem, saved))
    # If the launcher's signal comes before the closed connection is seen, that is told as the echo which it is.
    assert all("was told to stop and, before it had, met" in message for message in messages(start.output))


def test_a_rank_told_to_stop_by_the_launcher_tells_the_echo_in_one_sentence(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    start = warm.start(*arguments(run_dir, "--max_steps", "5000"))
    wait_until(lambda: steps(run_dir) >= 6, start)
    first, second = start.rank_pids()
    os.kill(first, signal.SIGSTOP)  # it sees nothing until the launcher has told it to stop
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: pending(first, signal.SIGTERM), start, timeout_s=30)
    os.kill(first, signal.SIGCONT)
    assert start.wait() != 0
    (message,) = messages(start.output)
    assert message.startswith("error: rank 0 was told to stop and, before it had, met ")
    assert f"The last checkpoint is {run_dir}/checkpoint-" in message
    assert "Traceback (most recent call last)" in (run_dir / "stack-rank-0.txt").read_text()


def pending(pid: int, number: int) -> bool:
    """Whether a signal waits for a process, as Linux shows it."""
    masks = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(("SigPnd", "ShdPnd"))]  # fmt: skip
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_ranks_write_their_stacks_and_a_hang_names_the_rank_that_did_not_arrive(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    start = warm.start(*arguments(run_dir, "--ddp_timeout", "15", "--max_steps", "5000", "--save_steps", "5000"))
    wait_until(lambda: steps(run_dir) >= 2, start)
    stacks = [run_dir / f"stack-rank-{rank}.txt" for rank in (0, 1)]
    os.kill(start.rank_pids()[1], signal.SIGUSR1)
    wait_until(lambda: all(path.exists() and "in train" in path.read_text() for path in stacks), start)
    assert "rank 1: SIGUSR1; step" in stacks[1].read_text()
    assert "rank 0: asked for by another rank; step" in stacks[0].read_text()
    before = steps(run_dir)

    os.mkfifo(run_dir / "storage-that-hangs")  # opening it to write waits for a reader
    os.replace(run_dir / "storage-that-hangs", run_dir / "metrics.jsonl")
    assert start.wait() != 0
    (message,) = messages(start.output)
    assert "no progress for" in message and "did not arrive: rank 0 (last seen at step" in message
    assert f"Python stacks are in {run_dir}/stack-rank-*.txt. There is no checkpoint yet" in message
    assert "the furthest rank, 1, waits at step" in message
    assert int(message.split("waits at step ")[1].split(",")[0]) > before
    assert all(path.read_text().count("(most recent call first)") >= 2 for path in stacks)
    assert "in write" in stacks[0].read_text().split("no progress", 1)[-1]


@pytest.mark.slow
def test_a_rank_that_falls_silent_ends_the_others_within_a_minute(warm, arguments, tmp_path):
    start = warm.start(*arguments(tmp_path / "run", "--max_steps", "5000"))
    wait_until(lambda: steps(tmp_path / "run") >= 1, start)
    waiting, frozen = start.rank_pids()
    os.kill(frozen, signal.SIGSTOP)  # as if its server had lost power: nothing closes a connection
    silent = time.monotonic()
    wait_until(lambda: waiting not in start.rank_pids(), start)
    assert 30 < time.monotonic() - silent < 60  # up to three beats until it is noticed, 30 s, two beats to speak
    start.kill_group()
    assert "did not arrive: rank 1 (last seen at " in start.output
    assert "its process is dead, stopped or cut off" in start.output


def test_missing_ranks_are_those_behind_the_furthest_and_the_silent():
    heard = {
        0: ("9|41|step 7, backward", 0.0),
        1: ("9|40|step 7, forward", 5.0),
        2: ("2|41|step 7, backward", 30.0),
    }
    assert name_missing(heard, beat_s=5.0) == (
        "did not arrive: rank 1 (last seen at step 7, forward), rank 2 (last seen at step 7, backward; its process is "
        "dead, stopped or cut off); the furthest rank, 0, waits at step 7, backward"
    )
    assert "a card or the network between them hangs" in name_missing({0: heard[0], 1: heard[0]}, beat_s=5.0)


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_optimizer(
    warm, arguments, tiny_model_dir, dataset_dir, tmp_path
):
    rows = Dataset(dataset_dir, ("train",)).train
    plan = batching.BatchPlan(np.asarray(rows["length"]), np.asarray(rows["target_tokens"]), 42, 1, 2, 2)
    ids = [set(row[:-1]) for row in rows["input_ids"]]
    # What training sees before: the rows of the first steps, and the row that is tried out before them (sft/packing.py).
    seen = ids[0].union(*(ids[row] for step in range(6) for row in plan.rows(step)))
    step, row, token = next(
        (step, row, token) for step in range(6, 20) for row in plan.rows(step) for token in sorted(ids[row])
        if token not in seen and not any(token in ids[other] for s in range(6, step + 1) for other in plan.rows(s) if other != row)
    )  # fmt: skip
    rank = next(rank for m in plan.layout(step) for rank in (0, 1) if row in m[rank])
    mine = [r for m in plan.layout(step) for r in m[rank]]
    model = poisoned(tiny_model_dir, tmp_path / "model", token)

    status, output = warm.run(
        *arguments(tmp_path / "run", "--model_name_or_path", model, "--no_eval_on_start", "--eval_steps", "999")
    )
    assert status != 0
    (message,) = messages(output)
    assert f"step {step + 1}: Σ loss per rank is" in message and f"not finite on rank {rank}." in message
    assert "The optimizer was not touched" in message
    assert "embed_tokens.weight of the base model holds NaN or inf: copy" in message and "learning_rate" not in message
    assert (
        f"Rows {mine} (ids {', '.join(rows[r]['id'] for r in mine)}) of {[rows[r]['length'] for r in mine]} tokens"
        in message
    )
    assert f"The last checkpoint is {tmp_path / 'run' / 'checkpoint-5'}" in message
    written = (tmp_path / "run" / f"non_finite_step-{step + 1}.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in written] == mine
    assert json.loads(written[0])["input_ids"] == rows[mine[0]]["input_ids"]
    assert steps(tmp_path / "run") == step
    assert [path.name for path in checkpoint.directories(tmp_path / "run")] == ["checkpoint-5"]


def poisoned(source: Path, target: Path, token: int) -> Path:
    """The model with a NaN in the input embedding of one token, its output embeddings untied and clean."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    config = artifacts.read_json(source / "config.json")
    artifacts.write_json(target / "config.json", {**config, "tie_word_embeddings": False})
    weights = load_file(str(source / "model.safetensors"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][token, 3] = float("nan")
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def test_a_full_disk_gives_one_sentence_and_the_run_goes_on_when_there_is_room(warm, arguments, peace, tmp_path):
    run_dir = tmp_path / "run"
    assert warm.run(*arguments(run_dir, "--stop_at_step", "5"))[0] == 0

    status, output = warm.run(*arguments(run_dir), limits={"RLIMIT_FSIZE": 50_000})  # the optimizer's file is larger
    assert status != 0
    (message,) = messages(output)
    assert f"could not write {run_dir / 'checkpoint-10'}: " in message and "File too large" in message
    assert "what was complete before is untouched" in message
    assert [path.name for path in checkpoint.directories(run_dir)] == ["checkpoint-5"]
    assert checkpoint.problem(run_dir / "checkpoint-5") is None

    start = warm.start(*arguments(run_dir))
    wait_until(lambda: "step 6/20: " in start.output, start)
    os.symlink("/dev/full", run_dir / "no-room")  # writing to it fails as on a full disk
    os.replace(run_dir / "no-room", run_dir / "metrics.jsonl")
    assert start.wait() != 0
    (message,) = messages(start.output)
    assert f"could not write {run_dir / 'metrics.jsonl'}: No space left on device" in message

    (run_dir / "metrics.jsonl").unlink()  # a link that leads out of a run directory is not followed
    status, output = warm.run(*arguments(run_dir))
    assert status == 0, output
    assert adapter(run_dir) == adapter(peace)
    # the records of steps 1 to 5 went with the replaced file, which only this test does
    assert numbers(run_dir)[-5:] == numbers(peace)[-5:]


def test_a_directory_that_cannot_be_written_gives_one_sentence(warm, arguments):
    status, output = warm.run(*arguments("/proc/run"), processes=1)  # read-only to everyone, root included
    assert status == 2
    (message,) = messages(output)
    assert "could not write /proc/run: " in message and "choose another place" in message


def test_a_run_killed_while_its_directory_was_begun_starts_afresh(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".provenance.json.tmp-abc").write_text("{")
    (run_dir / run_directory.LOCK).touch()
    status, output = warm.run(*arguments(run_dir, "--stop_at_step", "1"), processes=1)
    assert status == 0, output
    assert not (run_dir / ".provenance.json.tmp-abc").exists()


def test_the_single_process_launcher_leaves_no_child_behind(arguments, tmp_path):
    run_dir = tmp_path / "run"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_1.yaml", "train.py",
         *map(str, arguments(run_dir, "--max_steps", "5000"))],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: steps(run_dir) >= 3)
    holder = int((run_dir / run_directory.LOCK).read_text().split()[1])
    assert holder != launcher.pid
    launcher.send_signal(signal.SIGTERM)  # Accelerate does not pass it on
    launcher.wait(30)
    wait_until(lambda: not Path(f"/proc/{holder}").exists(), timeout_s=60)
    assert checkpoint.newest(run_dir).step == steps(run_dir)


@pytest.mark.npu
def test_out_of_memory_is_explained_and_auto_micro_batch_gets_by_with_the_same_result(
    warm, arguments, simulated_environment, tmp_path
):
    from tests.sim_ascend import environment

    small = environment(cards=1, memory_bytes=12_000_000)  # 64 rows at once need more, 8 do not
    more = ("--per_device_train_batch_size", "64", "--gradient_accumulation_steps", "1", "--max_steps", "3",
            "--dtype", "float32")  # fmt: skip
    fp32 = ["--mixed_precision", "no"]
    tried = launch("npu_1", "train.py", *arguments(tmp_path / "tried", *more), env=small, flags=fp32)
    (message,) = messages(tried.stderr)  # the mask of the one attention call alone has 4 MiB, and 20 while it is made
    assert "out of memory on rank 0 (npu:0) while the model is loaded and tried out, before the first step" in message
    assert not (tmp_path / "tried").exists()
    more = (*more, "--fused", "off")
    failed = launch("npu_1", "train.py", *arguments(tmp_path / "failed", *more), env=small, flags=fp32)
    assert failed.returncode != 0
    (message,) = messages(failed.stderr)
    assert (
        "out of memory on rank 0 (npu:0) in step 1, rows [" in message
        and "] tokens; set gradient_checkpointing" in message
    )
    assert "global_batch_size: 64 (same result), or auto_micro_batch: true. There is no checkpoint yet" in message

    fitted = must(
        launch("npu_1", "train.py", *arguments(tmp_path / "fitted", *more, "--auto_micro_batch"), env=small, flags=fp32)
    )
    assert (
        "Out of memory with 64 rows at once: going on with per_device_train_batch_size 32 × accumulation 2; the "
        in fitted.stdout
    )
    assert warm.run(*arguments(tmp_path / "whole", *more), processes=1)[0] == 0
    losses = [record["loss"] for record in read_metrics(tmp_path / "whole") if "loss" in record]
    # sums of 64 rows in another order, on another device
    assert [r["loss"] for r in read_metrics(tmp_path / "fitted") if "loss" in r] == pytest.approx(losses, rel=1e-5)
    assert len(losses) == 3


class SaturatingCard:
    """torch_npu as on a card without infinities: its overflow flag stays until it is cleared."""

    def __init__(self):
        self.flag = False

    def is_support_inf_nan(self) -> bool:
        return False

    def get_npu_overflow_flag(self) -> bool:
        return self.flag

    def clear_npu_overflow_flag(self) -> None:
        self.flag = False


def test_the_overflow_flag_of_a_saturating_card_is_read_and_cleared(monkeypatch):
    import types

    import torch

    card = SaturatingCard()
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "torch_npu.npu", types.SimpleNamespace(utils=card))
    npu = types.SimpleNamespace(type="npu")
    card.flag = True
    assert (device.overflowed(npu), device.overflowed(npu)) == (True, False)
    card.flag = True
    device.clear_overflow(npu)
    assert not device.overflowed(npu)
    assert not device.overflowed(torch.device("cpu"))


def test_ten_kills_lose_nothing_and_change_nothing(tiny_model_dir, dataset_dir, tmp_path):
    counts = torture(tiny_model_dir, dataset_dir, tmp_path, kills=10, seed=1)
    assert counts["kills"] == 10
    assert (counts["lost"], counts["different"], counts["refused"]) == ([], [], [])
