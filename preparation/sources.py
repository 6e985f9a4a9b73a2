"""Where rows come from: files, directories, `datasets` and hub names, read row by row with the line of each."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from preparation.encodings import explain_encoding
from preparation.records import RowError
from sft.artifacts import read_json, sha256_text
from sft.errors import UserError, did_you_mean

FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
ENDINGS = f"{', '.join(FORMATS)} (each also .gz)"
DATASET_MARKS = ("dataset_dict.json", "state.json")  # what save_to_disk of `datasets` leaves
MAGIC = {  # first bytes of files that are no text, whatever they are called
    b"PAR1": "a Parquet file: read it with --format parquet",
    b"PK\3\4": "a zip archive (a spreadsheet, say): unpack it, or save it as CSV",
    b"BZh": "compressed by bzip2: unpack it",
    b"\xfd7zXZ": "compressed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
}
MOST_DIGITS = 4300  # of a whole number; Python refuses longer ones (sys.set_int_max_str_digits)
SHARE_BLOCK = 1000  # rows of which a share is drawn at once


@dataclass
class Source:
    """One thing that rows come from."""

    path: str  # as it is shown to the user
    kind: str  # json, jsonl, csv, parquet, or dataset
    dataset: Any = None
    hashed: list[str] = field(default_factory=list)  # files whose bytes are the content
    share: float = 1.0  # of its rows that are taken


@contextlib.contextmanager
def explained_reading(path: str | Path) -> Iterator[None]:
    """Turns what the file system refuses into one sentence. Raises: UserError instead of OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read: {error.strerror or error}; check the name, its permissions and the disk"
        ) from None


def find_sources(inputs: list[str], file_format: str = "auto") -> tuple[list[Source], list[str]]:
    """What the user's inputs stand for, and the files of directories that are not read because of their ending.

    An input is a file, a directory of them, a `datasets` directory or a hub name; `:0.5` behind it takes that share of its
    rows. Raises: UserError.
    """
    sources, passed_over = [], []
    for word in inputs:
        name, share = split_share(word)
        if not name.strip():
            raise UserError("--input is empty; name a file, a directory or a data set")
        with explained_reading(name):
            found, others = _find(name, file_format)
        for source in found:
            source.share = share
        sources += found
        passed_over += others
    return sources, passed_over


def split_share(word: str) -> tuple[str, float]:
    """`rows.jsonl:0.5` as name and share; a name without one, or one that exists as it stands, has share 1."""
    name, colon, number = word.rpartition(":")
    if not colon or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", number, re.IGNORECASE) or os.path.lexists(word):
        return word, 1.0
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UserError(
            f"--input {word}: the share is {number}; expected a number above 0 and at most 1, for example 0.5"
        )
    return name, share


def _find(name: str, file_format: str) -> tuple[list[Source], list[str]]:
    path = Path(name)
    if path.is_dir():
        sources, passed_over = _find_in_directory(name)
        if not sources:
            raise UserError(f"{name} holds no file that is read; expected one of {ENDINGS}")
        return sources, passed_over
    if path.is_file():
        kind = _kind(path) if file_format == "auto" else file_format
        if not kind:
            raise UserError(
                f"{name}: files that end in {path.suffix or 'nothing'} are not read; expected one of {ENDINGS}; if it is "
                "one of these under another name, say which: --format jsonl (json, csv, parquet)"
            )
        return [Source(name, kind, hashed=[name])], []
    if os.path.lexists(name):
        raise UserError(f"--input {name} {_what_is_no_file(path)}; give a file, a directory or a data set")
    if _kind(path) or (path.suffix and path.parent.is_dir()) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        beside = (other.name for other in path.parent.glob("*")) if path.parent.is_dir() else ()
        raise UserError(f"--input {name}: there is no such file or directory{did_you_mean(path.name, beside)}")
    return [_open_dataset(name, from_disk=False)], []


def _find_in_directory(name: str) -> tuple[list[Source], list[str]]:
    """Files and `datasets` directories at any depth, in the order of their names; hidden ones are nobody's rows."""
    if any(os.path.lexists(os.path.join(name, mark)) for mark in DATASET_MARKS):
        return [_open_dataset(name, from_disk=True)], []
    sources, passed_over, seen = [], [], set()
    waiting = [name]
    while waiting:
        folder = waiting.pop()
        if os.path.realpath(folder) in seen:  # a link to a directory above
            continue
        seen.add(os.path.realpath(folder))
        names = sorted(entry for entry in os.listdir(folder) if entry[0] != ".")
        if folder != name and any(mark in names for mark in DATASET_MARKS):
            sources.append(_open_dataset(folder, from_disk=True))
            continue
        for entry in names:
            path = os.path.join(folder, entry)
            if os.path.isdir(path):
                waiting.append(path)
            elif not os.path.isfile(path):
                raise UserError(f"{path} {_what_is_no_file(Path(path))}; move it away, or give the files one by one")
            elif kind := _kind(Path(path)):
                sources.append(Source(path, kind, hashed=[path]))
            else:
                passed_over.append(path)
    return sorted(sources, key=lambda source: Path(source.path)), sorted(passed_over)


def _what_is_no_file(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"is a link to {os.readlink(path)}, which does not exist"
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return f"is {kinds.get(stat.S_IFMT(mode), 'something else')}, not a file (rows are read twice)"


def _kind(path: Path) -> str:
    return FORMATS.get(Path(path.name.lower().removesuffix(".gz")).suffix, "")


def _open_dataset(name: str, from_disk: bool) -> Source:
    import datasets  # slow to import, and only these sources need it

    if from_disk:
        _refuse_files_elsewhere(Path(name))
    try:
        found = datasets.load_from_disk(name) if from_disk else datasets.load_dataset(name)
        for rows in found.values() if isinstance(found, dict) else [found]:
            rows.data.table.validate(full=True)  # offsets, lengths, UTF-8
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
    ) as error:  # also the hub's client's
        place = "is not a whole `datasets` directory" if from_disk else "is no file here and not to be had from the hub"
        remedy = (
            "save it again with save_to_disk" if from_disk else "check the name and the network, or give a local file"
        )
        raise UserError(f"--input {name} {place} ({_first_line(error)}); {remedy}") from None
    if isinstance(found, dict):
        if "train" not in found:
            raise UserError(
                f"--input {name} has the splits {', '.join(found)}; expected train: save the one you mean alone"
            )
        found = found["train"]
    return Source(name, "dataset", found, [file["filename"] for file in found.cache_files])


def _refuse_files_elsewhere(directory: Path) -> None:
    """`datasets` follows the names in its descriptions wherever they lead. Raises: UserError when that is elsewhere."""

    def listed(path: Path, key: str) -> list:
        value = read_json(path).get(key, []) if path.is_file() else []
        return value if isinstance(value, list) else [value]

    try:
        splits = listed(directory / "dataset_dict.json", "splits")
        named = [(directory / "dataset_dict.json", split) for split in splits]
        for state in [directory / "state.json", *(directory / str(split) / "state.json" for split in splits)]:
            named += [(state, entry["filename"]) for entry in listed(state, "_data_files")]
    except (AttributeError, TypeError, KeyError):
        raise UserError(
            f"--input {directory} is not a whole `datasets` directory; save it again with save_to_disk"
        ) from None
    for place, name in named:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise UserError(
                f"{place} names a file outside its directory ({name}); do not use it, or save the rows again"
            )


def draw_share(rows: Iterable, share: float, seed: int, counts: dict) -> Iterator:
    """round(share × rows) of the rows in their order, drawn by a seeded hash in each block of SHARE_BLOCK rows.

    Sets `rows` and `taken` in `counts`.
    """
    rows = iter(rows)
    counts.update(rows=0, taken=0)
    while block := list(itertools.islice(rows, SHARE_BLOCK)):
        order = sorted(range(len(block)), key=lambda i: sha256_text(f"{seed} {counts['rows'] + i}"))
        counts["rows"] += len(block)
        chosen = sorted(order[: round(share * counts["rows"]) - counts["taken"]])
        counts["taken"] += len(chosen)
        yield from (block[i] for i in chosen)


def read_rows(source: Source, encoding: str = "utf-8") -> Iterator[tuple[int, Any]]:
    """(line, row) of each row; the line is where it begins, or the row's number where a file has no lines.

    Blank lines are skipped. Memory is bounded by a batch for jsonl, csv, parquet and datasets; a JSON array is held as one
    text. Raises: UserError naming file, line and column when the file itself is broken.
    """
    if source.kind == "dataset":
        for first in range(0, len(source.dataset), 1000):
            columns = source.dataset[first : first + 1000]
            for offset, values in enumerate(zip(*columns.values())):
                yield first + offset + 1, _without_nulls(dict(zip(columns, values)))
        return
    with explained_reading(source.path):
        try:
            yield from _read_parquet(source.path) if source.kind == "parquet" else _read_text(source, encoding)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{source.path} is not a whole gzip file ({error}); copy or compress it again") from None


def _read_text(source: Source, encoding: str) -> Iterator[tuple[int, Any]]:
    try:
        with _open_text(source, encoding) as file:
            yield from _read_csv(file, source.path) if source.kind == "csv" else _read_json(file, source.path)
    except UnicodeError as error:
        with open_bytes(source.path) as file:
            raise UserError(explain_encoding(source.path, file, encoding, error)) from None
    except LookupError:
        raise UserError(
            f"--encoding {encoding} is unknown to Python; for Chinese files try utf-8, gbk or gb18030"
        ) from None


def open_bytes(path: str):
    """The file's bytes, unpacked when they are gzip's, whatever the file is called."""
    with open(path, "rb") as file:
        is_packed = path.lower().endswith(".gz") or file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_packed else open(path, "rb")


def _open_text(source: Source, encoding: str) -> TextIO:
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        encoding = "utf-8-sig"  # a byte order mark is no text
    newline = "" if source.kind == "csv" else None  # the csv module wants line ends as they are
    file = open_bytes(source.path)
    start = file.peek(8)
    for magic, what in MAGIC.items():
        if start.startswith(magic):
            raise UserError(f"{source.path} is no text but {what}")
    return io.TextIOWrapper(file, encoding=encoding, newline=newline)


def _read_parquet(path: str) -> Iterator[tuple[int, dict]]:
    import pyarrow
    from pyarrow import parquet

    try:
        packed = open_bytes(path)
        with packed:
            whole = pyarrow.BufferReader(packed.read()) if isinstance(packed, gzip.GzipFile) else path
        file = parquet.ParquetFile(whole)
        _refuse_columns_of_one_name(path, file.schema_arrow, "the file")
        row = 0
        for batch in file.iter_batches(1000):
            for values in batch.to_pylist():
                row += 1
                yield row, _without_nulls(values)
    except UserError:
        raise
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        if getattr(error, "errno", None):  # the disk, not the content
            raise
        raise UserError(f"{path} is not a whole Parquet file ({_first_line(error)}); copy or write it again") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _without_nulls(row: dict) -> dict:
    """The row without the fields that its lists and objects have only because another row of the table has them."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(inner) for name, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return {name: clean(value) for name, value in row.items()}


def _refuse_columns_of_one_name(path: str, fields, where: str) -> None:
    """Raises: UserError when two columns, or two fields of a struct, have one name: nobody knows which is meant."""
    names = [column.name for column in fields]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: {where} has two columns named `{twice[0]}`; rename or delete one")
    for column in fields:
        kind = column.type
        while hasattr(kind, "value_type"):  # a list
            kind = kind.value_type
        if hasattr(kind, "num_fields") and kind.num_fields and hasattr(kind, "get_field_index"):
            _refuse_columns_of_one_name(path, [kind.field(i) for i in range(kind.num_fields)], f"`{column.name}`")


def _read_csv(file: TextIO, path: str) -> Iterator[tuple[int, dict]]:
    csv.field_size_limit(2**31 - 1)
    head = file.readline()
    unquoted = re.sub(r'"[^"]*"', "", head)
    is_tsv = Path(path.lower().removesuffix(".gz")).suffix == ".tsv"
    delimiter = "\t" if is_tsv and "\t" in unquoted else max(",;\t", key=unquoted.count)
    if separator := re.fullmatch(r'"?sep=(.)"?\s*', head, re.IGNORECASE):  # Excel's own first line
        head, delimiter = "\n", separator[1]
    reader = csv.reader(itertools.chain([head], file), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    line = 0
    while True:
        try:
            line = reader.line_num + 1
            values = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"{path}:{line}: not valid CSV ({error}); close the quotes and double those inside a field"
            ) from None
        if values is None:
            return
        if not values:
            continue
        if names is None:
            names = [value.strip() for value in values]
            if twice := [name for name in names if name and names.count(name) > 1]:
                raise UserError(f"{path}:{line}: the header names `{twice[0]}` twice; rename or delete one column")
        elif len(values) > len(names):
            reason = f"{len(values)} fields where the header has {len(names)}: quote fields that hold `{delimiter}`"
            yield line, RowError(reason)
        else:
            yield line, dict(itertools.zip_longest(names, values, fillvalue=""))


def _read_json(file: TextIO, path: str) -> Iterator[tuple[int, Any]]:
    """Rows of JSON Lines, or of an array; the first character tells which, whatever the file is called."""
    is_first = True
    for number, line in enumerate(file, 1):
        text = line.strip(" \t\r\n\ufeff")
        if not text:
            continue
        if is_first and text[0] == "[":
            yield from _read_array("\n" * (number - 1) + line + file.read(), path)
            return
        try:
            value = DECODER.decode(text)
        except RecursionError:
            raise UserError(f"{path}:{number}: the JSON is nested too deeply to be a row; delete that line") from None
        except json.JSONDecodeError as error:
            if is_first and text[0] == "{" and _is_json(line + file.read()):
                raise UserError(
                    f"{path}:{number}: one JSON object over several lines; expected one object a line, or one array of "
                    "objects: take the list of rows out of the object, or put [ ] around it"
                ) from None
            raise UserError(
                f"{path}:{number}:{line.index(text) + error.colno}: not valid JSON ({error.msg}); expected one whole JSON "
                "object a line, or one array: mend or delete that line (was the file cut off while it was copied?)"
            ) from None
        is_first = False
        yield number, value


def _object(pairs: list[tuple[str, Any]]) -> dict | RowError:
    found = dict(pairs)
    if len(found) < len(pairs):  # which of the two is meant, nobody knows
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        return RowError(f"the field `{twice}` stands there twice")
    return found


def _whole_number(text: str) -> int | RowError:
    return int(text) if len(text) <= MOST_DIGITS else RowError(f"a number of {len(text):,} digits")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole_number)


def _is_json(text: str) -> bool:
    try:
        DECODER.decode(text.strip(" \t\r\n\ufeff"))
    except (json.JSONDecodeError, RecursionError):
        return False
    return True


def _read_array(text: str, path: str) -> Iterator[tuple[int, Any]]:
    space = re.compile(r"[ \t\r\n\ufeff]*")
    line, counted = 1, 0
    at = space.match(text, space.match(text).end() + 1).end()
    is_first = True
    try:
        while not (is_first and text.startswith("]", at)):
            is_first = False
            value, end = DECODER.raw_decode(text, at)
            line += text.count("\n", counted, at)
            counted = at
            yield line, value
            at = space.match(text, end).end()
            if text.startswith("]", at):
                break
            if not text.startswith(",", at):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            at = space.match(text, at + 1).end()
        at = space.match(text, at + 1).end()
        if at < len(text):
            raise json.JSONDecodeError("Text after the array", text, at)
    except json.JSONDecodeError as error:
        hint = "delete the comma before ]" if text.startswith("]", error.pos) else "mend the file there"
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON ({error.msg}); {hint}") from None
    except RecursionError:
        raise UserError(f"{path}:{line}: the JSON is nested too deeply to be rows; mend the file there") from None
