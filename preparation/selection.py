"""Which encoded rows are written, which of them are held out, and what the manifest tells about the others."""

from dataclasses import dataclass

import numpy as np

from preparation.encoded_rows import EncodedRows
from preparation.holdout import choose_held_out, find_near


@dataclass
class Selection:
    """The rows that are written, and what became of the others."""

    split: dict[str, np.ndarray]  # train and eval: sorted row numbers
    found: dict  # keys of the manifest: rejected, truncated, duplicates, conflicting, leaks …


def select(rows: EncodedRows, paths: list[str], eval_fraction: float) -> Selection:
    """Leaves out rows without tokens and repeated ones, and holds out the share `eval_fraction`; `paths` of the sources."""
    figures = rows.figures

    def place(row: int) -> dict:
        return {"file": paths[figures["source"][row]], "line": int(figures["line"][row])}

    def name(row: int) -> str:
        return "{file}:{line}".format(**place(row))

    good = np.flatnonzero(figures["length"] > 0)
    _, first, group = np.unique(figures["row_hash"][good], return_index=True, return_inverse=True)
    kept = good[np.sort(first)]
    original = good[first][group.reshape(-1)]
    asked = figures["question_hash"][kept]
    held_out = choose_held_out(asked, eval_fraction)
    cut = kept[figures["truncated"][kept]]
    refused = rows.take(np.flatnonzero(figures["length"] == 0), ["reason"])
    conflicts = [kept[members] for members in find_conflicts(asked, figures["answer_hash"][kept])]
    questions = rows.take(np.array([members[0] for members in conflicts], dtype=int), ["question"])
    found = {
        "rejected": [{**place(row), **reason} for row, reason in refused.items()],
        "truncated": len(cut),
        "truncated_rows": [{**place(row), "tokens": int(figures["full_length"][row])} for row in cut],
        "duplicates": len(good) - len(kept),
        "duplicate_rows": [{**place(row), "same_as": name(same)} for row, same in zip(good, original) if row != same],
        "conflicting": [
            {**questions[int(members[0])], "rows": [name(row) for row in members]} for members in conflicts
        ],
        "leaks": find_leaks(rows, kept, held_out),
    }
    return Selection({"train": kept[~held_out], "eval": kept[held_out]}, found)


def find_conflicts(asked: np.ndarray, answers: np.ndarray) -> list[list[int]]:
    """Groups of rows that ask the same and answer differently, as row numbers."""
    _, group, sizes = np.unique(asked, return_inverse=True, return_counts=True)
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(sizes[group] > 1).tolist():
        groups.setdefault(int(group[row]), []).append(row)
    return [members for members in groups.values() if len(np.unique(answers[members])) > 1]


def find_leaks(rows: EncodedRows, kept: np.ndarray, held_out: np.ndarray) -> list[dict]:
    """Held-out questions that stand nearly the same in the training rows; those that are the same are held out together."""

    def read_questions(numbers: np.ndarray) -> list[str]:
        asks = rows.take(kept[numbers], ["asks"])
        return [asks[row]["asks"] for row in kept[numbers].tolist()]

    near = find_near(held_out, rows.figures["bands"][kept], read_questions)
    shown = rows.take(kept[[row for pair in near for row in pair[:2]]], ["id", "question"])
    return [
        {"held_out": shown[kept[row]], "train": shown[kept[other]], "kind": "near", "similarity": round(score, 3)}
        for row, other, score in near
    ]


def count_tokens(rows: EncodedRows, split: dict[str, np.ndarray]) -> dict:
    """The manifest's figures about tokens."""
    length = rows.figures["length"][np.concatenate(list(split.values()))]
    return {
        "tokens": {name: int(rows.figures["length"][numbers].sum()) for name, numbers in split.items()},
        "target_tokens": {name: int(rows.figures["target_tokens"][numbers].sum()) for name, numbers in split.items()},
        "length": {
            "min": int(length.min()),
            "median": int(np.percentile(length, 50)),
            "p95": int(np.percentile(length, 95)),
            "max": int(length.max()),
        },
    }
