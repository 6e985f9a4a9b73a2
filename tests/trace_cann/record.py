"""The part of `python -m tests.trace_cann` that runs inside the environment of the trace-only CANN."""

import json
import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    empty = sys.argv[1] == "--empty_weights"
    output, script, *arguments = sys.argv[1 + empty :]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    if sys.path[0] != os.getcwd():
        sys.path.insert(1, os.getcwd())
    os.environ.setdefault("TASK_QUEUE_ENABLE", "2")
    import torch
    import torch_npu  # noqa: F401  torch 2.1 does not load it by itself

    if empty:
        load_without_values()
    steps = record_steps(torch)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(output).write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")


def record_steps(torch) -> list[dict]:
    """A list that gets, at the end of each optimizer step, what was asked since the end of the one before.

    The first entry holds the start of the program too. `peak_bytes`: most memory that torch_npu's allocator had given out.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tests.trace_cann import counters

    steps, before, since = [], None, time.perf_counter()

    def step_done(*_) -> None:
        nonlocal before, since
        now = counters.read()
        counted = counters.difference(now, before or {name: {} if name == "launches" else 0 for name in now})
        steps.append(
            {
                **counters.summary(counted),
                "peak_bytes": torch.npu.max_memory_allocated(),
                "host_s": time.perf_counter() - since,
                "counted": counted,
            }
        )
        torch.npu.reset_peak_memory_stats()
        before, since = counters.read(), time.perf_counter()

    register_optimizer_step_post_hook(step_done)
    return steps


def load_without_values() -> None:
    """Makes `AutoModelForCausalLM.from_pretrained` build the model of a config.json with memory that nobody has written to.

    Memory is reserved and hardly touched, so that a model fits that is larger than the machine.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    def from_pretrained(name_or_path, *_, config=None, output_loading_info=False, **arguments):
        dtype = arguments.get("dtype", arguments.get("torch_dtype"))
        kept = {name: arguments[name] for name in ("attn_implementation", "dtype", "torch_dtype") if name in arguments}
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config or AutoConfig.from_pretrained(name_or_path), **kept)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model = model.to(dtype).to_empty(device="npu:0")
        for name, value in buffers.items():  # computed from the config, in float32
            holder, _, last = name.rpartition(".")
            model.get_submodule(holder).register_buffer(last, value.to("npu:0"), persistent=False)
        model.tie_weights()
        report = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return (model.eval(), report) if output_loading_info else model.eval()

    AutoModelForCausalLM.from_pretrained = from_pretrained
    assert torch.npu.device_count() == 1


if __name__ == "__main__":
    main()
