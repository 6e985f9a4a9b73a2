"""What a training step keeps in a card's memory beside weights and optimizer, from the model's config alone."""

from dataclasses import dataclass, replace

import torch

from sft import modeling

# Held outside torch's allocator, where no config tells it: two HCCL buffers of HCCL_BUFFSIZE = 200 MB (HCCL docs), and
# the context with its operator binaries, allocator fragments and workspaces, taken as 1 GiB (an assumption).
OUTSIDE_TORCH_BYTES = 2 * 200 * (1 << 20) + (1 << 30)
LARGEST = 8192  # tokens; the products of a larger micro-batch are no faster
STEP = 256  # so that the tokens do not hang on a few bytes
MARGIN = 0.15  # of the card's memory stays free: the estimate's own error, fragments
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configs call their number
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a layer of Llama's shape
SOURCES = {  # those that have their input in common
    "q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"
}  # fmt: skip
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")  # and the MLP that every token goes through


@dataclass(frozen=True)
class Plan:
    """What decides memory besides the model."""

    tokens: int  # of one micro-batch
    target_tokens: int  # of them in the loss
    dtype: torch.dtype  # of the frozen base
    autocast: bool  # mixed_precision of the launch config: LoRA's products in two bytes
    checkpointing: bool
    chunk_tokens: int  # target tokens whose logits are in memory at once; 0: all
    lora_r: int
    target_modules: tuple[str, ...]
    shards: int = 1  # ranks that FSDP divides over; 1: DDP or a single card
    fused: bool = False  # computed by the operators of an Ascend card (sft/fused.py)


def active_width(config) -> tuple[int, int]:
    """(width of the MLP that one token goes through, how many experts that is), with those that every token shares."""
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if not experts or not any(getattr(config, name, None) for name in EXPERTS):
        return config.intermediate_size, 0
    each = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = (getattr(config, "n_shared_experts", None) or 0) * each
    shared += next((getattr(config, name, None) or 0 for name in SHARED if hasattr(config, name)), 0)
    return experts * each + shared, experts


def kept_bytes_per_token(config, plan: Plan, normed_heads: bool = False) -> int:
    """What one decoder layer keeps for backward, per token.

    Frozen linear layers keep nothing (their input is only needed for the gradient of the weight). RMSNorm keeps its
    input in fp32; attention q, k, v (k and v repeated to all heads) and its output; SwiGLU gate, up and silu(gate);
    each LoRA its input. A mixture of experts keeps that of the experts that a token goes through, and their outputs.
    normed_heads: queries and keys go through a norm of their own, which keeps both in fp32. Counting rules: Korthikanti
    et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, applied to a frozen base.
    """
    hidden, (inner, experts), heads = config.hidden_size, active_width(config), config.num_attention_heads
    query = heads * (getattr(config, "head_dim", None) or hidden // heads)
    keys = query // heads * (getattr(config, "num_key_value_heads", None) or heads)
    size, targets = plan.dtype.itemsize, adapted(plan, experts)
    products = 4 * plan.lora_r * len(targets) + size * experts * hidden
    if plan.fused:
        return products + fused_bytes_per_token(
            plan, targets, (hidden, inner, query, keys, heads), experts, normed_heads
        )
    inputs = {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden, "o_proj": query, "gate_proj": hidden,
              "up_proj": hidden, "down_proj": inner}  # fmt: skip
    if size == 4 and not plan.autocast:  # no cast, no copy: layers with the same input keep it once
        lora = sum(4 * width for width in {SOURCES.get(name, name): inputs[name] for name in targets}.values())
    else:
        lora = sum((2 if plan.autocast else 4) * inputs[name] for name in targets)
    norms = 2 * 4 * hidden + (4 * (query + keys) if normed_heads else 0)
    attention = 4 * size * query + 4 * heads
    return products + norms + attention + 3 * size * inner + lora


def adapted(plan: Plan, experts: int) -> list[str]:
    """Names of a layer's linear layers that carry the adapter."""
    if plan.target_modules == (modeling.ALL_LINEAR,):
        return list(LINEARS)[:4] if experts else list(LINEARS)  # experts are tensors, no linear layers
    return [name for name in plan.target_modules if name in LINEARS]


def fused_bytes_per_token(plan: Plan, targets: list[str], shape: tuple, experts: int, normed_heads: bool) -> int:
    """The same for a layer as an Ascend card computes it, without what LoRA's own products keep.

    RMSNorm keeps its input as it is and a root; rotary angles query and key before, attention both after, the value, its
    output, and 2 × 8 fp32 statistics per head; SwiGLU gate and up in one tensor. Layers with the same input keep it
    once, the attention's output serves o_proj (op-plugin's derivatives, seen by torch's saved_tensors_hooks).
    """
    size, (hidden, inner, query, keys, heads) = plan.dtype.itemsize, shape
    norms = 2 * (size * hidden + 4) + (size * (query + keys) if normed_heads else 0)
    attention = size * (3 * query + 3 * keys) + 64 * heads
    widths = {"attention": hidden, "mlp": hidden, "down_proj": inner}  # o_proj's input is kept in any case
    lora = size * sum(widths[source] for source in {SOURCES.get(name, name) for name in targets} if source in widths)
    return norms + attention + (3 if experts else 2) * size * inner + lora


def activation_bytes(config, plan: Plan, normed_heads: bool = False) -> tuple[int, int]:
    """(kept from forward to backward, the most on top of it at one moment), in bytes for one micro-batch.

    On top come the logits of a chunk of targets, or later the gradients inside one MLP, with that layer's activations
    once more if they were not kept.
    """
    size, layers = plan.dtype.itemsize, config.num_hidden_layers
    layer = kept_bytes_per_token(config, plan, normed_heads) * plan.tokens
    kept = layers * size * config.hidden_size * plan.tokens if plan.checkpointing else layers * layer
    gradients = 3 if plan.fused else 4  # of the MLP's inner width
    in_layer = gradients * size * active_width(config)[0] * plan.tokens + (layer if plan.checkpointing else 0)
    return kept + 4 * config.hidden_size * plan.tokens, max(logits_bytes(config, plan), in_layer)


def logits_bytes(config, plan: Plan) -> int:
    """The logits of a chunk of targets: the loss works on them in fp32 and in place, beside a copy in a 16-bit model's
    dtype (sft/loss.py)."""
    rows = min(plan.target_tokens, plan.chunk_tokens) if plan.chunk_tokens else plan.target_tokens
    return (6 if plan.dtype.itemsize == 2 or plan.autocast else 4) * rows * config.vocab_size


def tokens_that_fit(config, plan: Plan, memory_bytes: int, held_bytes: int) -> int:
    """Tokens of a micro-batch, all of them targets, whose activations fit into a card beside `held_bytes` in torch; 0: none."""
    room = (1 - MARGIN) * memory_bytes - OUTSIDE_TORCH_BYTES - held_bytes

    def needed(tokens: int) -> int:
        return sum(activation_bytes(config, replace(plan, tokens=tokens, target_tokens=tokens)))

    return max((tokens for tokens in range(STEP, LARGEST + 1, STEP) if needed(tokens) <= room), default=0)
