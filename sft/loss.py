"""Negative log-likelihood of target tokens, with the logits of a bounded number of tokens in memory at once."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def token_nll(logits: Tensor, target_ids: Tensor) -> Tensor:
    """−log p(target) per token in nats, (n,) float32, from logits (n, V) of any dtype and target_ids (n,) int64."""
    return functional.cross_entropy(logits.float(), target_ids, reduction="none")


def chunked_token_nll(hidden: Tensor, head: torch.nn.Module, target_ids: Tensor, chunk_tokens: int) -> Tensor:
    """`token_nll` of `head(hidden)`, hidden (n, H), without ever holding more than chunk_tokens × V logits.

    Logits of a chunk are computed again in backward instead of being kept (as in Cut Cross-Entropy, Wijmans et al.
    2024, without its kernel): at V = 152,064 in fp32 each kept token would cost 0.6 MB. 0: one chunk, kept.
    """

    def chunk_nll(hidden_chunk: Tensor, ids_chunk: Tensor) -> Tensor:
        return token_nll(head(hidden_chunk), ids_chunk)

    if not chunk_tokens or len(target_ids) <= chunk_tokens:
        return chunk_nll(hidden, target_ids)
    parts = [
        checkpoint(chunk_nll, hidden_chunk, ids_chunk, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else chunk_nll(hidden_chunk, ids_chunk)
        for hidden_chunk, ids_chunk in zip(hidden.split(chunk_tokens), target_ids.split(chunk_tokens))
    ]
    return torch.cat(parts)
