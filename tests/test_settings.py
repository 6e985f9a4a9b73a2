"""Settings of train.py that decide numbers or delete files, each with the result that it has to have."""

import json
import shutil
import types

import pytest

from sft.config import TrainConfig
from sft.errors import UserError
from tests.conftest import losses, make_rows, must, numbers, run_script, write_jsonl


def settings(**values) -> TrainConfig:
    return TrainConfig(model_name_or_path="m", dataset_dir="d", output_dir="o", learning_rate=2e-4, **values)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [  # of 10 steps with warmup_ratio 0.15: two of them rise, of the other eight the first has the peak
        ("cosine", [1e-4, 2e-4, 2e-4, 1.9238795e-4, 1.7071068e-4, 1.3826834e-4, 1e-4, 6.1731657e-5, 2.9289322e-5, 7.6120467e-6]),
        ("linear", [1e-4, 2e-4, 2e-4, 1.75e-4, 1.5e-4, 1.25e-4, 1e-4, 7.5e-5, 5e-5, 2.5e-5]),
        ("constant", [1e-4] + [2e-4] * 9),
    ],
)  # fmt: skip
def test_learning_rates_have_the_shape_that_was_asked_for(shape, expected):
    from train import learning_rate_at

    asked = settings(lr_scheduler_type=shape, warmup_ratio=0.15)
    assert [learning_rate_at(step, 10, asked) for step in range(10)] == pytest.approx(expected, rel=1e-7)


def test_without_warm_up_the_first_step_has_the_peak():
    from train import learning_rate_at

    assert learning_rate_at(0, 10, settings(warmup_ratio=0.0)) == 2e-4


@pytest.fixture(scope="module")
def rising(warm_server, arguments, tmp_path_factory):
    """A run whose held-out loss rises in the end: its best step is not its last. Keeps one checkpoint beside the best."""
    run_dir = tmp_path_factory.mktemp("rising") / "run"
    flags = ["--learning_rate", 0.5, "--lr_scheduler_type", "constant", "--save_total_limit", 1, "--save_steps", 2,
             "--eval_steps", 2, "--logging_steps", 3, "--weight_decay", 0, "--max_grad_norm", 0]  # fmt: skip
    status, output = warm_server.run(*arguments(run_dir, *flags), processes=1)
    assert status == 0, output
    return run_dir


def test_the_best_step_is_the_one_with_the_lowest_held_out_loss(rising):
    held_out = {record["step"]: record["eval_loss"] for record in numbers(rising) if "eval_loss" in record}
    assert list(held_out) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    best = min((step for step in held_out if step), key=held_out.get)
    assert best != 20 and best != 2
    assert json.loads((rising / "summary.json").read_text())["best"] == {"step": best, "eval_loss": held_out[best]}
    assert {path.name for path in rising.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-20"}


def test_every_third_step_is_logged_and_the_last(rising):
    assert [record["step"] for record in numbers(rising) if "loss" in record] == [3, 6, 9, 12, 15, 18, 20]


def test_as_many_checkpoints_are_kept_as_were_asked_for(warm, arguments, tmp_path):
    """The held-out loss falls in this run, so that the best is among the newest."""
    status, output = warm.run(*arguments(tmp_path / "run", "--save_total_limit", 3), processes=1)
    assert status == 0, output
    held_out = [record["eval_loss"] for record in numbers(tmp_path / "run") if "eval_loss" in record]
    assert held_out == sorted(held_out, reverse=True)
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {f"checkpoint-{k}" for k in (10, 15, 20)}


@pytest.mark.parametrize(("epochs", "steps"), [(2, 24), (0.5, 6)])
def test_the_number_of_epochs_decides_the_number_of_steps(warm, arguments, tmp_path, epochs, steps):
    """361 rows at 32 a step are 12 steps an epoch."""
    flags = ["--num_train_epochs", epochs, "--max_steps", "none", "--global_batch_size", 32, "--save_steps", 100,
             "--gradient_accumulation_steps", "none", "--per_device_train_batch_size", 16, "--eval_steps", 100]  # fmt: skip
    status, output = warm.run(*arguments(tmp_path / "run", *flags), processes=1)
    assert status == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], len(losses(tmp_path / "run"))) == (steps, epochs, steps)


def test_overwriting_begins_anew(warm, arguments, tmp_path):
    run_dir = tmp_path / "run"
    short = ["--max_steps", 6, "--learning_rate", 0.01]
    status, output = warm.run(*arguments(run_dir, *short), processes=1)
    assert status == 0, output
    first = numbers(run_dir)
    flags = [*short, "--seed", 9, "--save_steps", 4, "--overwrite_output_dir"]
    status, output = warm.run(*arguments(run_dir, *flags), processes=1)
    assert status == 0, output
    assert "Going on from" not in output
    assert {path.name for path in run_dir.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    second = numbers(run_dir)
    assert [record["step"] for record in second] == [record["step"] for record in first]
    assert [record["loss"] for record in second if "loss" in record] != [r["loss"] for r in first if "loss" in r]
    assert json.loads((run_dir / "provenance.json").read_text())["seed"] == 9


def test_an_overflow_that_the_card_flags_stops_before_the_optimizer(tmp_path, tiny_model_dir, dataset_dir):
    """A card that saturates in the second step: every number is finite, and only its flag says that one is not."""
    program = f"""
import sys
import train
from sft import device, errors
flags = iter([False, False, False, True])  # cleared and read in step 1, cleared and read in step 2
device.overflowed = lambda _: next(flags)
sys.argv = ["train.py", "--model_name_or_path", {str(tiny_model_dir)!r}, "--dataset_dir", {str(dataset_dir)!r},
            "--output_dir", {str(tmp_path / "run")!r}, "--max_steps", "5", "--report_to", "none", "--no_eval_on_start"]
errors.run(train.main)
"""
    result = run_script("-c", program)
    assert result.returncode == 1
    assert "error: step 2: Σ loss per rank is [inf], gradient norm" in result.stderr
    assert len(losses(tmp_path / "run")) == 1


def test_flash_attention_is_refused_where_it_is_missing_or_ignores_windows(
    monkeypatch, tmp_path, tiny_model_dir, dataset_dir, warm, arguments
):
    status, output = warm.run(*arguments(tmp_path / "run", "--attn_implementation", "flash_attention_2"), processes=1)
    assert status == 2
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "needs a package that is not here" in message and "use attn_implementation: packed_sdpa" in message
    assert not (tmp_path / "run").exists()

    from sft.modeling import check_attention

    windowed = types.SimpleNamespace(model_type="tiny", sliding_window=64)
    check_attention(windowed, "flash_attention_2")  # no NPU here
    monkeypatch.setattr("accelerate.utils.is_npu_available", lambda: True)
    check_attention(windowed, "packed_sdpa")
    check_attention(types.SimpleNamespace(model_type="tiny", sliding_window=None), "flash_attention_2")
    check_attention(
        types.SimpleNamespace(model_type="tiny", sliding_window=64, use_sliding_window=False), "flash_attention_2"
    )
    with pytest.raises(
        UserError, match="tiny uses a sliding window of 64 tokens, which flash_attention_2 on this card ignores"
    ):
        check_attention(windowed, "flash_attention_2")


def test_code_of_a_model_runs_only_when_the_command_line_says_so(tmp_path, tiny_model_dir):
    model, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model_dir, model)
    (model / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import Qwen2Config, Qwen2ForCausalLM\n"
        f"Path({str(ran)!r}).touch()\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((model / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (model / "config.json").write_text(json.dumps({**config, **own}))
    source, data = write_jsonl(tmp_path / "rows.jsonl", make_rows(9)), tmp_path / "data"
    must(run_script("data_prep.py", "--input", source, "--model_name_or_path", model, "--output_dir", data))
    command = ["train.py", "--model_name_or_path", model, "--dataset_dir", data, "--output_dir", tmp_path / "run",
               "--max_steps", 2, "--report_to", "none"]  # fmt: skip
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    refused = run_script(*command, env=environment)
    assert refused.returncode == 2 and "trust_remote_code" in refused.stderr and "Traceback" not in refused.stderr
    assert not ran.exists() and not (tmp_path / "run").exists()
    must(run_script(*command, "--trust_remote_code", env=environment))
    assert ran.exists() and len(losses(tmp_path / "run")) == 2
