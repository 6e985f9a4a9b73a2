"""The report of an evaluation as one HTML file: no network, both languages, every answer; data can inject nothing.

Text that comes from rows or files reaches the page in two ways only: through Jinja's escaping, and as JSON that the
page's script puts in as plain text. A content security policy lets no other script run, and nothing be loaded.
"""

import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from evaluation.findings import comparison, facts, metric_meanings, notices, sentences
from evaluation.phrases import LANGUAGES, PHRASES
from evaluation.plots import draw_length_loss
from sft.loss_plot import draw_loss

TEMPLATES = Path(__file__).resolve().parent / "templates"
PLOT_INCHES = (6, 3.9)  # small, so that its letters can be read on a phone too


def render_page(report: dict, predictions: Sequence[dict], metrics: Sequence[dict]) -> str:
    """Returns the page. predictions: the lines of predictions.jsonl; metrics: the records of the run's metrics.jsonl."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = [row for row in predictions if "set" not in row]
    in_both = {language: _content(report, language) for language in LANGUAGES}
    return environment.get_template("report.html").render(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        script=Markup(script),
        languages=in_both,
        phrases=PHRASES,
        report=report,
        plots=[_svg(draw_loss(metrics, PLOT_INCHES)), _svg(draw_length_loss(own, PLOT_INCHES))],
        answers=[answer_data(row) for row in predictions],
        answered=any(row["base"] is not None for row in predictions),
    )


def _content(report: dict, language: str) -> dict:
    """Returns what the page says in one language; Markdown's stars go."""
    return {
        "notices": [text.replace("**", "") for text in notices(report, language)],
        "sets": [_content_of_set(name, part, language) for name, part in {"": report, **report["other_sets"]}.items()],
        "facts": facts(report, language),
        "meanings": metric_meanings(report, language),
    }


def _content_of_set(name: str, part: dict, language: str) -> dict:
    """Returns what the page says of one set of rows; `part` is the report, or one of its other sets."""
    return {
        "name": name,
        "conclusion": part["conclusion"],
        "sentences": [text.replace("**", "") for text in sentences(part, language)],
        "comparison": comparison(part, language),
        "bars": [interval_bar(part, metric) for metric in part["difference"]],
    }


def interval_bar(report: dict, name: str) -> dict:
    """Returns where a metric's interval and difference lie on a bar of 100 units with 0 in its middle, and its verdict."""
    difference = report["difference"][name]
    reach = 1.1 * max(abs(value) for value in (*difference["ci95"], difference["mean"])) or 1.0
    low, high, mean = (round(50 + 50 * value / reach, 2) for value in (*difference["ci95"], difference["mean"]))
    verdict = report["verdicts"][name]
    colours = {"better": "better", "worse": "worse", "longer": "other", "shorter": "other"}
    return {"low": low, "high": high, "mean": mean, "look": colours.get(verdict, "none")}


def answer_data(row: dict) -> dict:
    """Returns what the page's script needs of a line of predictions.jsonl."""
    data = {name: row[name] for name in ("id", "question", "reference", "base", "adapter")}
    for side in ("base", "adapter"):
        data[f"{side}_loss"] = row[f"{side}_nll"] / row["target_tokens"]
        data[f"{side}_chrf"] = row[f"{side}_scores"].get("chrf")
        data[f"{side}_stopped"] = row[f"{side}_stopped"]
    return data


def _svg(figure: Figure) -> Markup:
    """Returns a figure as an <svg> element: the same bytes each time, letters as text, nothing of it from a row."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sft", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    return Markup(text[text.index("<svg") :])
