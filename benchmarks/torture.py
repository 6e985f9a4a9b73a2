"""Kills trainings at random instants, starts them again until they finish, and compares with a run left in peace.

    python benchmarks/torture.py --kills 200 --programs 30

Each training is two processes of the real train.py on the CPU, with dropout, evaluations and frequent checkpoints. Every
record of metrics.jsonl (times and memory aside), the adapter and the optimizer must be the same bit for bit, and no
kill may cost a checkpoint that was complete before it.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tools.torture import make_inputs, torture, torture_programs  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--programs", type=int, default=0, help="kill the other programs so often each (rows.jsonl beside --dataset)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command_every", type=int, default=0, help="start every so manieth by accelerate launch")
    parser.add_argument("--model", type=Path, help="a tiny model directory; default: made on the spot")
    parser.add_argument("--dataset", type=Path, help="a data set that data_prep.py made with it")
    parser.add_argument("--output", type=Path, help="write the counts to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        folder = Path(temporary)
        model, dataset = (arguments.model, arguments.dataset) if arguments.model else make_inputs(folder)
        counts = torture(
            model, dataset, folder, arguments.kills, arguments.seed, arguments.command_every, partial(print, flush=True)
        )
        if arguments.programs:
            others = torture_programs(model, dataset, folder / "peace", folder, arguments.programs, arguments.seed)
            print(f"{others['kills']} kills of preparation, evaluation and export")
            for what in ("lost", "different", "refused"):
                counts[what] += others[what]
    print(f"{'what and when':40} kills")
    for name, count in counts["by"].items():
        print(f"{name:40} {count:5}")
    print(
        f"{counts['kills']} kills in {counts['starts']} starts of {counts['runs']} runs, {counts['seconds']} s: "
        f"{len(counts['lost'])} lost, {len(counts['different'])} different, {len(counts['refused'])} refused"
    )
    for what in ("lost", "different", "refused"):
        for line in counts[what]:
            print(f"{what}: {line}")
    if arguments.output:
        arguments.output.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(counts["lost"] or counts["different"] or counts["refused"]))


if __name__ == "__main__":
    main()
