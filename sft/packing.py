"""May this model's rows share a forward? Asked of the loaded model itself: layers that mix tokens without attention
(convolutions, state spaces, linear attention) see across the rows of a packed micro-batch, and no list names them all."""

from functools import partial

import numpy as np
import torch
from accelerate.utils import send_to_device

from sft import device
from sft.batching import collate
from sft.errors import UserError
from sft.modeling import generation_attention, text_config

PROBE_TOKENS = 32
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def choose_forward(model: torch.nn.Module, accelerator, rows) -> None:
    """Decides how `model` computes from now on: rows packed; or, where that differs from a row alone on the real weights,
    one row per forward, by the given attention or by one of transformers' own, whichever is right.

    model: a `TargetLoss`, prepared or not. rows: those that it will see; the last tokens of the first are the probe.
    A collective: every rank computes the same, and one all-reduce makes them agree.
    Raises: UserError when the model's loss is not finite, or when a row has more tokens than it has positions.
    """
    loss = accelerator.unwrap_model(model)
    longest = int(np.max(rows["length"]))
    check_positions(loss.causal.config, longest)
    was_training = model.training
    model.eval()
    probe = [int(token) for token in rows[0]["input_ids"]][-PROBE_TOKENS:]
    chosen, own = loss.causal.config._attn_implementation, generation_attention()
    nll = partial(nll_of_last, model, accelerator)
    expected, by_own, by_chosen = nll("eager", probe), nll(own, probe), nll(chosen, probe)
    # The neighbour is the same tokens in another order; nothing but rounding may tell the two neighbours apart.
    backwards, forwards = nll(chosen, probe[::-1], probe), nll(chosen, probe, probe)
    gaps = {
        "packed": max(distance(backwards, forwards), distance(forwards, expected)),
        "chosen": distance(by_chosen, expected),
        "own": distance(by_own, expected),
        "eager": distance(expected, expected),
    }
    if changes_with_length(loss.causal.config, longest):
        gaps["packed"] = gaps["chosen"] = float("inf")
    dtypes = [next(model.parameters()).dtype, MIXED.get(accelerator.mixed_precision, torch.float32)]
    allowed = tolerance(gaps["own"], dtypes)
    failed = torch.tensor([float(not gap <= allowed) for gap in gaps.values()], device=accelerator.device)
    wrong = dict(zip(gaps, (accelerator.reduce(failed, reduction="sum") > 0).tolist()))
    if wrong["eager"]:
        raise UserError(
            f"the loss of a row is not finite before any training{f' ({expected})' if isinstance(expected, str) else ''}: the base "
            "model or the adapter holds NaN or inf, or numbers too large for its dtype; copy it again, or use dtype: float32"
        )
    loss.packs, loss.sharded = not wrong["packed"], device.is_sharded(accelerator)
    attention = chosen if loss.packs or not wrong["chosen"] else own if not wrong["own"] else "eager"
    loss.causal.set_attn_implementation(attention)
    model.train(was_training)
    if wrong["packed"]:
        why = forwards if isinstance(forwards, str) else f"{gaps['packed']:.1g} nats per token from the same rows alone"
        accelerator.print(
            f"Rows of {loss.causal.config.model_type} are not packed ({why}): one row per forward, attention {attention}."
        )


def nll_of_last(model, accelerator, attention: str, *rows: list[int]) -> torch.Tensor | str:
    """Nats of the last row's tokens but the first, (n − 1,) float32 on the CPU, with all rows in one forward; or the
    reason why the model cannot compute them."""
    loss = accelerator.unwrap_model(model)
    loss.packs = len(rows) > 1
    batch = collate([{"input_ids": np.array(row), "labels": np.array(row)} for row in rows])
    try:
        loss.causal.set_attn_implementation(attention)
        return model(**send_to_device(batch, accelerator.device))[1 - len(rows[-1]) :].float().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        if device.is_out_of_memory(error):
            raise
        return str(error).strip().splitlines()[0]


def distance(one: torch.Tensor | str, other: torch.Tensor | str) -> float:
    """The largest difference, in nats; infinite when one of the two could not be computed."""
    return float("inf") if isinstance(one, str) or isinstance(other, str) else float((one - other).abs().max())


def tolerance(rounding: float, dtypes: list[torch.dtype]) -> float:
    """How far apart, in nats, two ways to compute the same may be, when two attentions of transformers, which differ by
    rounding alone, were `rounding` apart: four times that, at least 4 and at most 64 units in the last place of the
    coarsest dtype (bf16: 0.03 and 0.5), in float32 at least 1e-4 and at most 1e-3, as sums of many terms need."""
    unit = max(torch.finfo(dtype).eps for dtype in dtypes)
    return min(max(4 * rounding, 4 * unit, 1e-4), max(64 * unit, 1e-3))


def changes_with_length(config, longest: int) -> bool:
    """Whether a row of that many tokens meets what the probe's short rows do not: attention in chunks, or angles that
    depend on the longest row of the batch (longrope, dynamic)."""
    text = text_config(config)
    limits = [getattr(text, "attention_chunk_size", None)]
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for angles in (
        rope,
        *(value for value in rope.values() if isinstance(value, dict)),
    ):  # one kind, or one per kind of layer
        if angles.get("rope_type", angles.get("type")) in ("longrope", "dynamic"):
            limits.append(angles.get("original_max_position_embeddings") or text.max_position_embeddings)
    return any(limit and longest > limit for limit in limits)


def check_positions(config, longest: int) -> None:
    """Refuses rows that are longer than the model was made for, with what its rope scaling adds. Raises: UserError."""
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    positions = getattr(text, "max_position_embeddings", None) or longest
    stretched = (rope.get("original_max_position_embeddings") or positions) * (rope.get("factor") or 1)
    if longest > max(positions, stretched):
        raise UserError(
            f"the longest row has {longest} tokens, and {text.model_type} has {positions} positions "
            f"(max_position_embeddings); make the data set with --max_length {positions}"
        )
