"""What one process on the trace-only CANN has asked of its card so far."""

import ctypes
import json
from collections import Counter

import torch

WAITS = ("host waits for a stream", "host waits for the device", "host waits for an event")


def read() -> dict:
    """All counters, once everything that was asked has been launched: {"launches": {operator: count}, counter: count}."""
    library = ctypes.CDLL("libopapi.so")
    library.trace_read.restype = ctypes.c_char_p
    library.trace_count(0)
    torch.npu.synchronize()  # empties torch_npu's task queue
    library.trace_count(1)
    return json.loads(library.trace_read())


def difference(after: dict, before: dict) -> dict:
    """What was asked between two readings; operators that were not launched are left out."""
    launches = Counter(after["launches"])
    launches.subtract(before["launches"])
    found = {name: after[name] - before[name] for name in after if name != "launches"}
    return {"launches": {name: count for name, count in sorted(launches.items()) if count}, **found}


def summary(counted: dict) -> dict[str, int]:
    """The figures that budgets are for: launches, times that the host waited, copies by kind."""
    return {
        "launches": sum(counted["launches"].values()),
        "host waits": sum(counted[name] for name in WAITS),
        **{name: count for name, count in counted.items() if "copies" in name and "host to host" not in name},
    }
