"""How many tokens every rank computes at once: as a setting says, as its card's memory allows, or as trying shows."""

from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device

from sft import device, memory, modeling
from sft.batching import BatchPlan, collate
from sft.errors import RunFailed, UserError

SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")  # that the estimate needs


def choose(plan: BatchPlan, model: torch.nn.Module, train_rows, settings, accelerator) -> BatchPlan:
    """The plan with as many tokens to a micro-batch as fit; global batch, rows per step and results stay.

    model: a `TargetLoss` with its weights, prepared. Call it on every rank.
    """
    if settings.auto_micro_batch:
        return fit(plan, model, train_rows, accelerator)
    limit = settings.micro_batch_tokens or tokens_that_fit(model, settings, accelerator)
    plan = replace(plan, micro_batch_limit=limit)
    accelerator.print(f"Up to {plan.micro_batch_tokens} tokens at once on each rank.")
    return plan


def tokens_that_fit(model: torch.nn.Module, settings, accelerator) -> int:
    """Tokens of a micro-batch whose activations fit beside the weights into the smallest rank's card, by the estimate.

    The same for the same settings and cards. 0 where nothing is gained or known: on the CPU, for rows that are not
    packed, and for layers that the estimate does not count. One object collective.
    """
    loss = accelerator.unwrap_model(model)
    config = modeling.text_config(loss.causal.config)
    counted = all(getattr(config, name, None) for name in SHAPE)
    if accelerator.device.type == "cpu" or not loss.packs or not counted:
        return 0
    parameters = list(model.parameters())
    held = sum(local.numel() * local.element_size() for local in map(modeling.local_part, parameters))
    held += sum(3 * 4 * modeling.local_part(p).numel() for p in parameters if p.requires_grad)  # gradient, two moments
    if device.is_sharded(accelerator):  # what is gathered while it computes: embedding, head, two layers
        whole = sum(p.numel() for p in parameters)
        outer = {loss.causal.get_input_embeddings().weight, loss.causal.get_output_embeddings().weight}
        outside = sum(p.numel() for p in outer)
        held += parameters[0].element_size() * (outside + 2 * (whole - outside) // config.num_hidden_layers)
    frozen = next(p for p in parameters if not p.requires_grad)
    bounded = config.model_type in modeling.PLAIN_HEAD  # other models' logits are computed all at once
    plan = memory.Plan(
        tokens=0, target_tokens=0, dtype=frozen.dtype, autocast=accelerator.mixed_precision != "no",
        checkpointing=settings.gradient_checkpointing, chunk_tokens=settings.loss_chunk_tokens if bounded else 0,
        lora_r=settings.lora_r, target_modules=tuple(settings.target_modules),
        fused=settings.fused == "auto" and device.has_fused_operators(accelerator.device),
    )  # fmt: skip
    mine = memory.tokens_that_fit(config, plan, device.memory_bytes(accelerator.device), held)
    return min(gather_object([mine]))


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
