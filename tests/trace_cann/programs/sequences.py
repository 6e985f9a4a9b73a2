"""Asks the card for known things and writes what was counted: `python sequences.py OUTPUT.json`."""

import json
import sys
from pathlib import Path

import torch
import torch_npu

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.trace_cann import counters


def main() -> None:
    card = torch.device("npu:0")
    torch.npu.set_device(card)
    a, pinned = torch.empty(4, 5, device=card), torch.ones(3).pin_memory()
    positions = torch.empty(3, dtype=torch.long, device=card)

    def known_sequence():
        for _ in range(7):
            torch.add(a, a)
        torch.mm(a, a.t())
        a[positions]

    def side_stream():
        event, other = torch.npu.Event(), torch.npu.Stream()
        event.record()
        other.wait_event(event)
        event.synchronize()

    seen = {
        "nothing": counted(lambda: None),
        "known sequence": counted(known_sequence),
        "item": counted(lambda: torch.add(a, a).sum().item()),
        "nonzero": counted(lambda: a.nonzero()),
        "blocking copy": counted(lambda: torch.ones(3).to(card)),
        "asynchronous copy": counted(lambda: pinned.to(card, non_blocking=True)),
        "to the host": counted(lambda: a.cpu()),
        "number from the host": counted(lambda: torch.tensor(1.0).to(card)),
        "number on the card": counted(lambda: torch.full((), 1.0, device=card)),
        "synchronize": counted(torch.npu.synchronize),
        "side stream": counted(side_stream),
        "training": counted(lambda: train(card)),
    }
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    torch.empty(3 << 20, dtype=torch.uint8, device=card)
    seen["peak MiB"] = (torch.npu.max_memory_allocated() - before) / (1 << 20)
    # An operator that torch_npu asks CANN for by its name, in the older way.
    seen["unknown"] = error_of(lambda: torch_npu.npu_sort_v2(torch.empty(4, 4, device=card)))
    Path(sys.argv[1]).write_text(json.dumps(seen, indent=1))


def counted(function) -> dict:
    """What `function` asked for, without zeros."""
    before = counters.read()
    function()
    return {name: count for name, count in counters.difference(counters.read(), before).items() if count}


def train(card) -> None:
    """Forward, backward and SGD of one linear layer: mm; ones, mul by the loss's gradient, mm of the weight; add."""
    weight = torch.empty(5, 6, device=card, requires_grad=True)
    torch.mm(torch.empty(4, 5, device=card), weight).sum().backward()
    torch.optim.SGD([weight], lr=0.1, foreach=False).step()


def error_of(function) -> str:
    try:
        function()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
