"""The reproduction: the reference run on several card counts with evidence, and what becomes of failures."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, make_rows, run_script, write_jsonl
from tools import reproduce
from tools.reproduce import Step, run_step
from tools.reproduction_report import render


def test_a_failed_step_is_explained_and_leaves_out_only_what_needs_it(tmp_path):
    print_error = "import sys; print('libhccl.so: cannot open shared object file'); sys.exit(1)"
    broken = run_step(Step("broken", [sys.executable, "-c", print_error]), tmp_path, {})
    assert broken["status"] == "failed" and broken["exit_status"] == 1
    assert any("set_env.sh" in row["check"] for row in broken["explanations"])
    after = run_step(Step("after", [sys.executable, "-c", ""], needs=["broken"]), tmp_path, {"broken": broken})
    assert (after["status"], after["because"]) == ("left out", ["broken"])
    assert run_step(Step("beside", [sys.executable, "-c", ""]), tmp_path, {"broken": broken})["status"] == "done"


def test_what_is_done_is_not_repeated_unless_the_command_changed(tmp_path):
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'a').write('x')"]
    for _ in range(2):
        assert run_step(Step("once", command), tmp_path, {})["status"] == "done"
    assert mark.read_text() == "x"
    run_step(Step("once", [*command, "again"]), tmp_path, {})
    assert mark.read_text() == "xx"


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    import psutil

    pid = tmp_path / "pid"
    code = f"import subprocess, time; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid)); time.sleep(300)"
    result = run_step(Step("hangs", [sys.executable, "-c", code], timeout_s=3), tmp_path, {})
    assert result["status"] == "failed" and result["message"] == "no end after 3 s"
    child = int(pid.read_text())
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone


def test_a_wrong_number_of_cards_is_refused():
    result = run_script("-m", "tools.reproduce", "--cards", "two")
    assert result.returncode == 2 and result.stderr.startswith("error: --cards two: give numbers")


def check_whole(output, simulated: bool) -> None:
    facts = json.loads((output / "reproduction.json").read_text())
    undone = {name: step.get("message") for name, step in facts["steps"].items() if step["status"] != "done"}
    assert undone == {} and len(facts["steps"]) >= 16
    assert facts["simulated"] is simulated
    assert [row["cards"] for row in facts["table"]] == [1, 2]
    assert all(row["steps"] == 6 and row["last_loss"] > 0 and row["estimated_bytes"] > 0 for row in facts["table"])
    assert len(facts["table"][1]["peak_memory_bytes"]) == 2
    assert len(facts["equality"]) == 4 and all(row["holds"] for row in facts["equality"])
    page = (output / "reproduction.md").read_text()
    assert ("simulated Ascend: not a run on hardware" in page) is simulated
    assert "## The table" in page and "## What failed" not in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", pytest.param("npu", marks=pytest.mark.npu)])
def test_the_reproduction_on_two_ranks_is_whole(tmp_path, tiny_model_dir, kind, request):
    environment = request.getfixturevalue("npu_environment") if kind == "npu" else {}
    rows = write_jsonl(tmp_path / "rows.jsonl", make_rows(40))
    flags = ["--model_name_or_path", tiny_model_dir, "--cards", "1,2", "--kind", kind, "--input", rows]
    output = tmp_path / "out"
    command = ["-m", "tools.reproduce", *flags, "--max_steps", 6, "--eval_rows", 2, "--output_dir", output]
    result = run_script(*command, env=environment, timeout=1800)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    check_whole(output, simulated=bool(environment))
    again = run_script(*command, env=environment, timeout=300)
    assert again.returncode == 0 and again.stdout.count("done before") >= 16


@pytest.mark.slow
@pytest.mark.npu
def test_a_machine_where_set_env_was_not_sourced_is_named_with_the_remedy(
    tmp_path, tiny_model_dir, simulated_environment
):
    """The libraries of CANN are not found: `import torch` itself fails, in every step, and the page says what to do."""
    broken = {**simulated_environment, "LD_LIBRARY_PATH": "", "ASCEND_HOME_PATH": ""}
    rows = write_jsonl(tmp_path / "rows.jsonl", make_rows(40))
    flags = ["--model_name_or_path", tiny_model_dir, "--cards", "1", "--kind", "npu", "--input", rows]
    result = run_script("-m", "tools.reproduce", *flags, "--output_dir", tmp_path / "out", env=broken, timeout=600)
    assert result.returncode == 1
    facts = json.loads((tmp_path / "out" / "reproduction.json").read_text())
    assert facts["steps"]["doctor"]["status"] == "done"  # the doctor starts where torch cannot
    assert {check["name"] for check in facts["checks"] if check["status"] == "FAIL"} >= {"torch"}
    assert facts["steps"]["reference-1"]["status"] in ("failed", "left out")
    page = (tmp_path / "out" / "reproduction.md").read_text()
    assert "the doctor objects to: " in page and "## What the doctor objects to" in page and "set_env.sh" in page


def test_the_kind_is_found_without_a_card():
    assert subprocess.run([sys.executable, "-c", "import torch"], cwd=ROOT).returncode == 0
    assert reproduce.find_kind() in ("cpu", "cuda", "npu")


EVIDENCE = {
    "model": "m", "kind": "cpu", "cards": [1, 2], "max_steps": None,
    "steps": {
        name: {"name": name, "status": "done", "seconds": 1.0}
        for name in ("doctor", "estimate-1", "estimate-2", "reference-1", "reference-2", "evaluation")
    },
}  # fmt: skip
FINISHED = {
    "simulated": False, "steps": 2, "global_batch_size": 4, "train_time_s": 3.0, "tokens_per_s": 9.0, "first_loss": 2.0,
    "last_loss": 1.5, "eval_loss": None, "trainable_parameters": 1, "total_parameters": 2, "peak_memory_bytes": [5, 5],
    "world_size": 2,
}  # fmt: skip
RECORDS = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n'
FIGURES = {"rows": 6, "base": {"loss": 2.0}, "adapter": {"loss": 1.5}, "difference": {}, "signature": {}, "run": {}}


def finished_reproduction(output) -> None:
    """Files of a reproduction on one and two cards, as far as the page reads them."""
    (output / "steps").mkdir()
    (output / "steps" / "doctor.log").write_text('{"versions": {"torch": "2.13.0"}, "checks": []}')
    for cards in (1, 2):
        (output / "steps" / f"estimate-{cards}.log").write_text('a warning\n{"bytes": 7000000000}')
        run = output / f"reference-{cards}"
        (run / "eval").mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps(FINISHED))
        (run / "environment.json").write_text('{"device_name": "cpu"}')
        (run / "metrics.jsonl").write_text(RECORDS)
        (run / "eval" / "report.json").write_text(json.dumps(FIGURES))


def test_the_page_of_whole_files_names_none(tmp_path):
    finished_reproduction(tmp_path)
    page, facts = render(EVIDENCE, tmp_path)
    assert facts["damaged"] == [] and "could not be read" not in page
    assert facts["verdict"] == "6 steps done" and facts["equality"][0]["difference"] == 0
    assert "7.00 GB" in page and "2.0000 → 1.5000" in page


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("reference-2/summary.json", b"{"),
        ("reference-2/summary.json", b"[]"),
        ("reference-2/summary.json", b"\xff"),
        ("reference-1/summary.json", json.dumps(FINISHED | {"train_time_s": 0}).encode()),
        ("reference-2/summary.json", json.dumps(FINISHED | {"last_loss": "low"}).encode()),
        ("reference-2/environment.json", b"{}"),
        ("reference-2/environment.json", None),
        ("reference-2/metrics.jsonl", b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo'),
        ("reference-2/metrics.jsonl", b"\xff\n"),
        ("reference-2/metrics.jsonl", None),
        ("reference-2/eval/report.json", b'{"rows": 6}'),
        ("steps/estimate-1.log", b"no object"),
        ("steps/estimate-1.log", b'{"bytes": "many"}'),
        ("steps/estimate-1.log", None),
        ("steps/doctor.log", b'{"checks": [1]}'),
    ],
)
def test_a_damaged_file_is_named_in_the_page_which_goes_on(tmp_path, name, content):
    finished_reproduction(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    page, facts = render(EVIDENCE, tmp_path)
    assert len(facts["damaged"]) == 1 and str(tmp_path / name) in page.split("## What could not be read")[1]
    assert "1 files could not be read whole" in facts["verdict"] and "## The commands" in page
