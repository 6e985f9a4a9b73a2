"""What is known about a run, read back from its directory, and the report on it: JSON, two languages, plots."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft.artifacts import read_json, write_json, write_text
from sft.errors import UserError
from sft.journal import read_metrics
from sft.metrics import BETTER, FEWEST_ROWS, RESAMPLES, aggregate, compare, describe, judge, rows_needed
from sft.phrases import LANGUAGES, METRICS, PHRASES, format_value
from sft.plots import plot_differences, plot_length_loss, plot_loss

REPORTS = {"en": "report.md", "zh-CN": "report.zh-CN.md"}
TEXTS = ("id", "question", "reference", "base", "adapter")  # of a row of predictions.jsonl
EXAMPLES = 3  # best and worst rows shown, each
CELL_CHARACTERS = 400  # of a text in a table of examples


@dataclass(frozen=True)
class Run:
    """A run directory as data. What the run has not written yet is empty: `{}`, `[]`, and None for the report."""

    directory: Path
    config: dict  # every setting of train.py
    provenance: dict  # hashes and names of what it was made from
    environment: dict  # versions, device, simulated
    summary: dict  # last figures; {} until training has finished
    metrics: list[dict]  # the records of metrics.jsonl in order: those with "loss" and those with "eval_loss"
    report: dict | None  # eval/report.json
    predictions: list[dict]  # eval/predictions.jsonl, one per held-out row (see `join_predictions`)


def load_run(run_dir: str | Path) -> Run:
    """Returns everything that train.py and eval.py have written to a run directory, finished or not.

        run = load_run("outputs/demo/run")
        [record["loss"] for record in run.metrics if "loss" in record]
        run.report["difference"]["loss"]

    Raises:
        UserError: not a run directory, or a file of it is damaged.
    """
    directory = Path(run_dir)
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is not a run directory: it holds no config.json; give the output_dir of train.py")

    def read(name: str, default):
        return read_json(directory / name) if (directory / name).is_file() else default

    return Run(
        directory=directory,
        config=read("config.json", {}),
        provenance=read("provenance.json", {}),
        environment=read("environment.json", {}),
        summary=read("summary.json", {}),
        metrics=read_metrics(directory),
        report=read("eval/report.json", None),
        predictions=_read_lines(directory / "eval" / "predictions.jsonl"),
    )


def join_predictions(
    rows: Sequence[dict],
    base_rows: Sequence[dict],
    adapter_rows: Sequence[dict],
    base_answers: Sequence[str] | None = None,
    adapter_answers: Sequence[str] | None = None,
) -> list[dict]:
    """Returns the lines of predictions.jsonl: id, question, reference, length, target_tokens, and for base and adapter
    the answer (None without generation) under `base` and `adapter`, then `…_nll`, `…_stopped`, and all of
    `sft.metrics.score_row` under `…_scores`, as `sft.metrics.compare` takes them.

    rows: held-out rows with those first five columns. base_rows, adapter_rows: what `sft.metrics.evaluate_generations`
    or `evaluate_losses` gives for each row.
    """
    predictions = []
    for index, (row, base, adapter) in enumerate(zip(rows, base_rows, adapter_rows, strict=True)):
        line = {name: row[name] for name in ("id", "question", "reference", "length", "target_tokens")}
        for side, scores, answers in (("base", base, base_answers), ("adapter", adapter, adapter_answers)):
            line[side] = answers[index] if answers is not None else None
            line[f"{side}_nll"] = scores["nll"]
            line[f"{side}_stopped"] = scores.get("stopped")
            line[f"{side}_scores"] = scores
        predictions.append(line)
    return predictions


def build_report(
    run: Run,
    predictions: Sequence[dict],
    manifest: dict,
    language: str = "auto",
    decoding: str = "greedy",
    seed: int = 42,
    simulated: bool = False,
    times: dict | None = None,
    resamples: int = RESAMPLES,
) -> dict:
    """Returns report.json: figures of base and adapter, what their differences show, and all facts of the run.

    predictions: of `join_predictions`. manifest: of the data set that the rows came from. simulated: whether this
    evaluation, too, ran on simulated hardware. Everything but `times` is the same for each evaluation of the same run.
    """
    base_rows = [row["base_scores"] for row in predictions]
    adapter_rows = [row["adapter_scores"] for row in predictions]
    difference = compare(base_rows, adapter_rows, seed, resamples)
    enough = len(predictions) >= FEWEST_ROWS
    verdicts = judge(difference) if enough else dict.fromkeys(difference, "too few rows")
    conclusion = _conclude(verdicts) if enough else "too_few"
    found = {
        "adapter_changes_nothing": all(
            row["base"] == row["adapter"] and row["base_nll"] == row["adapter_nll"] for row in predictions
        ),
        "other_dataset": manifest["dataset_sha256"] != run.provenance["dataset_sha256"],
        "fewer_rows": len(predictions) < manifest["rows_written"]["eval"],
        "unfinished": not run.summary,
    }
    lists = {name: _count(manifest[name]) for name in ("rejected", "truncated", "duplicates")}
    data = {name: manifest[name] for name in ("rows_read", "rows_written", "tokens", "target_tokens", "dataset_sha256")}
    return {
        "simulated": bool(simulated or run.environment.get("simulated")),
        "rows": len(predictions),
        "conclusion": conclusion,
        "rows_needed": rows_needed(base_rows, adapter_rows) if conclusion in ("no_effect", "too_few") else None,
        "warnings": [name for name, present in found.items() if present],
        "base": aggregate(base_rows),
        "adapter": aggregate(adapter_rows),
        "difference": difference,
        "verdicts": verdicts,
        "signature": describe(adapter_rows, language, decoding, seed, resamples),
        "examples": _pick_examples(predictions),
        "leaks": manifest.get("leaks", []),
        "data": data | lists,
        "run": {
            "config": run.config,
            "provenance": run.provenance,
            "environment": run.environment,
            "summary": run.summary,
        },
        "times": times or {},
    }


def write_report(directory: str | Path, report: dict, predictions: Sequence[dict], metrics: Sequence[dict]) -> None:
    """Writes predictions.jsonl, three plots, report.md, report.zh-CN.md, report.json.

    metrics: the records of the run's metrics.jsonl. report.json comes last: where it is, the rest is whole.
    """
    directory = Path(directory)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
    write_text(directory / "predictions.jsonl", "".join(lines))
    plot_loss(metrics, directory / "loss.png")
    plot_differences(report["difference"], report["verdicts"], directory / "differences.png")
    plot_length_loss(predictions, directory / "length_loss.png")
    for language, name in REPORTS.items():
        write_text(directory / name, render_report(report, language))
    write_json(directory / "report.json", report)


def compare_runs(first: Run, second: Run, seed: int = 42) -> dict[str, dict]:
    """Returns {metric: {"mean", "ci95"}}, adapter of `second` − adapter of `first`, over the rows that both evaluated.

    Raises:
        UserError: one of them is not evaluated, or they share no row (by id, question and reference).
    """
    for run in (first, second):
        if not run.predictions:
            raise UserError(f"{run.directory} holds no eval/predictions.jsonl; run eval.py --run_dir {run.directory}")

    def keyed(run: Run) -> dict[tuple, dict]:
        return {(row["id"], row["question"], row["reference"]): row["adapter_scores"] for row in run.predictions}

    ours, theirs = keyed(first), keyed(second)
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise UserError(
            f"{first.directory} and {second.directory} were evaluated on different rows: nothing to compare"
        )
    return compare([ours[key] for key in shared], [theirs[key] for key in shared], seed)


def render_report(report: dict, language: str = "en") -> str:
    """Returns the whole report as Markdown, in "en" or "zh-CN"."""
    say = _speaker(language)
    shown = {"rows": report["rows"], "held_out": report["data"]["rows_written"]["eval"]}
    notices = (["simulated"] if report["simulated"] else []) + report["warnings"]
    signature = [(name, _code(text)) for name, text in report["signature"].items()]
    meanings = [(name, METRICS[name][LANGUAGES.index(language)]) for name in report["difference"]]
    parts = [
        f"# {say('title')}",
        *[f"> {say(notice, **shown)}" for notice in notices],
        render_words(report, language),
        f"## {say('comparison')}",
        render_table(report, language),
        say("how_to_read"),
        "![differences](differences.png)",
        f"## {say('trained')}",
        _table(("", ""), _facts(report, say)),
        f"## {say('curves')}",
        say("curves_text"),
        "![loss](loss.png)",
        "![length and loss](length_loss.png)",
    ]
    for kind, examples in report["examples"].items():
        parts += [f"## {say(kind)}", *([_example(example, say) for example in examples] or [say("no_examples")])]
    parts += [
        f"## {say('leaks')}",
        "\n".join(f"- {_leak(leak)}" for leak in report["leaks"]) or say("no_leaks"),
        f"## {say('metrics')}",
        _table(("", ""), meanings),
        f"## {say('signature')}",
        _table(("", ""), signature),
    ]
    return "\n\n".join(parts) + "\n"


def render_table(report: dict, language: str = "en") -> str:
    """Returns base against adapter as a Markdown table that can be read in a terminal as well."""
    say = _speaker(language)
    rows = []
    for name, difference in report["difference"].items():
        low, high = (format_value(name, bound, signed=True) for bound in difference["ci95"])
        rows.append(
            (
                name + {1: " ↑", -1: " ↓", 0: ""}[BETTER[name]],
                format_value(name, report["base"][name]),
                format_value(name, report["adapter"][name]),
                format_value(name, difference["mean"], signed=True),
                f"{low} … {high}",
                say(report["verdicts"][name]),
            )
        )
    head = ("metric", "base", "adapter", "difference", "interval", "verdict")
    return _table([say(name) for name in head], rows)


def render_words(report: dict, language: str = "en") -> str:
    """Returns in words whether it helped, and which differences exclude zero."""
    say = _speaker(language)
    comma, space = {"en": (", ", " "), "zh-CN": ("、", "")}[language]
    needed = report["rows_needed"]
    sentences = [f"**{say(report['conclusion'], rows=report['rows'], fewest=FEWEST_ROWS)}**"]
    sentences += [say("said_needed", needed=needed)] if needed and needed > max(report["rows"], FEWEST_ROWS) else []
    phrases = {
        "better": "said_better",
        "worse": "said_worse",
        "longer": "said_longer",
        "shorter": "said_shorter",
        "no difference shown": "said_none",
    }
    for verdict, phrase in phrases.items():
        names = [name for name, given in report["verdicts"].items() if given == verdict]
        sentences += [say(phrase, names=comma.join(names))] if names else []
    return space.join(sentences)


def _read_lines(path: Path) -> list[dict]:
    """Returns the objects of a .jsonl file, none when it does not exist; a last line without an end is left out."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not valid JSON ({error}); the file is damaged") from None
    return rows


def _conclude(verdicts: dict[str, str]) -> str:
    """Returns the headline: what the held-out loss shows, and "mixed" when another metric went the other way."""
    loss, other_way = verdicts["loss"], {"better": "worse", "worse": "better"}
    if loss not in other_way:
        return "no_effect"
    mixed = other_way[loss] in verdicts.values()
    return "mixed" if mixed else {"better": "helped", "worse": "hurt"}[loss]


def _pick_examples(predictions: Sequence[dict]) -> dict[str, list[dict]]:
    """Returns the rows whose answers gained and lost most chrF, which suits every language and grades finely."""
    rows = [
        {name: row[name] for name in TEXTS}
        | {"base_chrf": row["base_scores"]["chrf"], "adapter_chrf": row["adapter_scores"]["chrf"]}
        for row in predictions
        if row["base"] is not None
    ]
    ranked = sorted(rows, key=lambda row: row["adapter_chrf"] - row["base_chrf"])
    gained = [row for row in reversed(ranked) if row["adapter_chrf"] > row["base_chrf"]]
    lost = [row for row in ranked if row["adapter_chrf"] < row["base_chrf"]]
    return {"best": gained[:EXAMPLES], "worst": lost[:EXAMPLES]}


def _facts(report: dict, say) -> list[tuple[str, str]]:
    """Returns (label, text) of what was trained, on what and where; an unfinished run has fewer of them."""
    config, provenance, environment, summary = report["run"].values()
    data = report["data"]
    values = {**config, **data, **data["rows_written"], **summary}
    origin = f"{_code(config['dataset_dir'])}, SHA-256 {_code(provenance['dataset_sha256'])}"
    model = _code(config["model_name_or_path"])
    if provenance["model_sha256"]:
        model += f", SHA-256 {_code(provenance['model_sha256'])}"
    facts = {
        "base_model": model,
        "method": say("method_value", modules=", ".join(config["target_modules"]), **values),
        "data": origin,
        "rows": say("rows_value", **values),
        "target_tokens": say("target_tokens_value", **data["target_tokens"]),
        "learning_rate": say("learning_rate_value", **values),
    }
    if summary:
        trainable, total = summary["trainable_parameters"], summary["total_parameters"]
        peaks = ", ".join(f"{peak / 2**30:.1f}" for peak in summary["peak_memory_bytes"])
        facts |= {
            "parameters": say("parameters_value", trainable=trainable, total=total, share=trainable / total),
            "steps": say("steps_value", **values),
            "train_loss": say("train_loss_value", **values),
            "hardware": f"{summary['world_size']} × {environment['device_name']}, {summary['backend']}",
            "weights": provenance["base_dtype"],
            "cost": say("cost_value", peak=peaks, **values),
        }
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return [(say(label), text) for label, text in facts.items()]


def _example(example: dict, say) -> str:
    head = (
        say("reference"),
        f"{say('base')}: chrF {example['base_chrf']:.1f}",
        f"{say('adapter')}: chrF {example['adapter_chrf']:.1f}",
    )
    question = f"**{say('question')}** {_code(example['id'])}: {_escape(example['question'])}"
    return f"{question}\n\n{_table(head, [[_escape(example[name]) for name in ('reference', 'base', 'adapter')]])}"


def _leak(leak: dict) -> str:
    return _escape(", ".join(f"{name} {value}" for name, value in leak.items()))


def _speaker(language: str):
    """Returns a function that gives a phrase in this language with its blanks filled in."""
    index = LANGUAGES.index(language)
    return lambda key, **values: PHRASES[key][index].format(**values)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, its columns aligned for the terminal unless a cell is a whole text."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows)]
    widths = widths if max(widths) <= 40 else [0] * len(head)
    lines = [head, ["-" * max(width, 3) for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines)


def _escape(text: str) -> str:
    """Returns a text on one line, cut, with nothing that Markdown, HTML or a table cell would act on."""
    text = " ".join(text.split())
    text = text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + "…"
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", text)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _count(value: int | list) -> int:
    return value if isinstance(value, int) else len(value)
