"""Files that later steps rely on: written whole or not at all, and tied to what they were made from by SHA-256."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from sft import schemas
from sft.errors import UserError

# Letters of several scripts, composed and not, digits, blanks, line ends, signs: where tokenizers go different ways.
PROBE = "It's HE'LL x=12345.678 １２ e\u0301é ﬁ  \t\n\n\r\n 中文，日本語 한국 Привет עברית 🙂👩\u200d💻 <b>&amp;</b> --->\u00a0a_b\u3000end "
SAMPLES, SAMPLE_BYTES = 256, 4096  # of each weight file
PACKAGES = ("torch", "torch_npu", "accelerate", "transformers", "peft", "datasets", "evaluate", "tokenizers")


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, as 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: keys sorted, no spaces, so equal values have equal hashes."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def tokenizer_sha256(tokenizer) -> str:
    """Hash of what decides token ids: each (token, id) pair, which of them are special, which ends a sequence, and the ids of
    a text of many kinds of characters. The last finds what the vocabulary does not show: transformers 5 puts the
    normalizer and pre-tokenizer of the model's family in place of those in tokenizer.json, transformers 4 does not."""
    special = sorted(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    probe = tokenizer(PROBE, add_special_tokens=False).input_ids
    return sha256_json([sorted(tokenizer.get_vocab().items()), special, tokenizer.eos_token_id, probe])


def template_sha256(tokenizer) -> str:
    """Hash of the chat template's source and of what it makes of a short dialogue, which the version of transformers could
    change; of the source alone when it prints the date or refuses the dialogue; of "" when the tokenizer has none."""
    template = tokenizer.chat_template or ""
    source = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    if not source or "strftime_now" in source:
        return sha256_text(source)
    dialogue = [{"role": "user", "content": f" {PROBE} "}, {"role": "assistant", "content": PROBE}]
    try:
        return sha256_json([source, tokenizer.apply_chat_template(dialogue, tokenize=False)])
    except (TemplateError, TypeError, ValueError):  # as in encoding.py, where each row's refusal is reported
        return sha256_text(source)


def model_sha256(directory_or_name: str) -> str | None:
    """Hash over a local model's config.json and its weight files: names, sizes and samples; None for a hub name.

    SAMPLES pieces of 4 KiB, evenly spread from the first to the last byte, and the start of each tensor stand for a file:
    reading all of a 7 B model would take longer than loading it, and a model that was trained further differs almost
    everywhere. A few changed bytes between the samples are not seen.
    """
    directory = Path(directory_or_name)
    if not directory.is_dir():
        return None
    weights = sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf"))
    config = directory / "config.json"
    parts = [[p.name, p.stat().st_size, _sample_sha256(p)] for p in weights]
    return sha256_json([parts, sha256_file(config) if config.is_file() else None])


def _sample_sha256(path: Path) -> str:
    last = max(0, path.stat().st_size - SAMPLE_BYTES)
    places = [last * number // (SAMPLES - 1) for number in range(SAMPLES)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":  # its length in 8 bytes, its table of tensors as JSON, their bytes
            size = int.from_bytes(file.read(8), "little")
            with contextlib.suppress(
                ValueError, AttributeError, TypeError, LookupError, RecursionError
            ):  # loading says better what is wrong with it
                table = json.loads(file.read(min(size, 1 << 27)))
                places += [
                    8 + size + tensor["data_offsets"][0] for tensor in table.values() if "data_offsets" in tensor
                ]
        for place in sorted(place for place in places if isinstance(place, int) and place >= 0):
            file.seek(min(place, last + SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that are installed, read from their metadata without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def sync_file(path: str | Path) -> None:
    """Makes a file's content durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: str | Path) -> None:
    """Makes renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained_writing(path: str | Path, also_reads: bool = False) -> Iterator[None]:
    """Turns what the file system refuses, while `path` is written, into one sentence with its true cause.

    also_reads: the block reads, loads or sends things too. What names no file and may have come from them is left alone.
    Raises: UserError instead of OSError.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        named = [name for name in (error.filename, error.filename2) if isinstance(name, (str, os.PathLike))]
        others = [] if any(_is_part(name, path) for name in named) else named
        if also_reads and not named and not full and error.errno != errno.EROFS:
            raise
        reason = error.strerror or str(error)
        if named and not others and Path(path).absolute() in Path(named[0]).absolute().parents:
            reason += f" ({named[0]})"
        if others and not full:
            raise UserError(
                f"could not use {others[0]}: {reason}; check the name, its permissions and the disk (it was needed for {path}, "
                "where what was complete before is untouched)"
            ) from error
        raise UserError(
            f"could not write {others[-1] if others else path}: {reason}; what was complete before is untouched: "
            f"{'free space or ' if full else ''}choose another place, then run the same command again"
        ) from error


def _is_part(name: str | Path, path: str | Path) -> bool:
    """Whether a file is `path`, lies in it or in a temporary one beside it, or is a directory that it lies in."""
    file, whole = Path(os.path.abspath(name)), Path(os.path.abspath(path))
    below = file.parts[: len(whole.parts)]
    beside = below[:-1] == whole.parts[:-1] and bool(below) and below[-1].startswith(f".{whole.name}.")
    return below == whole.parts or beside or file in whole.parents


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 text file: temporary name beside it, fsync, rename. Raises: UserError when that fails."""
    path = Path(path)
    with explained_writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.tmp-")
        try:
            with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: str | Path, value: Any) -> None:
    """Writes a JSON file for people and programs: indented, keys in the given order, numbers in full precision."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path, shape: Any = schemas.ANY) -> Any:
    """Reads a JSON file and compares it with a shape of sft/schemas.py. Raises: UserError naming file and key."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits, brackets without end
        raise UserError(
            f"{path} is not valid JSON ({error}); it was not written by this project or is damaged"
        ) from None
    if wrong := schemas.mismatch(value, shape):
        raise UserError(f"{path} is damaged or was written by another program: {wrong}")
    return value


def read_json_lines(path: str | Path, shape: Any) -> list[Any]:
    """The lines of a file that are JSON of a shape; what a kill cut off or a disk spoilt is left out."""
    values = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if not schemas.mismatch(value, shape):
                values.append(value)
    return values


def refuse_links(directory: str | Path) -> None:
    """Refuses to write where symbolic links inside the directory lead out of it. Raises: UserError naming them."""
    inside = Path(directory).resolve()
    found = [Path(folder) / name for folder, folders, files in os.walk(inside) for name in (*folders, *files)]
    leading = [path for path in found if path.is_symlink() and not path.resolve().is_relative_to(inside)]
    if leading:
        names = ", ".join(f"{path.relative_to(inside)} → {os.readlink(path)}" for path in leading[:5])
        raise UserError(f"{directory} holds symbolic links that lead out of it ({names}); delete them")


@contextlib.contextmanager
def new_directory(path: str | Path, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary directory beside `path`; on leaving, its files are synced and it takes the final name.

    With `replace` an existing directory stays in place until the new one is complete. When the block raises, or on
    Ctrl-C, the temporary directory is removed and `path` is as it was; after a kill the next call removes it.
    Raises: UserError when `path` exists and `replace` is false, or when the file system refuses to write it; what the
    block reads or loads fails with its own error.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise UserError(f"{path} exists already; choose another directory")
    with explained_writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path)
        temporary, lock = _make_locked(path)
    try:
        with explained_writing(path, also_reads=True):
            os.chmod(temporary, 0o777 & ~_umask())
            yield temporary
        with explained_writing(path):
            _put_in_place(temporary, path, replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _put_in_place(temporary: Path, path: Path, replace: bool) -> None:
    """Makes a directory's files durable and gives it its final name."""
    for file in sorted(temporary.rglob("*")):
        if file.is_file():
            sync_file(file)
        else:
            sync_directory(file)
    sync_directory(temporary)
    if path.exists() and not replace:
        raise UserError(f"{path} has been made meanwhile by somebody else; choose another directory")
    if not path.exists():
        os.replace(temporary, path)
    elif _exchange(temporary, path):
        shutil.rmtree(temporary)
    else:
        old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old-"))
        os.replace(path, old / path.name)
        os.replace(temporary, path)
        shutil.rmtree(old)
    sync_directory(path.parent)


def _make_locked(path: Path) -> tuple[Path, int]:
    """A temporary directory beside `path`, and a descriptor whose lock on it says that its owner lives."""
    while True:
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.tmp-"))
        lock = os.open(temporary, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except BlockingIOError:  # by another start, which takes it for a leftover
            taken = True
        except OSError:  # a file system without locks: leftovers stay there
            taken = False
        if not taken and temporary.exists():
            return temporary, lock
        os.close(lock)


def clear_leftovers(path: str | Path) -> None:
    """Removes what a killed `new_directory(path)` left, and puts back what it had moved away; nothing of a living one."""
    path = Path(path)
    is_leftover = re.compile(re.escape(f".{path.name}") + r"\.(tmp|old)-[a-z0-9_]{8}")
    found = [
        one
        for one in sorted(path.parent.glob(".*"))
        if is_leftover.fullmatch(one.name) and one.is_dir() and not one.is_symlink()
    ]
    for leftover in reversed(found):  # the ones with locks first
        try:
            lock = os.open(leftover, os.O_RDONLY)
        except PermissionError:  # another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if ".old-" in leftover.name and (leftover / path.name).exists() and not path.exists():
                os.replace(leftover / path.name, path)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            return  # its owner lives
        finally:
            os.close(lock)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two directories in one step, so that a kill leaves neither name empty; False where that is not to be had."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux with glibc 2.28; not on network file systems
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2) and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
