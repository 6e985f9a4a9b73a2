"""Each benchmark runs through on the tiny model and writes its figures."""

import importlib.util
import json

import pytest

from tests.conftest import must, run_script

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install -r requirements-bench.txt"
)


def run_benchmark(name: str, folder, *flags) -> dict:
    output = folder / f"{name}.json"
    result = must(run_script(f"benchmarks/{name}.py", "--quick", "--output", output, *flags, timeout=600))
    assert result.stdout.count("|") > 10  # a table was printed
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["machine"]["cores"] and written["versions"]["torch"]
    return written


@needs_trl
def test_step_time_compares_the_same_training(tmp_path, tiny_model_dir, dataset_dir):
    result = run_benchmark(
        "step_time", tmp_path, "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir
    )  # fmt: skip
    assert [line["step"] for line in result["table"]] == ["train.py", "floor", "TRL", "plain", "padded"]
    losses = {name: [turn["loss"] for turn in result["turns"][name]] for name in ("train.py", "TRL", "plain")}
    assert len(losses["train.py"]) == len(losses["TRL"]) == 2
    # The same rows and the same learning: both take the mean over all target tokens, and start from B = 0.
    assert losses["TRL"] == pytest.approx(losses["train.py"], abs=0.05)
    assert 0 < result["share_of_the_step_waiting_for_data"] < 1
    assert losses["plain"] == pytest.approx(losses["train.py"], abs=0.3)  # a mean of means


def test_scaling_reports_equal_losses_on_one_and_two_processes(tmp_path, tiny_model_dir, dataset_dir):
    result = run_benchmark("scaling", tmp_path, "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir)
    one, two = result["table"]
    assert (one["world size"], one["accumulation"], two["world size"], two["accumulation"]) == (1, 4, 2, 2)
    assert one["effective batch"] == two["effective batch"] == 4
    assert one["loss first → last"] == two["loss first → last"]


@needs_trl
def test_startup_measures_first_steps(tmp_path, tiny_model_dir, dataset_dir):
    result = run_benchmark("startup", tmp_path, "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir)
    assert [line["start"] for line in result["table"]] == ["train.py", "TRL"]
    assert all(line["to first step s"] > 0 and line["peak GB a process"] > 0.1 for line in result["table"])


@needs_trl
def test_data_prep_compares_the_same_rows(tmp_path, tiny_model_dir):
    result = run_benchmark("data_prep", tmp_path, "--model_name_or_path", tiny_model_dir)
    assert [(line["rows"], line["by"]) for line in result["table"]] == [
        (380, "data_prep.py"), (380, "data_prep.py again"), (380, "TRL"),
    ]  # fmt: skip


def test_layout_is_measured_to_65536_rows_a_step(tmp_path):
    result = run_benchmark("layout", tmp_path)
    assert [line["rows a step"] for line in result["table"] if line["ranks"] == 8] == [128, 512, 4096, 65536]
    assert all(line["micro-batches"] >= 1 and line["median ms"] > 0 for line in result["table"])


@pytest.mark.npu
def test_launches_of_a_card_are_counted_for_train_py_and_a_plain_loop(tmp_path, tiny_model_dir, trace_environment):
    result = run_benchmark("npu_launches", tmp_path, "--tokenizer", tiny_model_dir)
    project, row_by_row, padded = result["table"]
    assert (project["step"], project["tokens"]) == ("train.py", "60+80+95+120")
    assert 3 * padded["launches"] < row_by_row["launches"] < 4 * padded["launches"]  # four forwards, one optimizer step
    assert all(line["peak GiB"] > 1 for line in result["table"])
