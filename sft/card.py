"""The model card of a finished run: README.md beside the adapter, as hubs and colleagues expect it."""

from pathlib import Path

from huggingface_hub import ModelCardData


def header(base_model: str, **fields) -> str:
    """The card's YAML front matter. A base on this machine's disk is left out: a hub would take it for a hub name."""
    named = {} if Path(base_model).exists() else {"base_model": base_model}
    return f"---\n{ModelCardData(**named, **fields, ignore_metadata_errors=True).to_yaml()}\n---\n"


def model_card(settings: dict, provenance: dict, summary: dict) -> str:
    """Markdown with PEFT's front matter: what was trained on what, how it went, how to load it."""
    held_out = ""
    if summary["eval_loss"] is not None:
        start = f"{summary['first_eval_loss']:.4f} → " if summary["first_eval_loss"] != summary["eval_loss"] else ""
        held_out = f"| held-out loss (nats per target token) | {start}{summary['eval_loss']:.4f} |\n"
    held_out += f"| this adapter | {_delivered(summary)} |\n"
    simulated = "\n**Made on a simulated Ascend, not on hardware.**\n" if summary["simulated"] else ""
    head = header(
        provenance["model_name_or_path"], library_name="peft", pipeline_tag="text-generation", tags=["lora", "sft"]
    )
    return f"""{head}
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


def _delivered(summary: dict) -> str:
    """Which step's adapter this is, with its held-out loss and that of the other that could have been delivered."""
    delivered, best, last = summary["delivered"], summary["best"], summary["eval_loss"]
    if delivered["step"] != summary["steps"]:
        return (
            f"of step {delivered['step']}, with the lowest held-out loss, {delivered['eval_loss']:.4f} (last step, "
            f"{summary['steps']}: {last:.4f})"
        )
    words = f"of the last step, {delivered['step']}" + (f", held-out loss {last:.4f}" if last is not None else "")
    if best and best["step"] != delivered["step"]:
        words += f" (lowest: {best['eval_loss']:.4f}, of step {best['step']})"
    return words


def merged_card(origin: dict, launch_lines: str) -> str:
    """Markdown for a merged model: what it was made from, how near it is to base + adapter, how to serve it."""
    verified = origin["verified"]
    head = header(
        origin["base_model"], base_model_relation="finetune", library_name="transformers", pipeline_tag="text-generation",
        tags=["sft"],
    )  # fmt: skip
    return f"""{head}
# {origin["base_model"]} with a LoRA adapter merged in

| | |
|---|---|
| base | `{origin["base_model"]}` |
| adapter | SHA-256 {origin["adapter_sha256"]}, r {origin["lora_r"]}, alpha {origin["lora_alpha"]}, on {", ".join(origin["target_modules"])} |
| data set | SHA-256 {origin["dataset_sha256"]} |
| weights | {origin["dtype"]}, {origin["merged_weights"]} of them changed |
| verified | logits of {verified["tokens"]} tokens within {verified["largest_error"]:.1e} of base + adapter, as a share of the largest (allowed {verified["tolerance"]:.0e}); the adapter moves them by up to {verified["largest_change"]:.1e} |

```bash
{launch_lines}
```
"""
