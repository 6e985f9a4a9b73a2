"""The plots of an evaluation, as PNG files. Labels are English: no font for Chinese is needed."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from evaluation.metrics import BETTER
from evaluation.phrases import format_value
from sft.loss_plot import BLUE, GREEN, GREY, INCHES, RED, draw_bare, place_title

SCALES = {
    "nats per target token": ("loss",),
    "e^loss": ("perplexity",),
    "0 to 1": ("exact_match", "token_f1", "rougeL", "stop_rate", "empty_rate", "truncated_rate", "repetition"),
    "0 to 100": ("bleu", "chrf"),
    "words": ("mean_length",),
}


def draw_differences(difference: dict[str, dict], verdicts: dict[str, str]) -> Figure:
    """Returns each metric's difference with its 95 % interval, as `evaluation.metrics.compare` gives them, drawn by scale,
    in the colours of what `evaluation.metrics.judge` says of them."""
    panels = {scale: [name for name in names if name in difference] for scale, names in SCALES.items()}
    panels = {scale: names for scale, names in panels.items() if names}
    heights = [len(names) + 1.2 for names in panels.values()]
    figure = Figure(figsize=(INCHES[0], 0.36 * sum(heights) + 0.9), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    looks = {"better": (GREEN, "o"), "worse": (RED, "X"), "longer": (BLUE, "D"), "shorter": (BLUE, "D")}
    for axes, (scale, names) in zip(all_axes, panels.items()):
        draw_bare(axes, "x").axvline(0, color="black", linewidth=0.8)
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
    axes = draw_bare(figure.subplots(), "y")
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
    place_title(axes, "Held-out rows: length and loss")
    return figure
