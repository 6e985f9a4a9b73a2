"""Question–answer files → a tokenised data set to train on: DATASET/train, DATASET/eval and manifest.json.

Reads what sft/records.py knows, encodes it with the model's own chat template, holds rows out, and says what became of
every row. Nothing appears under --output_dir before all of it is complete.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow
from tqdm import tqdm

from sft.artifacts import (
    library_versions,
    load_split,
    new_directory,
    read_manifest,
    sha256_file,
    sha256_json,
    template_sha256,
    tokenizer_sha256,
    write_json,
)
from sft.config import option, parse
from sft.encoding import IGNORED, encode_dialogues, encode_prompt
from sft.errors import UserError, run
from sft.holdout import BANDS, choose_held_out, find_near, question_hash, sketch
from sft.records import (
    SCHEMAS,
    RowError,
    Source,
    UnknownFields,
    find_sources,
    normalise_question,
    read_dialogue,
    read_rows,
)
from sft.tokenizer import load_tokenizer

BATCH = 1000  # rows that are in memory at once, in each worker
PART = 200_000  # rows that are mapped into memory at once while they are encoded
MOST_WORKERS = 8  # unless the user says otherwise; each takes about 0.5 GiB
ROWS_PER_WORKER = 2000  # below that a second process costs more than it brings
RECIPE_VERSION = 1  # to be raised when the same files and settings make another data set
SEPARATOR = "\x1f"  # between the turns of a row; control characters are no part of a normalised question
STOP = threading.Event()  # a signal came
ALL_WRITTEN = threading.Event()  # what is left is a rename and the summary: no signal ends that
UNFINISHED: list[Path] = []  # what goes when nothing else helps
INTERRUPTED = "interrupted: nothing was written"
GIVE_UP_S = 10.0  # an interrupted pool of processes may wait for ever
SHOWN = 10  # rows of one kind that are named on the screen; the manifest names all

COLUMNS = datasets.Features(
    {
        "id": datasets.Value("string"),
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "labels": datasets.Sequence(datasets.Value("int32")),
        "length": datasets.Value("int32"),
        "target_tokens": datasets.Value("int32"),
        "question": datasets.Value("string"),
        "reference": datasets.Value("string"),
    }
)
# What the stages hand to each other beside them; not part of the data set.
READ = pyarrow.schema(
    [("source", pyarrow.int32()), ("line", pyarrow.int64()), ("id", pyarrow.string()), ("messages", pyarrow.string())]
)
NOTES = datasets.Features(
    {
        "source": datasets.Value("int32"),
        "line": datasets.Value("int64"),
        "reason": datasets.Value("string"),
        "full_length": datasets.Value("int32"),
        "truncated": datasets.Value("bool"),
        "asks": datasets.Value("string"),  # all questions, normalised
        "question_hash": datasets.Value("uint64"),
        "answer_hash": datasets.Value("uint64"),
        "row_hash": datasets.Value("uint64"),
        "bands": datasets.Sequence(datasets.Value("uint32"), length=BANDS),
    }
)
ENCODED = datasets.Features({**COLUMNS, **NOTES})
NUMBERS = ["source", "line", "length", "target_tokens", "full_length", "truncated"]
NUMBERS += ["question_hash", "answer_hash", "row_hash"]


@dataclass
class PrepConfig:
    """All settings of data_prep.py."""

    input: list[str] = option(
        help="json, jsonl, csv or parquet files (also .gz), directories of them, `datasets`, hub names"
    )
    model_name_or_path: str = option(
        help="the model whose tokenizer and chat template are used: a directory or hub name"
    )
    output_dir: str = option(help="the data set, made by this script")
    max_length: int = option(512, "tokens of a row, at most")
    eval_fraction: float = option(0.05, "share of the rows that is held out; 0 holds nothing out")
    seed: int = option(42, "decides which rows are held out")
    encoding: str = option("utf-8", "of text files, for example gbk")
    format: str = option(
        "auto", "of the files; auto: by their names", choices=("auto", "json", "jsonl", "csv", "parquet")
    )
    on_too_long: str = option("truncate", "what happens to rows above max_length", choices=("truncate", "drop"))
    system_prompt: str = option("", "system text of the rows that have none of their own")
    question_column: str = option("", "field that holds the question, if it has another name than the known ones")
    answer_column: str = option("", "field that holds the answer, likewise")
    strict: bool = option(False, "end with an error when a row is rejected or a held-out question leaks into training")
    overwrite: bool = option(False, "replace the data set that output_dir holds, once the new one is complete")
    num_proc: int | None = option(
        None, "processes that encode; none: as many as the rows are worth, up to 8; the result is the same"
    )
    trust_remote_code: bool = option(
        False, "run Python code that comes with the tokenizer (only if you trust its author)"
    )

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(f"max_length is {self.max_length}; a row needs at least 2 tokens, 512 is usual")
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"eval_fraction is {self.eval_fraction}; expected at least 0 and below 1, for example 0.05")
        if self.question_column and self.question_column == self.answer_column:
            raise UserError(
                f"question_column and answer_column are both {self.answer_column}: the model would learn to repeat questions"
            )
        if self.num_proc is not None and self.num_proc < 1:
            raise UserError(f"num_proc is {self.num_proc}; expected at least 1")
        for name in self.input:
            if Path(name).is_dir() and Path(self.output_dir).resolve().is_relative_to(Path(name).resolve()):
                raise UserError(
                    f"--output_dir {self.output_dir} lies in --input {name}, so that it would be read as rows; choose another"
                )


def main(argv: list[str] | None = None) -> None:
    config = parse(PrepConfig, argv, __doc__)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    sources = find_sources(config.input, config.format)
    tokenizer = load_tokenizer(config.model_name_or_path, config.trust_remote_code)
    encode_prompt(tokenizer, [{"role": "user", "content": "?"}])  # a tokenizer that cannot do this is refused now
    recipe = describe_recipe(config, sources, tokenizer)
    if is_up_to_date(config, recipe):
        print(f"{config.output_dir} is up to date: same files, settings and tokenizer; nothing to do")
        return
    output = Path(config.output_dir)
    with new_directory(output, replace=output.exists()) as directory, heeding_signals():
        UNFINISHED.append(directory)
        work = directory / "work"
        work.mkdir()
        parts, read = read_sources(config, sources, work)
        files = encode_rows(config, parts, tokenizer)
        notes = read_notes(files)
        kept, held_out, found = sort_rows(config, sources, files, notes)
        found["rejected"] = sorted(read.pop("rejected") + found["rejected"], key=lambda row: (row["file"], row["line"]))
        refuse(config, found, len(kept), int(held_out.sum()))
        split = {"train": kept[~held_out], "eval": kept[held_out]}
        dataset_sha256 = write_splits(files, split, directory)
        shutil.rmtree(work)
        manifest = {
            **read,
            "rows_written": {name: len(rows) for name, rows in split.items()},
            **found,
            **count_tokens(notes, split),
            **{name: getattr(config, name) for name in ("max_length", "eval_fraction", "seed", "model_name_or_path")},
            **{name: recipe[name] for name in ("source_sha256", "tokenizer_sha256", "template_sha256")},
            "dataset_sha256": dataset_sha256,
            "versions": library_versions(),
            "recipe": recipe,
        }
        write_json(directory / "manifest.json", manifest)
    print_summary(config, manifest, tokenizer)


def describe_recipe(config: PrepConfig, sources: list[Source], tokenizer) -> dict:
    """Everything that decides the data set's content: equal recipes make equal data sets."""
    without = ("input", "model_name_or_path", "output_dir", "overwrite", "num_proc", "trust_remote_code")
    return {
        "recipe_version": RECIPE_VERSION,
        "source_names": [Path(source.path).name for source in sources],
        "source_sha256": sha256_json([sha256_file(file) for source in sources for file in source.hashed]),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": template_sha256(tokenizer),
        "tokenizers_version": library_versions()["tokenizers"],
        **{name: value for name, value in asdict(config).items() if name not in without},
    }


def is_up_to_date(config: PrepConfig, recipe: dict) -> bool:
    """Whether output_dir already holds what would be made. Raises: UserError when it holds anything else that stays."""
    output = Path(config.output_dir)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    if not (output / "manifest.json").is_file():
        raise UserError(
            f"--output_dir {output} exists and is no data set made by this script; choose another directory"
        )
    if config.overwrite:
        return False
    manifest = read_manifest(output)
    old = manifest.get("recipe", {})
    changed = [f"{name} {old.get(name)} → {recipe[name]}" for name in recipe if old.get(name) != recipe[name]]
    if changed:
        raise UserError(
            f"--output_dir {output} holds a data set that was made differently ({'; '.join(changed)}); choose another "
            "directory, or replace it with --overwrite"
        )
    rows = {name: len(load_split(output, name)) for name in ("train", "eval")}
    if rows != manifest["rows_written"]:
        raise UserError(f"--output_dir {output} holds a damaged data set ({rows} rows); make it again with --overwrite")
    return True


def read_sources(config: PrepConfig, sources: list[Source], work: Path) -> tuple[list[Path], dict]:
    """All usable rows as Arrow files of at most PART rows, and the first part of the manifest. Raises: UserError."""
    read = {"rows_read": 0, "rejected": [], "cut_turns": 0}
    rows = usable_rows(config, sources, read)
    parts = []
    while batch := list(itertools.islice(rows, BATCH)):
        parts.append(work / f"rows-{len(parts):05}.arrow")
        with pyarrow.OSFile(str(parts[-1]), "wb") as file, pyarrow.ipc.new_stream(file, READ) as writer:
            rest = itertools.islice(rows, PART - BATCH)
            while batch:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, READ))
                batch = list(itertools.islice(rest, BATCH))
    listed = ", ".join(source.path for source in sources)
    if not read["rows_read"]:
        raise UserError(f"{listed}: no rows; expected at least one question with its answer")
    print(f"read {read['rows_read']:,} rows from {listed}", flush=True)
    if not parts:
        refuse(config, read, kept=0, held_out=0)
    return parts, read


def usable_rows(config: PrepConfig, sources: list[Source], read: dict) -> Iterator[dict]:
    """The rows that can be used, in the form of READ; counts all and notes the others in `read`. Raises: UserError."""
    taken: set[int] = set()
    for number, source in enumerate(sources):
        before, unknown = read["rows_read"], []
        for line, row in tqdm(read_rows(source, config.encoding), f"Reading {source.path}", unit=" rows", disable=None):
            read["rows_read"] += 1
            try:
                dialogue = read_dialogue(row, config.question_column, config.answer_column, config.system_prompt)
            except RowError as error:
                read["rejected"].append({"file": source.path, "line": line, "reason": str(error)})
                unknown += [str(error)] if isinstance(error, UnknownFields) else []
                continue
            read["cut_turns"] += dialogue.cut_turns
            row_id = unique_name(dialogue.id or f"{Path(source.path).name}:{line}", taken)
            messages = json.dumps(dialogue.messages, ensure_ascii=False)
            yield {"source": number, "line": line, "id": row_id, "messages": messages}
        if unknown and len(unknown) == read["rows_read"] - before:
            raise UserError(
                f"{source.path}: {unknown[0]}; the schemas known are {SCHEMAS}; if the fields have other names, say "
                "which: --question_column Q --answer_column A"
            )


def unique_name(name: str, taken: set[int]) -> str:
    """`name`, with a number when it was given before; `taken` holds hashes, which need less memory than the names."""
    unique, number = name, 1
    while hash(unique) in taken:
        number += 1
        unique = f"{name}#{number}"
    taken.add(hash(unique))
    return unique


def encode_rows(config: PrepConfig, parts: list[Path], tokenizer) -> list[str]:
    """Arrow files that hold each row with its tokens, or with the reason why it has none, in the order of the rows."""
    files = []
    for number, part in enumerate(parts, 1):
        rows = datasets.Dataset.from_file(str(part))
        processes = min(config.num_proc or min(os.cpu_count() or 1, MOST_WORKERS), 1 + len(rows) // ROWS_PER_WORKER)
        if processes > 1:  # one thread in each process, and no warning about forking
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encoded = rows.map(
            encode_batch,
            batched=True,
            batch_size=BATCH,
            fn_kwargs={"tokenizer": tokenizer, "config": config},
            remove_columns=rows.column_names,
            features=ENCODED,
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(part.with_name(f"encoded-{number:05}.arrow")),
            new_fingerprint="encoded",  # else the tokenizer is hashed for a cache that is not used
            load_from_cache_file=False,
            desc="Encoding" + (f" part {number} of {len(parts)}" if len(parts) > 1 else ""),
        )
        files += [file["filename"] for file in encoded.cache_files]
    return files


def encode_batch(batch: dict[str, list], tokenizer, config: PrepConfig) -> pyarrow.Table:
    """The columns of COLUMNS and NOTES for some rows."""
    dialogues = [json.loads(messages) for messages in batch["messages"]]
    encoded = encode_dialogues(tokenizer, dialogues, config.max_length, config.on_too_long)
    answered = [last_answered(messages, row.answers) for messages, row in zip(dialogues, encoded)]
    asks = [SEPARATOR.join(map(normalise_question, contents(messages, "user"))) for messages in dialogues]
    bands = sketch(asks) if config.eval_fraction else np.zeros((len(asks), BANDS), dtype=np.uint32)
    columns = {
        "id": batch["id"],
        "input_ids": to_lists([row.input_ids for row in encoded]),
        "labels": to_lists([row.labels for row in encoded]),
        "length": [len(row.input_ids) for row in encoded],
        "target_tokens": [len(row.labels) - row.labels.count(IGNORED) for row in encoded],
        "question": [question for question, _ in answered],
        "reference": [reference for _, reference in answered],
        "source": batch["source"],
        "line": batch["line"],
        "reason": [row.reason for row in encoded],
        "full_length": [row.full_length for row in encoded],
        "truncated": [row.truncated for row in encoded],
        "asks": asks,
        "question_hash": [question_hash(question, config.seed) for question in asks],
        "answer_hash": [hash_text(SEPARATOR.join(contents(messages, "assistant"))) for messages in dialogues],
        "row_hash": [hash_text(messages) for messages in batch["messages"]],
        "bands": pyarrow.FixedSizeListArray.from_arrays(bands.reshape(-1), BANDS),
    }
    return pyarrow.table(columns, schema=ENCODED.arrow_schema)


def contents(messages: list[dict], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def last_answered(messages: list[dict], answers: int) -> tuple[str, str]:
    """Question and answer of the last turn that is in the row."""
    if not answers:
        return "", ""
    return contents(messages, "user")[answers - 1], contents(messages, "assistant")[answers - 1]


def to_lists(rows: list[list[int]]) -> pyarrow.ListArray:
    """List column made from one flat array: ten times faster than from Python lists."""
    offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
    flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=offsets[-1])
    return pyarrow.ListArray.from_arrays(offsets, flat)


def hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def stream(files: list[str], columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
    """Some columns of the files, batch by batch, read rather than mapped: pages of a mapping stay in memory."""
    for path in files:
        with pyarrow.OSFile(path) as file, pyarrow.ipc.open_stream(file) as batches:
            for batch in batches:
                yield batch.select(columns)


def read_notes(files: list[str]) -> dict[str, np.ndarray]:
    """The columns of NUMBERS for all rows, each as one array (rows,), and `bands` (rows, BANDS)."""
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in [*NUMBERS, "bands"]}
    for batch in stream(files, [*NUMBERS, "bands"]):
        for name in NUMBERS:
            pieces[name].append(np.array(batch.column(name)))  # a copy: a view would keep the whole batch in memory
        pieces["bands"].append(np.array(batch.column("bands").flatten()).reshape(-1, BANDS))
    return {name: np.concatenate(arrays) for name, arrays in pieces.items()}


def take(files: list[str], rows: np.ndarray, columns: list[str]) -> dict[int, dict]:
    """row → values of some columns, in one pass over the files."""
    rows, taken, first = np.unique(rows), {}, 0
    for batch in stream(files, columns) if len(rows) else ():
        here = rows[slice(*np.searchsorted(rows, [first, first + len(batch)]))]
        taken.update(zip(here.tolist(), batch.take(pyarrow.array(here - first)).to_pylist()))
        first += len(batch)
    return taken


def sort_rows(
    config: PrepConfig, sources: list[Source], files: list[str], notes: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, dict]:
    """Rows that are kept, which of them are held out (mask over these), and what the manifest tells about the others."""

    def place(row: int) -> dict:
        return {"file": sources[notes["source"][row]].path, "line": int(notes["line"][row])}

    def name(row: int) -> str:
        return "{file}:{line}".format(**place(row))

    good = np.flatnonzero(notes["length"] > 0)
    _, first, group = np.unique(notes["row_hash"][good], return_index=True, return_inverse=True)
    kept = good[np.sort(first)]
    original = good[first][group.reshape(-1)]
    asked = notes["question_hash"][kept]
    held_out = choose_held_out(asked, config.eval_fraction)
    cut = kept[notes["truncated"][kept]]
    refused = take(files, np.flatnonzero(notes["length"] == 0), ["reason"])
    conflicts = [kept[rows] for rows in find_conflicts(asked, notes["answer_hash"][kept])]
    questions = take(files, np.array([rows[0] for rows in conflicts], dtype=int), ["question"])
    found = {
        "rejected": [{**place(row), **reason} for row, reason in refused.items()],
        "truncated": len(cut),
        "truncated_rows": [{**place(row), "tokens": int(notes["full_length"][row])} for row in cut],
        "duplicates": len(good) - len(kept),
        "duplicate_rows": [{**place(row), "same_as": name(same)} for row, same in zip(good, original) if row != same],
        "conflicting": [{**questions[int(rows[0])], "rows": [name(row) for row in rows]} for rows in conflicts],
        "leaks": find_leaks(files, kept, held_out, notes["bands"][kept]),
    }
    return kept, held_out, found


def find_leaks(files: list[str], kept: np.ndarray, held_out: np.ndarray, bands: np.ndarray) -> list[dict]:
    """Held-out questions that stand nearly the same in the training rows; those that are the same are held out together."""

    def read_questions(rows: np.ndarray) -> list[str]:
        asks = take(files, kept[rows], ["asks"])
        return [asks[row]["asks"] for row in kept[rows].tolist()]

    near = find_near(held_out, bands, read_questions)
    shown = take(files, kept[[row for pair in near for row in pair[:2]]], ["id", "question"])
    return [
        {"held_out": shown[kept[row]], "train": shown[kept[other]], "kind": "near", "similarity": round(score, 3)}
        for row, other, score in near
    ]


def find_conflicts(asked: np.ndarray, answers: np.ndarray) -> list[list[int]]:
    """Groups of rows that ask the same and answer differently, as row numbers."""
    _, group, sizes = np.unique(asked, return_inverse=True, return_counts=True)
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(sizes[group] > 1).tolist():
        groups.setdefault(int(group[row]), []).append(row)
    return [rows for rows in groups.values() if len(np.unique(answers[rows])) > 1]


def refuse(config: PrepConfig, found: dict, kept: int, held_out: int) -> None:
    """Ends the run when there is nothing to train on, or when --strict forbids what was found. Raises: UserError."""
    rejected = describe([f"{row['file']}:{row['line']} {row['reason']}" for row in found["rejected"]])
    if not kept:
        raise UserError(f"no usable row is left: {rejected}; mend these rows")
    if held_out == kept:
        raise UserError(
            f"all {kept} usable rows would be held out; expected at least one to train on: lower --eval_fraction or add rows"
        )
    if config.strict and found["rejected"]:
        raise UserError(f"--strict: {len(found['rejected'])} rows cannot be used: {rejected}; mend or delete them")
    if config.strict and found["leaks"]:
        pairs = describe([f"{leak['held_out']['id']} ≈ {leak['train']['id']}" for leak in found["leaks"]])
        raise UserError(
            f"--strict: {len(found['leaks'])} held-out questions stand nearly the same in the training rows: {pairs}; "
            "delete one of each pair, or ask them in the same words (then they stay together)"
        )


def describe(lines: list[str]) -> str:
    return "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")


def count_tokens(notes: dict[str, np.ndarray], split: dict[str, np.ndarray]) -> dict:
    """The manifest's figures about tokens."""
    length = notes["length"][np.concatenate(list(split.values()))]
    return {
        "tokens": {name: int(notes["length"][rows].sum()) for name, rows in split.items()},
        "target_tokens": {name: int(notes["target_tokens"][rows].sum()) for name, rows in split.items()},
        "length": {
            "min": int(length.min()),
            "median": int(np.percentile(length, 50)),
            "p95": int(np.percentile(length, 95)),
            "max": int(length.max()),
        },
    }


def write_splits(files: list[str], split: dict[str, np.ndarray], directory: Path) -> str:
    """Writes each split as a directory that `datasets` loads.

    Returns the SHA-256 over ids, input_ids and labels of the splits in order, whatever the layout of the Arrow files.
    """
    hashes = []
    for name, rows in split.items():
        digests = {column: hashlib.sha256() for column in ("id", "length", "input_ids", "labels")}
        new_file, first = directory / f"{name}.arrow", 0
        with pyarrow.OSFile(str(new_file), "wb") as file, pyarrow.ipc.new_stream(file, COLUMNS.arrow_schema) as writer:
            for batch in stream(files, list(COLUMNS)):
                here = rows[slice(*np.searchsorted(rows, [first, first + len(batch)]))] - first
                first += len(batch)
                if len(here):
                    chosen = batch.take(pyarrow.array(here)).replace_schema_metadata(COLUMNS.arrow_schema.metadata)
                    writer.write_batch(chosen)
                    add_hashes(digests, chosen)
        hashes.append([name, *(digest.hexdigest() for digest in digests.values())])
        # `datasets` writes the files that describe one row, and all rows, which were never in memory at once, replace it.
        blank = {
            "id": "",
            "input_ids": [],
            "labels": [],
            "length": 0,
            "target_tokens": 0,
            "question": "",
            "reference": "",
        }
        frame = pyarrow.Table.from_pylist([blank], schema=COLUMNS.arrow_schema)
        datasets.Dataset(frame, fingerprint=sha256_json(hashes)[:16]).save_to_disk(str(directory / name))
        (data_file,) = (directory / name).glob("*.arrow")
        new_file.replace(data_file)
    return sha256_json(hashes)


def add_hashes(digests: dict, batch: pyarrow.RecordBatch) -> None:
    """Feeds one running hash per column, so that the cut into batches does not show."""
    digests["id"].update("".join(f"{row_id}\n" for row_id in batch.column("id").to_pylist()).encode())
    digests["length"].update(np.asarray(batch.column("length"), dtype="<i4").tobytes())
    for name in ("input_ids", "labels"):
        digests[name].update(np.asarray(batch.column(name).flatten(), dtype="<i4").tobytes())


def print_summary(config: PrepConfig, manifest: dict, tokenizer) -> None:
    """What became of the rows, and one of them with its trained spans in [[ ]]."""
    for title, lines in (
        ("rejected", [f"{row['file']}:{row['line']} {row['reason']}" for row in manifest["rejected"]]),
        ("truncated", [f"{row['file']}:{row['line']} {row['tokens']} tokens" for row in manifest["truncated_rows"]]),
        ("duplicates", [f"{row['file']}:{row['line']} same as {row['same_as']}" for row in manifest["duplicate_rows"]]),
        ("warning: one question with different answers",
         [f"{', '.join(row['rows'])} {row['question']!r}" for row in manifest["conflicting"]]),
        ("warning: held-out questions nearly the same in training",
         [f"{leak['held_out']['question']!r} ≈ {leak['train']['question']!r} ({leak['similarity']:.2f})"
          for leak in manifest["leaks"]]),
    ):  # fmt: skip
        if lines:
            print(f"{title}: {len(lines)}")
            print("\n".join(f"  {line[:300]}" for line in lines[:SHOWN]))
            if len(lines) > SHOWN:
                print(f"  and {len(lines) - SHOWN} more, all in manifest.json")
    if manifest["cut_turns"]:
        print(f"unanswered turns at the end that were cut: {manifest['cut_turns']}")
    rows, tokens, targets, length = (manifest[name] for name in ("rows_written", "tokens", "target_tokens", "length"))
    print("tokens per row: " + ", ".join(f"{name} {value}" for name, value in length.items()))
    for name in ("train", "eval"):
        print(f"{name}: {rows[name]:,} rows, {tokens[name]:,} tokens, {targets[name]:,} of them targets")
    wanted = round(config.eval_fraction * sum(rows.values()))
    if rows["eval"] != wanted:
        print(f"held out {rows['eval']} rows instead of {wanted}: rows that ask the same stay together")
    elif config.eval_fraction and not rows["eval"]:
        print(f"nothing is held out: --eval_fraction {config.eval_fraction} of {rows['train']} rows is less than one")
    print(f"one epoch: {-(-rows['train'] // 4):,} steps at global batch 4")
    print("the first row as it is trained, targets in [[ ]]:")
    row = load_split(config.output_dir, "train")[0]
    print("  " + mark_targets(tokenizer, row["input_ids"][:300], row["labels"][:300]).replace("\n", "\n  ").rstrip())
    print(f"wrote {config.output_dir}")


def mark_targets(tokenizer, input_ids: list[int], labels: list[int]) -> str:
    text = ""
    for is_target, run_of in itertools.groupby(zip(input_ids, labels), key=lambda pair: pair[1] != IGNORED):
        piece = tokenizer.decode([token for token, _ in run_of])
        text += f"[[{piece}]]" if is_target else piece
    return text


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """Makes an interrupt of what came of one: a library may swallow it (dill) or turn it into an error (datasets)."""
    try:
        yield
    except Exception:
        if STOP.is_set():
            raise KeyboardInterrupt from None
        raise
    ALL_WRITTEN.set()
    if STOP.is_set():
        raise KeyboardInterrupt


def abandon() -> None:
    """Ends an interrupted preparation that waits for workers which are gone."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    for directory in UNFINISHED:
        shutil.rmtree(directory, ignore_errors=True)
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(1)


def end_on_signals() -> None:
    """Ctrl-C and a polite kill end this process by KeyboardInterrupt, its workers without a word."""
    main_process = os.getpid()

    def stop(number, frame):
        if os.getpid() != main_process:
            os._exit(1)
        if ALL_WRITTEN.is_set():
            return
        STOP.set()
        last_resort = threading.Timer(GIVE_UP_S, abandon)
        last_resort.daemon = True
        last_resort.start()
        raise KeyboardInterrupt

    def report_unraisable(what):
        if not STOP.is_set():  # else it is the interrupt, where Python swallows errors (while it forks, say)
            sys.__unraisablehook__(what)

    sys.unraisablehook = report_unraisable
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


if __name__ == "__main__":
    end_on_signals()
    run(main, interrupted=INTERRUPTED)
