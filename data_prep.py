"""Question–answer files → a tokenised data set to train on: DATASET/train, DATASET/eval and manifest.json.

Reads what preparation/records.py knows, encodes it with the model's own chat template, holds rows out, and says what
became of every row. Nothing appears under --output_dir before all of it is complete.
"""

import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import numpy as np
from tqdm import tqdm

from preparation.encoded_rows import EncodedRows, Encoding, Row
from preparation.records import PAIRS, SCHEMAS, RowError, UnknownFields, read_dialogue
from preparation.selection import Selection, count_tokens, select
from preparation.sources import Source, draw_share, explained_reading, find_sources, read_rows, split_share
from preparation.summary import listed, print_summary
from preparation.workers import ALL_WRITTEN, end_on_signals, map_batches
from sft.artifacts import (
    clear_leftovers,
    library_versions,
    new_directory,
    sha256_file,
    sha256_json,
    template_sha256,
    tokenizer_sha256,
    write_json,
)
from sft.config import option, parse
from sft.dataset import Dataset, read_manifest
from sft.encoding import encode_prompt
from sft.errors import UserError, run
from sft.tokenizer import load_tokenizer

BATCH = 1000  # rows that are encoded at once, in each worker
MOST_WORKERS = 8  # unless the user says otherwise; each takes about 0.5 GiB
ROWS_PER_WORKER = 2000  # below that a second process costs more than it brings
RECIPE_VERSION = 3  # to be raised when the same files and settings make another data set


@dataclass
class PrepConfig:
    """All settings of data_prep.py."""

    input: list[str] = option(
        help="json, jsonl, csv or parquet files (also .gz), directories of them, `datasets`, hub names; NAME:0.5 takes half"
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
    thinking: str = option(
        "auto",
        "mode of the prompts: auto: with thinking where the row has a thought, off: never (thoughts are left out), on: always",
        choices=("auto", "on", "off"),
    )
    loss_on: str = option("all", "answers of a dialogue that are learnt", choices=("all", "last"))
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
        columns = {"question": self.question_column, "answer": self.answer_column}
        if self.question_column and self.question_column == self.answer_column:
            raise UserError(
                f"question_column and answer_column are both {self.answer_column}: the model would learn to repeat questions"
            )
        for here, there, known in (("question", "answer", PAIRS), ("answer", "question", [p[::-1] for p in PAIRS])):
            if not columns[there] and columns[here] in [pair[1] for pair in known]:
                raise UserError(
                    f"--{here}_column {columns[here]} alone: a field of that name holds the {there}; say both columns"
                )
        if self.num_proc is not None and self.num_proc < 1:
            raise UserError(f"num_proc is {self.num_proc}; expected at least 1")
        for name, _ in map(split_share, self.input):
            if Path(name).is_dir() and Path(self.output_dir).resolve().is_relative_to(Path(name).resolve()):
                raise UserError(
                    f"--output_dir {self.output_dir} lies in --input {name}, so that it would be read as rows; choose another"
                )


def main(argv: list[str] | None = None) -> None:
    config = parse(PrepConfig, argv, __doc__)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    sources, files_not_read = find_sources(config.input, config.format)
    tokenizer = load_tokenizer(config.model_name_or_path, config.trust_remote_code)
    encode_prompt(tokenizer, [{"role": "user", "content": "?"}])  # a tokenizer that cannot do this is refused now
    recipe = describe_recipe(config, sources, tokenizer)
    if is_up_to_date(config, recipe):
        print(f"{config.output_dir} is up to date: same files, settings and tokenizer; nothing to do")
        return
    output = Path(config.output_dir)
    with new_directory(output, replace=output.exists()) as directory:
        read = ReadRows(config, sources)
        rows = encode_rows(config, read, tokenizer, directory / "rows.arrow")
        selection = select(rows, [source.path for source in sources], config.eval_fraction)
        found = selection.found
        found["rejected"] = sorted(read.rejected + found["rejected"], key=lambda row: (row["file"], row["line"]))
        refuse(config, selection)
        written = np.sort(np.concatenate(list(selection.split.values())))
        split_sha256 = rows.write_splits(selection.split, directory)
        manifest = {
            "rows_read": read.count,
            "rows_written": {name: len(numbers) for name, numbers in selection.split.items()},
            **found,
            "cut_turns": read.cut_turns,
            "unused_fields": dict(read.unused_fields.most_common()),
            "shares": read.shares,
            "modes": rows.count(written, "mode"),
            "notes": rows.count(written, "notes"),
            "files_not_read": files_not_read,
            **count_tokens(rows, selection.split),
            **{name: getattr(config, name) for name in ("max_length", "eval_fraction", "seed", "model_name_or_path")},
            **{name: recipe[name] for name in ("source_sha256", "tokenizer_sha256", "template_sha256")},
            "split_sha256": split_sha256,
            "dataset_sha256": sha256_json(split_sha256),
            "versions": library_versions(),
            "recipe": recipe,
        }
        rows.path.unlink()
        write_json(directory / "manifest.json", manifest)
        ALL_WRITTEN.set()
    print_summary(manifest, config.output_dir, tokenizer)


def describe_recipe(config: PrepConfig, sources: list[Source], tokenizer) -> dict:
    """Everything that decides the data set's content: equal recipes make equal data sets."""
    without = ("input", "model_name_or_path", "output_dir", "overwrite", "num_proc", "trust_remote_code")
    with explained_reading(", ".join(config.input)):
        source_sha256 = sha256_json([sha256_file(file) for source in sources for file in source.hashed])
    return {
        "recipe_version": RECIPE_VERSION,
        "source_names": [Path(source.path).name for source in sources],
        "source_sha256": source_sha256,
        "shares": [source.share for source in sources],
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": template_sha256(tokenizer),
        "tokenizers_version": library_versions()["tokenizers"],
        **{name: value for name, value in asdict(config).items() if name not in without},
    }


def is_up_to_date(config: PrepConfig, recipe: dict) -> bool:
    """Whether output_dir already holds what would be made. Raises: UserError when it holds anything else that stays."""
    output = Path(config.output_dir)
    with explained_reading(output):
        clear_leftovers(output)
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return False
        if not (output / "manifest.json").is_file():
            raise UserError(
                f"--output_dir {output} exists and is no data set made by this script; choose another directory"
            )
        if config.overwrite and (foreign := foreign_files(output)):
            raise UserError(
                f"--overwrite would delete what this script did not write: {listed(foreign)}; move it out of {output}, or "
                "choose another --output_dir"
            )
        if config.overwrite:
            return False
        manifest = read_manifest(output)
        old = manifest.get("recipe") if isinstance(manifest.get("recipe"), dict) else {}
        changed = [f"{name} {old.get(name)} → {recipe[name]}" for name in recipe if old.get(name) != recipe[name]]
        if changed:
            raise UserError(
                f"--output_dir {output} holds a data set that was made differently ({'; '.join(changed)}); choose another "
                "directory, or replace it with --overwrite"
            )
        Dataset(output)  # verifies every row
    return True


def foreign_files(output: Path) -> list[str]:
    """What lies in a data set's directory beside the files that this script and `datasets` write there."""
    found = []
    for folder, folders, files in os.walk(output):
        place = os.path.relpath(folder, output)
        own = {".": {"manifest.json", "train", "eval"}}.get(place, {"dataset_info.json", "state.json"})
        links = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        for name in [*folders, *files]:
            is_rows = place in ("train", "eval") and name.endswith(".arrow") and name not in folders
            if (name not in own or name in links) and not is_rows:
                found.append(os.path.normpath(os.path.join(place, name)))
        folders[:] = [name for name in folders if name in own and name not in links]
    return sorted(found)


class ReadRows:
    """Goes through the rows of all sources once, gives the usable ones, and counts the others."""

    def __init__(self, config: PrepConfig, sources: list[Source]):
        self.config, self.sources = config, sources
        self.count, self.cut_turns = 0, 0
        self.rejected: list[dict] = []  # file, line, reason
        self.unused_fields: Counter = Counter()
        self.shares = {}  # path → share, rows of it, taken
        self._names: set[int] = set()  # hashes of the ids given, which need less memory than the ids

    def __iter__(self) -> Iterator[Row]:
        """Raises: UserError when a file is broken or none of its rows has a known schema."""
        for number, source in enumerate(self.sources):
            rows = self.usable(number, source)
            if source.share < 1:
                self.shares[source.path] = counts = {"share": source.share}
                rows = draw_share(rows, source.share, self.config.seed, counts)
            yield from rows

    def usable(self, number: int, source: Source) -> Iterator[Row]:
        """The rows of one source that can be used; the others are noted."""
        config, before, unknown = self.config, self.count, []
        rows = read_rows(source, config.encoding)
        for line, row in tqdm(rows, f"Reading {source.path}", unit=" rows", disable=None):
            self.count += 1
            try:
                dialogue = read_dialogue(row, config.question_column, config.answer_column, config.system_prompt)
            except RowError as error:
                self.rejected.append({"file": source.path, "line": line, "reason": str(error)})
                unknown += [str(error)] if isinstance(error, UnknownFields) else []
                continue
            self.cut_turns += dialogue.cut_turns
            self.unused_fields.update(dialogue.unused)
            yield Row(number, line, self.unique_id(dialogue.id or f"{Path(source.path).name}:{line}"), dialogue)
        if unknown and len(unknown) == self.count - before:
            raise UserError(
                f"{source.path}: {unknown[0]}; the schemas known are {SCHEMAS}; if the fields have other names, say "
                "which: --question_column Q --answer_column A"
            )

    def unique_id(self, name: str) -> str:
        """`name`, with a number when it was given before."""
        unique, number = name, 1
        while hash(unique) in self._names:
            number += 1
            unique = f"{name}#{number}"
        self._names.add(hash(unique))
        return unique


def encode_rows(config: PrepConfig, read: ReadRows, tokenizer, path: Path) -> EncodedRows:
    """All usable rows with their tokens, or with the reason why they have none, in the order of the rows."""
    most = config.num_proc or min(os.cpu_count() or 1, MOST_WORKERS)
    rows = iter(read)
    first_rows = list(itertools.islice(rows, most * ROWS_PER_WORKER))
    processes = min(most, 1 + len(first_rows) // ROWS_PER_WORKER)
    if processes > 1:
        print(f"encoding in {processes} processes", flush=True)
    rows = itertools.chain(first_rows, rows)
    batches = iter(lambda: list(itertools.islice(rows, BATCH)), [])
    encoding = Encoding(
        tokenizer, config.max_length, config.on_too_long, config.thinking, config.loss_on, config.seed,
        with_sketch=bool(config.eval_fraction),
    )  # fmt: skip
    encoded = EncodedRows(path, map_batches(encoding, batches, processes))
    names = ", ".join(source.path for source in read.sources)
    if not read.count:
        raise UserError(f"{names}: no rows; expected at least one question with its answer")
    print(f"read {read.count:,} rows from {names}", flush=True)
    return encoded


def refuse(config: PrepConfig, selection: Selection) -> None:
    """Ends the run when there is nothing to train on, or when --strict forbids what was found. Raises: UserError."""
    rejected, leaks = selection.found["rejected"], selection.found["leaks"]
    lines = listed([f"{row['file']}:{row['line']} {row['reason']}" for row in rejected])
    train, held_out = (len(selection.split[name]) for name in ("train", "eval"))
    if not train and not held_out:
        reasons = {re.sub(r"\d+", "#", row["reason"]) for row in rejected}
        remedy = "mend these rows"
        if all("chat template" in reason for reason in reasons):
            remedy = (
                f"the rows are not at fault, but the chat template of {config.model_name_or_path} cannot take them: use "
                "a model or a chat_template.jinja that can, or leave out what it has no place for"
            )
        if len(rejected) > len(reasons) == 1:
            lines = "all {:,} rows fail for the same reason, {file}:{line} {reason}".format(
                len(rejected), **rejected[0]
            )
        raise UserError(f"no usable row is left: {lines}; {remedy}")
    if not train:
        raise UserError(
            f"all {held_out} usable rows would be held out; expected at least one to train on: lower --eval_fraction or "
            "add rows"
        )
    if config.strict and rejected:
        raise UserError(f"--strict: {len(rejected)} rows cannot be used: {lines}; mend or delete them")
    if config.strict and leaks:
        pairs = listed([f"{leak['held_out']['id']} ≈ {leak['train']['id']}" for leak in leaks])
        raise UserError(
            f"--strict: {len(leaks)} held-out questions stand nearly the same in the training rows: {pairs}; "
            "delete one of each pair, or ask them in the same words (then they stay together)"
        )


if __name__ == "__main__":
    end_on_signals()
    run(main, interrupted="interrupted: nothing was written")
