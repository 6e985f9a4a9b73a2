"""Files that are read back are compared with what they must hold, and the sentence names file and key."""

import json
import shutil

import pytest

from sft import artifacts, schemas
from sft.errors import UserError
from sft.tokenizer import load_tokenizer

SHAPE = {"step": schemas.COUNT, "best?": {"loss": schemas.NUMBER}, "names": [schemas.TEXT], "of": {str: schemas.COUNT}}
GOOD = {"step": 3, "best": {"loss": float("nan")}, "names": ["a"], "of": {"x": 0}, "more": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "3"}, "step is '3'; expected a whole number from 0 on"),
        ({"step": True}, "step is true; expected a whole number from 0 on"),
        ({"step": -1}, "step is -1; expected"),
        ({"step": 1 << 63}, "step is 9223372036854775808; expected"),
        ({"step": None}, "step is null; expected a value"),
        ({"best": {"loss": "low"}}, "best.loss is 'low'; expected a number"),
        ({"best": {"loss": True}}, "best.loss is true; expected a number"),
        ({"best": []}, "best is a list; expected an object"),
        ({"best": {}}, "best.loss is missing"),
        ({"names": "a"}, "names is 'a'; expected a list"),
        ({"names": ["a", 1]}, "names[1] is 1; expected text"),
        ({"of": {"x": 0, "y": 1.5}}, "of.y is 1.5; expected a whole number from 0 on"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(change, words):
    assert schemas.mismatch(GOOD, SHAPE) is None
    assert schemas.mismatch({**GOOD, "best": None}, SHAPE) is None
    assert schemas.mismatch({**GOOD, **change}, SHAPE).startswith(words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"1" * 5000, "is not valid JSON"),
        (b"[]", "it is a list; expected an object"),
        (b"null", "it is null; expected an object"),
        (b'{"names": []}', "step is missing"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, words):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        artifacts.read_json(path, SHAPE)
    assert str(error.value).startswith(str(path)) and words in str(error.value)


def test_a_directory_or_a_forbidden_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        artifacts.read_json(tmp_path)


def test_damaged_lines_cost_no_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "lo\xffss": 2.0', b'"text"', b"[" * 9999, b'{"step": "x"}',
             b'{"step": 3, "loss": NaN}', b'{"step": 4, "lo']  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    assert [record["step"] for record in artifacts.read_json_lines(path, schemas.RECORD)] == [1, 3]


def test_what_the_programs_write_is_what_they_read(dataset_dir, tiny_run_dir):
    read = {
        dataset_dir / "manifest.json": schemas.MANIFEST,
        tiny_run_dir / "provenance.json": schemas.PROVENANCE, tiny_run_dir / "config.json": schemas.CONFIG,
        tiny_run_dir / "summary.json": schemas.SUMMARY, tiny_run_dir / "environment.json": schemas.ENVIRONMENT,
        tiny_run_dir / "adapter_config.json": schemas.ADAPTER,
    }  # fmt: skip
    (last,) = [path for path in tiny_run_dir.glob("checkpoint-*") if path.name.endswith("91")]
    read |= {last / "progress.json": schemas.PROGRESS, last / "checksums.json": schemas.CHECKSUMS}
    for path, shape in read.items():
        whole = artifacts.read_json(path, shape)
        for key in shape if isinstance(shape, dict) else ():
            assert key is str or key.endswith("?") or key in whole, (path, key)
        path_text = json.dumps(whole)
        assert json.loads(path_text) == whole


def test_links_that_lead_out_of_a_directory_are_refused(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "eval").mkdir(parents=True)
    outside.mkdir()
    (run / "inside").symlink_to("eval")  # leads nowhere else
    (tmp_path / "name").symlink_to(run)  # the directory itself may be one
    artifacts.refuse_links(run)
    artifacts.refuse_links(tmp_path / "name")
    artifacts.refuse_links(tmp_path / "not-there")
    for link in ("tensorboard", "eval/.partial-0.jsonl", ".lock", "dangling"):
        (run / link).symlink_to(outside if link != "dangling" else tmp_path / "nothing")
        with pytest.raises(UserError, match=f"links that lead out of it \\({link} → "):
            artifacts.refuse_links(tmp_path / "name")
        (run / link).unlink()


def test_a_link_in_a_leftovers_place_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    (outside / "data").mkdir(parents=True)
    (tmp_path / ".data.old-abcdefgh").symlink_to(outside)
    artifacts.clear_leftovers(tmp_path / "data")
    assert (outside / "data").is_dir() and not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda value: value["model"]["vocab"].update(a="text")),
        ("tokenizer.json", lambda value: value["model"].update(merges=7)),
        ("tokenizer.json", lambda value: value.clear()),
        ("tokenizer.json", lambda value: value.update(pre_tokenizer={"type": "Nothing"})),
        ("tokenizer_config.json", lambda value: value.update(eos_token=[1])),
    ],
)
def test_a_damaged_tokenizer_is_named(tiny_tokenizer_dir, tmp_path, name, change):
    folder = tmp_path / "model"
    shutil.copytree(tiny_tokenizer_dir, folder)
    value = json.loads((folder / name).read_text(encoding="utf-8"))
    change(value)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(UserError, match="model_name_or_path"):
        load_tokenizer(str(folder))
