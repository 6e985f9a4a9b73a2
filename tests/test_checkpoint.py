"""A run that was interrupted, on whatever number of processes it goes on, learns what it would have learnt."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sft import artifacts, batching, checkpoint, run_directory
from sft.errors import UserError
from sft.journal import read_metrics
from tests.conftest import STEPS
from tests.test_dataset import change_rows

VARIES = ("step_time_s", "tokens_per_s", "peak_memory_bytes", "rank_tokens_min", "rank_tokens_max")


def numbers(run_dir: Path) -> list[dict]:
    """The records of a run, without times and without what depends on the number of ranks."""
    return [{key: value for key, value in record.items() if key not in VARIES} for record in read_metrics(run_dir)]


def adapter(run_dir: Path) -> str:
    return artifacts.sha256_file(run_dir / "adapter_model.safetensors")


def test_a_run_cut_in_three_on_two_four_and_one_processes_has_the_same_losses(warm, arguments, peace, tmp_path):
    for processes, stop in ((2, 7), (4, 13), (1, STEPS)):
        status, output = warm.run(*arguments(tmp_path / "run", "--stop_at_step", stop), processes=processes)
        assert status == 0, output
    assert "Global batch 4 = 1 per device × 4 accumulation × 1 ranks" in output
    expected, found = numbers(peace), numbers(tmp_path / "run")
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    assert len(found) == STEPS + 5
    for before, after in zip(expected, found):
        # float32 sums in another order: single losses differ by 1e-7, which 20 steps of Adam carry on
        assert after == pytest.approx(before, rel=1e-5)


def test_the_rows_that_are_left_come_once_each_on_any_number_of_ranks():
    draw = np.random.default_rng(0)
    two = batching.BatchPlan(draw.integers(5, 90, 61), draw.integers(1, 5, 61), 42, 1, 2, 2)
    seen_before = [row for step in range(7) for row in two.rows(step)]
    checked = 0
    for world_size, accumulation in ((1, 4), (2, 2), (4, 1)):
        plan = replace(two, world_size=world_size, gradient_accumulation_steps=accumulation)
        left = [row for rows in batching.StepSampler(plan, 7, plan.steps_per_epoch) for row in rows]
        assert sorted(seen_before + left) == list(range(61))
        checked += 1
    assert checked == 3


def test_a_global_batch_that_another_card_count_cannot_keep_is_refused(warm, arguments, peace):
    status, output = warm.run(*arguments(peace), processes=3)
    assert status != 0
    assert "began with 4 rows per step and must keep them: global_batch_size 4 is not a multiple of" in output
    assert "the nearest that are: 3 or 6" in output


def test_dropout_is_the_same_after_a_resume_to_the_bit(warm, arguments, tmp_path):
    dropout = (
        "--lora_dropout",
        "0.3",
        "--max_steps",
        "8",
        "--save_steps",
        "4",
        "--eval_steps",
        "4",
        "--logging_steps",
        "3",
    )
    assert warm.run(*arguments(tmp_path / "whole", *dropout))[0] == 0
    assert warm.run(*arguments(tmp_path / "cut", *dropout, "--stop_at_step", "5"))[0] == 0
    assert warm.run(*arguments(tmp_path / "cut", *dropout))[0] == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert adapter(tmp_path / "cut") == adapter(tmp_path / "whole")
    assert [record["step"] for record in numbers(tmp_path / "cut")] == [0, 3, 4, 6, 8, 8]  # stopping adds no record


def test_a_damaged_adapter_of_a_finished_run_is_written_again(warm, arguments, peace, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(peace, run_dir)
    file = run_dir / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    status, output = warm.run(*arguments(run_dir))
    assert status == 0 and "Going on from" in output and "Done: " in output
    assert adapter(run_dir) == adapter(peace) and numbers(run_dir) == numbers(peace)
    status, output = warm.run(*arguments(run_dir))
    assert status == 0 and "is complete at step 20" in output


def test_a_run_stopped_where_it_was_told_to_says_so(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    output = warm.run(*arguments(run_dir, "--stop_at_step", "2"))[1]
    assert "The same command without stop_at_step goes on from there." in output
    output = warm.run(*arguments(run_dir, "--stop_at_step", "2"))[1]
    assert "Already at step 2, stop_at_step is 2: nothing to do." in output


def test_lost_metrics_are_told_and_no_later_loss_is_called_the_first(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    assert warm.run(*arguments(run_dir, "--stop_at_step", "7"))[0] == 0
    (run_dir / "metrics.jsonl").unlink()
    status, output = warm.run(*arguments(run_dir))
    assert status == 0, output
    assert "metrics.jsonl lacks 7 of the 7 steps trained before, the first is 1; plots and reports go" in output
    summary = artifacts.read_json(run_dir / "summary.json")
    assert summary["first_loss"] == summary["last_loss"] and summary["first_eval_loss"] == summary["eval_loss"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(warm, arguments, peace, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(peace, run_dir)
    (run_dir / "summary.json").unlink()
    newest, before = run_dir / "checkpoint-20", run_dir / "checkpoint-15"
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    content[5000] ^= 1
    (newest / "optimizer.safetensors").write_bytes(content)
    status, output = warm.run(*arguments(run_dir))
    assert status == 0, output
    assert f"skipping a damaged checkpoint: {newest / 'optimizer.safetensors'} does not have its checksum" in output
    assert f"Going on from {before} after step 15 of 20" in output
    assert numbers(run_dir) == numbers(peace)
    assert adapter(run_dir) == adapter(peace)
    assert checkpoint.problem(newest) is None  # written again


def test_another_run_is_refused_with_all_that_differs(warm, arguments, peace, tiny_model_dir, dataset_dir, tmp_path):
    model, dataset = tmp_path / "model", tmp_path / "dataset"
    shutil.copytree(tiny_model_dir, model)
    config = artifacts.read_json(model / "config.json")
    artifacts.write_json(model / "config.json", {**config, "rms_norm_eps": 1e-5})
    shutil.copytree(dataset_dir, dataset)
    change_rows(dataset, "train", lambda rows: [{**row, "question": row["question"] + "!"} for row in rows])
    before = sorted(path.name for path in peace.iterdir())
    changed = ("--seed", "7", "--lora_r", "4", "--global_batch_size", "8", "--gradient_accumulation_steps", "4",
               "--max_steps", "30", "--model_name_or_path", model, "--dataset_dir", dataset)  # fmt: skip
    status, output = warm.run(*arguments(peace, *changed))
    assert status != 0
    for difference in (
        "seed was 42, now 7", "lora_r was 8, now 4", "global_batch_size was 4, now 8", "total_steps was 20, now 30",
        "model_sha256 was", "dataset_sha256 was",
    ):  # fmt: skip
        assert difference in output
    assert output.count("holds another run") == 1
    assert sorted(path.name for path in peace.iterdir()) == before


def write_checkpoint(run_dir: Path, step: int, eval_loss: float | None = None) -> Path:
    """The files of a checkpoint, as small as they can be."""
    from safetensors.numpy import save_file

    path = run_dir / f"checkpoint-{step}"
    path.mkdir(parents=True)
    artifacts.write_json(path / "progress.json", {"step": step, "eval_loss": eval_loss, "provenance": {}})
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        save_file({"a": np.zeros(3, np.float32)}, str(path / name))
    sign(path)
    return path


def sign(path: Path) -> None:
    files = [file for file in path.iterdir() if file.name != checkpoint.CHECKSUMS]
    artifacts.write_json(path / checkpoint.CHECKSUMS, {file.name: artifacts.sha256_file(file) for file in files})


def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path):
    for step, loss in ((5, 3.0), (10, 2.0), (15, 2.5), (20, None), (25, 2.6)):
        write_checkpoint(tmp_path, step, loss)
        checkpoint.remove_old(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.directories(tmp_path)] == [
        "checkpoint-10",
        "checkpoint-20",
        "checkpoint-25",
    ]


def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(tmp_path):
    for step in (20, 25, 30):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-30" / "progress.json").write_text("{")
    checkpoint.remove_old(tmp_path, 25, keep=1)  # a run that went on from 20, because 30 was damaged
    assert checkpoint.newest(tmp_path, warn=lambda text: None).step == 25


@pytest.mark.parametrize("damage", ["missing file", "no checksums", "broken checksums", "cut off"])
def test_half_written_checkpoints_are_passed_over(tmp_path, damage):
    write_checkpoint(tmp_path, 5)
    path = write_checkpoint(tmp_path, 10)
    if damage == "missing file":
        (path / "optimizer.safetensors").unlink()
    elif damage == "no checksums":
        (path / checkpoint.CHECKSUMS).unlink()
    elif damage == "broken checksums":
        (path / checkpoint.CHECKSUMS).write_text('{"progress.json": "12')
    else:
        os.truncate(path / "adapter_model.safetensors", 40)
    warnings = []
    assert checkpoint.newest(tmp_path, warn=warnings.append).step == 5
    assert len(warnings) == 1 and str(path) in warnings[0]


def test_what_a_killed_process_left_is_cleared_and_a_replaced_checkpoint_comes_back(tmp_path):
    write_checkpoint(tmp_path / ".checkpoint-10.old-abc", 10)  # killed between the two renames of a replacement
    (tmp_path / ".checkpoint-10.tmp-def").mkdir()
    (tmp_path / ".metrics.jsonl.tmp-ghi").write_text("{")
    assert all(run_directory.is_leftover(path) for path in tmp_path.iterdir())
    run_directory.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]
    assert checkpoint.newest(tmp_path).step == 10


def test_a_run_directory_has_one_writer_at_a_time(tmp_path):
    import fcntl

    descriptor = os.open(tmp_path / run_directory.LOCK, os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"process 7 on elsewhere")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="is being written by process 7 on elsewhere; wait for it or end it"):
        run_directory.claim(tmp_path, wait_s=0.0)
    os.close(descriptor)
    run_directory.claim(tmp_path, wait_s=0.0)
    assert (tmp_path / run_directory.LOCK).read_text() == f"process {os.getpid()} on {os.uname().nodename}"


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return (os.mkdir, (str(self.canary),))


def test_nothing_that_comes_from_elsewhere_is_unpickled(warm, arguments, peace, tiny_model_dir, tmp_path):
    canary = tmp_path / "canary"
    trap = pickle.dumps(Trap(canary))
    run_dir = tmp_path / "run"
    shutil.copytree(peace, run_dir)
    shutil.rmtree(run_dir / "checkpoint-15")
    (run_dir / "summary.json").unlink()
    (run_dir / "checkpoint-20" / "optimizer.safetensors").write_bytes(trap)
    sign(run_dir / "checkpoint-20")  # whoever plants a file can compute checksums
    status, output = warm.run(*arguments(run_dir, "--stop_at_step", "1"), processes=1)
    assert status == 0 and "optimizer.safetensors is not a safetensors file; nothing else is loaded" in output

    pickled = tmp_path / "adapter"
    pickled.mkdir()
    shutil.copy(peace / "adapter_config.json", pickled)
    (pickled / "adapter_model.bin").write_bytes(trap)
    status, output = warm.run(*arguments(tmp_path / "new", "--adapter_name_or_path", pickled), processes=1)
    assert status == 2 and "pickled adapters (.bin) are not loaded" in output

    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(trap)
    status, output = warm.run(*arguments(tmp_path / "new", "--model_name_or_path", model), processes=1)
    assert status == 2 and f"model_name_or_path {model} could not be loaded" in output
    assert "Traceback" not in output
    assert not (tmp_path / "new").exists()
    assert not canary.exists()
    pickle.loads(trap)
    assert canary.exists()  # the trap was a real one


def test_paths_in_checksums_cannot_lead_outside(tmp_path):
    path = write_checkpoint(tmp_path / "run", 5)
    (tmp_path / "run" / "outside.safetensors").write_bytes(b"x")
    checksums = json.loads((path / checkpoint.CHECKSUMS).read_text())
    checksums["../outside.safetensors"] = artifacts.sha256_file(tmp_path / "run" / "outside.safetensors")
    artifacts.write_json(path / checkpoint.CHECKSUMS, checksums)
    assert "names a file outside the checkpoint: ../outside.safetensors" in checkpoint.problem(path)
