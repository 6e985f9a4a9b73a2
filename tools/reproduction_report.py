"""What a reproduction found, as a page: the reference report's table beside what was measured, and what failed."""

import json
import re
from pathlib import Path
from typing import Any

from sft import schemas
from sft.artifacts import read_json, read_json_lines
from sft.errors import UserError

GB = 1e9
ABOVE_0 = schemas.Kind("a number above 0", lambda value: schemas.NUMBER.holds(value) and value > 0)
SUMMARY = schemas.SUMMARY | {
    "simulated": schemas.BOOL, "steps": schemas.COUNT, "global_batch_size": schemas.COUNT, "train_time_s": ABOVE_0,
    "tokens_per_s": schemas.NUMBER, "first_loss": schemas.NUMBER, "last_loss": schemas.NUMBER,
}  # fmt: skip
CHECK = dict.fromkeys(("name", "status", "found", "remedy"), schemas.TEXT)
DOCTOR = {"versions?": {str: schemas.ANY}, "checks?": [CHECK]}
ESTIMATE = {"bytes": schemas.COUNT, "time?": {"step_s?": schemas.NUMBER}}
# The reference report: Qwen2.5-7B-Instruct on Ascend 910B3. It gives the two-card time as about half of one card's.
REFERENCE = {
    1: {"memory": "16.4 GB", "time": "1", "steps": 91},
    2: {"memory": "16.4 GB", "time": "about 0.5", "steps": 91},
}
TOLERANCES = {  # of two card counts' losses, step by step
    "small": (1e-4, "fp32: sums in another order; 20 steps of Adam amplify a last-digit difference"),
    "reference": (2e-2, "bf16 rounds by 2^-8 = 0.4 %, in many layers and steps; on the CPU fp32 and far closer"),
}


def render(evidence: dict, output: Path) -> tuple[str, dict]:
    """The page as markdown and all facts as one object. Reads the run directories below `output` that are there."""
    steps = evidence["steps"]
    damaged: list[str] = []  # what cannot be read is left out and named, a sentence each
    doctor = read_json_log(output, "doctor", DOCTOR, damaged) if is_done(evidence, "doctor") else {}
    runs = {name: read_run(output / name, damaged) for name in steps if name.startswith(("reference-", "small-"))}
    runs = {name: run for name, run in runs.items() if run}
    simulated = any(run["summary"]["simulated"] for run in runs.values())
    facts = {
        **evidence,
        "simulated": simulated,
        "versions": doctor.get("versions") or {},
        "checks": doctor.get("checks") or [],
        "table": [measured_row(cards, runs, output, evidence, damaged) for cards in evidence["cards"]],
        "equality": compare_card_counts(evidence["cards"], runs),
        "bandwidth": {name: read_bandwidth(output, name) for name in steps if name.startswith("collectives-")},
        "evaluation": read_evaluation(output, evidence, damaged),
        "damaged": damaged,
    }
    facts["verdict"] = verdict(evidence, facts["checks"], damaged)
    return page(facts), facts


def is_done(evidence: dict, step: str) -> bool:
    return evidence["steps"].get(step, {}).get("status") == "done"


def verdict(evidence: dict, checks: list[dict], damaged: list[str]) -> str:
    steps = evidence["steps"].values()
    failed = [step["name"] for step in steps if step["status"] == "failed"]
    left_out = [step["name"] for step in steps if step["status"] == "left out"]
    bad = [check["name"] for check in checks if check["status"] == "FAIL"]
    words = [f"{sum(step['status'] == 'done' for step in steps)} steps done"]
    words += [f"failed: {', '.join(failed)}"] if failed else []
    words += [f"{len(left_out)} left out, as they need those"] if left_out else []
    words += [f"the doctor objects to: {', '.join(bad)}"] if bad else []
    words += [f"{len(damaged)} files could not be read whole"] if damaged else []
    return "; ".join(words)


def read_json_log(output: Path, name: str, shape: Any, damaged: list[str]) -> dict:
    """The JSON object in a step's log, which warnings may surround; {} when there is none of that shape."""
    log = output / "steps" / f"{name}.log"
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
        start, end = text.find("\n{") + 1 if not text.startswith("{") else 0, text.rfind("}")
        value = json.loads(text[start : end + 1])
        wrong = schemas.mismatch(value, shape)
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"it holds no whole JSON object ({error})"
    if wrong:
        damaged.append(f"{log}: {wrong}")
        return {}
    return value


def read_run(directory: Path, damaged: list[str]) -> dict | None:
    """summary.json, environment.json and the losses by step of a finished run; None when one cannot be read."""
    if not (directory / "summary.json").is_file():
        return None
    try:
        summary = read_json(directory / "summary.json", SUMMARY)
        environment = read_json(directory / "environment.json", schemas.ENVIRONMENT)
    except UserError as error:
        damaged.append(str(error))
        return None
    return {"summary": summary, "environment": environment, "losses": read_losses(directory / "metrics.jsonl", damaged)}


def read_losses(path: Path, damaged: list[str]) -> dict[int, float]:
    """The loss of each step that metrics.jsonl still holds."""
    try:
        records = read_json_lines(path, schemas.RECORD)
        lines = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    except OSError as error:
        damaged.append(f"{path} cannot be read: {error.strerror}")
        return {}
    if len(records) < lines:
        damaged.append(f"{path}: {lines - len(records)} of {lines} lines are damaged")
    return {record["step"]: record["loss"] for record in records if record.get("loss") is not None}


def measured_row(cards: int, runs: dict, output: Path, evidence: dict, damaged: list[str]) -> dict:
    """What was measured on so many cards, beside the estimate."""
    run = runs.get(f"reference-{cards}")
    row = {"cards": cards, "reference": REFERENCE.get(cards)}
    if is_done(evidence, f"estimate-{cards}"):
        estimate = read_json_log(output, f"estimate-{cards}", ESTIMATE, damaged)
        row["estimated_bytes"] = estimate.get("bytes")
        row["estimated_step_s"] = (estimate.get("time") or {}).get("step_s")
    if run:
        summary = run["summary"]
        keys = ("steps", "train_time_s", "tokens_per_s", "peak_memory_bytes", "first_loss", "last_loss", "eval_loss")
        row |= {key: summary.get(key) for key in keys}
        first = runs.get(f"reference-{evidence['cards'][0]}")
        row["time_ratio"] = summary["train_time_s"] / first["summary"]["train_time_s"] if first else None
        row["device_name"] = run["environment"]["device_name"]
    return row


def compare_card_counts(cards: list[int], runs: dict) -> list[dict]:
    """The largest relative difference of losses between the first card count and each other with the same global batch."""
    found = []
    for kind in ("small", "reference"):
        for suffix in ("", "-deterministic"):
            first = runs.get(f"{kind}-{cards[0]}{suffix}")
            for other in cards[1:]:
                second = runs.get(f"{kind}-{other}{suffix}")
                if not first or not second:
                    continue
                if first["summary"]["global_batch_size"] != second["summary"]["global_batch_size"]:
                    continue
                common = sorted(step for step in first["losses"] if second["losses"].get(step))[:20]
                if not common:
                    continue
                difference = max(abs(first["losses"][step] / second["losses"][step] - 1) for step in common)
                tolerance, reason = TOLERANCES[kind]
                found.append({
                    "model": kind, "deterministic": bool(suffix), "cards": [cards[0], other], "steps": len(common),
                    "difference": difference, "tolerance": tolerance, "reason": reason, "holds": difference <= tolerance,
                })  # fmt: skip
    return found


def read_bandwidth(output: Path, name: str) -> str | None:
    """The bandwidth of the largest all-reduce that `doctor.py --collectives` timed, as it printed it."""
    log = output / "steps" / f"{name}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = re.findall(r"^ +\d+ [KM]B .*GB/s", text, re.MULTILINE)
    return " ".join(lines[-1].split()) if lines else None


def read_evaluation(output: Path, evidence: dict, damaged: list[str]) -> dict | None:
    report = output / f"reference-{evidence['cards'][-1]}" / "eval" / "report.json"
    if not is_done(evidence, "evaluation") or not report.is_file():
        return None
    try:
        read = read_json(report, schemas.REPORT | {"rows": schemas.COUNT})
    except UserError as error:
        damaged.append(str(error))
        return None
    return {key: read[key] for key in ("rows", "base", "adapter", "signature")}


def page(facts: dict) -> str:
    """The facts as markdown."""
    mark = " (simulated Ascend: not a run on hardware)" if facts["simulated"] else ""
    parts = [f"# Reproduction of the reference run{mark}", "", f"**{facts['verdict']}.**", ""]
    shortened = f"; shortened to {facts['max_steps']} steps" if facts["max_steps"] else ""
    parts += [
        f"Model {facts['model']}, kind {facts['kind']}, cards {', '.join(map(str, facts['cards']))}{shortened}.",
        "",
    ]
    parts += ["## The table", ""]
    head = ["cards", "memory per card, report", "measured", "estimated", "time, report", "measured", "seconds"]
    head += ["steps, report", "run", "loss", "held-out loss"]
    parts += table(head, [table_row(row) for row in facts["table"]])
    parts += ["", 'Times are relative to one card\'s. "Report" is the report that the reference run follows.']
    parts += ["", "## Do card counts agree, step by step?", ""]
    rows = [
        [row["model"], "yes" if row["deterministic"] else "no", " = ".join(map(str, row["cards"])), row["steps"],
         f"{row['difference']:.1e}", f"{row['tolerance']:.0e}: {row['reason']}", "yes" if row["holds"] else "**no**"]
        for row in facts["equality"]
    ]  # fmt: skip
    parts += table(
        ["model", "deterministic", "cards", "steps", "largest difference of a loss", "tolerance", "holds"], rows
    )
    if any(facts["bandwidth"].values()):
        parts += ["", "## Communication", ""]
        parts += table(
            ["step", "largest all-reduce"], [[name, text or "-"] for name, text in facts["bandwidth"].items()]
        )
    if facts["evaluation"]:
        parts += ["", "## Evaluation", ""]
        base, adapter = facts["evaluation"]["base"], facts["evaluation"]["adapter"]
        rows = [[name, number(base.get(name)), number(adapter[name])] for name in adapter]
        parts += table([f"{facts['evaluation']['rows']} rows", "base", "adapter"], rows)
    objections = [check for check in facts["checks"] if check["status"] != "ok"]
    if objections:
        parts += ["", "## What the doctor objects to", ""]
        rows = [[check["name"], check["status"], check["found"], check["remedy"]] for check in objections]
        parts += table(["check", "", "found", "what to do"], rows)
    failed = [step for step in facts["steps"].values() if step["status"] == "failed"]
    if failed:
        parts += ["", "## What failed", ""]
        for step in failed:
            parts += [f"### {step['name']}", "", f"    {step['message']}", "", f"Log: `{step['log']}`", ""]
            parts += [*(f"- {row['id']}: {row['meaning']} → {row['check']}" for row in step["explanations"]), ""]
    if facts["damaged"]:
        parts += [
            "",
            "## What could not be read",
            "",
            *(f"- {' '.join(sentence.split())}" for sentence in facts["damaged"]),
        ]
    parts += ["", "## The machine", ""]
    parts += table(["what", "version"], [[name, version] for name, version in sorted(facts["versions"].items())])
    parts += ["", *table(["check", "", "found"], [[c["name"], c["status"], c["found"]] for c in facts["checks"]])]
    parts += ["", "## The commands", ""]
    parts += table(
        ["step", "status", "seconds"],
        [[s["name"], s["status"], f"{s['seconds']:.0f}"] for s in facts["steps"].values()],
    )
    return "\n".join(parts) + "\n"


def table_row(row: dict) -> list[str]:
    reference = row["reference"] or {"memory": "-", "time": "-", "steps": "-"}
    peaks = row.get("peak_memory_bytes")
    memory = ", ".join(f"{peak / GB:.2f} GB" for peak in peaks) if peaks else "-"
    estimated = f"{row['estimated_bytes'] / GB:.2f} GB" if row.get("estimated_bytes") else "-"
    ratio = f"{row['time_ratio']:.2f}" if row.get("time_ratio") else "-"
    losses = f"{number(row['first_loss'])} → {number(row['last_loss'])}" if peaks else "-"
    return [
        str(row["cards"]), reference["memory"], memory, estimated, reference["time"], ratio,
        f"{row['train_time_s']:.0f}" if peaks else "-", str(reference["steps"]), str(row.get("steps", "-")), losses,
        number(row.get("eval_loss")),
    ]  # fmt: skip


def number(value) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def table(head: list, rows: list[list]) -> list[str]:
    """Lines of a markdown table; a bar inside a cell is escaped."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]
