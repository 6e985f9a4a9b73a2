"""What a card is asked to do, counted by the trace-only CANN (tests/trace_cann), and budgets for a training step."""

import json
from pathlib import Path

import pytest

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
