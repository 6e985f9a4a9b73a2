"""The tokenised data set that data_prep.py writes and that training and evaluation open: verified, then left alone."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import compute

from sft import schemas
from sft.artifacts import read_json, sha256_json, template_sha256, tokenizer_sha256
from sft.errors import RunFailed, UserError

# labels: not shifted, labels[i] is input_ids[i] or -100. question and reference are texts for the report.
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("labels", pyarrow.list_(pyarrow.int32())),
        ("length", pyarrow.int32()),
        ("target_tokens", pyarrow.int32()),
        ("question", pyarrow.string()),
        ("reference", pyarrow.string()),
    ]
)
SPLITS = ("train", "eval")
# A split up to this size is read into memory, where nobody can change it; a larger one stays a mapped file.
MOST_BYTES_IN_MEMORY = 4 << 30


class ContentHash:
    """A running SHA-256 of each column of a split; how the rows are cut into batches does not show in it."""

    def __init__(self) -> None:
        # Of a list or text, the lengths and the values have a hash each: only so the cut does not show.
        names = [(field.name, part) for field in SCHEMA for part in ("lengths", "values")]
        self.digests = {name: hashlib.sha256() for name in names}

    def update(self, batch: pyarrow.RecordBatch) -> None:
        """Adds the rows of a batch, with the columns of SCHEMA."""
        for field in SCHEMA:
            column = batch.column(field.name)
            values = self.digests[field.name, "values"]
            if pyarrow.types.is_integer(field.type):
                values.update(np.asarray(column, dtype="<i4").tobytes())
                continue
            lengths = (
                compute.list_value_length(column)
                if pyarrow.types.is_list(field.type)
                else compute.binary_length(column)
            )
            self.digests[field.name, "lengths"].update(np.asarray(lengths, dtype="<i4").tobytes())
            if pyarrow.types.is_list(field.type):
                values.update(np.asarray(column.flatten(), dtype="<i4").tobytes())
            else:
                values.update("".join(column.to_pylist()).encode())

    def sha256(self) -> str:
        """One hash for the split, 64 hex digits."""
        return sha256_json([[*name, digest.hexdigest()] for name, digest in self.digests.items()])


def split_sha256(batches: Iterable[pyarrow.RecordBatch]) -> str:
    """The hash of a split's rows."""
    content = ContentHash()
    for batch in batches:
        content.update(batch)
    return content.sha256()


class Dataset:
    """A data set on disk whose content is that of its manifest. `train` and `eval` are `datasets.Dataset`s.

    Raises: UserError when the directory holds none, or when a row differs from what data_prep.py wrote.
    """

    def __init__(self, directory: str | Path, splits: tuple[str, ...] = SPLITS):
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        self.sha256: str = self.manifest["dataset_sha256"]
        self._files: dict[Path, tuple] = {}
        self._rows = {name: self._open(name) for name in splits}

    @property
    def train(self):
        return self._rows["train"]

    @property
    def eval(self):
        return self._rows["eval"]

    def check_tokenizer(self, tokenizer) -> None:
        """Raises: UserError when the data set was made with another tokenizer or chat template."""
        name = tokenizer.name_or_path
        for what, found in (("tokenizer", tokenizer_sha256(tokenizer)), ("template", template_sha256(tokenizer))):
            made_with = self.manifest[f"{what}_sha256"]
            if made_with != found:
                raise UserError(
                    f"{self.directory} was made with another {what} than {name} has ({what}_sha256 {made_with[:12]}… and "
                    f"{found[:12]}…), so its token ids mean something else; make the data set again with "
                    f"data_prep.py --model_name_or_path {name}"
                )

    def check_unchanged(self) -> None:
        """Raises: RunFailed when a file that is read as training goes on was replaced or written to since it was verified."""
        for path, seen in self._files.items():
            if not path.is_file() or _identity(path) != seen:
                raise RunFailed(
                    f"{path} was changed while it was in use; stop what writes to it, make the data set again with "
                    "data_prep.py --overwrite, and give the same command again",
                    here_only=True,
                )

    def _open(self, name: str):
        """The rows of a split, compared with the manifest's hash."""
        import datasets  # slow to import, and only what reads rows needs it

        folder = self.directory / name
        files = sorted(folder.glob("*.arrow"))
        if len(files) != 1:
            what = "no" if not files else f"{len(files)} files for its"
            raise UserError(f"{self.directory} has {what} {name} split; {self._remedy()}")
        path = files[0]
        try:
            before = _identity(path)
            in_memory = path.stat().st_size <= MOST_BYTES_IN_MEMORY
            with pyarrow.OSFile(str(path)) if in_memory else pyarrow.memory_map(str(path)) as file:
                table = pyarrow.ipc.open_stream(file).read_all()
            if table.schema.names != SCHEMA.names or table.schema.types != SCHEMA.types:
                raise UserError(f"{path} has the columns {', '.join(table.schema.names)}; {self._remedy()}")
            table.validate(full=True)  # offsets and lengths inside the file
            found = split_sha256(table.to_batches())
        except (OSError, ValueError, TypeError, KeyError, NotImplementedError, pyarrow.ArrowException) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is damaged ({_first_line(error)}); {self._remedy()}") from error
        if found != self.manifest["split_sha256"][name]:
            raise UserError(
                f"{path} does not hold the rows that {self.directory / 'manifest.json'} names (SHA-256 {found[:12]}… instead of "
                f"{self.manifest['split_sha256'][name][:12]}…): it was changed or damaged; {self._remedy()}"
            )
        counts = {
            "rows_written": len(table),
            "tokens": compute.sum(table["length"], min_count=0).as_py(),
            "target_tokens": compute.sum(table["target_tokens"], min_count=0).as_py(),
        }
        for what, count in counts.items():
            if count != self.manifest[what][name]:
                raise UserError(
                    f"{self.directory / 'manifest.json'} is damaged: it says {what} {self.manifest[what][name]}, and {path} has "
                    f"{count}; {self._remedy()}"
                )
        if not in_memory:
            self._files[path] = before
        features = datasets.Features.from_arrow_schema(SCHEMA)
        table = table.replace_schema_metadata(None)
        return datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint=found[:16])

    def _remedy(self) -> str:
        return "make the data set again with data_prep.py --overwrite"


def read_manifest(directory: str | Path) -> dict:
    """The manifest of a data set made by data_prep.py. Raises: UserError when the directory holds none."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"dataset_dir {directory} does not exist; make it with data_prep.py --output_dir {directory}")
    path = directory / "manifest.json"
    if not path.is_file():
        raise UserError(f"{directory} holds no manifest.json: it is not a data set made by data_prep.py, or not whole")
    manifest = read_json(path, schemas.MANIFEST)
    hashes = manifest.get("split_sha256") or {}
    if set(hashes) != set(SPLITS) or sha256_json(hashes) != manifest["dataset_sha256"]:
        raise UserError(
            f"{path} is damaged, or written by an older data_prep.py that hashed less; make the data set again with "
            "data_prep.py --overwrite"
        )
    return manifest


def _identity(path: Path) -> tuple:
    """What changes when a file is written to or replaced."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
