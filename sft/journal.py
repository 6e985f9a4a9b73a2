"""The numbers of a run as it goes: metrics.jsonl, trackers and the progress line, all from the same records."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from sft import schemas
from sft.artifacts import explained_writing, read_json_lines, write_text
from sft.errors import UserError


def check_trackers(names: list[str]) -> None:
    """Refuses trackers that are not installed; Accelerate would leave them out silently. Raises: UserError."""
    for name in names:
        if name != "none" and importlib.util.find_spec(name) is None:
            raise UserError(f"report_to names {name}, which is not installed; pip install {name}, or report_to: none")


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The records of metrics.jsonl, oldest first. A line that is cut off or damaged is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    return read_json_lines(path, schemas.RECORD) if path.is_file() else []


class Journal:
    """Writes records on the main process; on the others it does nothing.

    A resumed run keeps the records up to its checkpoint's step and writes the later ones again.
    """

    def __init__(self, run_dir: Path, accelerator, total_steps: int, settings: dict):
        self.path, self.accelerator, self.settings = run_dir / "metrics.jsonl", accelerator, settings
        self.is_main = accelerator.is_main_process
        self.total_steps = total_steps
        self.line_every = max(1, total_steps // 20)
        self.bar = None

    def open(self, first_step: int) -> None:
        """Begins, or goes on after `first_step`, on the main process. Raises: UserError when the disk is full."""
        kept = [record for record in read_metrics(self.path.parent) if first_step and record["step"] <= first_step]
        there = {record["step"] for record in kept if "loss" in record}
        every = self.settings["logging_steps"]
        missing = [step for step in range(1, first_step + 1) if step % every == 0 and step not in there]
        if missing:
            print(
                f"warning: {self.path} lacks {len(missing)} of the {first_step} steps trained before, the first is {missing[0]}; "
                "plots and reports go without them",
                file=sys.stderr,
            )
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        plain = {
            key: value if isinstance(value, (int, float, str, bool)) else str(value)
            for key, value in self.settings.items()
        }
        self.accelerator.init_trackers("sft", config=plain)
        self.bar = tqdm(
            total=self.total_steps, initial=first_step, desc="train", unit="step", disable=not sys.stderr.isatty()
        )

    def write(self, record: dict) -> None:
        """Appends one record, sends its numbers to the trackers and shows it. Raises: UserError on a full disk."""
        if not self.is_main:
            return
        with explained_writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        numbers = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}
        with explained_writing(self.path.parent, also_reads=True):  # trackers may send
            self.accelerator.log(numbers, step=record["step"])
        self.show(record)

    def sync(self) -> None:
        """Makes what was written durable, before a checkpoint claims that its steps are recorded."""
        if self.is_main:
            with explained_writing(self.path), open(self.path, "a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def show(self, record: dict) -> None:
        """Progress for people: a bar on a terminal, otherwise some twenty lines a run."""
        step = record["step"]
        if "eval_loss" in record:
            self.bar.write(f"step {step}/{self.total_steps}: held-out loss {record['eval_loss']:.4f}", file=sys.stderr)
            return
        self.bar.update(step - self.bar.n)
        numbers = {
            "loss": f"{record['loss']:.4f}",
            "lr": f"{record['learning_rate']:.2e}",
            "tok/s": f"{record['tokens_per_s']:.0f}",
        }
        self.bar.set_postfix(numbers)
        if self.bar.disable and (step % self.line_every == 0 or step == self.total_steps):
            left = (self.total_steps - step) * record["step_time_s"]
            text = " ".join(f"{key} {value}" for key, value in numbers.items())
            print(f"step {step}/{self.total_steps}: {text}, about {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the progress line."""
        if self.bar is not None:
            self.bar.close()
