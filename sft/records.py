"""Question–answer files as dialogues: what is read, under which names, and why a row cannot be used."""

import csv
import difflib
import gzip
import io
import itertools
import json
import math
import re
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft.errors import UserError, did_you_mean

FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
PAIRS = [("question", "answer"), ("query", "response"), ("instruction", "output"), ("prompt", "completion")]
LISTS = ["messages", "conversations"]
SCHEMAS = "question/answer, query/response, instruction(+input)/output, prompt/completion, messages, conversations"
ROLES = {
    "system": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip


class RowError(ValueError):
    """Why one row is left out while the others go on."""


class UnknownFields(RowError):
    """The row has none of the known schemas."""


@dataclass
class Source:
    """One thing that rows come from."""

    path: str  # as it is shown to the user
    kind: str  # json, jsonl, csv, parquet, or dataset
    dataset: Any = None
    hashed: list[str] = field(default_factory=list)  # files whose bytes are the content


@dataclass
class Dialogue:
    """A row in the one form that all schemas are turned into."""

    messages: list[dict]  # [system]? (user assistant)+, each with role and content
    id: str = ""  # the row's own, if it has one
    cut_turns: int = 0  # turns of the user at the end that nobody answered


def find_sources(inputs: list[str], file_format: str = "auto") -> list[Source]:
    """What the user's inputs stand for: files, directories of files, `datasets` directories, hub names. Raises: UserError."""
    sources = []
    for name in inputs:
        path = Path(name)
        if path.is_dir() and any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            sources.append(_open_dataset(name, from_disk=True))
        elif path.is_dir():
            hidden = {file for file in path.rglob("*") if any(part[0] == "." for part in file.relative_to(path).parts)}
            files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) and file not in hidden)
            if not files:
                raise UserError(
                    f"{name} holds no file that is read; expected one of {', '.join(FORMATS)} (each also .gz)"
                )
            sources += [Source(str(file), _kind(file), hashed=[str(file)]) for file in files]
        elif path.is_file():
            kind = _kind(path) if file_format == "auto" else file_format
            if not kind:
                raise UserError(
                    f"{name}: files that end in {path.suffix or 'nothing'} are not read; expected one of {', '.join(FORMATS)} "
                    "(each also .gz); if it is one of these under another name, say which: --format jsonl (json, csv, parquet)"
                )
            sources.append(Source(name, kind, hashed=[name]))
        elif _kind(path) or (path.suffix and path.parent.is_dir()) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            close = did_you_mean(path.name, (other.name for other in path.parent.glob("*")))
            raise UserError(f"--input {name}: there is no such file or directory{close}")
        else:
            sources.append(_open_dataset(name, from_disk=False))
    return sources


def _kind(path: Path) -> str:
    return FORMATS.get(Path(path.name.lower().removesuffix(".gz")).suffix, "")


def _open_dataset(name: str, from_disk: bool) -> Source:
    import datasets  # slow to import, and only these sources need it

    try:
        found = datasets.load_from_disk(name) if from_disk else datasets.load_dataset(name)
    except (OSError, ValueError, ConnectionError) as error:  # also what the hub's client raises when it is offline
        place = "is not a whole `datasets` directory" if from_disk else "is no file here and not to be had from the hub"
        remedy = (
            "save it again with save_to_disk" if from_disk else "check the name and the network, or give a local file"
        )
        raise UserError(f"--input {name} {place} ({str(error).strip().splitlines()[0]}); {remedy}") from None
    if isinstance(found, dict):
        if "train" not in found:
            raise UserError(
                f"--input {name} has the splits {', '.join(found)}; expected train: save the one you mean alone"
            )
        found = found["train"]
    return Source(name, "dataset", found, [file["filename"] for file in found.cache_files])


def read_rows(source: Source, encoding: str = "utf-8") -> Iterator[tuple[int, Any]]:
    """(line, row) of each row; the line is where it begins, or the row's number where a file has no lines. Blank lines are skipped.

    Memory is bounded by a batch for jsonl, csv, parquet and datasets; a JSON array is held as one text.
    Raises: UserError naming file, line and column when the file itself is broken.
    """
    if source.kind == "dataset":
        for first in range(0, len(source.dataset), 1000):
            columns = source.dataset[first : first + 1000]
            for offset, values in enumerate(zip(*columns.values())):
                yield first + offset + 1, dict(zip(columns, values))
        return
    try:
        if source.kind == "parquet":
            yield from _read_parquet(source.path)
            return
        with _open_text(source, encoding) as file:
            yield from _read_csv(file, source.path) if source.kind == "csv" else _read_json(file, source.path)
    except UnicodeError as error:
        raise UserError(_explain_encoding(source.path, encoding, error)) from None
    except LookupError:
        raise UserError(
            f"--encoding {encoding} is unknown to Python; for Chinese files try utf-8, gbk or gb18030"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{source.path} is not a whole gzip file ({error}); copy or compress it again") from None
    except OSError as error:
        raise UserError(
            f"{source.path} cannot be read: {error.strerror or error}; check the disk and its permissions"
        ) from None


def _open_bytes(path: str):
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def _open_text(source: Source, encoding: str) -> TextIO:
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        encoding = "utf-8-sig"  # a byte order mark is no text
    newline = "" if source.kind == "csv" else None  # the csv module wants line ends as they are
    return io.TextIOWrapper(_open_bytes(source.path), encoding=encoding, newline=newline)


def _read_parquet(path: str) -> Iterator[tuple[int, dict]]:
    import pyarrow
    from pyarrow import parquet

    try:
        whole = pyarrow.BufferReader(_open_bytes(path).read()) if path.lower().endswith(".gz") else path
        row = 0
        for batch in parquet.ParquetFile(whole).iter_batches(1000):
            for values in batch.to_pylist():
                row += 1
                yield row, values
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file ({error}); copy or write it again") from None


def _read_csv(file: TextIO, path: str) -> Iterator[tuple[int, dict]]:
    csv.field_size_limit(2**31 - 1)
    head = file.readline()
    delimiter = max(",;\t", key=head.count)
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
            yield (
                line,
                RowError(
                    f"{len(values)} fields where the header has {len(names)}: quote fields that hold `{delimiter}`"
                ),
            )
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


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
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


def _explain_encoding(path: str, encoding: str, error: UnicodeError) -> str:
    """Which line cannot be read, what the file looks like, and what to do."""
    from charset_normalizer import from_bytes

    with _open_bytes(path) as file:
        start = file.read(1 << 16)
        file.seek(0)
        line = next((n for n, raw in enumerate(file, 1) if not _decodes(raw, encoding)), 1)
    guess = from_bytes(start).best()
    name = guess.encoding if guess else ""
    name = {"gb18030": "gbk", "gb2312": "gbk"}.get(name, name)
    if not name or name.replace("_", "-") == encoding.lower().replace("_", "-"):
        return (
            f"{path}:{line}: this is not {encoding.upper()} ({error.reason}); name the file's encoding with --encoding"
        )
    shown = name.upper().replace("_", "-")
    if shown in ("UTF-8", "ASCII"):
        return f"{path}:{line}: this is not {encoding.upper()}, it looks like UTF-8; leave out --encoding"
    return (
        f"{path}:{line}: this is not {encoding.upper()}, it looks like {shown}; read it with --encoding "
        f"{name}, or convert it: iconv -f {shown} -t UTF-8 {path} > new_file"
    )


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeError:
        return False
    return True


def read_dialogue(row: Any, question_column: str = "", answer_column: str = "", system_prompt: str = "") -> Dialogue:
    """A row of any known schema as a dialogue; a system text of its own wins over `system_prompt`.

    Surrounding blank lines and trailing spaces of each text go, and line ends become \\n; nothing else is changed.
    Raises: RowError with the reason why the row cannot be used, UnknownFields when no schema fits.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"the row is {_describe(row)}; expected an object with fields")
    names = _choose_fields(row, question_column, answer_column)
    if len(names) == 1:
        messages, cut = _read_turns(row[names[0]], names[0])
    else:
        messages, cut = _read_pair(row, *names), 0
    if messages[0]["role"] != "system":
        system = _text(row.get("system") or "", "system").strip() or system_prompt
        messages = ([{"role": "system", "content": system}] if system else []) + messages
    own_id = row.get("id")
    return Dialogue(messages, str(own_id).strip() if isinstance(own_id, (str, int)) else "", cut)


def _choose_fields(row: dict, question_column: str, answer_column: str) -> tuple[str, ...]:
    """The names of the row's question and answer, or the one name of its list of turns."""
    if question_column or answer_column:
        pairs = [(question_column or q, answer_column or a) for q, a in PAIRS]
        lists = []
    else:
        pairs, lists = PAIRS, LISTS
    for name in lists:
        if row.get(name) is not None:
            return (name,)
    for pair in pairs:
        if pair[0] in row and pair[1] in row:
            return pair
    found = ", ".join(map(str, row)) or "none"
    for pair in pairs:
        for have, lacking in (pair, pair[::-1]):
            if have in row:
                close = difflib.get_close_matches(lacking, [str(name) for name in row if name != have], n=1, cutoff=0.6)
                hint = f"; `{close[0]}` resembles `{lacking}`" if close else ""
                raise UnknownFields(f"the field `{lacking}` is missing (fields found: {found}){hint}")
    hint = ""
    for known in [name for pair in pairs for name in pair] + lists:
        close = difflib.get_close_matches(known, map(str, row), n=1, cutoff=0.75)
        hint = hint or (f"; `{close[0]}` resembles `{known}`" if close else "")
    raise UnknownFields(f"no known schema (fields found: {found}){hint}")


def _read_pair(row: dict, question_name: str, answer_name: str) -> list[dict]:
    question = _text(row[question_name], question_name)
    if question_name == "instruction" and row.get("input") not in (None, ""):
        question = f"{question}\n{_text(row['input'], 'input')}".strip("\n")
    if not question.strip():
        raise RowError(f"empty question (field `{question_name}`)")
    answer = _text(row[answer_name], answer_name)
    if not answer.strip():
        raise RowError(f"empty answer (field `{answer_name}`)")
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RowError(f"history is {_describe(history)}; expected a list of [question, answer] pairs")
    messages = []
    for turn in history:
        if isinstance(turn, dict):
            messages.append(turn)
        elif isinstance(turn, (list, tuple)) and len(turn) == 2:
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        else:
            raise RowError(f"history holds {_describe(turn)}; expected [question, answer] pairs")
    last = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _read_turns(messages + last, "history")[0]


def _read_turns(turns: Any, name: str) -> tuple[list[dict], int]:
    """The turns as role and content, and how many unanswered ones at the end were cut."""
    if not isinstance(turns, list):
        raise RowError(f"`{name}` is {_describe(turns)}; expected a list of turns")
    messages = []
    for turn in turns:
        if isinstance(turn, RowError):
            raise turn
        if not isinstance(turn, dict):
            raise RowError(
                f"`{name}` holds {_describe(turn)}; expected turns with role and content (or from and value)"
            )
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise RowError(f"the role {role!r} is unknown; expected system, user (human) or assistant (gpt)")
        role = ROLES[role]
        content = _text(turn.get("content", turn.get("value")), f"{role} turn")
        if role == "system" and not content and not messages:
            continue
        if not content.strip():
            raise RowError("empty answer" if role == "assistant" else f"empty {role} turn")
        messages.append({"role": role, "content": content})
    first = 1 if messages and messages[0]["role"] == "system" else 0
    for position, message in enumerate(messages[first:]):
        expected = ("user", "assistant")[position % 2]
        if message["role"] != expected:
            raise RowError(
                f"roles do not alternate: turn {first + position + 1} is {message['role']}, expected {expected}"
            )
    cut = (len(messages) - first) % 2
    messages = messages[: len(messages) - cut]
    if len(messages) <= first:
        raise RowError("nothing to learn: no assistant turn")
    return messages, cut


def _text(value: Any, name: str) -> str:
    """The value as clean text."""
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, RowError):
            raise part
        if isinstance(part, dict) and part.get("type") == "text":
            _text(part.get("text"), name)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, dict) and part.get("type") == "text" for part in value)
    ):
        value = "\n".join(str(part.get("text", "")) for part in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value in (math.inf, -math.inf):
            raise RowError(f"`{name}` is a number out of range; expected text")
        value = None if value != value else str(value)  # NaN is how spreadsheets and pandas write nothing
    if value is None:
        raise RowError(f"`{name}` is null; expected text")
    if not isinstance(value, str):
        raise RowError(f"`{name}` is {_describe(value)}; expected text")
    if "\r" in value:
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise RowError(f"`{name}` holds half a character (a lone surrogate); the file was cut or converted wrongly")
    value = value.rstrip()
    if value[:1] and _shows_nothing(value[0]) and all(map(_shows_nothing, value)):
        return ""
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", value) if value[:1].isspace() else value


def _shows_nothing(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp")


def _describe(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


class _Folded(dict):
    """Table for str.translate: punctuation, spaces and control characters vanish, all else stays; filled on demand."""

    def __missing__(self, code: int) -> str:
        self[code] = "" if unicodedata.category(chr(code))[0] in "PZC" else chr(code)
        return self[code]


_FOLDED = _Folded()


def normalise_question(text: str) -> str:
    """The text without case, full or half width (NFKC), punctuation and spaces, so that rows which ask the same are found."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return text.translate(_FOLDED) or text
