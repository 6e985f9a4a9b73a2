"""Known failures in a log. Standard library only."""

import bisect
import re

from doctor.machine import knowledge

PREFIX = re.compile(r"^\s*\[(?:rank|default)(\d+)\]:\s?")
RANK_INSIDE = re.compile(r"RankID:(\d+)|\[Rank (\d+)\]|^error on rank (\d+)")
STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[-_ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{3}))?")
OWN_SENTENCE = re.compile(r"^error(?: on rank \d+)?: .*")  # sft/errors.py
EXCEPTION = re.compile(
    rf"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*|{OWN_SENTENCE.pattern}"
)
CODE = r"(?i:code|result|errno|err|ret|status)[^\w\n]{{0,5}}(?:is[^\w\n]{{0,3}})?(?:{})\b"  # not "step 561003"
LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError")


def explain(log: str) -> dict:
    """Which known failures a log shows, and whose came first.

    Returns {"rank": int or None, "line": 1-based, "message": the first failing rank's first error, "failures":
    signatures found, causes before consequences}. The first failing rank is the one with the earliest error that is
    not itself the consequence of another rank's failure (a time-out, a closed connection); time stamps decide where
    both lines have one, the order in the log elsewhere; torchrun's own "first observed failure" where nothing else is.
    """
    starts = [0, *(match.end() for match in re.finditer("\n", log))]
    hits_of_line: dict[int, list[dict]] = {}
    for row in knowledge("signatures")["signatures"]:
        pattern = f"{row['pattern']}|{CODE.format(row['codes'])}" if "codes" in row else row["pattern"]
        for match in re.finditer(pattern, log):
            hits_of_line.setdefault(bisect.bisect_right(starts, match.start()), []).append(row)
    rank, errors, found, root, in_summary, after_place = None, [], {}, None, False, False
    for number, raw in enumerate(log.split("\n"), 1):
        prefix = PREFIX.match(raw)
        text = raw[prefix.end() :] if prefix else raw
        inside = RANK_INSIDE.search(text)
        if prefix:
            rank = int(prefix[1])
        elif inside:
            rank = int(next(group for group in inside.groups() if group))
        elif text.startswith("Traceback (most recent call last)"):
            rank = None
        in_summary = in_summary or "Root Cause (first observed failure)" in text
        if in_summary and root is None and (match := re.match(r"\s*rank\s*:\s*(\d+)", text)):
            root = rank = int(match[1])
        is_source, after_place = after_place and text.startswith("    "), text.lstrip().startswith('File "')
        hits = [] if is_source else hits_of_line.get(number, [])  # a traceback's quotation of the program
        if LAUNCHER.search(text) or not (hits or EXCEPTION.match(text)):
            continue
        for row in hits:
            found.setdefault(row["id"], {**row, "line": number, "rank": rank, "count": 0})["count"] += 1
        if hits and all(row.get("warning") for row in hits):
            continue
        stamp = STAMP.search(text)
        consequence = bool(hits) and all(row.get("consequence") for row in hits)
        errors.append({"rank": rank, "line": number, "message": text.strip(), "consequence": consequence,
                       "stamp": stamp.group(0) if stamp else None, "ids": [row["id"] for row in hits]})  # fmt: skip
    causes = [error for error in errors if not error["consequence"]] or errors
    if not causes:
        return {"rank": root, "line": None, "message": "no error found in the log", "failures": list(found.values())}
    stamped = [error for error in causes if error["stamp"]]
    first = min(causes, key=lambda error: error["line"])
    if first["stamp"] and len(stamped) > 1:
        first = min(stamped, key=lambda error: (re.sub(r"\D", "", error["stamp"])[:17].ljust(17, "0"), error["line"]))
    if first["consequence"] and root is not None:
        first = next((error for error in errors if error["rank"] == root), first)
    order = sorted(
        found.values(),
        key=lambda row: (
            row.get("warning", False),
            row.get("consequence", False) and row["id"] not in first["ids"],
            row.get("vague", False),
            row["id"] not in first["ids"],
            row["line"],
        ),
    )
    return {
        "rank": first["rank"] if first["rank"] is not None else root,
        "line": first["line"],
        "message": first["message"],
        "failures": order,
    }


def last_line(text: str) -> str:
    """The last line that is not blank, at most 200 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def remedy_for(text: str) -> str:
    """What to check for the failure that a tool's or a probe's output shows."""
    failures = explain(text)["failures"]
    return (
        failures[0]["check"]
        if failures
        else "not a known failure; install the requirements file in a fresh environment"
    )


def known(text: str) -> list[str]:
    """Names of the known failures in a text."""
    return [row["id"] for row in explain(text)["failures"]]
