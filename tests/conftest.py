"""Fixtures: a tiny model, a data set of 380 rows, and the real command lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim_ascend.fixtures import npu_environment, simulated_environment, trace_environment  # noqa: F401
from tools import tiny
from tools.tiny import make_rows, write_jsonl
from tools.warm import WarmServer

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
STEPS = 20  # of a short run
os.environ.update(ENVIRONMENT)  # a forgotten download fails, in this process too


def run_script(*argv, env=None, timeout=300, cwd=ROOT) -> subprocess.CompletedProcess:
    """Runs `python SCRIPT …` as a user would, from the repository root."""
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout
    )


def launch(config, *argv, env=None, timeout=300, flags=(), cwd=ROOT) -> subprocess.CompletedProcess:
    """Runs `accelerate launch --config_file CONFIG SCRIPT …`; CONFIG is a path or a name in accelerate_configs/.

    A free port is chosen by the launcher, so that tests may run side by side.
    """
    path = config if os.sep in str(config) else ROOT / "accelerate_configs" / f"{config}.yaml"
    return run_script(
        "-m", "accelerate.commands.launch", "--config_file", path, "--main_process_port", "0", *flags, *argv,
        env=env, timeout=timeout, cwd=cwd,
    )  # fmt: skip


def must(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """The result of a command that has to succeed; shows what it printed when it did not."""
    assert result.returncode == 0, f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result


def pytest_addoption(parser) -> None:
    parser.addoption("--at-least", type=int, default=0, help="fail when fewer tests than this passed")


def pytest_sessionfinish(session, exitstatus) -> None:
    """A suite that silently shrank is a failure: counted where the results of all workers come together."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    minimum = session.config.getoption("--at-least")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    passed = len(reporter.stats.get("passed", []))
    if passed < minimum and exitstatus == 0:
        reporter.write_line(f"only {passed} tests passed, at least {minimum} are expected", red=True)
        session.exitstatus = 1


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory, worker_id) -> Path:
    """A directory shared by all workers of this test session, so that they make the tiny model once."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def once(path: Path, make) -> Path:
    """`path`, made by `make(temporary)` in the first worker that asks; the others wait for it."""
    from filelock import FileLock

    with FileLock(f"{path}.lock"):
        if not path.exists():
            temporary = path.with_name(path.name + ".making")
            make(temporary)
            temporary.rename(path)
    return path


@pytest.fixture(scope="session")
def tiny_model_dir(session_dir) -> Path:
    """A tiny Qwen2 with its tokenizer and chat template, as a directory that from_pretrained reads."""

    def make(path: Path) -> None:
        path.mkdir()
        texts = [text for row in make_rows(200) for text in row.values()]
        tiny.save_model(path, tiny.save_tokenizer(path, texts))

    return once(session_dir / "tiny-model", make)


@pytest.fixture(scope="session")
def warm_server():
    """Starts train.py by a fork of a process that has imported everything, for tests that start it many times."""
    with WarmServer() as server:
        yield server


@pytest.fixture
def warm(warm_server):
    """`warm_server`, for one test: what the test leaves running ends with it."""
    yield warm_server
    warm_server.end_all()


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tiny_model_dir) -> Path:
    return tiny_model_dir


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tiny_tokenizer_dir))


@pytest.fixture(scope="session")
def dataset_dir(session_dir, tiny_model_dir) -> Path:
    """380 rows through data_prep.py: 361 to train on, 19 held out."""

    def make(path: Path) -> None:
        source = write_jsonl(path.with_suffix(".jsonl"), make_rows(380))
        must(
            run_script("data_prep.py", "--input", source, "--model_name_or_path", tiny_model_dir, "--output_dir", path)
        )

    return once(session_dir / "dataset-380", make)


@pytest.fixture(scope="session")
def tiny_run_dir(session_dir, dataset_dir, tiny_model_dir) -> Path:
    """A finished run of 91 steps at global batch 4 by one CPU process."""

    def make(path: Path) -> None:
        must(train("cpu_1", tiny_model_dir, dataset_dir, path))

    return once(session_dir / "run-1x4", make)


@pytest.fixture(scope="session")
def arguments(tiny_model_dir, dataset_dir):
    """The flags of a short run with frequent checkpoints, for a run directory."""

    def flags(run_dir, *more) -> list:
        return [
            "--model_name_or_path", tiny_model_dir, "--dataset_dir", dataset_dir, "--output_dir", run_dir,
            "--max_steps", STEPS, "--save_steps", "5", "--eval_steps", "5", "--gradient_accumulation_steps", "2",
            "--learning_rate", "1e-3", "--report_to", "none", *more,
        ]  # fmt: skip

    return flags


@pytest.fixture(scope="session")
def peace(warm_server, arguments, tmp_path_factory) -> Path:
    """A short run on two processes that nothing interrupts; each worker has its own, as tests start it again."""
    run_dir = tmp_path_factory.mktemp("peace") / "run"
    status, output = warm_server.run(*arguments(run_dir))
    assert status == 0, output
    return run_dir


def train(config, model_dir, dataset_dir, run_dir, *argv, **options) -> subprocess.CompletedProcess:
    """Launches train.py at global batch 4 with checkpoints at 30, 60 … and no trackers; later flags win."""
    return launch(
        config, "train.py", "--model_name_or_path", model_dir, "--dataset_dir", dataset_dir, "--output_dir", run_dir,
        "--global_batch_size", 4, "--save_steps", 30, "--report_to", "none", *argv, **options,
    )  # fmt: skip


def peak_bytes(function) -> int:
    """The most that torch's CPU allocator gave out at once while `function()` ran, by torch's profiler: to the byte,
    whatever else the machine or the process does."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


TIMES = {"tokens_per_s", "step_time_s", "peak_memory_bytes", "mfu"}


def numbers(run_dir: Path) -> list[dict]:
    """The records of metrics.jsonl without what differs from one execution to the next."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def adapter(run_dir: Path) -> dict:
    """The adapter's tensors of a run or checkpoint directory."""
    from safetensors.torch import load_file

    return load_file(str(Path(run_dir) / "adapter_model.safetensors"))


def losses(run_dir: Path) -> list[float]:
    """Training losses, one per step."""
    return [record["loss"] for record in numbers(run_dir) if "loss" in record]


def assert_same_numbers(first: Path, second: Path, relative: float = 1e-5) -> None:
    """Two runs with the same losses at every step and the same adapter, up to summation order."""
    import torch

    one, two = losses(first), losses(second)
    assert len(one) == len(two) > 0
    assert max(abs(a / b - 1) for a, b in zip(one, two)) <= relative
    first_adapter, second_adapter = adapter(first), adapter(second)
    assert first_adapter.keys() == second_adapter.keys() and first_adapter
    for name, tensor in first_adapter.items():
        torch.testing.assert_close(tensor, second_adapter[name], rtol=0, atol=relative)
