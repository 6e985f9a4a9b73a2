"""Attention over packed rows: each row sees itself alone, whatever stands beside it.

Three ways with one contract, (1, heads, T, d) query, key and value to (1, T, heads, d): a call of torch's attention per
row, which works everywhere, and one call for all rows where a card's libraries have it (`fused.py` chooses and compares).
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

# Longest side of the mask that npu_fusion_attention wants for its causal modes, whatever the length of the rows, and rows
# per call, of which it takes one to two thousand (torch_npu docs, npu_fusion_attention).
MASK_SIDE, ROWS_PER_CALL = 2048, 1000
CAUSAL, BAND = 3, 4  # its sparse_mode


def packed_sdpa(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Causal attention inside each row of a packed micro-batch: (1, heads, T, d) each, output (1, T, heads, d).

    `segment_lengths` (from the batch, through the model's keyword arguments) cuts T into rows. A sliding window shorter
    than a row is a band in that row. As transformers calls it; its `attention_mask` is None.
    """
    lengths = tuple(kwargs.get("segment_lengths") or (query.shape[2],))
    window = kwargs.get("sliding_window")
    window = window if window and window < max(lengths) else None
    fused = module.__dict__.get("fused_attention") if module is not None else None  # set by fused.py
    if fused and not dropout and query.shape[0] == 1:
        return fused(query, key, value, lengths, window, scaling, kwargs.get("cu_seq_lens_q")), None
    return sdpa_by_row(query, key, value, lengths, window, scaling, dropout), None


def sdpa_by_row(query, key, value, lengths, window, scaling, dropout=0.0) -> Tensor:
    """One call of scaled_dot_product_attention per row.

    It never builds the (T, T) mask, and its work grows with Σ length² instead of (Σ length)².
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths, outputs = list(lengths), []
    for q, k, v in zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2)):
        mask = None
        if window and q.shape[2] > window:
            position = torch.arange(q.shape[2], device=q.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        outputs.append(
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def fusion_attention(query, key, value, lengths, window, scaling, cu_seq_lens=None) -> Tensor:
    """One npu_fusion_attention for all rows; key and value with fewer heads as they are.

    Lengths are Python numbers, as a tensor of them would be a wait of the host. The mask must be given: without it
    sparse_mode is ignored and attention is full, without a word (torch_npu docs, npu_fusion_attention).
    """
    import torch_npu

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # One dtype, as torch's attention would have it under autocast: norms and angles of a float32 model give float32.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    outputs, start = [], 0
    for first in range(0, len(lengths), ROWS_PER_CALL):
        ends, total = [], 0
        for length in lengths[first : first + ROWS_PER_CALL]:
            total += length
            ends.append(total)
        part = slice(start, start + total) if len(lengths) > ROWS_PER_CALL else slice(None)
        start += total
        outputs.append(
            torch_npu.npu_fusion_attention(
                q[part], k[part], v[part], query.shape[1], "TND", atten_mask=future(query.device), scale=scaling,
                keep_prob=1.0, actual_seq_qlen=ends, actual_seq_kvlen=ends, sparse_mode=BAND if window else CAUSAL,
                **({"pre_tockens": window - 1, "next_tockens": 0} if window else {}),
            )[0]
        )  # fmt: skip
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


@functools.lru_cache(maxsize=1)
def future(device: torch.device) -> Tensor:
    """(2048, 2048) bool, True where the key comes after the query."""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu_(1)


def varlen_attention(query, key, value, lengths, window, scaling, cu_seq_lens) -> Tensor:
    """One varlen_attn of torch for all rows, FlashAttention's kernel: 16-bit numbers only, others go row by row."""
    from torch.nn.attention.varlen import varlen_attn

    if value.element_size() != 2 or cu_seq_lens is None:
        return sdpa_by_row(query, key, value, lengths, window, scaling)
    q, k, v = (tensor[0].transpose(0, 1).contiguous().to(value.dtype) for tensor in (query, key, value))
    longest = max(lengths)
    before = window - 1 if window else -1
    return varlen_attn(
        q, k, v, cu_seq_lens, cu_seq_lens, longest, longest, scale=scaling, window_size=(before, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )[None]  # fmt: skip


def register_packed_sdpa() -> None:
    """Makes attn_implementation="packed_sdpa" known to transformers.

    It gets no mask function: a name without one gets no mask, whereas one that returns None still makes transformers look
    for packed rows in the position ids, a wait of the host per forward (masking_utils, _preprocess_mask_arguments).
    """
    from transformers import AttentionInterface

    AttentionInterface.register("packed_sdpa", packed_sdpa)
