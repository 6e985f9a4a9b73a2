"""Memory per card of a training run, from the model's config alone: nothing is loaded, no network is needed.

The model is built on the meta device, which gives exact weight counts; activations are counted from the tensors that
autograd keeps for backward in the training step of this project (packed rows, fused attention, frozen base, LoRA).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from doctor.machine import GIB, knowledge
from sft import modeling, schemas
from sft.artifacts import read_json
from sft.config import TrainConfig, parse, read_yaml
from sft.errors import UserError

# Held outside torch's allocator, where no config tells it: two HCCL buffers of HCCL_BUFFSIZE = 200 MB (HCCL docs), and
# the context with its operator binaries, allocator fragments and workspaces, taken as 1 GiB (an assumption).
OUTSIDE_TORCH_BYTES = 2 * 200 * (1 << 20) + GIB
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configs call their number
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")  # and the MLP that every token goes through
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ASSUMED_TARGET_SHARE = 0.5  # of the tokens that are in the loss, where no data set says it


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


def read_model_config(name: str):
    """The transformers config of a local directory, a config.json, a model known offline, or a hub name."""
    known = knowledge("models")["models"]
    path = Path(name)
    if path.is_file() or (path / "config.json").is_file():
        values = read_json(path if path.is_file() else path / "config.json", schemas.OBJECT)
    elif name in known:
        values = known[name]
    else:
        try:
            return AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise UserError(
                f"the config of {name} cannot be read ({str(error).splitlines()[0]}); give a local directory, a "
                f"config.json, or one of {', '.join(known)}"
            ) from None
    for key in (*SHAPE, "vocab_size"):  # before a class makes lists of that many layers
        if key in values and (wrong := schemas.mismatch(values[key], schemas.SIZE)):
            raise UserError(f"the config of {name}: {key}{wrong.removeprefix('it')}")
    if not isinstance(values.get("model_type"), str):
        raise UserError(f"{path} names no model_type; give the config.json of a model")
    try:
        return AutoConfig.for_model(**{key: value for key, value in values.items() if key != "transformers_version"})
    except Exception as error:  # each model's config checks its values with exceptions of its own
        raise UserError(f"the config of {name} is refused: {(str(error).splitlines() or [''])[0]}; check it") from error


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
    normed_heads: queries and keys go through a norm of their own, which keeps both in fp32. Counting rules: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", section 4, applied to a frozen base.
    """
    hidden, (inner, experts), heads = config.hidden_size, active_width(config), config.num_attention_heads
    query = heads * (getattr(config, "head_dim", None) or hidden // heads)
    size = plan.dtype.itemsize
    inputs = {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden, "o_proj": query, "gate_proj": hidden,
              "up_proj": hidden, "down_proj": inner}  # fmt: skip
    targets = [name for name in plan.target_modules if name in inputs]
    if plan.target_modules == (modeling.ALL_LINEAR,):
        targets = list(inputs)[:4] if experts else list(inputs)  # experts are tensors, no linear layers
    if size == 4 and not plan.autocast:  # no cast, no copy: layers with the same input keep it once
        sources = {
            "q_proj": "attention",
            "k_proj": "attention",
            "v_proj": "attention",
            "gate_proj": "mlp",
            "up_proj": "mlp",
        }
        lora = sum(4 * width for width in {sources.get(name, name): inputs[name] for name in targets}.values())
    else:
        lora = sum((2 if plan.autocast else 4) * inputs[name] for name in targets)
    norms = 2 * 4 * hidden
    attention = 4 * size * query + 4 * heads
    if normed_heads:
        attention += 4 * (query + query // heads * (getattr(config, "num_key_value_heads", None) or heads))
    return norms + attention + 3 * size * inner + size * experts * hidden + lora + 4 * plan.lora_r * len(targets)


def estimate(config, plan: Plan) -> dict[str, int]:
    """Bytes by part at the moment of the highest use, the start of the backward pass.

    Raises: UserError for a model whose layers are not counted here: not of Llama's shape, with experts or without.
    """
    whole, config = config, modeling.text_config(config)
    if not all(getattr(config, name, None) for name in SHAPE):
        raise UserError(f"{config.model_type} is not a model of Llama's shape; the estimate does not count its layers")
    try:
        with torch.device("meta"):  # eager: the default of transformers 4.55 wants torch 2.1.1
            model = AutoModelForCausalLM.from_config(whole, attn_implementation="eager")
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        raise UserError(
            f"no {config.model_type} can be built from the model's config ({error}); check its sizes"
        ) from error
    size, hidden, vocabulary = plan.dtype.itemsize, config.hidden_size, config.vocab_size
    weights = sum(p.numel() for p in model.parameters())
    linears = modeling.language_linears(model)[0]
    adapter = sum(
        plan.lora_r * (model.get_submodule(name).in_features + model.get_submodule(name).out_features)
        for name in linears
        if plan.target_modules == (modeling.ALL_LINEAR,) or name.rsplit(".", 1)[-1] in plan.target_modules
    )
    if not adapter:
        raise UserError(
            f"target_modules {', '.join(plan.target_modules)} are not in {config.model_type}; check the config"
        )
    layers = config.num_hidden_layers
    in_layers = [
        sum(p.numel() for name, p in model.named_parameters() if f".layers.{number}." in name)
        for number in range(layers)
    ]
    layer_weights = sum(in_layers) // layers
    base = size * weights // plan.shards
    if plan.shards > 1:  # the root unit (embedding, head) and two layers are whole while they compute
        base += size * (weights - layers * layer_weights + 2 * max(in_layers))
    normed_heads = any(name.endswith(".q_norm.weight") for name, _ in model.named_parameters())
    layer = kept_bytes_per_token(config, plan, normed_heads) * plan.tokens
    kept = layers * size * hidden * plan.tokens if plan.checkpointing else layers * layer
    # The loss works on fp32 logits in place, beside a copy of them in a 16-bit model's dtype (sft/loss.py). Later
    # backward needs the gradients inside one MLP, and that layer's activations again if they were not kept.
    rows = min(plan.target_tokens, plan.chunk_tokens) if plan.chunk_tokens else plan.target_tokens
    logits = (6 if size == 2 or plan.autocast else 4) * rows * vocabulary
    in_layer = 4 * size * active_width(config)[0] * plan.tokens + (layer if plan.checkpointing else 0)
    return {
        "base weights": base,
        "adapter (fp32)": 4 * adapter // plan.shards,
        "gradients (fp32)": 4 * adapter // plan.shards,
        "Adam (2 × fp32)": 8 * adapter // plan.shards,
        "activations": kept + 4 * hidden * plan.tokens,
        "logits at targets" if logits >= in_layer else "backward of one layer": max(logits, in_layer),
    }


def read_plan(settings: TrainConfig, launch: dict, max_length: int | None) -> tuple[Plan, list[str]]:
    """The plan of a run, and what had to be assumed for it."""
    assumptions = []
    manifest = Path(settings.dataset_dir) / "manifest.json"
    share = ASSUMED_TARGET_SHARE
    if manifest.is_file():
        facts = read_json(manifest, schemas.LENGTHS)
        max_length = max_length or facts["max_length"]
        share = facts["target_tokens"]["train"] / max(facts["tokens"]["train"], 1)
    else:
        max_length = max_length or 512
        assumptions.append(
            f"no data set at {settings.dataset_dir}: rows of {max_length} tokens, {share:.0%} of them targets"
        )
    on_cpu = bool(launch.get("use_cpu")) or launch.get("distributed_type") == "MULTI_CPU"
    precision = str(launch.get("mixed_precision", "no"))
    dtype = settings.dtype if settings.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    sharded = launch.get("distributed_type") == "FSDP" or launch.get("use_fsdp")
    shards = 1
    if sharded:
        sizes = launch.get("parallelism_config") or {}
        replicas = int(sizes.get("parallelism_config_dp_replicate_size") or 1)
        shards = int(launch.get("num_processes", 1)) // replicas  # HSDP: each replica is whole
    recomputes = (launch.get("fsdp_config") or {}).get("fsdp_activation_checkpointing", False)
    tokens = settings.per_device_train_batch_size * max_length
    plan = Plan(
        tokens=tokens, target_tokens=max(1, int(tokens * share)), dtype=getattr(torch, dtype),
        autocast=precision in ("bf16", "fp16"), checkpointing=settings.gradient_checkpointing or bool(sharded and recomputes),
        chunk_tokens=settings.loss_chunk_tokens, lora_r=settings.lora_r, target_modules=tuple(settings.target_modules),
        shards=shards,
    )  # fmt: skip
    return plan, assumptions


def estimate_run(
    train_config: str | None, accelerate_config: str | None, model: str | None, max_length: int | None
) -> dict:
    """The doctor's answer to --estimate: parts, total, what it fits on, and the same run done more thriftily."""
    argv = ["--config", train_config] if train_config else ["--dataset_dir", "(none)", "--output_dir", "(none)"]
    if not train_config and not model:
        raise UserError("--estimate needs --config FILE.yaml or --model_name_or_path")
    settings = parse(TrainConfig, argv + (["--model_name_or_path", model] if model else []))
    launch = read_yaml(accelerate_config) if accelerate_config else {"mixed_precision": "bf16"}
    processes = launch.get("num_processes", 1)
    if not isinstance(processes, int) or processes < 1:
        raise UserError(f"{accelerate_config}: num_processes is {processes}; expected a number from 1 on")
    plan, assumptions = read_plan(settings, launch, max_length)
    config = read_model_config(settings.model_name_or_path)
    parts = estimate(config, plan)
    total = sum(parts.values())
    alternatives = {}
    for label, other in {
        "as configured": plan,
        "with gradient_checkpointing": replace(plan, checkpointing=True),
        "and FSDP over 8 cards": replace(plan, checkpointing=True, shards=8),
    }.items():
        needed = sum(estimate(config, other).values()) + OUTSIDE_TORCH_BYTES
        fits = [card["name"] for card in knowledge("versions")["cards"] if needed <= card["gib"] * GIB]  # usable
        alternatives[label] = {"bytes": needed, "fits": fits}
    lines = [f"{settings.model_name_or_path}: {plan.tokens} tokens a micro-batch, base in {str(plan.dtype)[6:]}"
             + (f", FSDP over {plan.shards}" if plan.shards > 1 else "")
             + (", gradient checkpointing" if plan.checkpointing else ""), ""]  # fmt: skip
    lines += [f"  {name:<22}{value / GIB:8.2f} GiB" for name, value in parts.items()]
    lines += [f"  {'in torch, at peak':<22}{total / GIB:8.2f} GiB   per card",
              f"  {'outside torch':<22}{OUTSIDE_TORCH_BYTES / GIB:8.2f} GiB   HCCL buffers 0.4, context and fragments 1.0 (assumed)", ""]  # fmt: skip
    for label, choice in alternatives.items():
        lines.append(
            f"  {label:<29}{choice['bytes'] / GIB:7.2f} GiB   fits: {', '.join(choice['fits']) or 'no card listed'}"
        )
    lines += [f"  assumed: {text}" for text in assumptions]
    return {"model": settings.model_name_or_path, "parts": parts, "bytes": total, "outside_bytes": OUTSIDE_TORCH_BYTES,
            "alternatives": alternatives, "assumptions": assumptions, "text": "\n".join(lines)}  # fmt: skip
