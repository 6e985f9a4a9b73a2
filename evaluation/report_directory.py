"""Where an evaluation goes: nothing that somebody else put there is replaced, and one evaluation at a time writes there."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from evaluation import report
from sft.artifacts import explained_writing, refuse_links
from sft.errors import UserError

LOCK, LEFTOVERS = ".lock", (".partial-", ".report.tmp-")


class ReportDirectory:
    """output_dir of eval.py, RUN_DIR/eval unless another is given. Raises: UserError when something else is there."""

    def __init__(self, run_dir: str | Path, output_dir: str | None):
        self.path = Path(output_dir or Path(run_dir) / "eval")
        self.lock = FileLock(self.path / LOCK)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir {self.path} is a file; choose another directory")
        if self.path.is_symlink() and not output_dir:
            raise UserError(f"{self.path} is a link to elsewhere; give the place to write to with --output_dir")
        refuse_links(self.path)
        names = sorted(name for name in os.listdir(self.path) if name != LOCK) if self.path.is_dir() else []
        begun = "report.json" not in names and any(name.startswith(LEFTOVERS) for name in names)
        if names and not begun and not report.is_report(self.path / "report.json"):
            raise UserError(
                f"output_dir {self.path} holds {names[0]} but no evaluation; choose another directory, or an empty one"
            )

    def claim(self) -> None:
        """Makes this process the only one that evaluates into the directory, until it ends. Raises: UserError."""
        with explained_writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                raise UserError(
                    f"another eval.py is writing {self.path}; wait for it, or give this one another --output_dir"
                ) from None

    def release(self) -> None:
        """Lets others in."""
        self.lock.release()

    def write(self, built: dict, predictions: Sequence[dict], metrics: Sequence[dict]) -> None:
        """Writes the report's files; report.json is missing while the others are being replaced."""
        with explained_writing(self.path, also_reads=True):
            for leftover in self.path.glob(".report.tmp-*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(dir=self.path, prefix=".report.tmp-") as folder:
                report.write_report(folder, built, predictions, metrics)
                (self.path / "report.json").unlink(missing_ok=True)
                for name in sorted(os.listdir(folder), key=lambda name: name == "report.json"):
                    os.replace(Path(folder) / name, self.path / name)
