"""Memory per card of a training run, from the model's config alone: nothing is loaded, no network is needed.

The model is built on the meta device, which gives exact weight counts; activations are counted from the tensors that
autograd keeps for backward in the training step of this project (packed rows, fused attention, frozen base, LoRA).
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from doctor import duration
from doctor.machine import GIB, knowledge
from sft import modeling, schemas
from sft.artifacts import read_json
from sft.batching import resolve_batch_size
from sft.config import TrainConfig, parse, read_yaml
from sft.errors import UserError
from sft.memory import (
    OUTSIDE_TORCH_BYTES,
    Plan,
    activation_bytes,
    active_width,
    adapted,
    logits_bytes,
    tokens_that_fit,
)

CARD, CARD_GIB = "Ascend910B3", 60.9  # that times are estimated for, and what torch may use of it (data/versions.json)

SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ASSUMED_TARGET_SHARE = 0.5  # of the tokens that are in the loss, where no data set says it
ASSUMED_LENGTH = 512  # tokens of a row
HELD = ("base weights", "adapter (fp32)", "gradients (fp32)", "Adam (2 × fp32)")  # parts that no tokens take


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
    size = plan.dtype.itemsize
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
    kept, on_top = activation_bytes(config, plan, normed_heads)
    return {
        "base weights": base,
        "adapter (fp32)": 4 * adapter // plan.shards,
        "gradients (fp32)": 4 * adapter // plan.shards,
        "Adam (2 × fp32)": 8 * adapter // plan.shards,
        "activations": kept,
        "logits at targets" if on_top == logits_bytes(config, plan) else "backward of one layer": on_top,
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
        max_length = max_length or ASSUMED_LENGTH
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
        shards=shards, fused=on_npu(launch) and settings.fused == "auto",
    )  # fmt: skip
    return plan, assumptions


def on_npu(launch: dict) -> bool:
    """Whether a launch config is for Ascend cards; one for FSDP that does not ask for CPUs is taken to be."""
    return not launch.get("use_cpu") and launch.get("distributed_type", "MULTI_NPU") in ("MULTI_NPU", "FSDP")


@dataclass(frozen=True)
class Share:
    """One rank's share of an optimizer step, as train.py lays it out on Ascend cards."""

    tokens: int
    forwards: int
    longest: int  # tokens of a row, at most
    largest: int  # tokens of a micro-batch, the longest row at least
    steps_per_epoch: int | None  # where the data set is there


def read_share(config, plan: Plan, settings: TrainConfig, launch: dict, max_length: int | None, held: int) -> Share:
    """What a card computes in a step on average: rows share a forward as far as a card of CARD_GIB has room.

    plan: of a single per-device batch. held: bytes of weights and optimizer on a card.
    """
    processes = launch.get("num_processes", 1)
    _, global_batch = resolve_batch_size(
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        settings.global_batch_size,
        processes,
    )
    manifest = Path(settings.dataset_dir) / "manifest.json"
    facts = read_json(manifest, schemas.LENGTHS) if manifest.is_file() else {}
    rows = facts.get("rows_written", {}).get("train")
    longest = max_length or facts.get("max_length", ASSUMED_LENGTH)
    row_tokens = min(facts["tokens"]["train"] / rows if rows else longest, longest)
    tokens = round(global_batch / processes * row_tokens)
    limit = settings.micro_batch_tokens or tokens_that_fit(config, plan, int(CARD_GIB * GIB), held)
    limit = plan.tokens if settings.auto_micro_batch else max(limit, longest)
    return Share(
        tokens=tokens, forwards=math.ceil(tokens / limit), longest=longest, largest=max(min(tokens, limit), longest),
        steps_per_epoch=math.ceil(rows / global_batch) if rows else None,
    )  # fmt: skip


def with_tokens(plan: Plan, tokens: int) -> Plan:
    """The plan for another micro-batch, with the same part of it in the loss."""
    return replace(plan, tokens=tokens, target_tokens=max(1, plan.target_tokens * tokens // plan.tokens))


def read_work(config, plan: Plan, share: Share, processes: int, parts: dict) -> duration.Work:
    """What the time of a step is estimated from. parts: `estimate` of the run without shards."""
    text, size = modeling.text_config(config), plan.dtype.itemsize
    table = 0 if config.tie_word_embeddings else text.vocab_size * text.hidden_size  # looked up, not multiplied
    weights = parts["base weights"] // size - table
    return duration.Work(
        forwards=share.forwards, tokens=share.tokens, layers=text.num_hidden_layers,
        adapted_linears=text.num_hidden_layers * len(adapted(plan, experts=0)), weights=weights, weight_bytes=size * weights,
        adapter_bytes=parts["gradients (fp32)"], recompute=plan.checkpointing, world_size=processes, shards=plan.shards,
    )  # fmt: skip


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
    parts, share = estimate(config, plan), None
    if plan.fused:
        held = sum(parts[name] for name in HELD)
        share = read_share(modeling.text_config(config), plan, settings, launch, max_length, held)
        if share.largest != plan.tokens:
            plan = with_tokens(plan, share.largest)
            parts = estimate(config, plan)
            assumptions.append(f"{share.tokens} tokens of a card in a step, which share forwards as on a 64 GB card")
    total = sum(parts.values())
    choices = {
        "as configured": plan,
        "with gradient_checkpointing": replace(plan, checkpointing=True),
        "and FSDP over 8 cards": replace(plan, checkpointing=True, shards=8),
    }
    if share and share.longest < plan.tokens:
        choices[f"with micro_batch_tokens: {share.longest}"] = with_tokens(plan, share.longest)
    alternatives = {}
    for label, other in choices.items():
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
    time = None
    if share and not active_width(modeling.text_config(config))[1]:  # launches of experts are not counted
        whole = parts if plan.shards == 1 else estimate(config, replace(plan, shards=1))
        work = read_work(config, plan, share, processes, whole)
        time = duration.estimate_time(work, CARD, share.steps_per_epoch)
        lines += ["", *duration.describe(time)]
    return {"model": settings.model_name_or_path, "parts": parts, "bytes": total, "outside_bytes": OUTSIDE_TORCH_BYTES,
            "alternatives": alternatives, "assumptions": assumptions, "time": time, "text": "\n".join(lines)}  # fmt: skip
