"""What a card is asked to do, counted by the trace-only CANN (tests/trace_cann), and budgets for a training step."""

import json
from pathlib import Path

import pytest
import torch

from doctor import duration, memory
from sft.memory import Plan
from tests.conftest import ROOT, must, once, run_script

pytestmark = pytest.mark.npu

PROGRAM = ROOT / "tests" / "trace_cann" / "programs" / "sequences.py"


@pytest.fixture(scope="session")
def seen(session_dir, trace_environment) -> dict:
    """What was counted for known things, with the task queue on as train.py has it."""

    def make(path: Path) -> None:
        must(run_script(PROGRAM, path, env={**trace_environment, "TASK_QUEUE_ENABLE": "2"}))

    return json.loads(once(session_dir / "trace-sequences", make).read_text())


def test_a_known_sequence_is_counted_exactly(seen):
    assert seen["nothing"] == {}
    assert seen["known sequence"] == {"launches": {"aclnnAdd": 7, "aclnnMm": 1, "aclnnIndex": 1}}
    assert seen["number on the card"] == {"launches": {"aclnnInplaceFillScalar": 1}}
    # Forward mm and sum; the gradient of the sum is expanded ones; backward mm of the weight; SGD's one addition.
    assert seen["training"] == {
        "launches": {"aclnnMm": 2, "aclnnReduceSum": 1, "aclnnInplaceFillScalar": 1, "aclnnInplaceAdd": 1}
    }


@pytest.mark.parametrize(
    ("what", "counted"),
    [
        ("item", {"host waits for a stream": 1, "blocking copies to the host": 1}),
        ("nonzero", {"host waits for a stream": 1}),
        ("blocking copy", {"host waits for a stream": 1, "blocking copies to the device": 1}),
        ("number from the host", {"host waits for a stream": 1, "blocking copies to the device": 1}),
        ("to the host", {"host waits for a stream": 1, "blocking copies to the host": 1}),
        ("asynchronous copy", {"asynchronous copies to the device": 1}),
        ("synchronize", {"host waits for the device": 1}),
        ("side stream", {"host waits for an event": 1, "stream waits for an event": 1}),
    ],
)
def test_a_planted_wait_or_copy_is_seen(seen, what, counted):
    assert {name: count for name, count in seen[what].items() if name != "launches"} == counted


def test_the_peak_is_that_of_torch_npus_own_allocator(seen):
    assert seen["peak MiB"] == 3.0 + 512 / (1 << 20)  # it asks for 32 bytes more than wanted, in steps of 512


def test_an_operator_that_is_not_known_is_an_error_by_name(seen):
    assert "operator SortV2 is not simulated" in seen["unknown"]


@pytest.fixture(scope="session")
def steps_of_7b(session_dir, tiny_model_dir, trace_environment) -> dict:
    """The benchmark's table for Qwen2.5-7B's shape, by step, and what was counted by operator."""

    def make(path: Path) -> None:
        must(run_script("benchmarks/npu_launches.py", "--tokenizer", tiny_model_dir, "--output", path, timeout=900))

    written = json.loads(once(session_dir / "npu-launches-7b", make).read_text())
    return {line["step"]: {**line, "by operator": written["counted"][line["step"]]} for line in written["table"]}


@pytest.mark.slow  # two minutes; `make test-npu` runs it
def test_a_step_of_7b_keeps_its_budget(steps_of_7b):
    """Four rows of 60, 80, 95 and 120 tokens on one card; a plain transformers loop is counted in the same run."""
    project, plain = steps_of_7b["train.py"], steps_of_7b["transformers + PEFT, row by row"]
    assert project["launches"] <= 3100 and project["host waits"] <= 2
    assert plain["launches"] > 7 * project["launches"] and plain["host waits"] >= 20
    copies = {name: count for name, count in project.items() if "copies" in name and count}
    # The batch is fetched by the card; the host reads one exchange: loss, norm and stop request.
    assert copies == {"asynchronous copies to the device": 5, "blocking copies to the host": 1}
    assert project["peak GiB"] < plain["peak GiB"] + 0.5


@pytest.mark.slow
def test_a_step_of_7b_is_28_layers_of_fused_operators(steps_of_7b):
    launches = steps_of_7b["train.py"]["by operator"]["launches"]
    once_a_layer = [
        "aclnnFlashAttentionVarLenScore", "aclnnFlashAttentionUnpaddingScoreGrad", "aclnnSwiGlu", "aclnnSwiGluGrad"
    ]  # fmt: skip
    assert {name: launches[name] for name in once_a_layer} == dict.fromkeys(once_a_layer, 28)
    assert launches["aclnnRmsNorm"] == 57
    assert launches["aclnnRotaryPositionEmbeddingV2"] == 56  # query and key


# ---- the estimate -----------------------------------------------------------------------------------------------------

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES = [
    {"model": f"Qwen/Qwen2.5-{size}-Instruct", "rows": rows, "checkpointing": checkpointing}
    for size in ("7B", "14B")
    for rows in ([95], [512], [512] * 4)
    for checkpointing in (False, True)
]


def measured_steps(folder: Path, cases: list[dict], environment: dict) -> list[dict]:
    """What the last of three steps of each case asked of the card (tests/trace_cann/programs/step_memory.py)."""
    (folder / "cases.json").write_text(json.dumps(cases))
    program = ROOT / "tests" / "trace_cann" / "programs" / "step_memory.py"
    must(run_script(program, folder / "cases.json", folder / "steps.json", env=environment, timeout=900))
    return json.loads((folder / "steps.json").read_text())


def estimated_bytes(case: dict) -> int:
    tokens = sum(case["rows"])
    targets = tuple(case.get("target_modules", QKVO))
    plan = Plan(tokens, tokens // 2, torch.bfloat16, True, case["checkpointing"], 1024, 8, targets, fused=True)
    config = memory.read_model_config(case["model"])
    config.num_hidden_layers = case.get("layers") or config.num_hidden_layers
    return sum(memory.estimate(config, plan).values())


@pytest.mark.slow  # two minutes: 7B and 14B whole
def test_the_estimate_is_within_3_percent_of_the_allocators_peak(tmp_path, trace_environment):
    steps = measured_steps(tmp_path, SIZES, trace_environment)
    assert len(steps) == 12
    for case, step in zip(SIZES, steps):
        assert estimated_bytes(case) == pytest.approx(step["peak_bytes"], rel=0.03), case


COUNTED = [
    {"model": "Qwen/Qwen2.5-7B-Instruct", "layers": layers, "rows": [64, 64], "forwards": forwards,
     "checkpointing": checkpointing, "target_modules": targets}
    for layers, forwards, checkpointing, targets in (
        (2, 1, False, QKVO), (4, 1, False, QKVO), (4, 2, False, QKVO), (4, 2, True, QKVO), (4, 1, True, ["all-linear"]),
        (3, 2, False, ["all-linear"]),
    )
]  # fmt: skip


def test_the_launches_of_the_time_estimate_are_those_that_are_counted(tmp_path, trace_environment):
    """Within 3 %: the program makes a step without train.py's sum and exchange, three operators a forward and a step."""
    steps = measured_steps(tmp_path, COUNTED, trace_environment)
    assert len(steps) == 6
    for case, step in zip(COUNTED, steps):
        linears = case["layers"] * (7 if case["target_modules"] == ["all-linear"] else 4)
        work = duration.Work(case["forwards"], 128, case["layers"], linears, 1, 1, 1, case["checkpointing"], 1, 1)
        assert duration.count_launches(work) == pytest.approx(step["launches"], rel=0.03), case


@pytest.mark.slow
def test_the_launches_of_a_step_of_7b_are_those_of_the_time_estimate(steps_of_7b):
    work = duration.Work(1, 355, 28, 4 * 28, 1, 1, 1, False, 1, 1)
    assert duration.count_launches(work) == pytest.approx(steps_of_7b["train.py"]["launches"], rel=0.01)
