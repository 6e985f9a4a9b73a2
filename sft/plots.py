"""The plots of a run and of its evaluation, as PNG files. Labels are English: no font for Chinese is needed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sft.metrics import BETTER
from sft.phrases import format_value

GREY, BLUE, PALE_BLUE, ORANGE, GREEN, RED = "#777777", "#1f5fa8", "#9dbfe3", "#d1610b", "#1a7f4b", "#c0392b"
SCALES = {
    "nats per target token": ("loss",),
    "e^loss": ("perplexity",),
    "0 to 1": ("exact_match", "token_f1", "rougeL", "stop_rate", "empty_rate", "truncated_rate", "repetition"),
    "0 to 100": ("bleu", "chrf"),
    "words": ("mean_length",),
}


INCHES = (8, 4.5)


def plot_loss(metrics: Sequence[dict], path: str | Path) -> None:
    """Writes `draw_loss` to a PNG file."""
    draw_loss(metrics).savefig(path, dpi=120)


def draw_loss(metrics: Sequence[dict], inches: tuple[float, float] = INCHES) -> Figure:
    """Returns the loss of each training step and of the held-out rows, drawn from the records of metrics.jsonl."""
    figure = Figure(figsize=inches, layout="constrained")
    axes = _bare(figure.subplots(), "y")
    train = np.array([(record["step"], record["loss"]) for record in metrics if "loss" in record])
    held_out = np.array([(record["step"], record["eval_loss"]) for record in metrics if "eval_loss" in record])
    if len(train):
        steps, losses = train.T
        marker = "." if len(steps) < 50 else ""
        axes.plot(steps, losses, color=PALE_BLUE, linewidth=1, marker=marker, label="training, each step")
        window = len(losses) // 10
        if window > 2:
            means = np.convolve(losses, np.ones(window) / window, mode="valid")
            axes.plot(steps[window - 1 :], means, color=BLUE, linewidth=2, label=f"training, mean of {window} steps")
    if len(held_out):
        axes.plot(*held_out.T, "o--", color=ORANGE, linewidth=1.5, label="held-out rows")
        for step, loss in held_out[[0, -1]]:
            axes.annotate(
                f"{loss:.3f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="center", color=ORANGE
            )
    axes.set(
        xlabel="optimizer step",
        ylabel="loss, nats per target token",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.04, y=0.12)
    _head(axes, "Loss")
    return figure


def draw_differences(difference: dict[str, dict], verdicts: dict[str, str]) -> Figure:
    """Returns each metric's difference with its 95 % interval, as `sft.metrics.compare` gives them, drawn by scale,
    in the colours of what `sft.metrics.judge` says of them."""
    panels = {scale: [name for name in names if name in difference] for scale, names in SCALES.items()}
    panels = {scale: names for scale, names in panels.items() if names}
    heights = [len(names) + 1.2 for names in panels.values()]
    figure = Figure(figsize=(INCHES[0], 0.36 * sum(heights) + 0.9), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    looks = {"better": (GREEN, "o"), "worse": (RED, "X"), "longer": (BLUE, "D"), "shorter": (BLUE, "D")}
    for axes, (scale, names) in zip(all_axes, panels.items()):
        _bare(axes, "x").axvline(0, color="black", linewidth=0.8)
        for place, name in enumerate(names):
            mean, (low, high) = difference[name]["mean"], difference[name]["ci95"]
            colour, marker = looks.get(verdicts[name], (GREY, "s"))
            axes.plot([low, high], [place, place], "|-", color=colour, linewidth=1.5, markersize=9)
            axes.plot(mean, place, marker, color=colour, markersize=7)
            value = format_value(name, mean, signed=True)
            axes.annotate(value, (1.01, place), xycoords=("axes fraction", "data"), va="center", color=colour)
        reach = 1.15 * max(abs(bound) for name in names for bound in difference[name]["ci95"]) or 1.0
        axes.set(xlim=(-reach, reach), ylim=(len(names) - 0.4, -0.6))
        axes.set_yticks(range(len(names)), [name + {1: " ↑", -1: " ↓", 0: ""}[BETTER[name]] for name in names])
        axes.set_xlabel(scale, fontsize=9, labelpad=1)
    figure.suptitle("Adapter − base, 95 % intervals (● better, ✖ worse, ■ no difference shown)", fontsize=11)
    return figure


def draw_length_loss(predictions: Sequence[dict], inches: tuple[float, float] = INCHES) -> Figure:
    """Returns each held-out row's loss by its length, for base and adapter, drawn from the lines of predictions.jsonl."""
    figure = Figure(figsize=inches, layout="constrained")
    axes = _bare(figure.subplots(), "y")
    lengths = [row["length"] for row in predictions]
    base = [row["base_nll"] / row["target_tokens"] for row in predictions]
    adapter = [row["adapter_nll"] / row["target_tokens"] for row in predictions]
    crowded = len(predictions) > 100
    if not crowded:
        axes.vlines(lengths, base, adapter, color="#cccccc", linewidth=1, zorder=0)
    look = {"s": 12 if crowded else 36, "alpha": 0.5 if crowded else 0.9, "linewidths": 0}
    axes.scatter(lengths, base, color=GREY, marker="s", label="base", **look)
    axes.scatter(lengths, adapter, color=BLUE, marker="o", label="adapter", **look)
    axes.set(xlabel="tokens of the row", ylabel="loss, nats per target token")
    _head(axes, "Held-out rows: length and loss")
    return figure


def _head(axes, title: str) -> None:
    """Puts the title and, below it, the legend above the axes, where they hide no point and each other in no width."""
    axes.set_title(title, loc="left", pad=24)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            frameon=False,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            borderaxespad=0.2,
            fontsize=9,
            columnspacing=1.2,
        )


def _bare(axes, grid: str):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    return axes
