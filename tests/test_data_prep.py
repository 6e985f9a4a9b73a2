"""data_prep.py from the command line's words to the files on disk."""

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import psutil
import pytest

import data_prep
from preparation.sources import FORMATS
from preparation.summary import mark_targets
from sft.errors import UserError
from tests.conftest import ROOT, make_rows, must, run_script, write_jsonl

DATA = Path(__file__).parent / "data"


@pytest.fixture
def prepare(tiny_tokenizer_dir, tmp_path):
    """Runs data_prep in this process; gives back the manifest."""

    def run(*inputs, output="out", **settings):
        flags = {"eval_fraction": 0, "num_proc": 1, **settings}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        data_prep.main(
            ["--input", *map(str, inputs), "--model_name_or_path", str(tiny_tokenizer_dir)]
            + ["--output_dir", str(tmp_path / output), *words]
        )
        return json.loads((tmp_path / output / "manifest.json").read_text())

    return run


def rows_of(directory: Path, split: str = "train") -> list[dict]:
    return list(datasets.load_from_disk(str(directory / split)))


# file: (rows written, words of each rejection, other figures of the manifest)
ACCEPTED = {
    "bom.jsonl": (6, [], {}),
    "crlf.jsonl": (6, [], {}),
    "no_final_newline.jsonl": (6, [], {}),
    "blank_lines.jsonl": (6, [], {}),
    "array_in_jsonl.jsonl": (6, [], {}),
    "empty_answer.jsonl": (6, [(3, "empty answer"), (4, "empty answer")], {}),
    "null_answer.jsonl": (2, [(3, "`answer` is null")], {}),
    "missing_field.jsonl": (2, [(3, "fields found: question, anwser); `anwser` resembles `answer`")], {}),
    "special_tokens_in_text.jsonl": (3, [], {}),
    "prompt_longer_than_max_length.jsonl": (2, [(3, "no room for a target token")], {}),
    "answer_longer_than_max_length.jsonl": (3, [], {"truncated": 1}),
    "exact_duplicates.jsonl": (6, [], {"duplicates": 3}),
    "conflicting_answers.jsonl": (7, [], {}),
    "alpaca_empty_input.json": (2, [], {}),
    "sharegpt.json": (1, [], {}),
    "sharegpt_ends_with_user.json": (1, [], {"cut_turns": 1}),
    "messages.jsonl": (1, [], {}),
    "prompt_completion.jsonl": (1, [], {}),
    "quoted_newlines.csv": (2, [], {}),
    "rows.jsonl.gz": (6, [], {}),
}
# file: words of the error
REFUSED = {
    "gbk.jsonl": ["gbk.jsonl:1:", "not UTF-8", "looks like GBK", "--encoding gbk", "iconv -f GBK"],
    "truncated_line.jsonl": ["truncated_line.jsonl:4:14:", "not valid JSON", "mend or delete that line"],
    "trailing_comma.json": ["trailing_comma.json:1:71:", "not valid JSON", "delete the comma"],
    "empty.jsonl": ["empty.jsonl", "no rows"],
    "unknown_fields.jsonl": ["fields found: q, a", "query/response", "--question_column Q --answer_column A"],
    "wrong_extension.txt": ["wrong_extension.txt", ".txt are not read", ".jsonl", ".parquet", "--format jsonl"],
    "sharegpt_two_user_turns.json": ["sharegpt_two_user_turns.json:1", "roles do not alternate", "turn 2 is user"],
    "messages_only_system.jsonl": ["messages_only_system.jsonl:1", "nothing to learn"],
}


def test_each_case_file_has_its_outcome_listed():
    assert sorted(path.name for path in DATA.iterdir()) == sorted([*ACCEPTED, *REFUSED])
    assert len(ACCEPTED) + len(REFUSED) == 28


@pytest.mark.parametrize("name", ACCEPTED)
def test_usable_rows_are_written_and_the_others_named(prepare, tmp_path, capsys, name):
    written, rejected, figures = ACCEPTED[name]
    manifest = prepare(DATA / name)
    screen = capsys.readouterr().out
    assert manifest["rows_written"] == {"train": written, "eval": 0}
    assert len(manifest["rejected"]) == len(rejected)
    for row, (line, reason) in zip(manifest["rejected"], rejected):
        assert (row["file"], row["line"]) == (str(DATA / name), line)
        assert reason in row["reason"]
        assert f"{DATA / name}:{line} {row['reason']}" in screen
    for key in ("truncated", "duplicates", "cut_turns"):
        assert manifest[key] == figures.get(key, 0)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == written
    for row in rows:
        assert not set("\ufeff\r") & set(row["question"] + row["reference"])
        assert row["length"] == len(row["input_ids"]) == len(row["labels"])
        assert row["target_tokens"] == sum(label != -100 for label in row["labels"]) > 0
        assert row["labels"][0] == -100


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_files_are_one_message_and_leave_nothing(prepare, tmp_path, name):
    with pytest.raises(UserError) as raised:
        prepare(DATA / name)
    for words in REFUSED[name]:
        assert words in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_the_options_that_the_errors_name_read_the_files(prepare, tmp_path):
    assert prepare(DATA / "gbk.jsonl", encoding="gbk")["rows_written"]["train"] == 3
    assert rows_of(tmp_path / "out")[0]["question"] == "什么是数据并行？"
    assert prepare(DATA / "wrong_extension.txt", format="jsonl", output="txt")["rows_written"]["train"] == 6


def test_columns_named_by_the_user_are_read(prepare):
    assert prepare(DATA / "unknown_fields.jsonl", question_column="q", answer_column="a")["rows_written"]["train"] == 1


def test_strict_ends_with_the_rejected_rows(prepare, tmp_path):
    with pytest.raises(UserError, match=r"empty_answer.jsonl:3 empty answer.*empty_answer.jsonl:4 empty answer"):
        prepare(DATA / "empty_answer.jsonl", strict="true")
    assert list(tmp_path.iterdir()) == []


def test_special_tokens_typed_in_a_text_come_back_as_text(prepare, tmp_path, tiny_tokenizer):
    prepare(DATA / "special_tokens_in_text.jsonl")
    row = rows_of(tmp_path / "out")[2]
    control = tiny_tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [i for i in row["input_ids"] if i in control] == [control[0], control[1]] * 2
    assert row["reference"] in tiny_tokenizer.decode(row["input_ids"])
    assert row["question"] in tiny_tokenizer.decode(row["input_ids"])


def test_a_truncated_answer_teaches_no_end_of_turn(prepare, tmp_path, tiny_tokenizer):
    manifest = prepare(DATA / "answer_longer_than_max_length.jsonl")
    row = rows_of(tmp_path / "out")[2]
    assert row["length"] == 512
    assert tiny_tokenizer.convert_tokens_to_ids("<|im_end|>") not in row["labels"]
    assert manifest["truncated_rows"][0]["line"] == 3
    assert manifest["truncated_rows"][0]["tokens"] > 512


def test_rows_that_are_too_long_can_be_dropped(prepare):
    manifest = prepare(DATA / "answer_longer_than_max_length.jsonl", on_too_long="drop")
    assert manifest["rows_written"]["train"] == 2
    assert manifest["rejected"][0]["reason"].startswith("too long: ")


def test_conflicting_answers_are_told_and_stay_on_one_side(prepare, tmp_path, capsys):
    sides = set()
    for seed in range(12):
        manifest = prepare(DATA / "conflicting_answers.jsonl", output=f"out{seed}", seed=seed, eval_fraction=0.3)
        assert manifest["conflicting"][0]["question"] == "What does rank 0 do in a 2-process job?"
        assert [place.rsplit(":", 1)[1] for place in manifest["conflicting"][0]["rows"]] == ["1", "7"]
        per_split = [
            sum(
                row["question"] == "What does rank 0 do in a 2-process job?"
                for row in rows_of(tmp_path / f"out{seed}", name)
            )
            for name in ("train", "eval")
        ]
        assert sorted(per_split) == [0, 2]
        sides.add(per_split[1])
    assert sides == {0, 2}
    assert "one question with different answers: 1" in capsys.readouterr().out


def test_the_manifest_ties_the_rows_to_their_sources(prepare, tmp_path):
    source = write_jsonl(tmp_path / "qa.jsonl", make_rows(380))
    manifest = prepare(source, eval_fraction=0.05)
    rows = {name: rows_of(tmp_path / "out", name) for name in ("train", "eval")}
    assert manifest["rows_read"] == 380
    assert manifest["rows_written"] == {"train": 361, "eval": 19}
    for figure, column in (("tokens", "length"), ("target_tokens", "target_tokens")):
        assert manifest[figure] == {name: sum(row[column] for row in rows[name]) for name in rows}
    for key in ("source_sha256", "tokenizer_sha256", "template_sha256", "dataset_sha256"):
        assert len(manifest[key]) == 64
    assert manifest["versions"]["datasets"] == datasets.__version__
    assert len({row["id"] for split in rows.values() for row in split}) == 380
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["eval", "manifest.json", "train"]


def test_all_numbers_of_processes_make_the_same_data_set(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(data_prep, "ROWS_PER_WORKER", 50)
    monkeypatch.setattr(data_prep, "BATCH", 32)
    source = write_jsonl(tmp_path / "qa.jsonl", [*make_rows(380), {"question": "Empty?", "answer": ""}])
    one = prepare(source, output="one", eval_fraction=0.05)
    two = prepare(source, output="two", eval_fraction=0.05, num_proc=2)
    assert one == two
    for name in ("train", "eval"):
        assert rows_of(tmp_path / "one", name) == rows_of(tmp_path / "two", name)
    monkeypatch.undo()
    assert prepare(source, output="whole", eval_fraction=0.05)["dataset_sha256"] == one["dataset_sha256"]


def test_held_out_questions_nearly_in_training_are_listed_and_refused_when_strict(prepare, tmp_path, capsys):
    rows = make_rows(60)
    for row in rows[:30]:
        rows.append({"question": row["question"].replace("?", " now?"), "answer": "Another answer."})
    source = write_jsonl(tmp_path / "qa.jsonl", rows)
    manifest = prepare(source, eval_fraction=0.2)
    assert len(manifest["leaks"]) >= 5
    train = {row["id"]: row["question"] for row in rows_of(tmp_path / "out")}
    held_out = {row["id"]: row["question"] for row in rows_of(tmp_path / "out", "eval")}
    for leak in manifest["leaks"]:
        assert held_out[leak["held_out"]["id"]] == leak["held_out"]["question"]
        assert train[leak["train"]["id"]] == leak["train"]["question"]
        assert leak["similarity"] >= 0.75
    assert f"nearly the same in training: {len(manifest['leaks'])}" in capsys.readouterr().out
    with pytest.raises(UserError, match="held-out questions stand nearly the same in the training rows"):
        prepare(source, eval_fraction=0.2, strict="true", output="strict")
    assert not (tmp_path / "strict").exists()


def test_an_unchanged_second_preparation_does_nothing(prepare, tmp_path, capsys):
    source = write_jsonl(tmp_path / "qa.jsonl", make_rows(10))
    first = prepare(source)
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    assert prepare(source) == first
    assert "up to date" in capsys.readouterr().out
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before


def test_another_data_set_is_replaced_only_when_told(prepare, tmp_path):
    source = write_jsonl(tmp_path / "qa.jsonl", make_rows(10))
    first = prepare(source)
    with pytest.raises(UserError, match=r"made differently \(max_length 512 → 64\).*--overwrite"):
        prepare(source, max_length=64)
    write_jsonl(source, make_rows(11))
    with pytest.raises(UserError, match=r"made differently \(source_sha256 "):
        prepare(source)
    assert prepare(source, overwrite="true")["rows_written"]["train"] == 11 != first["rows_written"]["train"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qa.jsonl"]


def test_a_failed_replacement_leaves_the_old_data_set(prepare, tmp_path):
    prepare(write_jsonl(tmp_path / "qa.jsonl", make_rows(10)))
    with pytest.raises(UserError, match="no rows"):
        prepare(DATA / "empty.jsonl", overwrite="true")
    assert len(rows_of(tmp_path / "out")) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qa.jsonl"]


def test_a_directory_of_something_else_is_never_replaced(prepare, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="no data set made by this script"):
        prepare(DATA / "bom.jsonl", overwrite="true")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_an_empty_output_directory_is_used(prepare, tmp_path):
    (tmp_path / "out").mkdir()
    assert prepare(DATA / "bom.jsonl")["rows_written"]["train"] == 6


def test_every_kind_of_input_gives_the_same_rows(prepare, tmp_path):
    rows = [{"question": f"What is {i}?", "answer": f"It is “{i}”,\nreally."} for i in range(7)]
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    dataset = datasets.Dataset.from_list(rows)
    write_jsonl(inputs / "a.jsonl", rows)
    (inputs / "a.json").write_text(json.dumps(rows, indent=1))
    dataset.to_csv(str(inputs / "a.csv"), index=False)
    dataset.to_parquet(str(inputs / "a.parquet"))
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        (inputs / f"{name}.gz").write_bytes(gzip.compress((inputs / name).read_bytes()))
    dataset.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "dict"))
    kinds = [*sorted(inputs.iterdir()), tmp_path / "plain", tmp_path / "dict"]
    assert len(kinds) == 10
    assert {suffix for suffix in FORMATS if suffix not in (".ndjson", ".tsv")} == {
        ".json",
        ".jsonl",
        ".csv",
        ".parquet",
    }
    expected = {row["question"]: row["answer"] for row in rows}
    for number, kind in enumerate(kinds):
        manifest = prepare(kind, output=f"out{number}")
        assert manifest["rejected"] == []
        found = {row["question"]: row["reference"] for row in rows_of(tmp_path / f"out{number}")}
        assert found == expected, kind
    together = prepare(inputs, output="together")
    assert (together["rows_read"], together["rows_written"]["train"], together["duplicates"]) == (56, 7, 49)


def test_the_system_prompt_is_for_rows_without_one(prepare, tmp_path, tiny_tokenizer):
    rows = [{"question": "a?", "answer": "b"}, {"question": "c?", "answer": "d", "system": "Be rude."}]
    prepare(write_jsonl(tmp_path / "qa.jsonl", rows), system_prompt="Be kind.")
    texts = [tiny_tokenizer.decode(row["input_ids"]) for row in rows_of(tmp_path / "out")]
    assert ["Be kind." in text for text in texts] == [True, False]
    assert ["Be rude." in text for text in texts] == [False, True]


def test_the_screen_shows_an_example_with_its_targets_marked(prepare, tmp_path, capsys):
    prepare(DATA / "messages.jsonl", eval_fraction=0.05)
    screen = capsys.readouterr().out
    assert "[[HBM.<|im_end|>]]" in screen
    assert "one epoch: 1 steps at global batch 4" in screen
    assert "nothing is held out: --eval_fraction 0.05 of 1 rows is less than one" in screen


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_length", "1"], "max_length is 1"),
        (["--eval_fraction", "1.5"], "eval_fraction is 1.5"),
        (["--num_proc", "0"], "num_proc is 0"),
        (["--on_too_long", "trunkate"], "did you mean truncate"),
        (["--input", "no/such/file.jsonl"], "no such file"),
        (["--input", "nobody/no-such-data"], "not to be had from the hub"),
        (["--model_name_or_path", "no/such/model"], "no/such/model"),
        (["--encoding", "utf-9"], "utf-9 is unknown"),
    ],
)
def test_wrong_settings_are_one_message(tiny_tokenizer_dir, tmp_path, flags, message):
    words = ["--input", str(DATA / "bom.jsonl"), "--model_name_or_path", str(tiny_tokenizer_dir)]
    with pytest.raises(UserError, match=message):
        data_prep.main([*words, "--output_dir", str(tmp_path / "out"), *flags])
    assert list(tmp_path.iterdir()) == []


def test_an_output_inside_the_input_is_refused(tiny_tokenizer_dir, tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "qa.jsonl", make_rows(5))
    words = ["--model_name_or_path", tiny_tokenizer_dir, "--output_dir", tmp_path / "in" / "out"]
    wrong = run_script("data_prep.py", "--input", tmp_path / "in", *words)
    assert wrong.returncode == 2 and "so that it would be read as rows" in wrong.stderr


def test_holding_everything_out_is_refused(prepare):
    with pytest.raises(UserError, match="all 1 usable rows would be held out"):
        prepare(DATA / "messages.jsonl", eval_fraction=0.9)


def test_the_command_line_ends_with_status_0_and_2(tiny_tokenizer_dir, tmp_path):
    words = ["--model_name_or_path", tiny_tokenizer_dir, "--output_dir", tmp_path / "out"]
    must(run_script("data_prep.py", "--input", DATA / "rows.jsonl.gz", *words, "--eval_fraction", 0.2))
    assert len(rows_of(tmp_path / "out")) == 5
    wrong = run_script("data_prep.py", "--input", DATA / "truncated_line.jsonl", *words, "--overwrite")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert "truncated_line.jsonl:4:14" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert len(rows_of(tmp_path / "out")) == 5


@contextlib.contextmanager
def preparing(tokenizer_dir, tmp_path):
    """A preparation with two workers that are at work, and these."""
    source = write_jsonl(tmp_path / "qa.jsonl", make_rows(60_000))
    command = [sys.executable, "data_prep.py", "--input", source, "--model_name_or_path", tokenizer_dir]
    command += ["--output_dir", tmp_path / "out", "--num_proc", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, start_new_session=True, **pipes) as process:
        assert process.stdout.readline() == "encoding in 2 processes\n"  # they are started now
        deadline = time.monotonic() + 60
        while len(workers := psutil.Process(process.pid).children()) < 2:
            assert time.monotonic() < deadline
        yield process, workers
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_preparation_leaves_nothing(tiny_tokenizer_dir, tmp_path, number):
    with preparing(tiny_tokenizer_dir, tmp_path) as (process, workers):
        os.killpg(process.pid, number)  # what a terminal sends on Ctrl-C
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip().endswith("interrupted: nothing was written")
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["qa.jsonl"]
    psutil.wait_procs(workers, timeout=30)
    assert not any(worker.is_running() for worker in workers)


def test_a_killed_worker_is_one_sentence(tiny_tokenizer_dir, tmp_path):
    with preparing(tiny_tokenizer_dir, tmp_path) as (process, workers):
        workers[0].kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: a worker process of the preparation was killed, mostly because memory ran out")
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["qa.jsonl"]


def test_workers_do_not_outlive_a_killed_preparation_whose_leftovers_the_next_one_removes(
    tiny_tokenizer_dir, prepare, tmp_path
):
    with preparing(tiny_tokenizer_dir, tmp_path) as (process, workers):
        with pytest.raises(UserError, match="not a whole Parquet file"):  # ends before it writes, while the other lives
            prepare(tmp_path / "qa.jsonl", format="parquet")
        (leftover,) = tmp_path.glob(".out.tmp-*")
        process.kill()
        psutil.wait_procs(workers, timeout=30)
        assert not any(worker.is_running() for worker in workers)
    assert leftover.exists()
    write_jsonl(tmp_path / "qa.jsonl", make_rows(5))
    prepare(tmp_path / "qa.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qa.jsonl"]


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_terminal_that_cannot_show_a_text_ends_no_preparation(tiny_tokenizer_dir, tmp_path, encoding):
    source = write_jsonl(tmp_path / "qa.jsonl", [{"question": "क्या है?", "answer": "梯度 🙂"}])
    words = ["--input", source, "--model_name_or_path", tiny_tokenizer_dir, "--output_dir", tmp_path / "out"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "data_prep.py", *map(str, words)], cwd=ROOT, env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\U0001f642" in done.stdout
    assert len(rows_of(tmp_path / "out")) == 1


def test_a_reader_that_goes_away_ends_no_preparation(tiny_tokenizer_dir, tmp_path):
    source = write_jsonl(tmp_path / "qa.jsonl", make_rows(20))
    words = ["--input", source, "--model_name_or_path", tiny_tokenizer_dir, "--output_dir", tmp_path / "out"]
    command = [sys.executable, "data_prep.py", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.wait(), errors) == (0, "")
    assert len(rows_of(tmp_path / "out")) == 19


def test_overwriting_removes_only_what_was_written_here(prepare, tmp_path):
    source = write_jsonl(tmp_path / "qa.jsonl", make_rows(10))
    prepare(source)
    own = tmp_path / "out"
    for name in ("run/summary.json", "train/notes.txt", "eval/deep/x.arrow"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text("years of work")
    (own / "train" / "cache-1.arrow").write_text("of `datasets`")
    with pytest.raises(
        UserError, match="would delete what this script did not write: eval/deep; run; train/notes.txt; move"
    ):
        prepare(source, overwrite="true")
    assert (own / "run" / "summary.json").read_text() == "years of work"
    for name in ("run", "eval/deep"):
        shutil.rmtree(own / name)
    (own / "train" / "notes.txt").unlink()
    assert prepare(source, overwrite="true", max_length=64)["max_length"] == 64


@pytest.mark.parametrize(("flag", "column"), [("question", "answer"), ("question", "output"), ("answer", "question")])
def test_a_column_of_the_other_kind_alone_is_refused(prepare, tmp_path, flag, column):
    with pytest.raises(UserError, match=f"--{flag}_column {column} alone: a field of that name holds the"):
        prepare(DATA / "bom.jsonl", **{f"{flag}_column": column})
    assert list(tmp_path.iterdir()) == []


def test_shares_of_files_are_mixed_and_told(prepare, tmp_path, capsys):
    one = write_jsonl(tmp_path / "one.jsonl", make_rows(40))
    other = write_jsonl(tmp_path / "other.jsonl", [{"question": f"Other {i}?", "answer": "Yes."} for i in range(60)])
    manifest = prepare(one, f"{other}:0.25", eval_fraction=0.1)
    assert (manifest["rows_read"], manifest["rows_written"]) == (100, {"train": 49, "eval": 6})
    assert manifest["shares"] == {str(other): {"share": 0.25, "rows": 60, "taken": 15}}
    assert f"{other}: 15 of 60 rows taken" in capsys.readouterr().out
    questions = [row["question"] for name in ("train", "eval") for row in rows_of(tmp_path / "out", name)]
    assert sum(question.startswith("Other") for question in questions) == 15
    again = prepare(one, f"{other}:0.25", eval_fraction=0.1, output="again")
    assert again["dataset_sha256"] == manifest["dataset_sha256"]
    with pytest.raises(UserError, match="made differently"):
        prepare(one, f"{other}:0.5", eval_fraction=0.1)


def test_unused_fields_and_files_are_named(prepare, tmp_path, capsys):
    rows = [{"question": f"Q{i}?", "answer": "A.", "topic": "x", "empty": ""} for i in range(3)]
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "qa.jsonl", [*rows, {"question": "Q9?", "answer": "A.", "score": 0.5}])
    (tmp_path / "in" / "notes.docx").write_text("x")
    manifest = prepare(tmp_path / "in")
    assert manifest["unused_fields"] == {"topic": 3, "score": 1}
    assert manifest["files_not_read"] == [str(tmp_path / "in" / "notes.docx")]
    screen = capsys.readouterr().out
    assert "fields that are not used: topic (3 rows); score (1 rows)" in screen
    assert f"  {tmp_path / 'in' / 'notes.docx'}\n" in screen


def test_rows_that_all_fail_for_one_reason_are_told_once(prepare, tmp_path):
    rows = [{"question": f"Q{i}?", "answer": " "} for i in range(30)]
    with pytest.raises(UserError, match=r"all 30 rows fail for the same reason, .*qa.jsonl:1 empty answer \(.*; mend"):
        prepare(write_jsonl(tmp_path / "qa.jsonl", rows))


def test_a_template_that_takes_no_row_is_said_to_be_at_fault(prepare, tmp_path):
    rows = [{"question": f"Q{i}?", "answer": "A.", "thinking": "hm"} for i in range(30)]
    words = r"all 30 rows fail for the same reason.*no place for a thought.*; the rows are not at fault, but the chat template of .*tiny-model"
    with pytest.raises(UserError, match=words):
        prepare(write_jsonl(tmp_path / "qa.jsonl", rows))
    assert prepare(tmp_path / "qa.jsonl", thinking="off")["notes"] == {"thoughts left out, as --thinking off says": 30}


ROWS = Path(__file__).parent / "rows"
# In the manner of Qwen3: thoughts are shown in the last answer only, tools and calls as JSON.
THINKING_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if loop.last %}<think>
{{ message.reasoning_content or '' }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role != 'system' or not tools %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>'
NO_PLACE, NO_TOOLS, END = "has no place for a thought", "the chat template knows no tools", "<|im_end|>"
BOTH = "as the other"
# file: targets with the thinking template, targets with plain ChatML; a text alone is the reason of the refusal
TODAY = {
    "thought_field": (["<think>\neight sevens\n</think>\n\nIt is 56." + END], NO_PLACE),
    "thought_field_of_a_pair": (["<think>\nnine sevens\n</think>\n\nIt is 63." + END], NO_PLACE),
    "thought_in_answer": (["<think>\nthree and three\n</think>\n\nIt is 6." + END], ["<think>three and three</think>It is 6." + END]),
    "thought_in_last_turn": (["Two." + END, "<think>\nfour over two\n</think>\n\nTwo rows." + END], ["Two." + END, "<think>four over two</think>Two rows." + END]),
    "thought_in_earlier_turn": (["<think>\n19 of 380\n</think>\n\n361 rows." + END, "342 rows." + END], ["<think>19 of 380</think>361 rows." + END, "342 rows." + END]),
    "thought_parts": (["<think>\nthink of it\n</think>\n\nBecause." + END], NO_PLACE),
    "weight_zero_turn": (["It is 36." + END], BOTH),
    "loss_false_turn": (["Two." + END], BOTH),
    "weight_half_turn": ("`weight` of a turn is 0.5; expected 0 or 1", BOTH),
    "all_turns_context": ("nothing to learn: all answers are marked as context", BOTH),
    "tool_calls": (["I look." + CALL, "It rains." + END], NO_TOOLS),
    "tool_calls_as_text": ([CALL, "It rains." + END], NO_TOOLS),
    "sharegpt_function_call": ([CALL, "It rains." + END], NO_TOOLS),
    "sharegpt_call_without_a_name": (["{}" + END, "It rains." + END], NO_TOOLS),
    "tool_call_ends_row": (["I look." + CALL], NO_TOOLS),
    "tools_that_are_no_json": ("`tools` is a text that is no JSON", BOTH),
    "images": ("`images` is not empty: this trains text only", BOTH),
    "image_place_beside_an_empty_field": ("a place for an image, audio or video: this trains text only", BOTH),
    "image_part": ("a part of type 'image_url': this trains text only", BOTH),
    "image_word_in_a_text": (["A tag." + END], BOTH),
    "system_null": (["Two." + END], BOTH),
    "developer": (["Two." + END], BOTH),
    "parts_with_value": (["Rank 0." + END], BOTH),
    "prompt_completion_lists": (["It is 6." + END], BOTH),
    "greeting_first": (["A library." + END], BOTH),
    "preference_pair": ("`chosen` holds an answer to compare with", BOTH),
    "kto_verdict": ("`kto_tag` is false", BOTH),
    "alpaca_with_history": (["Paris." + END, "Rome." + END], BOTH),
    "empty_messages_beside_a_pair": (["Two." + END], BOTH),
}  # fmt: skip


@pytest.fixture(scope="module")
def thinking_tokenizer_dir(tiny_tokenizer_dir, tmp_path_factory):
    copy = tmp_path_factory.mktemp("thinking") / "tokenizer"
    shutil.copytree(tiny_tokenizer_dir, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return copy


def targets(tokenizer, rows: list[dict]) -> list[str]:
    """The spans that are learnt, in the order of the answers."""
    spans = []
    for row in rows:
        marked = mark_targets(tokenizer, row["input_ids"], row["labels"])
        spans += re.findall(r"\[\[(.*?)\]\]", marked, re.DOTALL)
    return spans


def test_all_files_of_rows_have_their_outcome_listed():
    assert sorted(path.stem for path in ROWS.iterdir()) == sorted(TODAY) and len(TODAY) == 29


@pytest.mark.parametrize("kind", ["thinking", "plain"])
@pytest.mark.parametrize("name", TODAY)
def test_rows_of_today_are_learnt_as_they_are_asked_or_refused_by_name(
    prepare, tmp_path, tiny_tokenizer, thinking_tokenizer_dir, tiny_tokenizer_dir, name, kind
):
    expected = TODAY[name][kind == "plain"]
    expected = TODAY[name][0] if expected == BOTH else expected
    model = thinking_tokenizer_dir if kind == "thinking" else tiny_tokenizer_dir
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            prepare(ROWS / f"{name}.jsonl", model_name_or_path=model)
        assert list(tmp_path.iterdir()) == []
        return
    manifest = prepare(ROWS / f"{name}.jsonl", model_name_or_path=model)
    assert manifest["rejected"] == [] and manifest["unused_fields"] == {}
    rows = rows_of(tmp_path / "out")
    assert targets(tiny_tokenizer, rows) == expected
    assert rows[-1]["reference"] and sum(manifest["modes"].values()) == len(rows)
    assert "NEVER-LEARN" not in "".join(expected) and ("<think>" in "".join(expected)) <= (
        kind == "plain" or "thinking" in manifest["modes"]
    )
