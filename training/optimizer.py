"""AdamW over all trainable weights as one tensor."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: Iterable[Tensor], learning_rate: float, weight_decay: float, accelerator):
    """AdamW over these weights: as one tensor, but for sharded ones and for those whose gradients a loss scaler divides."""
    flat = not accelerator.is_fsdp2 and accelerator.scaler is None
    kind = FlatAdamW if flat else torch.optim.AdamW
    return kind(parameters, lr=learning_rate, weight_decay=weight_decay)


def clip_grad_norm(accelerator, model: torch.nn.Module, optimizer, max_norm: float) -> Tensor:
    """Scales the gradients down to that norm, over all ranks, and returns the norm that they had.

    optimizer: as Accelerate has prepared it.
    """
    if isinstance(optimizer.optimizer, FlatAdamW):
        return optimizer.optimizer.clip(max_norm)
    return accelerator.clip_grad_norm_(model.parameters(), max_norm)


class FlatAdamW(torch.optim.AdamW):
    """torch's AdamW whose weights, gradients and moments lie one behind another: a dozen operators a step, whatever the
    number of weights. An adapter has hundreds of small ones, for each of which a step launches several.

    Arithmetic, hyper-parameters and state are torch's: `state[parameter]` holds step, exp_avg and exp_avg_sq, as views, so
    that checkpoints are the same. Parameters must be whole, of one dtype, on one device, in one group.
    """

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Gathers the gradients, scales them down to `max_norm` when they exceed it, and returns their norm before that.

        As torch.nn.utils.clip_grad_norm_, whose formula it is.
        """
        self.gradient = torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters])
        norm = torch.linalg.vector_norm(self.gradient)
        if max_norm < math.inf:
            self.gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm

    @property
    def parameters(self) -> list[Tensor]:
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure=None):
        """One step on the gradients of the last `clip`."""
        group = self.param_groups[0]
        if not self.is_flat():
            self.make_flat()
        steps = self.state[self.parameters[0]]["step"]
        adamw(
            [self.weight], [self.gradient], [self.moments[0]], [self.moments[1]], [], [steps], foreach=False, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        del self.gradient

    def is_flat(self) -> bool:
        """Whether weights and moments still are where the last step left them; a checkpoint that was read moves them."""
        first = self.parameters[0]
        here = [first, *(self.state[first].get(name) for name in MOMENTS)]
        flat = [getattr(self, "weight", None), *getattr(self, "moments", (None, None))]
        return all(a is not None and b is not None and a.data_ptr() == b.data_ptr() for a, b in zip(here, flat))

    def make_flat(self) -> None:
        """Moves weights and moments, which start at zero, into one tensor each."""
        for parameter in self.parameters:
            self.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32))
        shared = self.state[self.parameters[0]]["step"]  # one count for all: a step is a step of all
        self.weight = torch.cat([parameter.data.reshape(-1) for parameter in self.parameters])
        self.moments = tuple(
            torch.cat([self.state[p].get(name, torch.zeros_like(p)).reshape(-1) for p in self.parameters])
            for name in MOMENTS
        )
        start = 0
        for parameter in self.parameters:
            part = slice(start, start + parameter.numel())
            start = part.stop
            parameter.data = self.weight[part].view(parameter.shape)
            self.state[parameter]["step"] = shared
            for name, moment in zip(MOMENTS, self.moments):
                self.state[parameter][name] = moment[part].view(parameter.shape)
