"""What data_prep.py says at its end: what became of the rows, and one of them with its targets marked."""

import itertools

from sft.dataset import Dataset
from sft.encoding import IGNORED

SHOWN = 10  # rows of one kind that are named on the screen; the manifest names all
WIDTH = 300  # characters of a line, tokens of the example


def print_summary(manifest: dict, output_dir: str, tokenizer) -> None:
    for title, lines in noteworthy_rows(manifest):
        print(f"{title}: {len(lines)}")
        print("\n".join(f"  {line[:WIDTH]}" for line in lines[:SHOWN]))
        if len(lines) > SHOWN:
            print(f"  and {len(lines) - SHOWN} more, all in manifest.json")
    if manifest["cut_turns"]:
        print(f"unanswered turns at the end that were cut: {manifest['cut_turns']}")
    for note, count in manifest["notes"].items():
        print(f"{note}: {count:,} rows")
    if thinking := manifest["modes"].get("thinking"):
        print(f"asked for with a thought: {thinking:,} rows, without: {manifest['modes'].get('plain', 0):,}")
    if unused := manifest["unused_fields"]:
        print("fields that are not used: " + listed([f"{name} ({count:,} rows)" for name, count in unused.items()]))
    for path, share in manifest["shares"].items():
        print(f"{path}: {share['taken']:,} of {share['rows']:,} rows taken")
    rows, tokens, targets, length = (manifest[name] for name in ("rows_written", "tokens", "target_tokens", "length"))
    print("tokens per row: " + ", ".join(f"{name} {value}" for name, value in length.items()))
    for name in ("train", "eval"):
        print(f"{name}: {rows[name]:,} rows, {tokens[name]:,} tokens, {targets[name]:,} of them targets")
    fraction = manifest["eval_fraction"]
    wanted = round(fraction * sum(rows.values()))
    if rows["eval"] != wanted:
        print(f"held out {rows['eval']} rows instead of {wanted}: rows that ask the same stay together")
    elif fraction and not rows["eval"]:
        print(f"nothing is held out: --eval_fraction {fraction} of {rows['train']} rows is less than one")
    print(f"one epoch: {-(-rows['train'] // 4):,} steps at global batch 4")
    print("the first row as it is trained, targets in [[ ]]:")
    row = Dataset(output_dir, ("train",)).train[0]
    print(
        "  " + mark_targets(tokenizer, row["input_ids"][:WIDTH], row["labels"][:WIDTH]).replace("\n", "\n  ").rstrip()
    )
    print(f"wrote {output_dir}")


def noteworthy_rows(manifest: dict) -> list[tuple[str, list[str]]]:
    """(title, one line a row) for each kind of row that the user should see."""
    near = manifest["leaks"]
    kinds = [
        ("rejected", [f"{row['file']}:{row['line']} {row['reason']}" for row in manifest["rejected"]]),
        ("truncated", [f"{row['file']}:{row['line']} {row['tokens']} tokens" for row in manifest["truncated_rows"]]),
        ("duplicates", [f"{row['file']}:{row['line']} same as {row['same_as']}" for row in manifest["duplicate_rows"]]),
        (
            "warning: one question with different answers",
            [f"{', '.join(row['rows'])} {row['question']!r}" for row in manifest["conflicting"]],
        ),
        (
            "warning: held-out questions nearly the same in training",
            [f"{x['held_out']['question']!r} ≈ {x['train']['question']!r} ({x['similarity']:.2f})" for x in near],
        ),
        ("files that are not read, because of their ending", manifest["files_not_read"]),
    ]
    return [(title, lines) for title, lines in kinds if lines]


def listed(lines: list[str]) -> str:
    """The first SHOWN in one sentence, and how many more."""
    return "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")


def mark_targets(tokenizer, input_ids: list[int], labels: list[int]) -> str:
    text = ""
    for is_target, run_of in itertools.groupby(zip(input_ids, labels), key=lambda pair: pair[1] != IGNORED):
        piece = tokenizer.decode([token for token, _ in run_of])
        text += f"[[{piece}]]" if is_target else piece
    return text
