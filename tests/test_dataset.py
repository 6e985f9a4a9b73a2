"""A data set is what its manifest says, row by row, or it is refused; the same for training and evaluation."""

import hashlib
import json
import random
import shutil

import numpy as np
import pyarrow
import pytest

from sft.artifacts import sha256_json
from sft.dataset import SCHEMA, Dataset, split_sha256
from sft.errors import RunFailed, UserError
from tests.conftest import make_rows, must, run_script, train, write_jsonl

TWO_ROWS = [
    {"id": "a", "input_ids": [5, 6, 7], "labels": [-100, 6, 7], "length": 3, "target_tokens": 2, "question": "?", "reference": "é"},
    {"id": "b", "input_ids": [8], "labels": [8], "length": 1, "target_tokens": 1, "question": "", "reference": "x y"},
]  # fmt: skip


def table(rows: list[dict]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(rows, schema=SCHEMA)


@pytest.fixture
def copy(dataset_dir, tmp_path):
    """A data set of one's own to damage."""
    shutil.copytree(dataset_dir, tmp_path / "data")
    return tmp_path / "data"


def arrow_file(directory, split):
    (path,) = (directory / split).glob("*.arrow")
    return path


def rewrite(path, change) -> None:
    """Puts `change(rows)` in place of the rows of an Arrow file, with valid Arrow."""
    with pyarrow.OSFile(str(path)) as file:
        rows = pyarrow.ipc.open_stream(file).read_all()
    changed = table(change(rows.to_pylist()))
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, changed.schema) as writer:
        writer.write_table(changed)


def change_rows(directory, split, change) -> None:
    """Makes an honest data set of other rows: file, counts and hashes agree."""
    path, manifest = arrow_file(directory, split), json.loads((directory / "manifest.json").read_text())
    rewrite(path, change)
    with pyarrow.OSFile(str(path)) as file:
        rows = pyarrow.ipc.open_stream(file).read_all()
    manifest["split_sha256"][split] = split_sha256(rows.to_batches())
    manifest["dataset_sha256"] = sha256_json(manifest["split_sha256"])
    manifest["rows_written"][split] = len(rows)
    manifest["tokens"][split] = sum(rows.column("length").to_pylist())
    manifest["target_tokens"][split] = sum(rows.column("target_tokens").to_pylist())
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_the_hash_of_two_rows_is_the_one_computed_by_hand():
    def sha256(value: bytes) -> str:
        return hashlib.sha256(value).hexdigest()

    def int32(*numbers: int) -> str:
        return sha256(b"".join(number.to_bytes(4, "little", signed=True) for number in numbers))

    nothing = sha256(b"")
    expected = [
        ["id", "lengths", int32(1, 1)], ["id", "values", sha256(b"ab")],
        ["input_ids", "lengths", int32(3, 1)], ["input_ids", "values", int32(5, 6, 7, 8)],
        ["labels", "lengths", int32(3, 1)], ["labels", "values", int32(-100, 6, 7, 8)],
        ["length", "lengths", nothing], ["length", "values", int32(3, 1)],
        ["target_tokens", "lengths", nothing], ["target_tokens", "values", int32(2, 1)],
        ["question", "lengths", int32(1, 0)], ["question", "values", sha256(b"?")],
        ["reference", "lengths", int32(2, 3)], ["reference", "values", sha256("éx y".encode())],
    ]  # fmt: skip
    assert [field.name for field in SCHEMA] == list(dict.fromkeys(row[0] for row in expected))
    assert split_sha256(table(TWO_ROWS).to_batches()) == sha256_json(expected)


def test_how_rows_are_cut_into_batches_does_not_show_in_the_hash():
    rows = table([{**TWO_ROWS[number % 2], "id": str(number)} for number in range(101)])
    hashes = {split_sha256(rows.to_batches(max_chunksize=size)) for size in (1, 7, 101)}
    assert len(hashes) == 1 and hashes == {split_sha256(rows.combine_chunks().to_batches())}


@pytest.mark.parametrize(("first", "second"), [(["ab", "c"], ["a", "bc"]), ([[1, 2], [3]], [[1], [2, 3]])])
def test_where_one_row_ends_and_the_next_begins_shows_in_the_hash(first, second):
    column = "question" if isinstance(first[0], str) else "input_ids"
    hashes = {
        split_sha256(table([{**row, column: value} for row, value in zip(TWO_ROWS, values)]).to_batches())
        for values in (first, second)
    }
    assert len(hashes) == 2


def reverse_answers(rows):
    """Each answer backwards, in tokens and labels, with every number of the manifest unchanged."""
    for row in rows:
        start = next(i for i, label in enumerate(row["labels"]) if label != -100)
        for column in ("input_ids", "labels"):
            row[column][start:] = row[column][start:][::-1]
    return rows


def change_a_prompt_token(rows):
    for row in rows:
        row["input_ids"][1] = (row["input_ids"][1] + 1) % 300
    return rows


def exchange_references(rows):
    rows[0]["reference"], rows[1]["reference"] = rows[1]["reference"], rows[0]["reference"]
    return rows


@pytest.mark.parametrize(
    "change", [reverse_answers, change_a_prompt_token, exchange_references, lambda rows: rows[::-1]]
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_any_changed_row_is_refused(copy, change, split):
    rewrite(arrow_file(copy, split), change)
    with pytest.raises(UserError, match=f"{split}/data-.* does not hold the rows that .*manifest.json names"):
        Dataset(copy)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_bit_flip_is_refused_or_changes_nothing(copy, dataset_dir, split):
    """60 flips anywhere in the Arrow file. Padding may flip unseen; then the rows are those that were written."""
    path = arrow_file(copy, split)
    good, draw, refused = path.read_bytes(), random.Random(split), 0
    expected = Dataset(dataset_dir)._rows[split].to_list()
    for _ in range(60):
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            assert Dataset(copy, (split,))._rows[split].to_list() == expected
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and "make the data set again" in str(error)
    assert refused >= 40


def test_a_cut_file_and_a_missing_one_are_refused(copy):
    path = arrow_file(copy, "train")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"train/data-.* is damaged \(.*\); make the data set again"):
        Dataset(copy)
    path.unlink()
    with pytest.raises(UserError, match="has no train split"):
        Dataset(copy)


def test_what_is_not_a_data_set_is_said(tmp_path, copy):
    with pytest.raises(UserError, match=r"does not exist; make it with data_prep\.py"):
        Dataset(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        Dataset(tmp_path / "empty")
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    for damaged in ([], {}, {**manifest, "split_sha256": None}, {**manifest, "dataset_sha256": "0" * 64},
                    {**manifest, "split_sha256": {**manifest["split_sha256"], "eval": 7}}):  # fmt: skip
        path.write_text(json.dumps(damaged))
        with pytest.raises(
            UserError,
            match=r"manifest\.json is damaged(, or written by an older data_prep\.py| or was written by another)",
        ):
            Dataset(copy)


@pytest.mark.parametrize("name", ["rows_written", "tokens", "target_tokens"])
def test_a_count_that_is_not_that_of_the_rows_is_refused(copy, name):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[name]["eval"] += 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=rf"manifest\.json is damaged: it says {name} \d+, and .*/eval/data-.* has \d+; make"
    ):
        Dataset(copy, ("eval",))


def test_rows_that_were_read_stay_when_the_file_is_written_to(copy):
    rows = Dataset(copy).train
    before = rows[:3]["input_ids"]
    path = arrow_file(copy, "train")
    with open(path, "r+b") as file:  # in place: the file stays the same one
        file.write(bytes(path.stat().st_size))
    assert rows[:3]["input_ids"] == before
    with open(path, "r+b") as file:
        file.truncate(10)
    assert rows[:3]["input_ids"] == before


def test_a_file_that_is_too_large_for_memory_is_watched(copy, monkeypatch):
    monkeypatch.setattr("sft.dataset.MOST_BYTES_IN_MEMORY", 1000)
    data = Dataset(copy)
    data.check_unchanged()
    path = arrow_file(copy, "train")
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(RunFailed, match="was changed while it was in use"):
        data.check_unchanged()
    path.unlink()
    with pytest.raises(RunFailed, match="was changed while it was in use"):
        data.check_unchanged()


def test_training_refuses_changed_rows_and_evaluation_changed_held_out_rows(
    tmp_path, copy, tiny_model_dir, tiny_run_dir, dataset_dir
):
    rewrite(arrow_file(copy, "train"), reverse_answers)
    refused = train("cpu_1", tiny_model_dir, copy, tmp_path / "run")
    assert refused.returncode != 0 and "does not hold the rows" in refused.stderr
    assert not (tmp_path / "run").exists()
    shutil.copytree(dataset_dir, copy, dirs_exist_ok=True)
    rewrite(arrow_file(copy, "eval"), exchange_references)
    result = run_script("eval.py", "--run_dir", tiny_run_dir, "--dataset_dir", copy, "--output_dir", tmp_path / "eval")
    assert result.returncode == 2 and "does not hold the rows" in result.stderr and not (tmp_path / "eval").exists()


def test_data_prep_makes_again_what_was_changed(tmp_path, tiny_tokenizer_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", make_rows(20))
    command = [
        "data_prep.py",
        "--input",
        source,
        "--model_name_or_path",
        tiny_tokenizer_dir,
        "--output_dir",
        tmp_path / "data",
    ]
    must(run_script(*command))
    assert "is up to date" in must(run_script(*command)).stdout
    rewrite(arrow_file(tmp_path / "data", "train"), reverse_answers)
    refused = run_script(*command)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr
    must(run_script(*command, "--overwrite"))
    assert np.all(np.asarray(Dataset(tmp_path / "data").train["length"]) > 0)


def test_a_split_whose_file_is_a_dangling_link_is_named(copy):
    path = arrow_file(copy, "eval")
    path.unlink()
    path.symlink_to("nothing-there")
    with pytest.raises(UserError, match=r"eval/.*\.arrow is damaged"):
        Dataset(copy)
