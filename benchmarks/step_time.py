"""How long an optimizer step takes: train.py, TRL's SFTTrainer, a plain DDP loop, the same padded, and the least possible.

    python benchmarks/step_time.py

Every contender is a job of its own with one thread per rank, on the same rows in the same order. They take turns, one step
at a time, so that whatever else the machine does meets all; ratios are medians over the rounds. The floor is the step's
matrix products alone, timed inside train.py's own job after each step.
"""

import contextlib
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import median_ratio, take_turn, training_rows, waiting_job, write_result  # noqa: E402
from sft import errors  # noqa: E402
from sft.config import option, parse  # noqa: E402


@dataclass
class StepConfig:
    """All settings of this benchmark."""

    model_name_or_path: str = option("models/SmolLM2-135M-Instruct", "base model")
    dataset_dir: str = option("", "data set made by data_prep.py; none: 361 rows made on the spot")
    rows: str = option("short", "rows made on the spot: short ones, or as they are", choices=("short", "embedded"))
    ranks: int = option(2, "processes, one thread each")
    global_batch_size: int = option(4, "rows per step over all ranks, one row per micro-batch")
    rounds: int = option(12, "steps that are timed")
    warm_up: int = option(2, "steps before them")
    padded_every: int = option(4, "rounds between steps padded to max_length; 0: none")
    max_length: int = option(512, "what those are padded to")
    quick: bool = option(False, "two rounds only, to see that it runs")
    output: str = option("outputs/benchmarks/step_time.json", "where the figures go")


def main() -> None:
    settings = parse(StepConfig, description=__doc__)
    if settings.quick:
        settings.rounds, settings.warm_up, settings.padded_every = 2, 1, 1
    settings.dataset_dir = training_rows(settings.model_name_or_path, settings.dataset_dir, settings.rows == "short")
    measured = measure(settings)
    steps = {name: [one["seconds"] for one in turns] for name, turns in measured.items()}
    cpu = {name: [one["cpu_s"] for one in turns] for name, turns in measured.items()}
    linear = [one["linear"] for one in measured["floor"]]
    steps["floor"] = [one["linear"] + one["attention"] for one in measured["floor"]]
    beside_padded = [steps["train.py"][one["round"]] for one in measured.get("padded", [])]
    table = [
        {
            "step": name,
            "median s": statistics.median(seconds),
            "CPU s": statistics.median(cpu[name]),
            "× train.py": median_ratio(seconds, beside_padded if name == "padded" else steps["train.py"]),
            "loss first → last": "" if name in ("floor", "padded")
            else f"{measured[name][0]['loss']:.3f} → {measured[name][-1]['loss']:.3f}",
        }
        for name, seconds in steps.items()
    ]  # fmt: skip
    write_result(
        settings.output, settings, table,
        times_faster_than_trl=median_ratio(steps["TRL"], steps["train.py"]),
        times_less_cpu_than_trl=median_ratio(cpu["TRL"], cpu["train.py"]),
        times_faster_than_plain=median_ratio(steps["plain"], steps["train.py"]),
        times_faster_than_padded=median_ratio(steps["padded"], beside_padded) if beside_padded else None,
        step_over_floor=median_ratio(steps["train.py"], steps["floor"]),
        share_of_the_step_waiting_for_data=median_ratio([one["data_s"] for one in measured["train.py"]], steps["train.py"]),
        step_over_linear_floor=median_ratio(steps["train.py"], linear),
        turns=measured,
    )  # fmt: skip


def measure(settings: StepConfig) -> dict[str, list[dict]]:
    """The timed turns of each contender, in the order in which they were taken."""
    folder = Path(tempfile.mkdtemp(prefix="step_time-"))
    measured: dict[str, list[dict]] = {"train.py": [], "floor": [], "TRL": [], "plain": []}
    try:
        with contextlib.ExitStack() as jobs:
            ranks = {}
            for name in ("ours", "trl", "plain"):
                print(f"starting {name}", flush=True)
                ranks[name] = jobs.enter_context(
                    waiting_job(
                        settings.ranks, "benchmarks/contenders.py", name, "--model_name_or_path",
                        settings.model_name_or_path, "--dataset_dir", settings.dataset_dir, "--output_dir", folder / name,
                        "--global_batch_size", settings.global_batch_size, "--max_length", settings.max_length,
                        "--steps", settings.warm_up + settings.rounds + 1,  # none comes to its end
                    )
                )  # fmt: skip
            for number in range(-settings.warm_up, settings.rounds):
                turns = {
                    "train.py": take_turn(ranks["ours"], "step"),
                    "floor": take_turn(ranks["ours"], "floor"),
                    "TRL": take_turn(ranks["trl"], "step"),
                    "plain": take_turn(ranks["plain"], "step"),
                }
                if number >= 0 and settings.padded_every and number % settings.padded_every == 0:
                    turns["padded"] = {**take_turn(ranks["plain"], "padded"), "round": number}
                print(" ".join(f"{name} {one['seconds']:.2f} s" for name, one in turns.items()), flush=True)
                for name, one in turns.items() if number >= 0 else ():
                    measured.setdefault(name, []).append(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return measured


if __name__ == "__main__":
    errors.run(main)
