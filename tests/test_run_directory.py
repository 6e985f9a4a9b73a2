"""Whether a directory may be begun, continued or replaced, and what a run leaves in it."""

import json
import math
import shutil
from pathlib import Path

import pytest

from sft import artifacts, run_directory
from sft.config import TrainConfig
from sft.errors import UserError
from sft.journal import read_metrics
from tests.test_checkpoint import adapter, numbers, write_checkpoint

PROVENANCE = {"model_name_or_path": "m", "model_sha256": "a" * 64, "dataset_sha256": "b" * 64, "seed": 42,
              "tokenizer_sha256": "c" * 64, "template_sha256": "d" * 64, "base_dtype": "float32", "mixed_precision": "no"}  # fmt: skip


def settings(run_dir: Path, **more) -> TrainConfig:
    return TrainConfig(model_name_or_path="m", dataset_dir="d", output_dir=str(run_dir), global_batch_size=4, **more)


def begin(run_dir: Path, steps: int, saved: tuple[int, ...] = (), **provenance) -> None:
    """A run's directory as train.py begins it, with checkpoints."""
    provenance = {**PROVENANCE, "global_batch_size": 4, "total_steps": steps, **provenance}
    run_dir.mkdir(exist_ok=True)
    artifacts.write_json(run_dir / "provenance.json", provenance)
    for step in saved:
        path = write_checkpoint(run_dir, step)
        progress = {"step": step, "provenance": provenance}
        artifacts.write_json(path / "progress.json", progress)
        sign(path)


def sign(path: Path) -> None:
    from tests.test_checkpoint import sign

    sign(path)


def start(run_dir: Path, rows: int = 361, provenance: dict = PROVENANCE, **more) -> run_directory.Start:
    return run_directory.find_start(settings(run_dir, **more), provenance, rows, world_size=1)


def test_a_longer_run_is_refused_with_how_to_train_longer_and_then_goes_on(tmp_path):
    begin(tmp_path, steps=91, saved=(91,))
    with pytest.raises(UserError, match="total_steps was 91, now 182.*train_longer: true to train on past its end"):
        start(tmp_path, num_train_epochs=2.0)
    longer = start(tmp_path, num_train_epochs=2.0, train_longer=True)
    assert (longer.checkpoint.step, longer.complete) == (91, False)
    assert longer.provenance["total_steps"] == 182 and longer.provenance["former_total_steps"] == [91]
    # Killed after it had begun: its newest checkpoint is still one of the shorter run.
    artifacts.write_json(tmp_path / "provenance.json", longer.provenance)
    assert start(tmp_path, num_train_epochs=2.0).checkpoint.step == 91
    longest = start(tmp_path, num_train_epochs=3.0, train_longer=True)
    assert longest.provenance["former_total_steps"] == [91, 182]
    with pytest.raises(UserError, match="total_steps was 182, now 91") as shorter:
        start(tmp_path, train_longer=True)
    assert "train_longer" not in str(shorter.value)


def test_another_mixed_precision_is_another_run(tmp_path):
    begin(tmp_path, steps=91, saved=(10,))
    with pytest.raises(UserError, match="mixed_precision was no, now bf16"):
        start(tmp_path, provenance={**PROVENANCE, "mixed_precision": "bf16"})
    begin(tmp_path / "old", steps=91)
    recorded = artifacts.read_json(tmp_path / "old" / "provenance.json")
    del recorded["mixed_precision"]  # as an earlier version wrote it
    artifacts.write_json(tmp_path / "old" / "provenance.json", recorded)
    assert start(tmp_path / "old").checkpoint is None


def test_another_commit_of_a_hub_model_is_refused_with_the_one_to_ask_for(tmp_path):
    begin(tmp_path, steps=91, saved=(10,), model_commit="1" * 40)
    with pytest.raises(
        UserError, match=f"model_commit was 1+, now 2+.*revision: {'1' * 40} to load the same model again"
    ):
        start(tmp_path, provenance={**PROVENANCE, "model_commit": "2" * 40, "model_sha256": "e" * 64})
    copied = {**PROVENANCE, "model_commit": None, "model_name_or_path": "/local/copy"}
    assert start(tmp_path, provenance=copied).checkpoint.step == 10
    begin(tmp_path / "old", steps=91, model_sha256=None)  # an earlier version hashed no model of a hub
    assert start(tmp_path / "old").checkpoint is None


def test_a_hub_name_is_a_directory_and_a_commit(tmp_path, monkeypatch):
    """The layout of the hub's own cache, as huggingface_hub documents it."""
    from huggingface_hub import constants

    from sft import hub

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    for commit, refs in (("1" * 40, ["v1"]), ("2" * 40, ["main"])):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        for ref in refs:
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / ref).write_text(commit)
    for revision, commit in ((None, "2" * 40), ("v1", "1" * 40), ("1" * 40, "1" * 40)):
        directory, found = hub.local_directory("someone/tiny", revision)
        assert (Path(directory), found) == (repository / "snapshots" / commit, commit)
    with pytest.raises(UserError, match="base model someone/tiny at revision v9 is neither a directory nor to be had"):
        hub.local_directory("someone/tiny", "v9")
    assert hub.local_directory(str(tmp_path)) == (str(tmp_path), None)
    with pytest.raises(UserError, match="is a local directory, which has no revision v1"):
        hub.local_directory(str(tmp_path), "v1")


@pytest.mark.parametrize("content", ["{}", "[]", '{"name": "a wine"}', "{", "\udcff"])
def test_a_file_called_provenance_makes_no_run(tmp_path, content):
    (tmp_path / "provenance.json").write_text(content, errors="surrogateescape")
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (True, False):
        with pytest.raises(UserError, match="is not empty and holds no run of train.py"):
            start(tmp_path, overwrite_output_dir=overwrite)


def test_only_what_the_program_wrote_is_removed(tmp_path):
    begin(tmp_path, steps=91, saved=(10, 20))
    own = ["config.json", "metrics.jsonl", "summary.json", "README.md", "loss.png", "stack-rank-0.txt", "adapter_config.json",
           "tensorboard/sft/1/events.out.tfevents.1", "eval/report.json", "eval/report.zh-CN.md", "eval/difference.png",
           "eval/.partial-0.jsonl", "set-aside-1/metrics.jsonl", "set-aside-1/checkpoint-30/progress.json"]  # fmt: skip
    foreign = [
        "notes.txt",
        "checkpoint-20/mine.txt",
        "eval/mine.csv",
        "run2/provenance.json",
        "checkpoints/config.json",
    ]
    for name in own + foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    left = run_directory.remove_run(tmp_path)
    assert left == ["checkpoint-20", "checkpoints", "eval", "notes.txt", "run2"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(foreign)


@pytest.mark.parametrize("name", [".lock", "tensorboard", "checkpoint-7", ".metrics.jsonl.tmp-abc", "stack-rank-0.txt"])
def test_a_link_that_would_be_written_through_is_refused(tmp_path, name):
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    begin(run_dir, steps=91, saved=(10,))
    outside.mkdir()
    (run_dir / name).symlink_to(outside / "target")
    for overwrite in (True, False):
        with pytest.raises(UserError, match=rf"symbolic links that lead out of it .{name} → .*outside/target"):
            start(run_dir, overwrite_output_dir=overwrite)
    assert list(outside.iterdir()) == []


def test_a_finished_run_is_told_from_an_edited_one(tmp_path):
    begin(tmp_path, steps=91)
    assert "it has no adapter_config.json" in run_directory.unfinished(tmp_path)
    hashes = {}
    for key, name in (
        ("adapter_config_sha256", "adapter_config.json"),
        ("adapter_sha256", "adapter_model.safetensors"),
    ):
        (tmp_path / name).write_text('{"lora_alpha": 16}')
        hashes[key] = artifacts.sha256_file(tmp_path / name)
    sizes = {"trainable_parameters": 1, "total_parameters": 2, "peak_memory_bytes": [1], "world_size": 1}
    artifacts.write_json(tmp_path / "summary.json", {**sizes, **hashes})
    assert run_directory.unfinished(tmp_path) == ""
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert "adapter_config.json is damaged or not the one that it wrote" in run_directory.unfinished(tmp_path)


def test_damaged_lines_of_the_records_are_left_out(tmp_path):
    lines = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "l\xffss": 1.9', b'["step"]', b'{"step": "3"}', b'{"loss": 1.0}',
             b'{"step": 4, "loss": "x"}', b"[" * 100_000, b"9" * 5000, b'{"step": 5, "loss": 1.5}', b'{"step": 6, "lo']  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 5]


@pytest.mark.parametrize("wrong", [{"step": "20"}, {"best": []}, {"best": {"step": 3}}, {"eval_loss": "low"},
                                   {"provenance": None}, {"train_time_s": {}}])  # fmt: skip
def test_a_checkpoint_with_fields_of_another_type_is_passed_over(tmp_path, wrong):
    begin(tmp_path, steps=91, saved=(10, 20))
    progress = artifacts.read_json(tmp_path / "checkpoint-20" / "progress.json")
    artifacts.write_json(tmp_path / "checkpoint-20" / "progress.json", {**progress, **wrong})
    sign(tmp_path / "checkpoint-20")
    assert start(tmp_path).checkpoint.step == 10


def test_going_back_to_an_earlier_checkpoint_loses_nothing_and_auto_goes_on_from_there(
    warm, arguments, peace, tmp_path
):
    run_dir = tmp_path / "run"
    shutil.copytree(peace, run_dir)
    before = numbers(run_dir)
    back = arguments(run_dir, "--resume_from_checkpoint", run_dir / "checkpoint-15", "--stop_at_step", "17")
    status, output = warm.run(*back, processes=1)
    assert status == 0, output
    assert f"checkpoint-20 and the records as they were are in {run_dir / 'set-aside-1'}" in output
    assert numbers(run_dir / "set-aside-1") == before and (run_dir / "set-aside-1" / "checkpoint-20").is_dir()
    status, output = warm.run(*arguments(run_dir), processes=1)
    assert status == 0 and f"Going on from {run_dir / 'checkpoint-17'} after step 17" in output, output
    assert [record["step"] for record in numbers(run_dir)] == [record["step"] for record in before]


def test_a_finished_run_trains_longer_by_the_longer_schedule(warm, arguments, peace, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(peace, run_dir)
    before = numbers(run_dir)
    status, output = warm.run(*arguments(run_dir, "--max_steps", "25", "--train_longer"), processes=1)
    assert status == 0 and "after step 20 of 25" in output, output
    records = numbers(run_dir)
    assert records[: len(before)] == before
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 26))
    # cosine from its peak after ⌈0.03 · 25⌉ = 1 step of warm-up to 0 after step 25; step s uses the point s − 1
    expected = [1e-3 * (1 + math.cos(math.pi * (step - 2) / 24)) / 2 for step in range(21, 26)]
    assert [record["learning_rate"] for record in steps[20:]] == pytest.approx(expected, rel=1e-12)
    summary = artifacts.read_json(run_dir / "summary.json")
    assert (summary["steps"], run_directory.unfinished(run_dir)) == (25, "")


def test_the_best_adapter_is_delivered_and_patience_ends_the_run_resumed_or_not(warm, arguments, tmp_path):
    """At a learning rate of 3 the tiny model gets worse soon."""
    flags = ("--learning_rate", "3", "--eval_steps", "2", "--save_steps", "9", "--early_stopping_patience", "3")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    status, output = warm.run(*arguments(whole, *flags), processes=1)
    assert status == 0, output
    held_out = {r["step"]: r["eval_loss"] for r in numbers(whole) if "eval_loss" in r and r["step"]}
    best = min(held_out, key=held_out.get)
    last = max(held_out)
    assert last == best + 6 < 20  # three evaluations later
    summary = artifacts.read_json(whole / "summary.json")
    assert summary["delivered"] == {"step": best, "eval_loss": held_out[best]}
    assert (summary["steps"], summary["eval_loss"], summary["ended_early"]) == (last, held_out[last], True)
    assert {path.name for path in whole.glob("checkpoint-*")} == {f"checkpoint-{last}"}  # none at the best step
    assert adapter(whole) == artifacts.sha256_file(whole / f"checkpoint-{last}" / "best_adapter.safetensors")
    assert warm.run(*arguments(tmp_path / "until", *flags, "--stop_at_step", best), processes=1)[0] == 0
    assert adapter(whole) == adapter(tmp_path / "until" / f"checkpoint-{best}") != adapter(whole / f"checkpoint-{last}")
    words = f"of step {best}, with the lowest held-out loss, {held_out[best]:.4f}"
    assert f"{words} (last step: {held_out[last]:.4f})" in output and words in (whole / "README.md").read_text()

    for stop in (3, best + 3):
        assert warm.run(*arguments(cut, *flags, "--stop_at_step", stop), processes=1)[0] == 0
    assert warm.run(*arguments(cut, *flags), processes=1)[0] == 0
    assert numbers(cut) == numbers(whole) and adapter(cut) == adapter(whole)
    status, output = warm.run(*arguments(cut, *flags), processes=1)
    assert status == 0 and f"is complete at step {last}: nothing to do" in output

    status, output = warm.run(
        *arguments(cut, *flags, "--deliver", "last", "--early_stopping_patience", "99"), processes=1
    )
    assert status == 0, output
    summary = json.loads((cut / "summary.json").read_text())
    assert (summary["steps"], summary["delivered"]["step"], summary["ended_early"]) == (20, 20, False)
    assert adapter(cut) == adapter(cut / "checkpoint-20")
