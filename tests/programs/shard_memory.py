"""Prints, for the ranks together, how much memory loading a sharded model takes at most, in copies of the model."""

import json
import re
import sys
from pathlib import Path

import torch

from sft import device, modeling, weights


def resident_bytes(kind: str) -> int:
    """VmRSS or VmHWM (the most since the last reset) of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{kind}:\s+(\d+) kB", status)[1]) * 1024


def main(model_dir: str, output: str) -> None:
    accelerator = device.start()
    accelerator.wait_for_everyone()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM (man proc)
    before = resident_bytes("VmRSS")
    base = modeling.load_base(model_dir, torch.float32, accelerator.device, empty=device.is_sharded(accelerator))
    model = modeling.TargetLoss(modeling.add_lora(base, 8, 16, 0.0, ["q_proj", "v_proj"], seed=0))
    optimizer = torch.optim.AdamW(modeling.trainable_parameters(model).values())
    model, optimizer = accelerator.prepare(model, optimizer)
    weights.fill_from_disk(model, model_dir, accelerator.device)
    grown = torch.tensor([[resident_bytes("VmHWM") - before, modeling.held_parameters(model)]])
    grown = accelerator.gather(grown)
    if accelerator.is_main_process:
        copy = sum(file.stat().st_size for file in Path(model_dir).glob("*.safetensors"))
        numbers = {"copies": grown[:, 0].sum().item() / copy, "held": grown[:, 1].tolist(), "copy_bytes": copy}
        Path(output).write_text(json.dumps(numbers), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
