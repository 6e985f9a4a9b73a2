"""The model card of a finished run: README.md beside the adapter, as hubs and colleagues expect it."""


def model_card(settings: dict, provenance: dict, summary: dict) -> str:
    """Markdown with PEFT's front matter: what was trained on what, how it went, how to load it."""
    held_out = ""
    if summary["eval_loss"] is not None:
        start = f"{summary['first_eval_loss']:.4f} → " if summary["first_eval_loss"] != summary["eval_loss"] else ""
        held_out = f"| held-out loss (nats per target token) | {start}{summary['eval_loss']:.4f} |\n"
    simulated = "\n**Made on a simulated Ascend, not on hardware.**\n" if summary["simulated"] else ""
    return f"""---
base_model: {provenance["model_name_or_path"]}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- sft
---

# LoRA adapter for {provenance["model_name_or_path"]}
{simulated}
| | |
|---|---|
| data set | `{settings["dataset_dir"]}` (SHA-256 {provenance["dataset_sha256"]}) |
| LoRA | r {provenance["lora_r"]}, alpha {provenance["lora_alpha"]}, dropout {provenance["lora_dropout"]}, on {", ".join(provenance["target_modules"])} |
| trainable parameters | {summary["trainable_parameters"]:,} of {summary["total_parameters"]:,} |
| optimizer steps | {summary["steps"]} at global batch {summary["global_batch_size"]} ({summary["epochs"]:.2f} epochs) |
| learning rate | {provenance["learning_rate"]}, {provenance["lr_scheduler_type"]}, warm-up {provenance["warmup_ratio"]} |
| training loss (nats per target token) | {summary["first_loss"]:.4f} → {summary["last_loss"]:.4f} |
{held_out}| ran on | {summary["world_size"]} × {summary["device"]}, base weights {provenance["base_dtype"]}, {summary["train_time_s"]:.0f} s |

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{provenance["model_name_or_path"]}")
model = PeftModel.from_pretrained(base, "{settings["output_dir"]}")
```
"""
