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

    At V = 152,064 in fp32 the logits of one token are 0.6 MB. A frozen head costs nothing extra for it; a trained or
    sharded one computes the logits of a chunk again in backward. 0: one chunk.
    """
    size = chunk_tokens or max(len(target_ids), 1)
    if type(head) is torch.nn.Linear and not head.weight.requires_grad and not hasattr(head.weight, "placements"):
        return _FrozenHeadNll.apply(hidden, head.weight, head.bias, target_ids, size)

    def chunk_nll(hidden_chunk: Tensor, ids_chunk: Tensor) -> Tensor:
        return token_nll(head(hidden_chunk), ids_chunk)

    if len(target_ids) <= size:
        return chunk_nll(hidden, target_ids)
    parts = [
        checkpoint(chunk_nll, hidden_chunk, ids_chunk, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else chunk_nll(hidden_chunk, ids_chunk)
        for hidden_chunk, ids_chunk in zip(hidden.split(size), target_ids.split(size))
    ]
    return torch.cat(parts)


class _FrozenHeadNll(torch.autograd.Function):
    """The loss and, in the same pass over the logits, its gradient by `hidden`: (softmax − one-hot) W.

    As in Liger Kernel (Hsu et al. 2024), without its kernel. Only that (n, H) gradient is kept for backward. The scores
    are worked on in place, so that one buffer of chunk × V is all there is and the allocator has nothing to scatter.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, size: int) -> Tensor:
        nll = torch.empty(len(target_ids), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(target_ids), size):
            part, ids = slice(start, start + size), target_ids[start : start + size, None]
            logits = functional.linear(hidden[part], weight, bias)
            dtype, scores = logits.dtype, logits.float()
            del logits
            scores.sub_(scores.amax(1, keepdim=True))
            target = scores.gather(1, ids)
            total = scores.exp_().sum(1, keepdim=True)  # now softmax × total
            nll[part] = (total.log() - target)[:, 0]
            if gradient is not None:
                scores.scatter_(1, ids, target.exp() - total)
                gradient[part] = scores.to(dtype) @ weight / total
            del scores  # before the next chunk's logits are made
        ctx.save_for_backward(gradient)
        return nll

    @staticmethod
    def backward(ctx, of_nll: Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * of_nll[:, None]).to(gradient.dtype), None, None, None, None
