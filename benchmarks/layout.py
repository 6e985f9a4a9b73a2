"""Milliseconds that the layout of one optimizer step over ranks and micro-batches takes, by rows per step.

python benchmarks/layout.py
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import write_result  # noqa: E402
from sft import errors  # noqa: E402
from sft.batching import BatchPlan  # noqa: E402
from sft.config import option, parse  # noqa: E402


@dataclass
class LayoutBenchmark:
    """All settings of this benchmark."""

    rows_per_step: list[str] = option(["4", "128", "512", "4096", "65536"], "global batch sizes")
    world_size: list[str] = option(["1", "8"], "numbers of ranks")
    steps: int = option(20, "steps laid out for each, after one that is not counted")
    quick: bool = option(False, "three steps each, to see that it runs")
    output: str = option("outputs/benchmarks/layout.json", "where the figures go")


def main() -> None:
    settings = parse(LayoutBenchmark, description=__doc__)
    steps = 3 if settings.quick else settings.steps
    # Instruction rows: 5 to 512 tokens, half of them below 80.
    lengths = np.clip(np.random.default_rng(3).lognormal(4.3, 0.8, 1 << 18).astype(np.int64) + 5, 5, 512)
    table = []
    for world_size in map(int, settings.world_size):
        for rows in map(int, settings.rows_per_step):
            if rows % world_size:
                continue
            plan = BatchPlan(lengths, lengths, 42, 1, rows // world_size, world_size)
            plan.layout(plan.steps_per_epoch)  # another epoch's, so that the order of rows is all that is known
            plan.rows(0)
            times = [timed(plan, step) for step in range(min(steps, plan.steps_per_epoch))]
            table.append(
                {"rows a step": rows, "ranks": world_size, "micro-batches": len(plan.layout(0)),
                 "median ms": 1e3 * statistics.median(times)}
            )  # fmt: skip
    write_result(settings.output, settings, table)


def timed(plan: BatchPlan, step: int) -> float:
    """Seconds that `plan.layout` takes for a step that was not asked for before."""
    started = time.perf_counter()
    plan.layout(step)
    return time.perf_counter() - started


if __name__ == "__main__":
    errors.run(main)
