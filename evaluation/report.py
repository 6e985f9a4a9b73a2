"""What is known about a run, read back from its directory, and the report on it: JSON, two languages, plots."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.markdown import render_report
from evaluation.metrics import FEWEST_ROWS, RESAMPLES, aggregate, compare, judge, rows_needed, signature_of
from evaluation.plots import draw_differences, draw_length_loss
from evaluation.webpage import render_page
from sft import schemas
from sft.artifacts import read_json, write_json, write_text
from sft.errors import UserError
from sft.journal import read_metrics
from sft.loss_plot import draw_loss

REPORTS = {"en": "report.md", "zh-CN": "report.zh-CN.md"}
TEXTS = ("id", "question", "reference", "base", "adapter")  # of a row of predictions.jsonl
EXAMPLES = 3  # best and worst rows shown, each


@dataclass(frozen=True)
class RunResults:
    """A run directory as data. What the run has not written yet is empty: `{}`, `[]`, and None for the report."""

    directory: Path
    config: dict  # every setting of train.py
    provenance: dict  # hashes and names of what it was made from
    environment: dict  # versions, device, simulated
    summary: dict  # last figures; {} until training has finished
    metrics: list[dict]  # the records of metrics.jsonl in order: those with "loss" and those with "eval_loss"
    report: dict | None  # eval/report.json
    predictions: list[dict]  # eval/predictions.jsonl, one per row that the run held out (see `join_predictions`)


def load_run(run_dir: str | Path) -> RunResults:
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

    def read(name: str, shape, default):
        return read_json(directory / name, shape) if (directory / name).is_file() else default

    return RunResults(
        directory=directory,
        config=read("config.json", schemas.CONFIG, {}),
        provenance=read("provenance.json", schemas.PROVENANCE, {}),
        environment=read("environment.json", schemas.ENVIRONMENT, {}),
        summary=read("summary.json", schemas.SUMMARY, {}),
        metrics=read_metrics(directory),
        report=read("eval/report.json", schemas.REPORT, None),
        predictions=[row for row in _read_lines(directory / "eval" / "predictions.jsonl") if "set" not in row],
    )


def is_report(path: Path) -> bool:
    """Whether a file is a report.json of eval.py, of whatever version."""
    try:
        read_json(path, schemas.REPORT)
    except UserError:
        return False
    return True


def join_predictions(
    rows: Sequence[dict],
    base_rows: Sequence[dict],
    adapter_rows: Sequence[dict],
    base_answers: Sequence[str] | None = None,
    adapter_answers: Sequence[str] | None = None,
) -> list[dict]:
    """Returns the lines of predictions.jsonl: id, question, reference, length, target_tokens, and for base and adapter
    the answer (None without generation) under `base` and `adapter`, then `…_nll`, `…_stopped`, and all of
    `evaluation.metrics.score_row` under `…_scores`, as `evaluation.metrics.compare` takes them.

    rows: held-out rows with those first five columns. base_rows, adapter_rows: what `evaluation.metrics.evaluate_generations`
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
    run: RunResults,
    predictions: Sequence[dict],
    manifest: dict,
    language: str = "auto",
    decoding: str = "greedy",
    seed: int = 42,
    simulated: bool = False,
    times: dict | None = None,
    resamples: int = RESAMPLES,
    others: dict[str, Sequence[dict]] | None = None,
) -> dict:
    """Returns report.json: figures of base and adapter, what their differences show, and all facts of the run.

    predictions: of `join_predictions`. manifest: of the data set that the rows came from. simulated: whether this
    evaluation, too, ran on simulated hardware. others: predictions of other sets of rows, by name. Everything but `times` is the same for each evaluation of the same run.
    """
    adapter_rows = [row["adapter_scores"] for row in predictions]
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
        **compare_sides(predictions, seed, resamples),
        "warnings": [name for name, present in found.items() if present],
        "other_sets": {name: compare_sides(lines, seed, resamples) for name, lines in (others or {}).items()},
        "signature": signature_of(adapter_rows, language, decoding, seed, resamples),
        "examples": _pick_examples(predictions),
        "leaks": manifest.get("leaks", []),
        "data": data | lists | {"modes": manifest.get("modes", {})},
        "run": {
            "config": run.config,
            "provenance": run.provenance,
            "environment": run.environment,
            "summary": run.summary,
        },
        "times": times or {},
    }


def compare_sides(predictions: Sequence[dict], seed: int = 42, resamples: int = RESAMPLES) -> dict:
    """Returns the figures of base and adapter over these rows, and what their differences show."""
    sides = [[row[f"{side}_scores"] for row in predictions] for side in ("base", "adapter")]
    difference = compare(*sides, seed, resamples)
    enough = len(predictions) >= FEWEST_ROWS
    verdicts = judge(difference) if enough else dict.fromkeys(difference, "too few rows")
    conclusion = _conclude(verdicts) if enough else "too_few"
    return {
        "rows": len(predictions),
        "conclusion": conclusion,
        "rows_needed": rows_needed(*sides) if conclusion in ("no_effect", "too_few") else None,
        "base": aggregate(sides[0]),
        "adapter": aggregate(sides[1]),
        "difference": difference,
        "verdicts": verdicts,
    }


def split_sets(predictions: Sequence[dict], sizes: dict[str, int]) -> dict[str, list[dict]]:
    """Returns the lines of each set, which stand one after another; those of a named one get that name as `set`."""
    sets, start = {}, 0
    for name, size in sizes.items():
        sets[name] = predictions[start : start + size]
        start += size
        for line in sets[name] if name else []:
            line["set"] = name
    return sets


def write_report(directory: str | Path, report: dict, predictions: Sequence[dict], metrics: Sequence[dict]) -> None:
    """Writes predictions.jsonl, three plots, report.md, report.zh-CN.md, report.html, report.json.

    metrics: the records of the run's metrics.jsonl. report.json comes last: where it is, the rest is whole.
    """
    directory = Path(directory)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
    write_text(directory / "predictions.jsonl", "".join(lines))
    drawn = {
        "loss": draw_loss(metrics),
        "differences": draw_differences(report["difference"], report["verdicts"]),
        "length_loss": draw_length_loss([row for row in predictions if "set" not in row]),
    }
    for name, figure in drawn.items():
        figure.savefig(directory / f"{name}.png", dpi=120)
    write_text(directory / "report.html", render_page(report, predictions, metrics))
    for language, name in REPORTS.items():
        write_text(directory / name, render_report(report, language))
    write_json(directory / "report.json", report)


def compare_runs(first: RunResults, second: RunResults, seed: int = 42) -> dict[str, dict]:
    """Returns {metric: {"mean", "ci95"}}, adapter of `second` − adapter of `first`, over the rows that both evaluated.

    Raises:
        UserError: one of them is not evaluated, or they share no row (by id, question and reference).
    """
    for run in (first, second):
        if not run.predictions:
            raise UserError(f"{run.directory} holds no eval/predictions.jsonl; run eval.py --run_dir {run.directory}")

    def keyed(run: RunResults) -> dict[tuple, dict]:
        return {(row["id"], row["question"], row["reference"]): row["adapter_scores"] for row in run.predictions}

    ours, theirs = keyed(first), keyed(second)
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise UserError(
            f"{first.directory} and {second.directory} were evaluated on different rows: nothing to compare"
        )
    return compare([ours[key] for key in shared], [theirs[key] for key in shared], seed)


def _read_lines(path: Path) -> list[dict]:
    """Returns the objects of a .jsonl file, none when it does not exist; a last line without an end is left out."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is not valid JSON ({error}); the file is damaged") from None
        if wrong := schemas.mismatch(rows[-1], schemas.PREDICTION):
            raise UserError(f"{path}:{number} is damaged: {wrong}")
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


def _count(value: int | list) -> int:
    return value if isinstance(value, int) else len(value)
