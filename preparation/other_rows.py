"""Rows of other files for an evaluation, encoded as those of a run's data set were."""

import datasets
import pyarrow
from pyarrow import compute

from preparation.encoded_rows import Encoding, Row
from preparation.records import RowError, read_dialogue
from preparation.sources import find_sources, read_rows
from sft.dataset import SCHEMA
from sft.errors import UserError


def read_other_rows(name: str, tokenizer, recipe: dict, limit: int | None = None) -> datasets.Dataset:
    """The usable rows of a file, directory or data set that data_prep.py would read, their ids preceded by `name: `.

    recipe: of the run's manifest: which mode the prompts have, how long a row may be, the system prompt. limit: of rows.
    Raises: UserError when nothing can be used, naming the first reason.
    """
    sources, _ = find_sources([name])
    rows, reasons = [], []
    for number, source in enumerate(sources):
        for line, row in read_rows(source, recipe["encoding"]):
            if len(rows) == limit:
                break
            try:
                dialogue = read_dialogue(row, system_prompt=recipe["system_prompt"])
            except RowError as error:
                reasons.append(f"{source.path}:{line} {error}")
                continue
            rows.append(Row(number, line, f"{name}: {dialogue.id or line}", dialogue))
    encode = Encoding(
        tokenizer, recipe["max_length"], recipe["on_too_long"], recipe["thinking"], recipe["loss_on"], recipe["seed"],
        with_sketch=False,
    )  # fmt: skip
    encoded = pyarrow.Table.from_batches([encode(rows)]) if rows else None
    usable = encoded.filter(compute.greater(encoded["length"], 0)) if encoded else None
    if not usable:
        reasons += [reason for reason in encoded["reason"].to_pylist() if reason] if encoded else []
        raise UserError(f"--eval_input {name} has no row that can be asked: {reasons[0] if reasons else 'it is empty'}")
    if len(usable) < len(rows) + len(reasons):
        print(f"{name}: {len(rows) + len(reasons) - len(usable)} rows cannot be asked and are left out", flush=True)
    table = usable.select(SCHEMA.names).cast(SCHEMA)
    ids = [f"{row_id}#{number}" for number, row_id in enumerate(table["id"].to_pylist(), start=1)]
    unique = table["id"] if len(set(table["id"].to_pylist())) == len(table) else pyarrow.chunked_array([ids])
    table = table.set_column(0, "id", unique)
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(SCHEMA)))
