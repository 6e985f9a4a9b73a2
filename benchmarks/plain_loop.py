"""LoRA fine-tuning as most people would write it with transformers and PEFT: what benchmarks/npu_launches.py compares with.

    python benchmarks/plain_loop.py MODEL DATASET STEPS ROWS_AT_ONCE

Each step trains all rows of the data set, ROWS_AT_ONCE in a padded batch, and accumulates their gradients.
"""

import sys

import torch
from accelerate import Accelerator
from datasets import load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main() -> None:
    model_dir, dataset_dir, steps, at_once = sys.argv[1:]
    rows, at_once = load_from_disk(f"{dataset_dir}/train").with_format("torch"), int(at_once)
    accelerator = Accelerator(gradient_accumulation_steps=len(rows) // at_once)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, attn_implementation="sdpa")
    base.config.use_cache = False
    adapter = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    loader = torch.utils.data.DataLoader(rows, batch_size=at_once, collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(int(steps)):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(loss.item())


def pad(rows: list[dict]) -> dict:
    """input_ids, attention_mask and labels, (rows, longest), as transformers' collators give them."""
    padded = torch.nn.utils.rnn.pad_sequence
    ids, labels = [row["input_ids"].long() for row in rows], [row["labels"].long() for row in rows]
    return {
        "input_ids": padded(ids, batch_first=True),
        "attention_mask": padded([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": padded(labels, batch_first=True, padding_value=-100),
    }


if __name__ == "__main__":
    main()
