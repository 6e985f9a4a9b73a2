"""Puts one fault after another into a copy of the code and runs the tests that have to notice it.

    python -m tools.mutate [--only WORD] [--every N] [--output FILE.json]

The score is killed / all. A fault that no test notices is printed with its place; each needs a test or a reason in NOTES.md.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900  # a fault that makes the tests wait for ever is noticed as well


@dataclass(frozen=True)
class Mutation:
    """`before`, which stands once in `file`, becomes `after`; the tests of `tests` run until one fails."""

    file: str
    tests: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}: {self.before.strip()!r} → {self.after.strip()!r}"

    def count(self) -> int:
        """How often the text to replace stands in the file: 1, or the list of mutations is behind the code."""
        return (ROOT / self.file).read_text(encoding="utf-8").count(self.before)


def mutations() -> list[Mutation]:
    return [Mutation(*place, *change) for place, changes in MUTATIONS.items() for change in changes]


def copy_repository(directory: Path) -> None:
    """What git tracks or would track, and links to what is built."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    for name in ("models", ".cache", ".venv"):
        if (ROOT / name).exists() and not (directory / name).exists():
            (directory / name).symlink_to((ROOT / name).resolve())


def run_tests(directory: Path, tests: str) -> bool:
    """Whether all tests passed. False as well after TIMEOUT_S; then everything that the tests started is killed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def survives(directory: Path, mutation: Mutation) -> bool:
    """Whether the tests pass with the fault in the copy, which is mended again."""
    path = directory / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        return run_tests(directory, mutation.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose file or tests hold this word")
    parser.add_argument("--every", type=int, default=1, help="each Nth mutation, for a sample")
    parser.add_argument(
        "--list", action="store_true", help="print the mutations and check that each still has its place"
    )
    parser.add_argument("--output", default="outputs/mutation.json")
    options = parser.parse_args()
    chosen = [m for m in mutations() if options.only in f"{m.file} {m.tests}"][:: options.every]
    stale = [m for m in chosen if m.count() != 1]
    for mutation in stale:
        print(f"the list is behind the code: {mutation.count()} times instead of once {mutation}", file=sys.stderr)
    chosen = [m for m in chosen if m not in stale]
    if options.list:
        print("\n".join(map(str, chosen)))
        return len(stale) > 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends with this
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy_repository(Path(folder))
        for tests in dict.fromkeys(m.tests for m in chosen):
            if not run_tests(Path(folder), tests):
                print(f"{tests}: fail without any fault; mend them first", file=sys.stderr)
                return 1
        for number, mutation in enumerate(chosen, 1):
            started = time.monotonic()
            alive = survives(Path(folder), mutation)
            survivors += [str(mutation)] if alive else []
            took_s = time.monotonic() - started
            print(f"{number}/{len(chosen)} {'SURVIVED' if alive else 'killed'} {took_s:.0f} s  {mutation}", flush=True)
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} killed: {killed / len(chosen):.0%}")
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"mutations": len(chosen), "killed": killed, "survivors": survivors}, indent=2) + "\n")
    return len(stale) > 0


if __name__ == "__main__":
    sys.exit(main())
