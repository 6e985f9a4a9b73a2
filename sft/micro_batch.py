"""auto_micro_batch: the largest micro-batch that fits into every rank's memory."""

from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import send_to_device

from sft import device
from sft.batching import BatchPlan, collate
from sft.errors import RunFailed, UserError


def fit(plan: BatchPlan, model: torch.nn.Module, train_rows, accelerator) -> BatchPlan:
    """A plan whose largest possible micro-batch fits into memory on every rank; the global batch stays.

    Tries forward and backward on the longest rows and, while any rank runs out of memory, divides the micro-batch and
    multiplies the accumulation. Raises: RunFailed when a single row does not fit.
    """
    if device.is_sharded(accelerator):
        raise UserError(
            "auto_micro_batch does not work with FSDP: the ranks that do not run out of memory would wait for the others' "
            "weights; choose per_device_train_batch_size by hand (`python doctor.py` estimates what fits)"
        )
    while not fits(plan, model, train_rows, accelerator):
        size = plan.per_device_train_batch_size
        smaller = max((n for n in range(1, size) if size % n == 0), default=0)
        if not smaller:
            raise RunFailed(
                f"out of memory with a single row of {int(plan.lengths.max())} tokens; set gradient_checkpointing: true or "
                "make the data set with a smaller --max_length"
            )
        plan = replace(
            plan,
            per_device_train_batch_size=smaller,
            gradient_accumulation_steps=plan.gradient_accumulation_steps * (size // smaller),
        )
        accelerator.print(
            f"Out of memory with {size} rows at once: going on with per_device_train_batch_size {smaller} × accumulation "
            f"{plan.gradient_accumulation_steps}; the global batch stays {plan.global_batch_size}."
        )
    return plan


def fits(plan: BatchPlan, model: torch.nn.Module, train_rows, accelerator) -> bool:
    """Whether every rank gets through forward and backward of the longest rows. One collective."""
    longest = np.argsort(-plan.lengths, kind="stable")[: plan.per_device_train_batch_size]
    batch = send_to_device(collate([train_rows[int(row)] for row in longest]), accelerator.device)
    failed = torch.zeros(1, device=accelerator.device)
    try:
        with accelerator.no_sync(model):
            accelerator.backward(model(**batch).sum())
    except (RuntimeError, MemoryError) as error:
        if not device.is_out_of_memory(error):
            raise
        failed += 1
    model.zero_grad(set_to_none=True)
    return not accelerator.reduce(failed, reduction="sum").item()
