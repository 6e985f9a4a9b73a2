"""Writes what tensor and context parallelism of the installed libraries do with a LoRA model on two CPU ranks.

Started by torchrun. Nothing of the product is used: this asks the libraries, so that a test notices when they change.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

IDS = torch.arange(1, 65)[None]


def load(model_dir: str, **options):
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa", **options
    ).requires_grad_(False)


def add_lora(model, targets: str):
    modules = [f"{name}_proj" for name in targets]
    model = get_peft_model(model, LoraConfig(r=8, target_modules=modules, task_type="CAUSAL_LM"))
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            value = torch.randn(parameter.shape, generator=draw) * 0.05
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)
    return model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(model_dir: str, targets: str, mend: bool = False) -> dict:
    """Largest differences between a tensor-parallel LoRA model and the same in one process; or the error's message."""
    from transformers.distributed import DistributedConfig

    single = add_lora(load(model_dir), targets)
    expected = single(input_ids=IDS).logits
    expected.logsumexp(-1).sum().backward()
    parallel = add_lora(load(model_dir, distributed_config=DistributedConfig(tp_size=2)), targets)
    if mend:  # PEFT counts the columns of one rank where transformers wants those of all
        for name, module in parallel.named_modules():
            if "lora_A" in name and hasattr(module, "in_features"):
                module.in_features = module.weight.shape[1]
    try:
        logits = whole(parallel(input_ids=IDS).logits)
    except RuntimeError as error:
        return {"error": str(error)}
    logits.logsumexp(-1).sum().backward()
    wanted = dict(single.named_parameters())
    differences = [
        ((whole(p.grad) - wanted[name].grad).abs().max() / wanted[name].grad.abs().max()).item()
        for name, p in parallel.named_parameters()
        if p.requires_grad
    ]
    found = {"logits": (logits - expected).abs().max().item(), "gradients": max(differences)}
    try:
        torch.nn.utils.clip_grad_norm_([p for p in parallel.parameters() if p.requires_grad], 1.0)
    except RuntimeError as error:
        found["clipping"] = str(error)
    return found


def context_parallel(model_dir: str) -> dict:
    """Largest difference of logits with the sequence cut over two ranks; or the error's message."""
    expected = load(model_dir)(input_ids=IDS).logits
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False),
    )
    model = load(model_dir).requires_grad_(True)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffers = [IDS.clone(), torch.arange(IDS.shape[1])[None], expected.clone()]
    try:
        with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            logits = model(input_ids=buffers[0], position_ids=buffers[1], use_cache=False).logits
            return {"logits": (logits - buffers[2]).abs().max().item()}
    except (NotImplementedError, RuntimeError) as error:
        return {"error": str(error)}


def main(model_dir: str, output: str) -> None:
    state = PartialState(cpu=True)
    found = {
        "tensor_qkv": compare(model_dir, "qkv"),
        "tensor_qkvo": compare(model_dir, "qkvo"),
        "tensor_qkvo_mended": compare(model_dir, "qkvo", mend=True),
        "context": context_parallel(model_dir),
    }
    if state.is_main_process:
        Path(output).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
