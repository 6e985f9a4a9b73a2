"""Writes down, for the ranks together, how much memory loading a model takes, in copies of the model: at most with all
pages, and at the end of their own, which leaves out a file's pages that ranks of one server share."""

import json
import re
import sys
from pathlib import Path

import torch

from sft import device, modeling, weights


def resident_bytes(kind: str) -> int:
    """VmRSS, VmHWM (the most since the last reset) or RssAnon (without files' pages) of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{kind}:\s+(\d+) kB", status)[1]) * 1024


def main(model_dir: str, output: str) -> None:
    accelerator = device.start()
    accelerator.wait_for_everyone()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM (man proc)
    before, private = resident_bytes("VmRSS"), resident_bytes("RssAnon")
    base = modeling.load_base(model_dir, torch.float32, accelerator.device, empty=device.is_sharded(accelerator))
    model = modeling.TargetLoss(modeling.add_lora(base, 8, 16, 0.0, ["q_proj", "v_proj"], seed=0))
    optimizer = torch.optim.AdamW(modeling.trainable_parameters(model).values())
    model, optimizer = accelerator.prepare(model, optimizer)
    weights.fill_from_disk(model, model_dir, accelerator.device)
    for parameter in model.parameters():  # a file's pages are read only now
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).sum()
    sizes = [resident_bytes("VmHWM") - before, modeling.held_parameters(model), resident_bytes("RssAnon") - private]
    grown = torch.tensor([sizes])
    grown = accelerator.gather(grown)
    if accelerator.is_main_process:
        copy = sum(file.stat().st_size for file in Path(model_dir).glob("*.safetensors"))
        numbers = {
            "copies": grown[:, 0].sum().item() / copy, "held": grown[:, 1].tolist(),
            "private_copies": grown[:, 2].sum().item() / copy,
        }  # fmt: skip
        Path(output).write_text(json.dumps(numbers), encoding="utf-8")
    del model, optimizer
    device.end(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
