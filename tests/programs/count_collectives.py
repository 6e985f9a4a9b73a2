"""Runs train.py and writes which collectives three of its steps made on the main process, seen by torch's profiler."""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from torch.profiler import ProfilerActivity, profile  # noqa: E402

import train  # noqa: E402

FIRST, LAST = 2, 5  # steps after which the profiler is started and stopped


def main() -> None:
    output = Path(sys.argv.pop(1))
    profiler = profile(activities=[ProfilerActivity.CPU])
    record = train.Run.record

    def record_and_count(run, step, *rest):
        record(run, step, *rest)
        if step == FIRST:
            profiler.start()
        if step == LAST:
            profiler.stop()
            names = Counter(event.name for event in profiler.events())
            found = {
                name: count for name, count in sorted(names.items()) if name.startswith(("gloo:", "nccl:", "hccl:"))
            }
            counts = {
                "steps": LAST - FIRST, "micro_batches": run.plan.gradient_accumulation_steps, "collectives": found
            }  # fmt: skip
            if run.accelerator.is_main_process:
                output.write_text(json.dumps(counts), encoding="utf-8")

    train.Run.record = record_and_count
    train.main()


if __name__ == "__main__":
    main()
