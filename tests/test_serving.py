"""The trained adapter, and the merged model, behind a real OpenAI-compatible server: answers as eval.py's."""

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, launch, must, run_script

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
PYTHON = ROOT / ".venv-serving" / "bin" / "python"
NEW_TOKENS = 24

pytestmark = pytest.mark.slow


def require(path: Path, remedy: str) -> None:
    if not path.exists():
        message = f"{path.relative_to(ROOT)} is missing; {remedy}"
        pytest.fail(message) if os.environ.get("REQUIRE_SERVING_TESTS") else pytest.skip(message)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of twelve steps on the embedded model, with the answers of eval.py to three held-out questions."""
    require(PYTHON, "make test-serving sets it up")
    require(MODEL / "config.json", "make demo prepares it")
    folder = tmp_path_factory.mktemp("serving")
    argv = ["--input", "data/ascend_qa_en.jsonl", "--model_name_or_path", MODEL, "--output_dir", folder / "dataset"]
    must(run_script("data_prep.py", *argv))
    flags = ["--model_name_or_path", MODEL, "--dataset_dir", folder / "dataset", "--output_dir", folder / "run",
             "--global_batch_size", 2, "--max_steps", 12, "--learning_rate", "3e-3", "--eval_steps", 99, "--report_to", "none",
             "--no_eval_on_start"]  # fmt: skip
    must(launch("cpu_1", "train.py", *flags, timeout=1200))
    limit = ["--limit", 3, "--max_new_tokens", NEW_TOKENS]
    must(launch("cpu_1", "eval.py", "--run_dir", folder / "run", *limit, timeout=1200))
    return folder / "run"


@pytest.fixture(scope="module")
def expected(run_dir) -> list[dict]:
    lines = (run_dir / "eval" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 3 and any(row["base"] != row["adapter"] for row in rows)
    return rows


@contextlib.contextmanager
def serving(log: Path, *argv):
    """vLLM's server with a model in float32 on a free loopback port; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port, "--dtype", "float32",
        "--max-model-len", 512, "--enforce-eager", *argv,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(log, "w", encoding="utf-8") as file:
        server = subprocess.Popen([*map(str, words)], cwd=log.parent, env=environment, stdout=file, stderr=file)
    family = []
    try:
        yield f"http://127.0.0.1:{port}/v1"
        family = psutil.Process(server.pid).children(recursive=True)
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        for process in (*family, server):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        server.wait()


def ask(address: str, questions: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(the server's models, its answers to (model, question) pairs), through the `openai` client."""
    lines = [json.dumps({"model": model, "question": text, "max_tokens": NEW_TOKENS}) for model, text in questions]
    result = subprocess.run(
        [PYTHON, ROOT / "tests" / "programs" / "ask.py", address, "540"],
        input="\n".join(lines), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    models, *answers = [json.loads(line) for line in must(result).stdout.splitlines()]
    return models["models"], [answer["answer"].strip() for answer in answers]


def test_served_base_and_adapter_answer_as_eval_does(tmp_path, run_dir, expected):
    argv = ["--model", MODEL, "--served-model-name", "base", "--enable-lora", "--max-lora-rank", 8,
            "--lora-modules", f"adapter={run_dir}"]  # fmt: skip
    with serving(tmp_path / "server.log", *argv) as address:
        questions = [(side, row["question"]) for row in expected for side in ("base", "adapter")]
        models, answers = ask(address, questions)
    assert models == ["base", "adapter"]
    assert answers == [row[side].strip() for row in expected for side in ("base", "adapter")]


def test_served_merged_model_answers_as_eval_does(tmp_path, run_dir, expected):
    must(run_script("export.py", "--run_dir", run_dir, "--output_dir", tmp_path / "merged"))
    with serving(tmp_path / "server.log", "--model", tmp_path / "merged", "--served-model-name", "merged") as address:
        models, answers = ask(address, [("merged", row["question"]) for row in expected])
    assert models == ["merged"]
    assert answers == [row["adapter"].strip() for row in expected]
