"""Seconds of a training step, estimated from the card's figures, the launches that were counted, and stated assumptions.

A roofline with the host beside it (Williams et al. 2009): the card computes or reads weights, whichever takes longer, while
the host launches operators; the slower of card and host decides, and what the cards exchange comes on top.
"""

import math
from dataclasses import dataclass

from sft.speed import find_card, flop_per_token

# Share of the peak that products reach. Published: 4,269 tokens/s on one card of this generation for LoRA of Llama-2-7B on
# rows of 2,048 tokens, 37 % of 313 TFLOP/s.
EFFICIENCY = 0.37
LAUNCH_S = 7.5e-6  # of the host for one operator; assumed, 5 to 10 µs are usual with TASK_QUEUE_ENABLE=2
# Operators of a step with those of training/fused.py, counted on the trace-only CANN (tests/test_npu_launches.py compares):
PER_STEP = 17  # clipping, AdamW, what the ranks tell each other
PER_FORWARD = 30  # embedding, angles, last norm, head and loss, with their backward
PER_LAYER = 47
PER_ADAPTED_LINEAR = 14
ADDED_GRADIENTS = 2  # for each adapted linear, in all forwards of a step but the first
RECOMPUTED = {"forward": 13, "layer": 14, "adapted linear": 6}  # on top, with gradient_checkpointing


@dataclass(frozen=True)
class Work:
    """What one rank does in an optimizer step."""

    forwards: int  # micro-batches
    tokens: int  # over all of them
    layers: int
    adapted_linears: int  # in all layers
    weights: int  # that a token is multiplied with: all but the input embeddings
    weight_bytes: int  # of the base as this rank reads it
    adapter_bytes: int  # gradients that are exchanged, fp32
    recompute: bool
    world_size: int
    shards: int  # ranks that FSDP divides over; 1: DDP


def count_launches(work: Work) -> int:
    """Operators that the host launches in a step; it does not depend on the rows in a forward."""
    forward = PER_FORWARD + PER_LAYER * work.layers + PER_ADAPTED_LINEAR * work.adapted_linears
    if work.recompute:
        forward += RECOMPUTED["forward"] + RECOMPUTED["layer"] * work.layers
        forward += RECOMPUTED["adapted linear"] * work.adapted_linears
    return PER_STEP + work.forwards * forward + (work.forwards - 1) * ADDED_GRADIENTS * work.adapted_linears


def estimate_step(work: Work, device_name: str) -> dict:
    """Seconds of a step by part, their combination as step_s, tokens_per_s over all ranks, and what limits it.

    Raises: KeyError when the card is not listed in sft/cards.json.
    """
    card = find_card(device_name)
    if card is None:
        raise KeyError(device_name)
    passes = 3 if work.recompute else 2  # forward, backward, and the forward again
    launches = count_launches(work)
    seconds = {
        "launches": launches * LAUNCH_S,
        "arithmetic": work.tokens * flop_per_token(work.weights, work.recompute) / (card["bf16_flops"] * EFFICIENCY),
        "weight reading": work.forwards * passes * work.weight_bytes / card["memory_bytes_per_s"],
    }
    # Ring collectives: each card sends 2 (n - 1) / n of an all-reduce's bytes, (n - 1) / n of a gather's.
    exchanged = 2 * (work.world_size - 1) / work.world_size * work.adapter_bytes
    if work.shards > 1:
        exchanged += work.forwards * passes * (work.shards - 1) / work.shards * work.weight_bytes
    exchange = exchanged / card["link_bytes_per_s"]
    limit = max(seconds, key=seconds.get)
    step_s = max(seconds.values()) + exchange
    if exchange > max(seconds.values()):
        limit = "exchange between cards"
    return {
        "card": device_name,
        "parts_s": {**seconds, "exchange between cards": exchange},
        "launches": launches,
        "step_s": step_s,
        "tokens_per_s": work.tokens * work.world_size / step_s,
        "limit": limit,
    }


def estimate_time(work: Work, device_name: str, steps_per_epoch: int | None) -> dict:
    """`estimate_step` and seconds of an epoch (None where the number of rows is not known), with all that is assumed."""
    found = estimate_step(work, device_name)
    assumed = [
        f"{work.tokens} tokens of a card in a step, in {work.forwards} forward{'s' if work.forwards > 1 else ''}",
        f"{LAUNCH_S * 1e6:.1f} µs of the host per launch",
        f"products reach {EFFICIENCY:.0%} of the card's peak, as published for Llama-2-7B on rows of 2,048 tokens",
        "card and host work at the same time, the exchange after both",
    ]
    if work.world_size > 1:
        assumed.append("all cards are joined as those of one server are")
    if work.shards > 1:
        assumed.append("what FSDP launches besides is not counted, and nothing of its exchange is hidden")
    epoch_s = None if steps_per_epoch is None else steps_per_epoch * found["step_s"]
    return {
        **found,
        "epoch_s": epoch_s,
        "steps_per_epoch": steps_per_epoch,
        "forwards": work.forwards,
        "assumptions": assumed,
    }


def describe(time: dict) -> list[str]:
    """The estimate in lines for a terminal."""
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time["parts_s"].items() if seconds)
    epoch = ""
    if time["epoch_s"] is not None:
        epoch = (
            f", {time['epoch_s']:.0f} s an epoch of {time['steps_per_epoch']} steps, evaluation and saving not counted"
        )
    return [
        f"  estimated time on {time['card']}, not measured: {significant(time['step_s'])} s a step{epoch}",
        f"  {time['tokens_per_s']:.0f} tokens/s, limited by {time['limit']} ({parts}; {time['launches']} launches)",
        *(f"  assumed: {text}" for text in time["assumptions"]),
    ]


def significant(seconds: float) -> str:
    """Two digits: more would say that it is known better than it is."""
    return f"{seconds:.{max(0, 1 - math.floor(math.log10(seconds)))}f}"
