"""Launches, host waits, copies and peak memory of one optimizer step on an Ascend card, without a card.

    python benchmarks/npu_launches.py

The real torch_npu runs on a CANN that computes nothing and counts what it is asked (tests/trace_cann). The figures are
exact and the same on every machine; they say nothing of time. Rows of the given numbers of tokens, on one card: train.py
as it is, and the loop that most people would write with transformers and PEFT, row by row and padded to one batch.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import write_result  # noqa: E402
from doctor.memory import read_model_config  # noqa: E402
from sft import errors  # noqa: E402
from sft.config import option, parse  # noqa: E402
from sft.errors import RunFailed  # noqa: E402

STEPS = 3  # of which the last is shown: the first makes the optimizer's state
PADDED, ROW_BY_ROW, PROJECT = "transformers + PEFT, padded", "transformers + PEFT, row by row", "train.py"


@dataclass
class LaunchesBenchmark:
    """All settings of this benchmark."""

    model: str = option(
        "Qwen/Qwen2.5-7B-Instruct", "whose shape is used: a config.json, or a model that the doctor knows"
    )
    tokenizer: str = option("models/SmolLM2-135M-Instruct", "whose words make up the rows")
    tokens: list[str] = option(["60", "80", "95", "120"], "tokens of the rows of a step")
    target_share: float = option(0.5, "share of them that is in the loss")
    train_flags: list[str] = option([], "further settings of train.py, for example gradient_checkpointing=true")
    only_project: bool = option(False, "train.py alone")
    layers: int | None = option(None, "of the model, instead of all")
    quick: bool = option(False, "two layers, to see that it runs")
    output: str = option("outputs/benchmarks/npu_launches.json", "where the figures go")


def main() -> None:
    settings = parse(LaunchesBenchmark, description=__doc__)
    with tempfile.TemporaryDirectory(prefix="npu_launches-") as folder:
        table, counted = measure(settings, Path(folder))
    write_result(settings.output, settings, table, counted=counted)


def measure(settings: LaunchesBenchmark, folder: Path) -> tuple[list[dict], dict]:
    """The table, and what was counted by operator for each of its lines."""
    if settings.quick:
        settings = replace(settings, layers=2)
    tokens = list(map(int, settings.tokens))
    model = write_model(settings, folder / "model")
    rows = write_rows(settings, tokens, folder)
    flags = [word for flag in settings.train_flags for word in (f"--{flag.partition('=')[0]}", flag.partition("=")[2])]
    commands = {
        PROJECT: [
            "train.py", "--model_name_or_path", model, "--dataset_dir", rows, "--output_dir", folder / "run",
            "--gradient_accumulation_steps", len(tokens), "--max_steps", STEPS, "--save_steps", STEPS, "--report_to", "none",
            *flags,
        ],
        ROW_BY_ROW: ["benchmarks/plain_loop.py", model, rows, STEPS, 1],
        PADDED: ["benchmarks/plain_loop.py", model, rows, STEPS, len(tokens)],
    }  # fmt: skip
    table, counted = [], {}
    for name, command in commands.items():
        if settings.only_project and name != PROJECT:
            continue
        step = traced(command, folder / "trace.json")
        counted[name] = step.pop("counted")
        shown = {"step": name, "tokens": "+".join(map(str, tokens)), **step, "peak GiB": step["peak_bytes"] / (1 << 30)}
        table.append({key: value for key, value in shown.items() if key not in ("peak_bytes", "host_s")})
    return table, counted


def traced(command: list, output: Path) -> dict:
    """The figures of the last step of a script. Raises: RunFailed with what it printed when it fails."""
    words = [sys.executable, "-m", "tests.trace_cann", "--empty_weights", output, *command]
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"{command[0]} failed on the trace-only CANN:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(output.read_text(encoding="utf-8"))[-1]


def write_model(settings: LaunchesBenchmark, path: Path) -> Path:
    """A model directory with the shape that was asked for, a tokenizer, and no weights but one that nobody reads."""
    import torch
    from safetensors.torch import save_file

    config = read_model_config(settings.model)
    config.num_hidden_layers = settings.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    path.mkdir()
    for file in Path(settings.tokenizer).glob("*"):
        if file.name not in ("config.json", "README.md") and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(file, path)
    config.save_pretrained(path)
    save_file({"none": torch.zeros(1)}, str(path / "model.safetensors"))
    return path


def write_rows(settings: LaunchesBenchmark, tokens: list[int], folder: Path) -> Path:
    """A data set, made by data_prep.py, whose rows have these numbers of tokens."""
    from sft.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "model"))

    def length(question: str, answer: str) -> int:
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return len(
            tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)["input_ids"]
        )

    lines = []
    for number, wanted in enumerate(tokens):
        question, answer = f"q{number}", "a"
        while length(question, answer + " a") <= wanted:  # a word adds few tokens
            if len(answer.split()) < settings.target_share * wanted:
                answer += " a"
            else:
                question += " a"
        for sign in "z.q!x?k:j":  # a sign adds one at most
            if length(question, answer + sign) <= wanted:
                answer += sign
        if length(question, answer) != wanted:
            raise RunFailed(f"no row of {wanted} tokens could be made with the tokenizer of {settings.tokenizer}")
        lines.append(json.dumps({"question": question, "answer": answer}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [
        sys.executable, "data_prep.py", "--input", folder / "rows.jsonl", "--model_name_or_path", folder / "model",
        "--output_dir", folder / "dataset", "--eval_fraction", "0", "--max_length", max(tokens),
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"data_prep.py failed: {done.stderr[-2000:]}")
    return folder / "dataset"


if __name__ == "__main__":
    errors.run(main)
