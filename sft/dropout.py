"""LoRA's dropout with masks that belong to rows: the same on any number of cards, in any micro-batch, after any resume."""

import hashlib

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import functional


class DropoutRows:
    """The rows of the forward at hand, which the dropouts of all layers look up. seed: of the run."""

    def __init__(self, seed: int):
        self.seed, self.step, self.rows = seed, 0, []
        self.segments: list[tuple[int, int]] = []  # (row, tokens) of a packed forward, in order

    def begin(self, step: int, rows: list[int]) -> None:
        """Call it before each micro-batch of training; then the model's forward calls `pack`, or `begin_row` for each row."""
        self.step, self.rows, self.segments = step, rows, []

    def pack(self, segment_lengths: tuple[int, ...]) -> None:
        """Says where the rows stand in one packed input; padding may follow the last."""
        self.segments = list(zip(self.rows, segment_lengths))

    def begin_row(self, position: int) -> None:
        """Seeds torch itself, whose state activation checkpointing keeps for when it computes a row again."""
        if position < len(self.rows):
            torch.manual_seed(self.key(self.rows[position]))

    def key(self, row: int, layer: int = -1) -> int:
        """A seed for the mask of this row, in this step."""
        text = f"{self.seed} {self.step} {row} {layer}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class RowDropout(torch.nn.Module):
    """Dropout whose mask for a row of a packed input is a function of (seed, step, row, layer) and nothing else."""

    def __init__(self, p: float, layer: int, rows: DropoutRows):
        super().__init__()
        self.p, self.layer, self.rows = p, layer, rows

    def forward(self, x: Tensor) -> Tensor:  # (1, T, features)
        if not self.training or not self.rows.segments:
            return functional.dropout(x, self.p, self.training)
        kept = torch.zeros(x.shape[1:], dtype=x.dtype, device=x.device)  # a segment of padding stays zero
        generator, start = torch.Generator(x.device), 0
        for row, tokens in self.rows.segments:
            generator.manual_seed(self.rows.key(row, self.layer))
            drawn = torch.rand((tokens, x.shape[2]), generator=generator, device=x.device)
            kept[start : start + tokens] = (drawn >= self.p).to(x.dtype)
            start += tokens
        return x * (kept / (1 - self.p))


def own_dropout(model: torch.nn.Module, seed: int) -> DropoutRows:
    """Puts RowDropout where the adapters of `model` have torch's dropout. Returns what has to be told the rows."""
    rows = DropoutRows(seed)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for number, layer in enumerate(layers):
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, torch.nn.Dropout):
                layer.lora_dropout[name] = RowDropout(dropout.p, number, rows)
    return rows
