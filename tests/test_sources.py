"""Files as people have them: what is read, what is named, and what the message says when neither is possible."""

import contextlib
import gzip
import json
import os

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from preparation.records import RowError, UnknownFields, read_dialogue
from preparation.sources import draw_share, find_sources, read_rows, split_share
from sft.errors import UserError

QA = {"question": "什么是数据并行？", "answer": "每个进程处理不同的数据。"}
LINE = json.dumps(QA, ensure_ascii=False) + "\n"


def read(path, encoding="utf-8", file_format="auto"):
    sources, _ = find_sources([str(path)], file_format)
    return [row for source in sources for _, row in read_rows(source, encoding)]


@contextlib.contextmanager
def ordinary_user():
    """Permissions do not bind root."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def test_directories_are_read_at_any_depth_and_other_endings_are_named(tmp_path):
    for name in ("b/deep/c.jsonl", "a.jsonl", "notes.md", "b/LICENSE", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LINE)
    datasets.Dataset.from_list([QA]).save_to_disk(str(tmp_path / "b" / "saved"))
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "e.jsonl").write_text(LINE)
    (tmp_path / "link").symlink_to(elsewhere)
    sources, passed_over = find_sources([str(tmp_path)])
    found = [(os.path.relpath(source.path, tmp_path), source.kind) for source in sources]
    assert found == [
        ("a.jsonl", "jsonl"), ("b/deep/c.jsonl", "jsonl"), ("b/saved", "dataset"), ("link/e.jsonl", "jsonl")
    ]  # fmt: skip
    assert [os.path.relpath(path, tmp_path) for path in passed_over] == ["b/LICENSE", "notes.md"]
    assert [row for source in sources for _, row in read_rows(source)] == [QA] * 4


@pytest.mark.parametrize("name", ["", " ", ":0.5"])
def test_an_empty_input_is_not_the_working_directory(name):
    with pytest.raises(UserError, match="--input is empty"):
        find_sources([name])


@pytest.mark.parametrize("name", ["a.jsonl", "sub", "sub/b.jsonl"])
def test_what_may_not_be_read_is_named(tmp_path, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "sub" / "b.jsonl").write_text(LINE)
    for folder in (tmp_path, *tmp_path.parents):  # pytest makes its own for its user alone
        if "pytest-" in str(folder):
            folder.chmod(0o755)
    (tmp_path / name).chmod(0)
    try:
        with ordinary_user(), pytest.raises(UserError, match=f"{name} cannot be read: Permission denied"):
            read(tmp_path)
    finally:
        (tmp_path / name).chmod(0o755)


def test_pipes_links_to_nothing_and_devices_are_said_to_be_that(tmp_path):
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    for name, what in (
        (tmp_path / "fifo.jsonl", "is a pipe, not a file"),
        (tmp_path / "link.jsonl", "is a link to gone.jsonl, which does not exist"),
        ("/dev/null", "is a device, not a file"),
        (tmp_path, "fifo.jsonl is a pipe, not a file"),
    ):
        with pytest.raises(UserError, match=what):
            find_sources([str(name)])


def save(path, rows=1):
    datasets.Dataset.from_list([QA] * rows).save_to_disk(str(path))
    return path


def edit(path, key, value):
    content = json.loads(path.read_text())
    content[key] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "value",
    [[{"filename": "../secret/data-00000-of-00001.arrow"}], [{"filename": "/etc/x.arrow"}], [{"filename": ".."}], [{"filename": 7}]],
)  # fmt: skip
def test_a_description_that_names_files_elsewhere_is_refused(tmp_path, value):
    save(tmp_path / "secret")
    save(tmp_path / "given")
    assert read(tmp_path / "given") == [QA]
    edit(tmp_path / "given" / "state.json", "_data_files", value)
    with pytest.raises(UserError, match="state.json names a file outside its directory"):
        read(tmp_path / "given")


def test_splits_elsewhere_are_refused(tmp_path):
    save(tmp_path / "secret")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([QA])}).save_to_disk(str(tmp_path / "given"))
    edit(tmp_path / "given" / "dataset_dict.json", "splits", ["train", "../secret"])
    with pytest.raises(UserError, match="dataset_dict.json names a file outside its directory"):
        read(tmp_path / "given")


@pytest.mark.parametrize("content", ["[]", "7", '{"_data_files": [7]}', '{"_data_files": 7}', "{", "null"])
def test_descriptions_of_another_shape_are_one_sentence(tmp_path, content):
    save(tmp_path / "given")
    (tmp_path / "given" / "state.json").write_text(content)
    with pytest.raises(UserError, match="given"):
        read(tmp_path / "given")


def test_packed_rows_are_read_whatever_their_name(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(gzip.compress(LINE.encode()))
    assert read(tmp_path / "rows.jsonl") == [QA]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\3\4...", "is no text but a zip archive"),
        (b"\x28\xb5\x2f\xfd..", "compressed by zstd: unpack it"),
        (b"PAR1....", "a Parquet file: read it with --format parquet"),
    ],
)
def test_files_that_are_no_text_are_told_by_their_first_bytes(tmp_path, content, words):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LINE.encode()[:-13], "rows.jsonl:1: the file ends inside a character: it was cut off"),
        ((LINE + LINE).encode()[:-13], "rows.jsonl:2: the file ends inside a character: it was cut off"),
        (LINE.encode() + b'{"question": "caf\xe9"}\n' + LINE.encode(), r"rows.jsonl:2: byte 18 of the line \(0xe9\) is not UTF-8"),
        (LINE.encode("gb18030"), r"looks like GBK \(a guess\)"),
        (LINE.replace("据", "據").encode("big5", "ignore"), r"\(a guess\)"),
        ('{"question": "Où est le café?", "answer": "À côté."}\n'.encode("latin-1"), r"looks like CP1252 \(a guess\)"),
        ("{}".encode("utf-16"), "this is not UTF-8 but UTF-16"),
    ],
)  # fmt: skip
def test_other_encodings_are_guesses_and_cut_files_are_cut(tmp_path, content, words):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "rows.jsonl")


def test_a_utf_8_file_read_as_gbk_is_told(tmp_path):
    (tmp_path / "rows.jsonl").write_text(LINE)
    with pytest.raises(UserError, match="this is not GBK, it looks like UTF-8; leave out --encoding"):
        read(tmp_path / "rows.jsonl", encoding="gbk")


def test_a_tsv_is_parted_at_tabs_whatever_its_header_holds(tmp_path):
    (tmp_path / "a.tsv").write_text("question\tanswer, in short, or not\nx, y\tz\n")
    assert read(tmp_path / "a.tsv") == [{"question": "x, y", "answer, in short, or not": "z"}]
    (tmp_path / "b.csv").write_text('question;"a, b, c, d"\nx;y\n')
    assert read(tmp_path / "b.csv") == [{"question": "x", "a, b, c, d": "y"}]


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    for name, table in (
        ("flat", pyarrow.table([["q"], ["a"], ["b"]], names=["question", "answer", "answer"])),
        ("deep", pyarrow.table({"messages": pyarrow.array([[]], pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("role", pyarrow.string())])))})),
    ):  # fmt: skip
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(UserError, match="two columns named `(answer|role)`"):
            read(tmp_path / f"{name}.parquet")


def test_fields_that_only_other_rows_have_are_no_fields(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "tool_calls": [{"a": 1}]},
            ]
        }
    ]
    rows += [{"messages": [{"role": "user", "content": "q", "name": "x"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == rows[0]


@pytest.mark.parametrize("form", ["%s\n", "[%s]"])
def test_numbers_of_thousands_of_digits_cost_one_row(tmp_path, form):
    (tmp_path / "a.json").write_text(form % '{"question": "q", "answer": %s}' % ("7" * 5000))
    (row,) = read(tmp_path / "a.json")
    with pytest.raises(RowError, match="a number of 5,000 digits"):
        read_dialogue(row)


def test_a_list_of_rows_inside_an_object_is_told(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": [QA, QA]}))
    with pytest.raises(
        UnknownFields, match="if the 2 objects in `data` are the rows, put that list alone into the file"
    ):
        read_dialogue(read(tmp_path / "a.json")[0])


def test_a_share_is_exact_drawn_by_the_seed_and_spread():
    counts = {}
    taken = list(draw_share(range(2345), 0.3, 42, counts))
    assert counts == {"rows": 2345, "taken": 704}  # 703.5, to the even one
    assert taken == sorted(set(taken)) and len(taken) == 704
    assert taken == list(draw_share(range(2345), 0.3, 42, {}))
    assert taken != list(draw_share(range(2345), 0.3, 43, {}))
    assert [sum(low <= row < low + 500 for row in taken) for low in range(0, 2000, 500)] == pytest.approx(
        [150] * 4, abs=35
    )
    assert list(draw_share(range(3), 0.1, 42, {})) == []


def test_shares_are_read_from_names(tmp_path):
    (tmp_path / "a.jsonl:0.5").write_text(LINE)
    assert split_share(str(tmp_path / "a.jsonl:0.5")) == (str(tmp_path / "a.jsonl:0.5"), 1.0)
    assert split_share("b.jsonl:0.25") == ("b.jsonl", 0.25)
    assert split_share("C:rows.jsonl") == ("C:rows.jsonl", 1.0)
    for word in ("b.jsonl:0", "b.jsonl:1.5", "b.jsonl:-1", "b.jsonl:1.2.3"):
        with pytest.raises(UserError, match="the share is .*; expected a number above 0 and at most 1"):
            split_share(word)


def test_damaged_files_are_one_sentence_whatever_is_damaged(tmp_path):
    """Every tenth byte of each file changed, and each file cut at every tenth byte."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((LINE * 3).encode()))
    parquet.write_table(pyarrow.Table.from_pylist([QA, QA]), tmp_path / "a.parquet")
    save(tmp_path / "saved")
    tried = 0
    for path in (tmp_path / "a.jsonl.gz", tmp_path / "a.parquet", *(tmp_path / "saved").iterdir()):
        whole = path.read_bytes()
        place = path if path.parent == tmp_path else path.parent
        for at in range(0, len(whole), 10):
            for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]):
                path.write_bytes(damaged)
                tried += 1
                try:
                    read(place, encoding="utf-16" if at % 20 else "utf-8")
                except UserError as error:
                    assert "\n" not in str(error)
        path.write_bytes(whole)
    assert tried > 400
