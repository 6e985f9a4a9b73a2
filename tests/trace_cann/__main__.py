"""Runs a Python script on the trace-only CANN and writes what each of its optimizer steps asked of the card.

python -m tests.trace_cann [--empty_weights] OUTPUT.json SCRIPT [ARGUMENT …]
"""

import argparse
import os
import sys

from tests.sim_ascend import Unavailable

from .build import environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.trace_cann", description=__doc__)
    parser.add_argument(
        "--empty_weights", action="store_true", help="models get weights without values: only config.json is needed"
    )
    parser.add_argument("output", help="JSON file to write")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script and its arguments")
    arguments = parser.parse_args()
    try:
        variables = environment()
    except Unavailable as reason:
        sys.exit(f"no trace-only CANN: {reason}")
    flags = ["--empty_weights"] * arguments.empty_weights
    command = [sys.executable, "-m", "tests.trace_cann.record", *flags, arguments.output, *arguments.script]
    os.execve(sys.executable, command, {**os.environ, **variables})  # the loader reads its variables at the start


if __name__ == "__main__":
    main()
