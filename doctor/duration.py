"""Seconds of a training step, estimated from the card's figures, the launches that were counted, and stated assumptions.

A roofline with the host beside it (Williams et al. 2009): the card computes or reads weights, whichever takes longer, while
the host launches operators; the slower of card and host decides, and what the cards exchange comes on top.
"""

from dataclasses import dataclass

from sft.speed import find_card, flop_per_token

# Share of the peak that products reach. Published: 4,269 tokens/s on one card of this generation for LoRA of Llama-2-7B on
# rows of 2,048 tokens, 37 % of 313 TFLOP/s.
EFFICIENCY = 0.37
LAUNCH_S = 7.5e-6  # of the host for one operator; 5 to 10 µs are usual (torch_npu with TASK_QUEUE_ENABLE=2)
# Counted by `python benchmarks/npu_launches.py`: of a forward and backward with its layers, and of the rest of a step.
LAUNCHES_PER_LAYER = 101
LAUNCHES_PER_FORWARD = 60
LAUNCHES_PER_STEP = 60


@dataclass(frozen=True)
class Work:
    """What one rank does in an optimizer step."""

    forwards: int  # micro-batches
    tokens: int  # over all of them
    layers: int
    weights: int  # that a token is multiplied with: all but the input embeddings
    weight_bytes: int  # of the base as this rank reads it
    adapter_bytes: int  # gradients that are exchanged, fp32
    recompute: bool
    world_size: int
    shards: int  # ranks that FSDP divides over; 1: DDP


def estimate_step(work: Work, device_name: str) -> dict:
    """Seconds of a step by part, their combination as step_s, tokens_per_s over all ranks, and what limits it.

    Raises: KeyError when the card is not listed in sft/cards.json.
    """
    card = find_card(device_name)
    if card is None:
        raise KeyError(device_name)
    passes = 3 if work.recompute else 2  # forward, backward, and the forward again
    launches = (
        work.forwards * (LAUNCHES_PER_FORWARD + LAUNCHES_PER_LAYER * work.layers * passes // 2) + LAUNCHES_PER_STEP
    )
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
