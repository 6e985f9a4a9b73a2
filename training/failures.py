"""What a run that cannot go on says: which rank, step and rows, what is intact, and what to change."""

import contextlib
import json

import numpy as np
import torch

from sft import device
from sft.artifacts import write_text
from sft.errors import RunFailed
from sft.modeling import plain_name


@contextlib.contextmanager
def explained_memory(run, step: int, rows: list[int]):
    """Turns running out of memory on these rows into a sentence with rank and step. Raises: RunFailed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if torch.are_deterministic_algorithms_enabled() and "deterministic" in str(error):
            raise RunFailed(
                f"deterministic: true, but this model needs an operation that is not: {str(error).splitlines()[0]}; leave "
                f"deterministic out. {run.directory.where_to_go_on()}",
                here_only=True,
            ) from error
        if not device.is_out_of_memory(error):
            raise
        accelerator, plan = run.accelerator, run.plan
        raise RunFailed(
            f"out of memory on rank {accelerator.process_index} ({accelerator.device}) in step {step + 1}, rows "
            f"{rows} of {[int(plan.lengths[row]) for row in rows]} tokens; set gradient_checkpointing: true, or a "
            f"smaller per_device_train_batch_size with global_batch_size: {plan.global_batch_size} (same result), or "
            f"auto_micro_batch: true. {run.directory.where_to_go_on()}. The allocator said: {(str(error).splitlines() or [''])[0]}",
            here_only=True,
        ) from error


@contextlib.contextmanager
def explained_start(accelerator):
    """Turns running out of memory before the first step into a sentence. Raises: RunFailed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not device.is_out_of_memory(error):
            raise
        raise RunFailed(
            f"out of memory on rank {accelerator.process_index} ({accelerator.device}) while the model is loaded and tried "
            "out, before the first step; free the card of other processes, or cut the model over several cards with a "
            "*_fsdp launch config (`python doctor.py --estimate` says how many). The allocator said: "
            f"{(str(error).splitlines() or [''])[0]}",
            here_only=True,
        ) from error


def fail_on_non_finite(run, step: int, ranks: np.ndarray, layout: list[list[list[int]]]) -> None:
    """Ends the run on every rank; the main process first writes the rows concerned to a file.

    ranks: (ranks, 3), the first two columns each rank's Σ nats and gradient norm. Raises: RunFailed.
    """
    train_rows = run.inputs.train_rows
    bad = [rank for rank in range(len(ranks)) if not np.isfinite(ranks[rank, 0])] or list(range(len(ranks)))
    rows = [row for micro_batch in layout for rank in bad for row in micro_batch[rank]]
    path = run.directory.path / f"non_finite_step-{step + 1}.jsonl"
    if run.accelerator.is_main_process:
        lines = [json.dumps({"row": row, **train_rows[row]}, ensure_ascii=False) for row in rows]
        write_text(path, "\n".join(lines) + "\n")
    raise RunFailed(
        f"step {step + 1}: Σ loss per rank is {ranks[:, 0].tolist()}, gradient norm {ranks[0, 1]}; not finite on rank "
        f"{', '.join(map(str, bad))}. The optimizer was not touched. Rows {rows} (ids "
        f"{', '.join(train_rows[row]['id'] for row in rows)}) of {[int(run.plan.lengths[row]) for row in rows]} tokens are "
        f"in {path}. {run.directory.where_to_go_on()}. Look at the rows; "
        + "; ".join(
            damage(run.learner.model)
            or remedies(run.settings, run.directory.provenance["base_dtype"], run.accelerator.mixed_precision)
        )
    )


def damage(model: torch.nn.Module) -> list[str]:
    """What to do about the first frozen weight that is not finite, of those that this rank holds; nothing, if all are."""
    for name, parameter in model.named_parameters():
        weight = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not parameter.requires_grad and not weight.isfinite().all():
            return [f"{plain_name(name)} of the base model holds NaN or inf: copy or download it again"]
    return []


def remedies(settings, base_dtype: str, mixed_precision: str) -> list[str]:
    """What helps against numbers that are not finite. bfloat16 reaches as far as float32, only float16 overflows early."""
    found = ["lower learning_rate"]
    if settings.lora_alpha / settings.lora_r > 100:  # usual are 1 to 4
        found = [f"lower lora_alpha: the update is multiplied by {settings.lora_alpha / settings.lora_r:.3g}", *found]
    if not settings.max_grad_norm:
        found.append("set max_grad_norm: 1.0")
    if base_dtype == "float16":
        found.append("use dtype: bfloat16, or float32 on cards without it")
    elif base_dtype != "float32" or mixed_precision != "no":
        found.append("to rule out rounding, use dtype: float32 with accelerate launch --mixed_precision no")
    return found
