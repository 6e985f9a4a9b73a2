"""Text files in another encoding than was said: which line shows it, what the file looks like, what to do."""

import codecs
from typing import BinaryIO

GUESSES = [
    "gb18030",
    "big5",
    "shift_jis",
    "euc_kr",
    "cp1252",
    "cp1251",
]  # what old files are mostly written in
MARKS = [(codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")]  # fmt: skip
SAMPLE = 1 << 16  # bytes that a guess is made from


def explain_encoding(path: str, file: BinaryIO, encoding: str, error: UnicodeError) -> str:
    """One sentence about a file that `encoding` cannot read; `file` is open at its start."""
    start = file.read(4)
    name = next((name for mark, name in MARKS if start.startswith(mark)), "")
    if name:
        return f"{path}:1: this is not {encoding.upper()} but {name.upper()}; " + _remedy(path, name)
    file.seek(0)
    line, raw, sample, others, is_last = _first_bad_line(file, encoding)
    place = f"{path}:{line}: this is not {encoding.upper()}"
    if not _is_utf8(encoding):
        if _decodes(sample, "utf-8"):
            return f"{place}, it looks like UTF-8; leave out --encoding"
    elif is_last and not _decodes(raw, "utf-8") and _decodes(raw, "utf-8", final=False):
        return f"{path}:{line}: the file ends inside a character: it was cut off; copy it again, or delete that line"
    elif others:  # lines with other than ASCII characters that are UTF-8
        column = _bad_byte(raw, encoding)
        return f"{path}:{line}: byte {column + 1} of the line (0x{raw[column]:02x}) is not UTF-8, while other lines are: mend or delete that line"
    guess = _guess(sample)
    if not guess or guess == encoding.lower():
        return f"{place} ({getattr(error, 'reason', error)}); name the file's encoding with --encoding"
    return f"{place}, it looks like {guess.upper()} (a guess); " + _remedy(path, guess)


def _remedy(path: str, name: str) -> str:
    return f"read it with --encoding {name}, or convert it: iconv -f {name.upper()} -t UTF-8 {path} > new_file"


def _first_bad_line(file: BinaryIO, encoding: str) -> tuple[int, bytes, bytes, int, bool]:
    """Number and bytes of the first line that cannot be decoded, a sample of such lines, how many others hold UTF-8
    characters beyond ASCII, and whether the first bad line is the last of the file."""
    number, first, sample, others, last = 0, b"", [], 0, 0
    for last, raw in enumerate(file, 1):
        if not _decodes(raw, encoding):
            if not number:
                number, first = last, raw
            if sum(map(len, sample)) < SAMPLE:
                sample.append(raw[:SAMPLE])
        elif not raw.isascii():
            others += 1
    return number or 1, first, b"".join(sample), others, number == last


def _guess(sample: bytes) -> str:
    from charset_normalizer import from_bytes

    guess = from_bytes(sample, cp_isolation=GUESSES).best()
    return {"gb18030": "gbk"}.get(guess.encoding, guess.encoding) if guess else ""


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig")


def _decodes(raw: bytes, encoding: str, final: bool = True) -> bool:
    try:
        codecs.getincrementaldecoder(encoding)().decode(raw, final)
    except UnicodeError:
        return False
    return True


def _bad_byte(raw: bytes, encoding: str) -> int:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start
    return 0
