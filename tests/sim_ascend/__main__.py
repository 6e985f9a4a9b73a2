"""Builds the simulated Ascend and prints `export` lines for a shell: eval "$(python -m tests.sim_ascend --cards 2)"."""

import argparse
import shlex
import sys

from .build import Unavailable, environment


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.sim_ascend", description=__doc__)
    parser.add_argument("--cards", type=int, default=8, help="number of simulated cards")
    parser.add_argument("--memory_bytes", type=int, default=64 << 30, help="memory of each card")
    parser.add_argument("--soc", default="Ascend910B3", help="chip name that the cards report")
    try:
        variables = environment(**vars(parser.parse_args()))
    except Unavailable as reason:
        sys.exit(f"No simulated Ascend: {reason}")
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
