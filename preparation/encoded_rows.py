"""All rows with their tokens: one Arrow file on disk, their figures in memory, and the splits that are made of them."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow
from pyarrow import compute

from preparation.holdout import BANDS, question_hash, sketch
from preparation.records import Dialogue, normalise_question
from sft import dataset
from sft.encoding import IGNORED, encode_dialogues

SEPARATOR = "\x1f"  # between the turns of a row; control characters are no part of a normalised question
SEVERAL = "one of several sequences of a row, whose earlier answers the template shows otherwise than it asks for them"

# What is known of a row beside these; not part of the data set.
FIGURES = {
    "source": pyarrow.int32(),
    "line": pyarrow.int64(),
    "length": pyarrow.int32(),
    "target_tokens": pyarrow.int32(),
    "full_length": pyarrow.int32(),
    "truncated": pyarrow.bool_(),
    "question_hash": pyarrow.uint64(),
    "answer_hash": pyarrow.uint64(),
    "row_hash": pyarrow.uint64(),
}
SCHEMA = pyarrow.schema(
    [
        *dataset.SCHEMA,
        *((name, kind) for name, kind in FIGURES.items() if name not in dataset.SCHEMA.names),
        ("reason", pyarrow.string()),
        ("mode", pyarrow.string()),
        ("notes", pyarrow.list_(pyarrow.string())),
        ("asks", pyarrow.string()),  # all questions, normalised
        ("bands", pyarrow.list_(pyarrow.uint32(), BANDS)),
    ]
)


@dataclass
class Row:
    """A usable row and where it stands."""

    source: int  # number of the source
    line: int
    id: str
    dialogue: Dialogue


@dataclass
class Encoding:
    """How rows become tokens: what the worker processes need."""

    tokenizer: object
    max_length: int
    on_too_long: str
    thinking: str
    loss_on: str
    seed: int
    with_sketch: bool  # for the search of near copies; of no use when nothing is held out

    def __call__(self, rows: list[Row]) -> pyarrow.RecordBatch:
        """The rows as SCHEMA has them, one that makes several sequences as several, whose ids name the answer; what cannot
        be encoded has length 0 and a reason."""
        encoded = encode_dialogues(
            self.tokenizer, [row.dialogue.messages for row in rows], self.max_length, self.on_too_long,
            tools=[row.dialogue.tools for row in rows], thinking=self.thinking, loss_on=self.loss_on,
        )  # fmt: skip
        asks = [SEPARATOR.join(map(normalise_question, contents(row.dialogue.messages, "user"))) for row in rows]
        bands = sketch(asks) if self.with_sketch else np.zeros((len(asks), BANDS), dtype=np.uint32)
        question_hashes = [question_hash(question, self.seed) for question in asks]
        said = [json.dumps([row.dialogue.messages, row.dialogue.tools]) for row in rows]
        answer_hashes = [hash_text(json.dumps(answers_of(row.dialogue.messages))) for row in rows]
        pairs = [(rows[one.row], one) for one in encoded]
        columns = {
            "id": [f"{row.id} answer {one.turn}" if one.turn else row.id for row, one in pairs],
            "input_ids": to_lists([one.input_ids for one in encoded]),
            "labels": to_lists([one.labels for one in encoded]),
            "length": [len(one.input_ids) for one in encoded],
            "target_tokens": [len(one.labels) - one.labels.count(IGNORED) for one in encoded],
            "question": [last_question(row.dialogue.messages, one.position) for row, one in pairs],
            "reference": [one.reference for one in encoded],
            "source": [row.source for row, _ in pairs],
            "line": [row.line for row, _ in pairs],
            "reason": [
                f"answer {one.turn}: {one.reason}" if one.turn and one.reason else one.reason for one in encoded
            ],
            "mode": [one.mode for one in encoded],
            "notes": [sorted({*one.notes, *([SEVERAL] if one.turn else [])}) for one in encoded],
            "full_length": [one.full_length for one in encoded],
            "truncated": [one.truncated for one in encoded],
            "asks": [asks[one.row] for one in encoded],
            "question_hash": [question_hashes[one.row] for one in encoded],
            "answer_hash": [answer_hashes[one.row] for one in encoded],
            "row_hash": [hash_text(f"{said[one.row]}#{one.turn}") for one in encoded],
            "bands": pyarrow.FixedSizeListArray.from_arrays(bands[[one.row for one in encoded]].reshape(-1), BANDS),
        }
        return pyarrow.RecordBatch.from_arrays(
            [
                column if isinstance(column, pyarrow.Array) else pyarrow.array(column, SCHEMA.field(name).type)
                for name, column in ((name, columns[name]) for name in SCHEMA.names)
            ],
            schema=SCHEMA,
        )


def contents(messages: list[dict], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def answers_of(messages: list[dict]) -> list[list]:
    """What the assistant says, calls included: two rows that ask the same contradict each other where these differ."""
    return [[one["content"], one.get("tool_calls")] for one in messages if one["role"] == "assistant"]


def last_question(messages: list[dict], position: int) -> str:
    """What the user asked last before the message at `position`."""
    return (contents(messages[: max(position, 0)], "user") or [""])[-1]


def to_lists(rows: list[list[int]]) -> pyarrow.ListArray:
    """List column made from one flat array: ten times faster than from Python lists."""
    offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
    flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=offsets[-1])
    return pyarrow.ListArray.from_arrays(offsets, flat)


def hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class EncodedRows:
    """Rows of SCHEMA in an Arrow file, and `figures`: one array (rows,) for each name of FIGURES, and `bands` (rows, BANDS)."""

    def __init__(self, path: Path, batches: Iterator[pyarrow.RecordBatch]):
        """Writes the batches as they come. Raises: OSError when the disk refuses."""
        self.path = path
        pieces = {name: [np.empty(0, kind.to_pandas_dtype())] for name, kind in FIGURES.items()}
        pieces["bands"] = [np.empty((0, BANDS), np.uint32)]
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
                for name in FIGURES:  # copies: a view would keep the whole batch in memory
                    pieces[name].append(np.array(batch.column(name)))
                pieces["bands"].append(np.array(batch.column("bands").flatten()).reshape(-1, BANDS))
        self.figures = {name: np.concatenate(arrays) for name, arrays in pieces.items()}

    def __len__(self) -> int:
        return len(self.figures["length"])

    def batches(self, columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
        """Some columns, batch by batch, read rather than mapped: pages of a mapping stay in memory."""
        with pyarrow.OSFile(str(self.path)) as file, pyarrow.ipc.open_stream(file) as batches:
            for batch in batches:
                yield batch.select(columns)

    def taken(self, rows: np.ndarray, columns: list[str]) -> Iterator[tuple[np.ndarray, pyarrow.RecordBatch]]:
        """The batches cut down to the rows (sorted row numbers) that each has, and which these are."""
        first = 0
        for batch in self.batches(columns) if len(rows) else ():
            here = rows[slice(*np.searchsorted(rows, [first, first + len(batch)]))]
            if len(here):
                yield here, batch.take(pyarrow.array(here - first))
            first += len(batch)

    def take(self, rows: np.ndarray, columns: list[str]) -> dict[int, dict]:
        """row → values of some columns, in one pass over the file."""
        taken: dict[int, dict] = {}
        for numbers, batch in self.taken(np.unique(rows), columns):
            taken.update(zip(numbers.tolist(), batch.to_pylist()))
        return taken

    def count(self, rows: np.ndarray, column: str) -> dict[str, int]:
        """How often each value stands in a column of texts, or of lists of texts, among the rows (sorted)."""
        counts: Counter = Counter()
        for _, batch in self.taken(rows, [column]):
            values = batch.column(column)
            values = values.flatten() if pyarrow.types.is_list(values.type) else values
            counts.update({pair["values"]: pair["counts"] for pair in compute.value_counts(values).to_pylist()})
        return dict(sorted(counts.items()))

    def write_splits(self, split: dict[str, np.ndarray], directory: Path) -> dict[str, str]:
        """Writes each split as a directory that `datasets` loads, and returns the SHA-256 of each one's content."""
        hashes = {}
        schema = datasets.Features.from_arrow_schema(dataset.SCHEMA).arrow_schema  # with the library's own notes
        for name, rows in split.items():
            content = dataset.ContentHash()
            new_file = directory / f"{name}.arrow"
            with pyarrow.OSFile(str(new_file), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
                for _, batch in self.taken(rows, schema.names):
                    writer.write_batch(batch.replace_schema_metadata(schema.metadata))
                    content.update(batch)
            hashes[name] = content.sha256()
            # `datasets` writes the files that describe one row; all rows, never in memory at once, replace it.
            blank = {"id": "", "input_ids": [], "labels": [], "length": 0, "target_tokens": 0, "question": "", "reference": ""}  # fmt: skip
            frame = pyarrow.Table.from_pylist([blank], schema=schema)
            datasets.Dataset(frame, fingerprint=hashes[name][:16]).save_to_disk(str(directory / name))
            (data_file,) = (directory / name).glob("*.arrow")
            new_file.replace(data_file)
        return hashes
