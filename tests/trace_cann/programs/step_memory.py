"""Peak memory and launches of training steps on the trace-only CANN: `python step_memory.py CASES.json OUTPUT.json`.

CASES.json: [{"model": as for doctor.py, "layers", "rows": tokens of each, of which half are targets, "forwards" of these
rows, "checkpointing", "target_modules"}]; layers, forwards and target_modules may be left out. A step is made of what train.py makes it of, on one card under bf16 autocast; the weights of the base
are reserved and hold no values.
"""

import gc
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ.setdefault("TASK_QUEUE_ENABLE", "2")
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

import torch
import torch_npu  # noqa: F401
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM

from doctor.memory import read_model_config
from sft import device, modeling
from sft.batching import collate
from tests.trace_cann import counters
from tests.trace_cann.record import load_without_values
from training import fused
from training.optimizer import clip_grad_norm, make_optimizer

STEPS = 3  # of which the last is shown: the first makes the optimizer's state


def main() -> None:
    load_without_values()
    modeling.register_packed_sdpa()
    accelerator = device.start()
    found = [measure(case, accelerator) for case in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")


def measure(case: dict, accelerator) -> dict:
    """What the last step of a case asked of the card, `counters.summary` and peak_bytes."""
    gc.collect()
    held = torch.npu.memory_allocated()  # what other cases left
    config = read_model_config(case["model"])
    config.num_hidden_layers = case.get("layers") or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    base = AutoModelForCausalLM.from_pretrained(
        "", config=config, attn_implementation="packed_sdpa", dtype=torch.bfloat16
    )
    base.requires_grad_(False)
    if case["checkpointing"]:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    targets = case.get("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj"])
    peft_model = modeling.add_lora(base, 8, 16, 0.0, targets, seed=0)
    trainable = modeling.trainable_parameters(peft_model).values()
    optimizer = make_optimizer(trainable, 1e-4, 0.0, accelerator)
    model, optimizer = accelerator.prepare(modeling.TargetLoss(peft_model), optimizer)
    model.train()
    fused.use_fused_operators(model, accelerator)
    rows = [
        {"input_ids": [0] * length, "labels": [-100] * (length - length // 2) + [0] * (length // 2)}
        for length in case["rows"]
    ]
    before, figures = None, {}
    for _ in range(STEPS):
        before = counters.read()
        torch.npu.reset_peak_memory_stats()
        for _ in range(case.get("forwards", 1)):
            batch = send_to_device(collate(rows, pin=True), accelerator.device, non_blocking=True)
            accelerator.backward(model(**batch).sum())
        clip_grad_norm(accelerator, model, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        figures = counters.summary(counters.difference(counters.read(), before))
        del batch
    figures["peak_bytes"] = torch.npu.max_memory_allocated() - held
    accelerator.free_memory()
    del model, optimizer, base, peft_model, trainable
    gc.collect()
    return figures


if __name__ == "__main__":
    main()
