"""The pipeline on Ascend NPUs: real cards where there are some, otherwise the simulated Ascend (tests/sim_ascend).

These are the promises of the CPU tests with another environment; nothing here knows which of the two it runs on.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import (
    ROOT,
    adapter,
    assert_same_numbers,
    launch,
    losses,
    make_rows,
    must,
    numbers,
    run_script,
    train,
    write_jsonl,
)  # fmt: skip

pytestmark = pytest.mark.npu

FP32 = {"flags": ["--mixed_precision", "no"]}  # the launch configs say bf16


@pytest.fixture(scope="module")
def two_cards_dir(tmp_path_factory, tiny_model_dir, dataset_dir, npu_environment):
    """The run of tiny_run_dir in fp32 on two cards."""
    path = tmp_path_factory.mktemp("npu") / "run"
    must(train("npu_2", tiny_model_dir, dataset_dir, path, "--dtype", "float32", env=npu_environment, **FP32))
    return path


def test_each_rank_has_its_own_card_over_hccl(two_cards_dir, npu_environment):
    environment = json.loads((two_cards_dir / "environment.json").read_text())
    summary = json.loads((two_cards_dir / "summary.json").read_text())
    assert [rank["device"] for rank in environment["ranks"]] == ["npu:0", "npu:1"]
    assert environment["distributed_type"] == "MULTI_NPU"
    assert (summary["backend"], summary["device"], summary["world_size"]) == ("hccl", "npu", 2)
    assert summary["simulated"] is environment["simulated"] is bool(npu_environment)
    assert all(peak > 0 for peak in summary["peak_memory_bytes"])
    if summary["simulated"]:
        assert "simulated Ascend" in (two_cards_dir / "README.md").read_text()


def test_the_fused_operators_are_on_and_a_step_is_one_forward(two_cards_dir):
    """Else the equality with the CPU below would be that of what they replace."""
    environment = json.loads((two_cards_dir / "environment.json").read_text())
    kinds = [line.split(": ")[0] for line in environment["fused"]]
    assert kinds == ["attention", "RMSNorm", "SwiGLU", "rotary", "linear"]
    assert "one call for all rows in 2 layers" in environment["fused"][0]
    assert environment["fused"][1].startswith("RMSNorm: 5 modules") and "left as it is" not in str(environment["fused"])
    assert environment["micro_batch_tokens"] == 8192


def test_more_processes_than_visible_cards_are_refused(tmp_path, tiny_model_dir, dataset_dir, npu_environment):
    one = {**npu_environment, "ASCEND_RT_VISIBLE_DEVICES": "0"}
    result = train("npu_2", tiny_model_dir, dataset_dir, tmp_path / "run", env=one)
    assert result.returncode != 0 and not (tmp_path / "run").exists()
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "2 processes on this server but 1 card is visible (ASCEND_RT_VISIBLE_DEVICES=0)" in line


def test_two_cards_in_fp32_give_the_numbers_of_one_cpu_process(two_cards_dir, tiny_run_dir):
    assert_same_numbers(tiny_run_dir, two_cards_dir)


def test_bf16_stays_near_fp32(tmp_path, tiny_model_dir, dataset_dir, tiny_run_dir, npu_environment):
    """bf16 has 8 bits of precision, 2^-8 = 0.4 % a rounding; a loss is a mean over many of them."""
    run_dir = tmp_path / "run"
    must(train("npu_1", tiny_model_dir, dataset_dir, run_dir, "--stop_at_step", 20, env=npu_environment))
    assert json.loads((run_dir / "provenance.json").read_text())["base_dtype"] == "bfloat16"
    assert losses(run_dir) == pytest.approx(losses(tiny_run_dir)[:20], rel=0.01)
    assert all(tensor.dtype == torch.float32 for tensor in adapter(run_dir / "checkpoint-20").values())


def test_what_cards_made_is_used_on_the_cpu_and_two_cards_score_like_one(
    tmp_path, two_cards_dir, tiny_model_dir, dataset_dir, npu_environment
):
    common = ["eval.py", "--run_dir", two_cards_dir, "--max_new_tokens", 16, "--output_dir"]
    must(launch("npu_2", *common, tmp_path / "two", env=npu_environment, **FP32))
    must(launch("cpu_1", *common, tmp_path / "cpu"))
    two, cpu = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("two", "cpu"))
    trained = json.loads((two_cards_dir / "summary.json").read_text())["eval_loss"]
    for report in (two, cpu):
        assert report["adapter"]["loss"] == pytest.approx(trained, rel=1e-5)
    for side in ("base", "adapter"):
        for metric in ("loss", "token_f1", "chrf"):
            assert two[side][metric] == pytest.approx(cpu[side][metric], rel=1e-5)
    if npu_environment:
        assert "simulated Ascend" in (tmp_path / "two" / "report.md").read_text()


def test_eight_cards_see_each_of_380_rows_once_and_two_go_on_with_the_rest(tmp_path, tiny_model_dir, npu_environment):
    """Global batch 8: eight cards until step 20, then two with accumulation 4, against one CPU process."""
    source = write_jsonl(tmp_path / "rows.jsonl", make_rows(380))
    data = tmp_path / "dataset"
    must(run_script("data_prep.py", "--input", source, "--model_name_or_path", tiny_model_dir, "--output_dir", data,
                    "--eval_fraction", 0))  # fmt: skip
    eight, one = tmp_path / "eight", tmp_path / "one"
    flags = ["--global_batch_size", 8, "--dtype", "float32"]
    must(train("npu_8", tiny_model_dir, data, eight, *flags, "--stop_at_step", 20, env=npu_environment, **FP32))
    environment = json.loads((eight / "environment.json").read_text())
    assert [rank["device"] for rank in environment["ranks"]] == [f"npu:{card}" for card in range(8)]
    must(train("npu_2", tiny_model_dir, data, eight, *flags, env=npu_environment, **FP32))
    must(train("cpu_1", tiny_model_dir, data, one, *flags))
    assert_same_numbers(one, eight)
    assert sum(record["rows"] for record in numbers(eight) if "rows" in record) == 380
    assert len(losses(eight)) == 48


def start(tiny_model_dir, dataset_dir, run_dir, npu_environment, log, **variables) -> subprocess.Popen:
    """A long run on two cards in a session of its own; collectives give up after 20 s."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / "npu_2.yaml",
        "--main_process_port", "0", "train.py", "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir,
        "--output_dir", run_dir, "--global_batch_size", 4, "--max_steps", 2000, "--save_steps", 5, "--report_to", "none",
        "--eval_steps", 1000, "--ddp_timeout", 40,
    ]  # fmt: skip
    environment = {**os.environ, **npu_environment, "HCCL_EXEC_TIMEOUT": "20", **variables}
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def ranks_of(launcher: subprocess.Popen) -> dict[int, int]:
    """Rank → pid of the training processes under a launcher."""
    import psutil

    found = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if "train.py" in " ".join(child.cmdline()):
            found[int(child.environ()["RANK"])] = child.pid
    return found


def wait_for(condition, seconds: float) -> bool:
    """Whether the condition came true in time; looked at four times a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.25)
    return False


@pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "stuck")])
def test_a_lost_or_stuck_rank_ends_the_job_and_the_run_resumes(
    tmp_path, tiny_model_dir, dataset_dir, npu_environment, number, what
):
    run_dir = tmp_path / "run"
    with open(tmp_path / "log", "w+") as log:
        launcher = start(tiny_model_dir, dataset_dir, run_dir, npu_environment, log)
        try:
            assert wait_for(lambda: (run_dir / "checkpoint-5").exists(), 180), (tmp_path / "log").read_text()[-3000:]
            os.kill(ranks_of(launcher)[1], number)
            assert wait_for(lambda: launcher.poll() is not None, 120), f"still running with rank 1 {what}"
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
        text = (tmp_path / "log").read_text()
    assert launcher.returncode != 0
    assert ("rank 1" in text) or ("rank      : 1" in text) or ("local_rank: 1" in text), text[-3000:]
    before = len(losses(run_dir))
    flags = ["--max_steps", 2000, "--eval_steps", 1000, "--stop_at_step", before + 3]
    must(train("npu_2", tiny_model_dir, dataset_dir, run_dir, *flags, env=npu_environment))
    assert len(losses(run_dir)) == before + 3
