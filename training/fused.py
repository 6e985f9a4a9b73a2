"""Parts of a model computed by one operator of the card instead of several, or without what training does not need.

Each is chosen by the kind of module, never by a model's name; compared at start, on real weights, with what it replaces;
and left out, with a sentence, where the two differ by more than the stated tolerance.
"""

import copy
import functools
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sft import attention, device
from sft.batching import collate

# Largest difference from the module that is replaced, in output and gradient, as a share of the largest number there: some
# roundings of the dtype (2⁻²⁴, 2⁻⁸ and 2⁻¹¹ each), as the same terms are added up in another order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
PROBE_ROWS = (5, 1, 23, 8)  # tokens of the rows on which they are compared


def use_fused_operators(model: nn.Module, accelerator) -> list[str]:
    """Replaces what the card has one operator for, in place; returns a line for the log per kind of module.

    model: a `TargetLoss`, prepared or not. Weights must be there, whole or sharded (then call it on every rank).
    """
    lines, card = [], accelerator.device
    if accelerator.mixed_precision in ("bf16", "fp16"):
        for module in model.modules():  # else x is cast to the adapter's fp32, and by autocast back again
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    if device.has_varlen_attention(card):
        lines.append(choose_attention(model, attention.varlen_attention))
    if device.has_fused_operators(card):
        lines.append(choose_attention(model, attention.fusion_attention))
        lines.append(replace_forward(model, "RMSNorm", is_rms_norm, [rms_norm, rms_norm_plus_one]))
        lines.append(replace_forward(model, "SwiGLU", is_swiglu, [swiglu]))
        lines.append(replace_rotary(model, card))
        lines.append(replace_forward(model, "linear", lambda module: type(module) is nn.Linear, [linear]))
    return [line for line in lines if line]


# ---- the replacements -----------------------------------------------------------------------------------------------


def rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    """npu_rms_norm in place of a square, a mean, a root and two products (torch_npu docs)."""
    import torch_npu

    if x.dtype != module.weight.dtype:
        return type(module).forward(module, x)
    return torch_npu.npu_rms_norm(x, module.weight, epsilon(module))[0]


def rms_norm_plus_one(module: nn.Module, x: Tensor) -> Tensor:
    """The same for norms that scale by 1 + weight (Gemma)."""
    import torch_npu

    if x.dtype != module.weight.dtype:
        return type(module).forward(module, x)
    return torch_npu.npu_rms_norm(x, 1 + module.weight, epsilon(module))[0]


def is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__ and weight is not None and weight.dim() == 1 and epsilon(module) is not None
    )


def epsilon(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def swiglu(module: nn.Module, x: Tensor) -> Tensor:
    """npu_swiglu in place of silu and a product: silu(first half) · second half (torch_npu docs)."""
    import torch_npu

    if hasattr(module, "gate_up_proj"):
        both = module.gate_up_proj(x)
    else:
        both = torch.cat([module.gate_proj(x), module.up_proj(x)], dim=-1)
    return module.down_proj(torch_npu.npu_swiglu(both, dim=-1))


def is_swiglu(module: nn.Module) -> bool:
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    names = {name for name, _ in module.named_children()}
    gated = {"gate_proj", "up_proj", "down_proj"} <= names or {"gate_up_proj", "down_proj"} <= names
    return gated and type(activation).__name__ in ("SiLU", "SiLUActivation")


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """A plain matrix product, of which autograd keeps no input where the weight is frozen: torch_npu's formula for linear
    keeps both operands (op-plugin, MatmulKernelNpu), 3.5 kB per token of a 7B model's layer for each."""
    rows, weight = x.reshape(-1, x.shape[-1]), module.weight.t()
    y = torch.mm(rows, weight) if module.bias is None else torch.addmm(module.bias, rows, weight)
    return y.view(*x.shape[:-1], y.shape[-1])


def rotary(original: Callable, card_type: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest, **named):
    """npu_rotary_mul, which turns halves (torch_npu docs), for q (B, heads, T, d) and k with cos and sin (B, T, d).

    It works on (B, T, heads, d), the layout in which the projections leave q and k and the attention takes them.
    """
    import torch_npu

    fits = q.device.type == card_type and q.dtype == cos.dtype and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
    if rest or named or not fits:
        return original(q, k, cos, sin, *rest, **named)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    q, k = (torch_npu.npu_rotary_mul(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    return q, k


# ---- putting them in, and comparing -----------------------------------------------------------------------------------


def replace_forward(model: nn.Module, kind: str, applies: Callable, candidates: list[Callable]) -> str:
    """Gives each module of a kind the first candidate that agrees with its own forward. Returns the line for the log.

    Modules of the same class and shapes are compared once.
    """
    groups = {}
    for module in model.modules():
        if applies(module):
            shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
            groups.setdefault((type(module), shapes), []).append(module)
    replaced, worst, refused = 0, 0.0, []
    for modules in groups.values():
        probe = whole_copy(modules[0])
        x = probe_input(probe)
        differences = {
            candidate: difference(probe.forward, functools.partial(candidate, probe), x) for candidate in candidates
        }
        best = min(differences, key=differences.get)
        if differences[best] > TOLERANCE[x.dtype]:
            refused.append(f"{type(modules[0]).__name__} differs by {differences[best]:.1e}")
            continue
        worst = max(worst, differences[best])
        for module in modules:
            module.forward = functools.partial(best, module)
        replaced += len(modules)
    off = f"; left as it is: {', '.join(refused)}, more than {TOLERANCE[x.dtype]:.1e}" if refused else ""
    return f"{kind}: {replaced} modules, differing by {worst:.1e} at most{off}" if groups else ""


def choose_attention(model: nn.Module, fused: Callable) -> str:
    """Has every attention layer compute all rows in one call when that agrees with a call per row."""
    layers = attention_layers(model)
    if not layers or layers[0].config._attn_implementation != "packed_sdpa":
        return ""
    config, d = layers[0].config, layers[0].head_dim
    parameter = next(layers[0].parameters())
    card, dtype = local(parameter).device, parameter.dtype
    batch = collate([{"input_ids": [0] * n, "labels": [0] * n} for n in PROBE_ROWS])
    ends, total = batch["cu_seq_lens"].to(card), sum(PROBE_ROWS)
    q = seeded((1, config.num_attention_heads, total, d), card, dtype)
    k, v = seeded((2, config.num_attention_heads // layers[0].num_key_value_groups, total, d), card, dtype).split(1)
    windows = {None, *(4 for layer in layers if getattr(layer, "sliding_window", None))}
    worst = max(
        difference(
            functools.partial(attention.sdpa_by_row, key=k, value=v, lengths=PROBE_ROWS, window=window, scaling=None),
            functools.partial(fused, key=k, value=v, lengths=PROBE_ROWS, window=window, scaling=None, cu_seq_lens=ends),
            q,
        )
        for window in windows
    )
    if worst > TOLERANCE[dtype]:
        return f"attention: a call per row, as one for all differs by {worst:.1e}, more than {TOLERANCE[dtype]:.1e}"
    for layer in layers:
        layer.fused_attention = fused
    return f"attention: one call for all rows in {len(layers)} layers, differing by {worst:.1e}"


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Modules with the two numbers that all attention layers of transformers have."""
    return [
        module for module in model.modules() if hasattr(module, "num_key_value_groups") and hasattr(module, "head_dim")
    ]


def replace_rotary(model: nn.Module, card: torch.device) -> str:
    """Puts `rotary` in the place of apply_rotary_pos_emb in the file that the attention layers come from."""
    layers = attention_layers(model)
    files = (
        [sys.modules[cls.__module__] for cls in type(layers[0]).__mro__ if cls.__module__ in sys.modules]
        if layers
        else []
    )
    file = next((file for file in files if hasattr(file, "apply_rotary_pos_emb")), None)
    angles = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if file is None or not angles:
        return ""
    original = getattr(file.apply_rotary_pos_emb, "replaced", file.apply_rotary_pos_emb)
    dtype = next(layers[0].parameters()).dtype
    q = seeded((1, 11, 3, layers[0].head_dim), card, dtype).transpose(1, 2)
    cos, sin = angles[0](q, torch.arange(11, device=card)[None])
    fused = functools.partial(rotary, original, card.type)
    found = difference(lambda x: original(x, x, cos, sin)[1], lambda x: fused(x, x, cos, sin)[1], q)
    if found > TOLERANCE[dtype]:
        return f"rotary: as it is, as the fused operator differs by {found:.1e}, more than {TOLERANCE[dtype]:.1e}"
    fused.replaced = original
    file.apply_rotary_pos_emb = fused
    return f"rotary: differing by {found:.1e}"


def difference(original: Callable, fused: Callable, x: Tensor) -> float:
    """Largest difference of output and of the gradient by x, as a share of the largest number of each.

    Infinite when the card refuses the operator.
    """
    expected = result_and_gradient(original, x)
    try:
        found = result_and_gradient(fused, x)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:  # torch_npu 2.1 raises IndexError ("map::at")
        if device.is_out_of_memory(error):
            raise
        return math.inf
    pairs = zip(expected, found)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


def result_and_gradient(function: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a function gives for x, and its gradient by x, float32 on the CPU."""
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf)
    slope = seeded(y.shape, y.device, y.dtype, seed=1)  # along x itself a norm has no slope
    (gradient,) = torch.autograd.grad(y, leaf, slope)
    return y.detach().float().cpu(), gradient.float().cpu()


def whole_copy(module: nn.Module) -> nn.Module:
    """The module with its own weights, gathered where they are sharded. The copy shares whatever is whole."""
    memo = {}
    for parameter in module.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        memo[id(parameter)] = nn.Parameter(whole.detach(), requires_grad=False)
    return copy.deepcopy(module, memo)


def probe_input(module: nn.Module) -> Tensor:
    """Random numbers of the shape that a module takes, (1, tokens, width)."""
    parameter = next(module.parameters())
    return seeded((1, sum(PROBE_ROWS), parameter.shape[-1]), parameter.device, parameter.dtype)


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def seeded(shape: tuple[int, ...], card: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, the same at each call, drawn on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(card, dtype)
