"""LoRA on a tiny Qwen2 under Accelerate, against the same on one CPU process: `accelerate launch … finetune.py FILE`.

The main process writes what it saw to FILE as JSON.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

STEPS = 3


def make_model(dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return get_peft_model(Qwen2ForCausalLM(config).to(dtype), lora)


def make_optimizer(model):
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


def batches(ranks):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 512, (ranks, 16), generator=draw) for _ in range(STEPS)]


def step(model, optimizer, rows, backward, clip):
    loss = model(input_ids=rows, labels=rows).loss
    backward(loss)
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().float()


def adapter(model) -> dict:
    return {name: value.detach().float().cpu() for name, value in model.named_parameters() if "lora" in name}


def difference(first: dict, second: dict) -> float:
    return max((first[name] - second[name]).abs().max().item() for name in second)


def train(accelerator, dtype) -> dict:
    model = make_model(dtype)
    reference = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    reference_optimizer = make_optimizer(reference)
    losses, reference_losses = [], []
    for rows in batches(accelerator.num_processes):
        mine = rows[accelerator.process_index :][:1].to(accelerator.device)
        loss = step(model, optimizer, mine, accelerator.backward, accelerator.clip_grad_norm_)
        losses.append(accelerator.reduce(loss, "mean").item())
        backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
        reference_losses.append(step(reference, reference_optimizer, rows, backward, clip).item())
    plain = accelerator.unwrap_model(model)
    prompt = batches(1)[0][:, :4]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    seen = {
        "losses": losses,
        "reference losses": reference_losses,
        "adapter difference": difference(adapter(plain), adapter(reference)),
        "generated": plain.generate(input_ids=prompt.to(accelerator.device), **settings).tolist(),
        "reference generated": reference.generate(input_ids=prompt, **settings).tolist(),
        "peak memory": torch.npu.max_memory_allocated(),
    }
    if dtype == torch.float32:
        seen["restored difference"] = restore(accelerator, model)
    return seen


def restore(accelerator, model) -> float:
    """Difference between an adapter and itself, saved by save_state, spoilt and loaded."""
    directory = [tempfile.mkdtemp()] if accelerator.is_main_process else []
    directory = gather_object(directory)[0]
    before = adapter(accelerator.unwrap_model(model))
    accelerator.save_state(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    accelerator.wait_for_everyone()
    accelerator.load_state(directory)
    return difference(adapter(accelerator.unwrap_model(model)), before)


def main():
    accelerator = Accelerator()
    seen = {
        "devices": gather_object([str(accelerator.device)]),
        "distributed_type": accelerator.distributed_type.value,
        "backend": accelerator.state.backend,
        "float32": train(accelerator, torch.float32),
        "bfloat16": train(accelerator, torch.bfloat16),
    }
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main()
