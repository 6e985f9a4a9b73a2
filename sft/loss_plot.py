"""The plot of a run's losses as a PNG file. Labels are English: no font for Chinese is needed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

GREY, BLUE, PALE_BLUE, ORANGE, GREEN, RED = "#777777", "#1f5fa8", "#9dbfe3", "#d1610b", "#1a7f4b", "#c0392b"
INCHES = (8, 4.5)


def plot_loss(metrics: Sequence[dict], path: str | Path) -> None:
    """Writes `draw_loss` to a PNG file."""
    draw_loss(metrics).savefig(path, dpi=120)


def draw_loss(metrics: Sequence[dict], inches: tuple[float, float] = INCHES) -> Figure:
    """Returns the loss of each training step and of the held-out rows, drawn from the records of metrics.jsonl."""
    figure = Figure(figsize=inches, layout="constrained")
    axes = draw_bare(figure.subplots(), "y")
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
    place_title(axes, "Loss")
    return figure


def place_title(axes, title: str) -> None:
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


def draw_bare(axes, grid: str):
    """Returns the axes with nothing but a grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    return axes
