"""How long it takes until the first step is done, and what a process holds in memory: train.py against TRL's SFTTrainer.

    python benchmarks/startup.py

Each starts as one process on the same rows and model, in turns. "Above imports" leaves out what importing torch,
transformers, peft, accelerate and datasets alone takes, which is measured in turns as well.
"""

import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import launch_command, run_watched, training_rows, write_result  # noqa: E402
from sft import errors  # noqa: E402
from sft.config import option, parse  # noqa: E402

BARE_IMPORTS = "import torch, transformers, peft, accelerate, datasets"
IMPORTS = {
    "torch, transformers, peft, accelerate, datasets": BARE_IMPORTS,
    "train.py": "import train",
    "TRL": "from trl import SFTConfig, SFTTrainer",
}


@dataclass
class StartConfig:
    """All settings of this benchmark."""

    model_name_or_path: str = option("models/SmolLM2-135M-Instruct", "base model")
    dataset_dir: str = option("", "data set made by data_prep.py; none: the 361 embedded rows")
    processes: int = option(1, "ranks of each job, one thread each")
    steps: int = option(3, "optimizer steps; memory is read after the last")
    rounds: int = option(3, "times that each is started")
    quick: bool = option(False, "one round, to see that it runs")
    output: str = option("outputs/benchmarks/startup.json", "where the figures go")


def main() -> None:
    settings = parse(StartConfig, description=__doc__)
    if settings.quick:
        settings.rounds, settings.steps = 1, 2
    settings.dataset_dir = training_rows(settings.model_name_or_path, settings.dataset_dir)
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    starts: dict[str, list[dict]] = {"train.py": [], "TRL": []}
    for number in range(settings.rounds):
        for name, code in IMPORTS.items():
            imports[name].append(run_watched([sys.executable, "-c", code])["seconds"])
        for name, kind in (("train.py", "ours"), ("TRL", "trl")):
            starts[name].append(start(settings, kind))
        print(f"round {number + 1} of {settings.rounds} done", flush=True)
    bare = statistics.median(imports["torch, transformers, peft, accelerate, datasets"])
    first = {name: statistics.median(one["first_step_s"] for one in of_name) for name, of_name in starts.items()}
    table = [
        {
            "start": name,
            "import s": statistics.median(imports[name]),
            "to first step s": first[name],
            "above bare imports s": first[name] - bare,
            "of that, the step itself s": statistics.median(one["later_step_s"] for one in of_name),
            "peak GB a process": statistics.median(one["peak_memory_bytes"] for one in of_name) / 1e9,
        }
        for name, of_name in starts.items()
    ]
    write_result(
        settings.output, settings, table, bare_imports_s=bare,
        start_of_trl=(first["train.py"] - bare) / (first["TRL"] - bare), imports=imports, starts=starts,
    )  # fmt: skip


def start(settings: StartConfig, kind: str) -> dict:
    """Seconds from the command to the end of the first step, of a later step, and the peak memory."""
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    try:
        began = time.time()
        run = run_watched(
            launch_command(
                settings.processes, "benchmarks/contenders.py", kind, "--model_name_or_path",
                settings.model_name_or_path, "--dataset_dir", settings.dataset_dir, "--output_dir", folder / kind,
                "--steps", settings.steps, "--global_batch_size", settings.processes,
            )
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = re.findall(r"step done at ([\d.]+), peak memory (\d+)", run["output"])
    lines = [(float(at), int(peak)) for at, peak in found]
    if len(lines) < settings.steps * settings.processes:
        raise RuntimeError(f"{kind} reported {len(lines)} steps, expected {settings.steps}:\n{run['output'][-3000:]}")
    ends = sorted(at for at, _ in lines)
    return {
        "first_step_s": ends[settings.processes - 1] - began,
        "later_step_s": (ends[-1] - ends[settings.processes - 1]) / (settings.steps - 1),
        "peak_memory_bytes": max(peak for _, peak in lines),
        "cpu_s": run["cpu_s"],
    }


if __name__ == "__main__":
    errors.run(main)
