"""The same training on 1, 2 and 4 processes of one thread each: time, memory and loss curve.

    python benchmarks/scaling.py

Runs train.py with the same global batch on each number of processes, round after round, and compares the median times
of a step. More processes than the machine has cores show equal results, not speed.
"""

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import launch_command, median_ratio, read_lines, run_watched, training_rows, write_result  # noqa: E402
from sft import errors  # noqa: E402
from sft.artifacts import read_json  # noqa: E402
from sft.config import option, parse  # noqa: E402


@dataclass
class ScalingConfig:
    """All settings of this benchmark."""

    model_name_or_path: str = option("models/SmolLM2-135M-Instruct", "base model")
    dataset_dir: str = option("", "data set made by data_prep.py; none: the 361 embedded rows")
    processes: list[str] = option(["1", "2", "4"], "numbers of processes to compare")
    global_batch_size: int = option(4, "rows per step, the same for all")
    steps: int = option(10, "optimizer steps of a run")
    rounds: int = option(3, "runs of each")
    quick: bool = option(False, "one round of three steps on 1 and 2 processes, to see that it runs")
    output: str = option("outputs/benchmarks/scaling.json", "where the figures go")


def main() -> None:
    settings = parse(ScalingConfig, description=__doc__)
    if settings.quick:
        settings.processes, settings.rounds, settings.steps = ["1", "2"], 1, 3
    settings.dataset_dir = training_rows(settings.model_name_or_path, settings.dataset_dir)
    counts = [int(count) for count in settings.processes]
    runs: dict[int, list[dict]] = {count: [] for count in counts}
    for number in range(settings.rounds):
        for count in counts:
            runs[count].append(train(settings, count))
            print(f"round {number + 1}: {count} processes, {runs[count][-1]['step_s']:.2f} s a step", flush=True)
    base = runs[counts[0]]
    table = [
        {
            "world size": count,
            "per-card batch": of_count[0]["per_device_train_batch_size"],
            "accumulation": of_count[0]["gradient_accumulation_steps"],
            "effective batch": of_count[0]["global_batch_size"],
            "steps": of_count[0]["steps"],
            "GB a process": max(max(run["peak_memory_bytes"]) for run in of_count) / 1e9,
            "loss first → last": f"{of_count[0]['first_loss']:.4f} → {of_count[0]['last_loss']:.4f}",
            "s a step": statistics.median(run["step_s"] for run in of_count),
            "speedup": median_ratio([run["step_s"] for run in base], [run["step_s"] for run in of_count]),
        }
        for count, of_count in runs.items()
    ]
    write_result(settings.output, settings, table, runs={str(count): of_count for count, of_count in runs.items()})


def train(settings: ScalingConfig, processes: int) -> dict:
    """The summary of one run of train.py, with the median time of its steps after the first."""
    run_dir = Path(tempfile.mkdtemp(prefix="scaling-")) / "run"
    try:
        run_watched(
            launch_command(
                processes, "train.py", "--model_name_or_path", settings.model_name_or_path, "--dataset_dir",
                settings.dataset_dir, "--output_dir", run_dir, "--global_batch_size", settings.global_batch_size,
                "--max_steps", settings.steps, "--learning_rate", "1e-3", "--eval_on_start", "false", "--eval_steps",
                10**6, "--save_steps", 10**6, "--report_to", "none",
            )
        )  # fmt: skip
        times = [record["step_time_s"] for record in read_lines(run_dir / "metrics.jsonl") if "step_time_s" in record]
        return {**read_json(run_dir / "summary.json"), "step_s": statistics.median(times[1:]), "step_times_s": times}
    finally:
        shutil.rmtree(run_dir.parent, ignore_errors=True)


if __name__ == "__main__":
    errors.run(main)
