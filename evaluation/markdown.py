"""The report of an evaluation as Markdown, in two languages; nothing that a row or a file says can act in it."""

import re
from collections.abc import Sequence

from evaluation.findings import comparison, facts, metric_meanings, notices, sentences, speaker
from sft.terminal import visible

COLUMNS = ("metric", "base", "adapter", "difference", "interval", "verdict")
CELL_CHARACTERS = 400  # of a text in a table of examples


def render_report(report: dict, language: str = "en") -> str:
    """Returns the whole report as Markdown, in "en" or "zh-CN"."""
    say = speaker(language)
    signature = [(name, _code(text)) for name, text in report["signature"].items()]
    parts = [
        f"# {say('title')}",
        *[f"> {notice}" for notice in notices(report, language)],
        render_words(report, language),
        f"## {say('comparison')}",
        render_table(report, language),
        say("how_to_read"),
        "![differences](differences.png)",
        *(_other_sets(report["other_sets"], language) if report["other_sets"] else []),
        f"## {say('trained')}",
        _table(("", ""), facts(report, language, _escape, _code)),
        f"## {say('curves')}",
        say("curves_text"),
        "![loss](loss.png)",
        "![length and loss](length_loss.png)",
    ]
    for kind, examples in report["examples"].items():
        parts += [f"## {say(kind)}", *([_example(example, say) for example in examples] or [say("no_examples")])]
    parts += [
        f"## {say('leaks')}",
        "\n".join(f"- {_leak(leak, say)}" for leak in report["leaks"]) or say("no_leaks"),
        f"## {say('metrics')}",
        _table(("", ""), metric_meanings(report, language)),
        f"## {say('signature')}",
        _table(("", ""), signature),
    ]
    return "\n\n".join(parts) + "\n"


def _other_sets(sets: dict[str, dict], language: str) -> list[str]:
    """Returns the section on rows of other files, whether or not they have to do with what was trained."""
    say = speaker(language)
    parts = [f"## {say('other_sets')}", say("other_sets_text")]
    for name, part in sets.items():
        parts += [f"### {_code(name)}", render_words(part, language), render_table(part, language)]
    return parts


def render_table(report: dict, language: str = "en") -> str:
    """Returns base against adapter as a Markdown table that can be read in a terminal as well."""
    say = speaker(language)
    rows = [list(row.values()) for row in comparison(report, language)]
    return _table([say(name) for name in COLUMNS], rows)


def render_words(report: dict, language: str = "en") -> str:
    """Returns in words whether it helped, and in which metrics base and adapter differ."""
    headline, *others = sentences(report, language)
    return {"en": " ", "zh-CN": ""}[language].join([f"**{headline}**", *others])


def _example(example: dict, say) -> str:
    head = (
        say("reference"),
        f"{say('base')}: chrF {example['base_chrf']:.1f}",
        f"{say('adapter')}: chrF {example['adapter_chrf']:.1f}",
    )
    question = f"**{say('question')}** {_code(example['id'])}: {_escape(example['question'])}"
    return f"{question}\n\n{_table(head, [[_escape(example[name]) for name in ('reference', 'base', 'adapter')]])}"


def _leak(leak: dict, say) -> str:
    """Returns a pair of alike questions as the manifest of data_prep.py names it."""
    asked = {
        side: f"{_code(leak[side]['id'])} {_escape(leak[side].get('question', ''))}" for side in ("held_out", "train")
    }
    return say("leak_value", similarity=leak["similarity"], **asked)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, its columns aligned for the terminal unless a cell is a whole text."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows)]
    widths = widths if max(widths) <= 40 else [0] * len(head)
    lines = [head, ["-" * max(width, 3) for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines)


def _one_line(text: str) -> str:
    """Returns a text on one line, cut, with characters that a terminal would act on shown as their numbers."""
    text = visible(" ".join(text.split()))
    return text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + "…"


def _escape(text: str) -> str:
    """Returns a text on one line with nothing that Markdown, HTML or a table cell would act on."""
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", _one_line(text))


def _code(text: str) -> str:
    """Returns a text as it is, between backticks."""
    return "`" + (_one_line(text).replace("`", "'").replace("|", "\\|") or " ") + "`"
