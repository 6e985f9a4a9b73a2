#!/usr/bin/env python
"""Will it run here, how much memory will it take, and why did it fail?

    python doctor.py                                     is this machine ready to train? exit 0 yes, 3 no
    python doctor.py --accelerate_config FILE.yaml       the same, for this launch config
    python doctor.py --explain LOGFILE                   known failures in a log ("-": standard input)
    python doctor.py --estimate --config configs/qwen2.5-7b.yaml --accelerate_config accelerate_configs/npu_2.yaml
    accelerate launch --config_file FILE.yaml doctor.py --collectives
    python doctor.py --report report.md                  all of it in one file to show to others, secrets hidden

It starts with the standard library alone: it must speak when torch cannot be imported.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from doctor import checks, explanations
from doctor.machine import GIB, Machine
from sft import masking
from sft.errors import UserError, run

NOT_READY = 3  # exit status when the answer is "no"


def positive(kind: type, least: float = 0):
    """A type for argparse: numbers above `least` and below 10^12."""

    def convert(text: str):
        value = kind(text)
        if not least < value < 1e12:
            raise argparse.ArgumentTypeError(f"{text}: it must be above {least:.0f} and below 10^12")
        return value

    convert.__name__ = "number"  # argparse names it when the text is no number
    return convert


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    parser.add_argument("--explain", metavar="LOGFILE", help="name known failures in a log; - reads standard input")
    parser.add_argument(
        "--estimate", action="store_true", help="memory per card and time, from the model's config alone"
    )
    parser.add_argument("--collectives", action="store_true", help="test communication; under accelerate launch")
    parser.add_argument("--report", metavar="FILE.md", help="write everything as one markdown file without secrets")
    parser.add_argument("--config", metavar="FILE.yaml", help="training config, as for train.py")
    parser.add_argument("--accelerate_config", metavar="FILE.yaml", help="launch config (default: the wizard's)")
    parser.add_argument("--model_name_or_path", help="with --estimate: another model than the config's")
    parser.add_argument(
        "--max_length", type=positive(int), help="with --estimate: tokens per row (default: the data set's, or 512)"
    )
    parser.add_argument(
        "--deadline_s", type=positive(float), default=60, help="with --collectives: seconds per collective"
    )
    parser.add_argument(
        "--max_mib", type=positive(int), default=256, help="with --collectives: largest message that is timed"
    )
    parser.add_argument(
        "--parameters", type=positive(int), default=5_046_272, help="with --collectives: trainable fp32 parameters"
    )
    parser.add_argument(
        "--timeout_s", type=positive(float), default=120, help="seconds that a probe of torch or a card may take"
    )
    parser.add_argument("--root", default="/", help="look for CANN, driver and devices under this directory")
    parser.add_argument(
        "--min_shm_gib", type=positive(float, least=-1), default=1, help="free space that /dev/shm must have"
    )
    args = parser.parse_args()
    if sum(map(bool, (args.explain, args.estimate, args.collectives))) > 1 and not args.report:
        parser.error(
            "--explain, --estimate and --collectives answer one question each; --report takes several together"
        )
    return args


def main() -> None:
    args = arguments()
    for path in (args.config, args.accelerate_config):
        if path and not Path(path).is_file():
            raise UserError(f"{path} is not there; give the path of an existing YAML file")
    if args.collectives:
        from doctor.collectives import check_collectives

        sys.exit(0 if check_collectives(args.deadline_s, args.max_mib, args.parameters) else NOT_READY)
    if args.report:
        return write_report(args)
    if args.explain:
        answer, good = explain(args.explain), True
    elif args.estimate:
        answer, good = estimate(args), True
    else:
        answer, good = examine(args)
    print(json.dumps(answer, indent=2, ensure_ascii=False) if args.json else answer["text"])
    sys.exit(0 if good else NOT_READY)


def examine(args: argparse.Namespace) -> tuple[dict, bool]:
    """All checks of this machine; whether none failed."""
    machine = Machine(
        root=Path(args.root), accelerate_config=args.accelerate_config, train_config=args.config,
        timeout_s=args.timeout_s, min_shm_bytes=int(args.min_shm_gib * GIB),
    )  # fmt: skip
    results = checks.examine(machine)
    verdict = checks.verdict(machine, results)
    lines = []
    for check in results:
        lines.append(f"{check.status:4}  {check.name}: {check.found}")
        if check.remedy:
            lines.append(f"      → {check.remedy}")
    answer = {
        "verdict": verdict,
        "kind": machine.kind,
        "versions": machine.versions,
        "checks": [dataclasses.asdict(check) for check in results],
        "text": "\n".join([*lines, "", f"Verdict: {verdict}"]),
    }
    return answer, not any(check.status == "FAIL" for check in results)


def explain(path: str) -> dict:
    """Known failures in a log file or on standard input, the first failing rank's own message first."""
    if path == "-":
        log = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    elif Path(path).exists() and not Path(path).is_dir():
        log = Path(path).read_text(encoding="utf-8", errors="replace")
    else:
        raise UserError(f"the log {path} is no file; give a file, or - and pipe the log in")
    answer = explanations.explain(log)
    rank = "" if answer["rank"] is None else f", rank {answer['rank']}"
    place = f" (line {answer['line']}{rank})" if answer["line"] else rank
    lines = [f"First failure{place}: {answer['message']}"]
    for row in answer["failures"]:
        follows = "  [usually a consequence of another rank's failure]" if row.get("consequence") else ""
        follows = "  [a warning: runs go on after it]" if row.get("warning") else follows
        lines += ["", f"{row['id']}, line {row['line']}, seen {row['count']} ×{follows}",
                  f"  means   {row['meaning']}", f"  check   {row['check']}", f"  source  {row['source']}"]  # fmt: skip
    if explanations.OWN_SENTENCE.match(answer["message"]) and not answer["failures"]:
        lines += ["", "That is this program's own sentence: it names the reason, and mostly the remedy."]
    elif answer["line"] and not answer["failures"]:
        lines += ["", "Not a known failure. On Ascend the reason is often in ~/ascend/log/debug/plog; "
                  "run again with ASCEND_LAUNCH_BLOCKING=1 to see the true line."]  # fmt: skip
    return {**answer, "text": "\n".join(lines)}


def estimate(args: argparse.Namespace) -> dict:
    from doctor.memory import estimate_run

    return estimate_run(args.config, args.accelerate_config, args.model_name_or_path, args.max_length)


def write_report(args: argparse.Namespace) -> None:
    """One markdown file: checks, and estimate and explanation where asked for; nothing that identifies anybody."""
    if not Path(args.report).parent.is_dir():
        raise UserError(f"--report {args.report}: the directory {Path(args.report).parent} is not there; make it first")
    if Path(args.report).is_dir():
        raise UserError(f"--report {args.report} is a directory; name a file in it")
    machine, _ = examine(args)
    parts = [("Machine", machine["text"])]
    if args.estimate or args.config:
        try:
            parts.append(("Memory", estimate(args)["text"]))
        except (UserError, ImportError, OSError) as error:  # the rest of the report is what is needed then
            parts.append(("Memory", f"could not be estimated: {error}"))
    if args.explain:
        parts.append((f"Log {Path(args.explain).name}", explain(args.explain)["text"]))
    parts.append(("Versions", json.dumps(machine["versions"], indent=1)))
    for title, path in (("Training config", args.config), ("Launch config", args.accelerate_config)):
        if path:
            parts.append((title, Path(path).read_text(encoding="utf-8")))
    text = "\n\n".join(f"## {title}\n\n```\n{body.strip()}\n```" for title, body in parts)
    keep = tuple(machine["versions"].values())
    Path(args.report).write_text(masking.anonymise(f"# Doctor's report\n\n{text}\n", keep), encoding="utf-8")
    print(f"wrote {args.report}: {machine['verdict']}")


if __name__ == "__main__":
    run(main)
