"""Question–answer files: what is read, and how the held-out rows are chosen."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preparation.holdout import choose_held_out, find_near, question_hash, similarity, sketch
from preparation.records import RowError, UnknownFields, normalise_question, read_dialogue
from preparation.sources import find_sources, read_rows
from sft.errors import UserError


def pair(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


SYSTEM = [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"question": "q", "answer": "a"}, pair("q", "a")),
        ({"query": "q", "response": "a"}, pair("q", "a")),
        ({"prompt": "q", "completion": " a "}, pair("q", " a")),
        ({"instruction": "q", "output": "a"}, pair("q", "a")),
        ({"instruction": "q", "input": "i", "output": "a"}, pair("q\ni", "a")),
        ({"instruction": "q", "input": "", "output": "a"}, pair("q", "a")),
        ({"instruction": "q", "input": None, "output": "a"}, pair("q", "a")),
        ({"instruction": "q", "input": 0, "output": "a"}, pair("q\n0", "a")),
        ({"question": "q", "answer": 4}, pair("q", "4")),
        ({"question": "q", "answer": "\n \n  a\r\nb\n "}, pair("q", "  a\nb")),
        ({"question": "q", "answer": "a", "system": "Be brief."}, SYSTEM + pair("q", "a")),
        ({"question": "q", "answer": "a", "system": None}, pair("q", "a")),
        ({"question": "q", "answer": "a", "history": [["h", "i"]]}, pair("h", "i") + pair("q", "a")),
        ({"question": "q", "answer": "a", "history": pair("h", "i")}, pair("h", "i") + pair("q", "a")),
        ({"question": "q", "answer": "a", "messages": None}, pair("q", "a")),
        ({"messages": SYSTEM + pair("q", "a")}, SYSTEM + pair("q", "a")),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, pair("", "a")[1]]},
            pair("q", "a"),
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, pair("q", "a")),
        ({"conversations": pair("q", "a"), "system": "Be brief."}, SYSTEM + pair("q", "a")),
    ],
)
def test_each_schema_becomes_the_same_dialogue(row, messages):
    assert read_dialogue(row).messages == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": " \n"}, "empty answer (field `answer`)"),
        ({"question": "", "answer": "a"}, "empty question (field `question`)"),
        ({"question": "q", "answer": None}, "`answer` is null; expected text"),
        ({"question": "q", "answer": ["a"]}, "`answer` is a list; expected text"),
        ({"question": "q", "answer": True}, "`answer` is true or false; expected text"),
        ({"question": "q", "answer": float("inf")}, "`answer` is a number out of range"),
        ({"question": "q", "answer": "\0\1"}, "empty answer"),
        ({"question": [{"type": "text", "text": None}], "answer": "a"}, "`question` is null; expected text"),
        ({"question": "q\ud83d", "answer": "a"}, "`question` holds half a character"),
        ({"question": "q", "answer": "a", "history": "h"}, "history is text; expected a list"),
        (
            {"question": "q", "answer": "a", "history": [["h"]]},
            "history holds a list; expected [question, answer] pairs",
        ),
        ({"messages": "q"}, "`messages` is text; expected a list of turns"),
        ({"messages": []}, "nothing to learn"),
        ({"messages": pair("q", "a")[:1]}, "nothing to learn"),
        ({"messages": pair("q", "a")[::-1]}, "nothing to learn: no assistant turn"),
        (
            {"messages": pair("q", "a") + pair("q", "a")[1:]},
            "roles do not alternate: turn 3 is assistant, expected user",
        ),
        ({"messages": pair("q", "a") + SYSTEM}, "roles do not alternate: turn 3 is system, expected user"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "roles do not alternate: turn 1 is tool, expected user"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "the role 'narrator' is unknown"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "the role ['user'] is unknown"),
        ({"messages": pair("q", " ")}, "empty answer"),
        (["q", "a"], "the row is a list; expected an object with fields"),
    ],
)
def test_unusable_rows_say_why(row, reason):
    with pytest.raises(RowError) as raised:
        read_dialogue(row)
    assert str(raised.value).startswith(reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "anwser": "a"}, "the field `answer` is missing (fields found: question, anwser); `anwser` resembles `answer`"),
        ({"questoin": "q", "answer": "a"}, "the field `question` is missing (fields found: questoin, answer); `questoin` resembles `question`"),
        ({"messages": None, "x": 1}, "no known schema (fields found: messages, x); `messages` is null"),
        ({"conversation": []}, "no known schema (fields found: conversation); `conversation` resembles `conversations`"),
        ({}, "no known schema (fields found: none)"),
    ],
)  # fmt: skip
def test_unknown_fields_name_what_they_resemble(row, reason):
    with pytest.raises(UnknownFields) as raised:
        read_dialogue(row)
    assert str(raised.value) == reason


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
WRAPPED = {"type": "function", "function": TOOL}


def call(**arguments) -> dict:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def turns(*pairs_of: tuple) -> list[dict]:
    return [{"role": role, "content": content, **dict(*more)} for role, content, *more in pairs_of]


@pytest.mark.parametrize(
    ("row", "messages", "tools"),
    [
        ({"question": "q", "answer": "a", "reasoning_content": "r"}, turns(("user", "q"), ("assistant", "a", {"reasoning_content": "r"})), None),
        ({"messages": turns(("user", "q"), ("assistant", "a", {"thinking": "r"}))}, turns(("user", "q"), ("assistant", "a", {"reasoning_content": "r"})), None),
        ({"messages": turns(("user", "q"), ("assistant", "a", {"reasoning": None, "tool_calls": []}))}, pair("q", "a"), None),
        ({"messages": turns(("assistant", "hi"), ("user", "q"), ("assistant", "a"))}, turns(("assistant", "hi", {"train": False}), ("user", "q"), ("assistant", "a")), None),
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": [call(x=1)]}))}, turns(("user", "q"), ("assistant", "", {"tool_calls": [call(x=1)]})), None),
        ({"messages": turns(("user", "q"), ("assistant", None, {"function_call": {"name": "f", "arguments": '{"x": 1}'}}))}, turns(("user", "q"), ("assistant", "", {"tool_calls": [call(x=1)]})), None),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "I look."}, {"from": "function_call", "value": '[{"name": "f", "arguments": {"x": null}}, {"name": "f"}]'}, {"from": "observation", "value": "7"}, {"from": "gpt", "value": "a"}], "tools": json.dumps([TOOL])},
         turns(("user", "q"), ("assistant", "I look.", {"tool_calls": [call(x=None), call()]}), ("tool", "7"), ("assistant", "a")), [WRAPPED]),
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": [call()]}), ("tool", {"t": 7}, {"name": "f", "tool_call_id": "1"}), ("tool", ""), ("assistant", "a")), "tools": [WRAPPED]},
         turns(("user", "q"), ("assistant", "", {"tool_calls": [call()]}), ("tool", '{"t": 7}', {"name": "f", "tool_call_id": "1"}), ("tool", ""), ("assistant", "a")), [WRAPPED]),
        ({"prompt": turns(("user", "q")), "completion": "a", "tools": "[]"}, pair("q", "a"), None),
        ({"messages": turns(("developer", "Be brief."), *[("user", "q"), ("assistant", "a")])}, SYSTEM + pair("q", "a"), None),
        ({"messages": None, "question": None, "answer": None, "prompt": "q", "completion": "a"}, pair("q", "a"), None),
        ({"question": "q", "answer": "a", "images": [], "tools": None, "label": True, "weight": 1}, pair("q", "a"), None),
    ],
)  # fmt: skip
def test_thoughts_calls_and_results_are_kept(row, messages, tools):
    dialogue = read_dialogue(row)
    assert (dialogue.messages, dialogue.tools) == (messages, tools)


DEEP = "[" * 60 + "]" * 60


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": [{"function": {}}]}))}, "a tool call has no name"),
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": "f()"}))}, "`tool_calls` is a text that is no JSON: 'f()'"),
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": [{"name": "f", "arguments": "x"}]}))}, "`arguments` is a text that is no JSON"),
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": [{"name": "f", "arguments": [1]}]}))}, "the arguments of the call of f are a list"),
        ({"messages": turns(("user", "q"), ("assistant", "", {"tool_calls": [call()]}), ("assistant", "a"))}, "roles do not alternate: turn 3 is assistant, expected tool"),
        ({"messages": turns(("user", "q", {"images": ["a"]}), ("assistant", "a"))}, "the user turn has `images`: this trains text only"),
        ({"messages": turns(("system", "s", {"tools": [TOOL]}), ("user", "q"), ("assistant", "a"))}, "the system turn has `tools`: put them beside the list of turns"),
        ({"question": "q", "answer": "a", "tools": json.loads(f'[{{"name": "f", "x": {DEEP}}}]')}, "`tools` is nested more than 50 levels deep"),
        ({"question": "q", "answer": "a", "tools": [{"name": "f", "x": b"1"}]}, "`tools` holds a bytes that JSON cannot hold"),
        ({"question": "q", "answer": "a", "tools": 7}, "`tools` holds a number; expected objects"),
        ({"question": "q", "answer": "a", "thinking": True}, "`thinking` is true or false; expected text"),
        ({"question": "q", "answer": "a", "audio": "a.wav"}, "`audio` is not empty: this trains text only"),
        ({"question": "q", "answer": "a", "weight": 0}, "nothing to learn: the row's weight is 0"),
        ({"question": "q", "answer": "a", "label": False}, "`label` is false, which marks an answer that is not to be learnt"),
        ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "x"}]}, pair("q", "a")[1]]}, "`user turn` has a part of type 'audio': this trains text only"),
    ],
)  # fmt: skip
def test_what_text_training_cannot_honour_is_refused_by_name(row, reason):
    with pytest.raises(RowError) as raised:
        read_dialogue(row)
    assert str(raised.value).startswith(reason)


def test_fields_that_are_not_used_are_named():
    row = {"id": 1, "question": "q", "answer": "a", "score": 0.5, "topic": "", "input": "i", "system": "s"}
    assert read_dialogue(row).unused == ["input", "score"]
    row = {"messages": [*SYSTEM, *pair("q", "a")], "system": "other", "question": "p"}
    row["messages"][1] = {**row["messages"][1], "name": "Ann", "reasoning_content": "r"}
    assert read_dialogue(row).unused == ["messages[].name", "messages[].reasoning_content", "question", "system"]
    assert read_dialogue({"q": "q", "chosen": "a", "rejected": "b"}, "q", "chosen").unused == ["rejected"]


def test_the_users_columns_and_system_prompt_are_taken():
    row = {"q": "x", "a": "y", "question": "no"}
    assert read_dialogue(row, "q", "a", "Be brief.").messages == SYSTEM + pair("x", "y")
    assert read_dialogue({"question": "x", "a": "y"}, "", "a").messages == pair("x", "y")
    with pytest.raises(UnknownFields, match="`a` is missing"):
        read_dialogue({"q": "x"}, "q", "a")


def test_an_unanswered_last_turn_is_cut_and_counted():
    dialogue = read_dialogue({"messages": pair("q", "a") + pair("more?", "")[:1], "id": 7})
    assert (dialogue.messages, dialogue.cut_turns, dialogue.id) == (pair("q", "a"), 1, "7")


def read(path, encoding="utf-8", file_format="auto"):
    (source,), _ = find_sources([str(path)], file_format)
    return list(read_rows(source, encoding))


def test_lines_are_those_where_rows_begin(tmp_path):
    array = tmp_path / "a.json"
    array.write_text('\n[\n  {"a": "x\\ny"},\n\n  {\n    "a": 1\n  }, {"a": 2}]\n')
    assert read(array) == [(3, {"a": "x\ny"}), (5, {"a": 1}), (7, {"a": 2})]
    table = tmp_path / "a.csv"
    table.write_text('a;b\n"x\ny;""z""";1\n\n2;3\n4\n')
    assert read(table) == [(2, {"a": 'x\ny;"z"', "b": "1"}), (5, {"a": "2", "b": "3"}), (6, {"a": "4", "b": ""})]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"a": "\u2028"}\r\n\r\n{"a": 2}', encoding="utf-8")
    assert read(lines) == [(1, {"a": "\u2028"}), (3, {"a": 2})]
    spreadsheet = tmp_path / "b.csv"
    spreadsheet.write_text("sep=|\na|b\n1;,|2\n")  # as Excel writes it
    assert read(spreadsheet) == [(3, {"a": "1;,", "b": "2"})]
    spreadsheet.write_text('"SEP=;"\na;b\n1;2\n')
    assert read(spreadsheet) == [(3, {"a": "1", "b": "2"})]
    (tmp_path / "empty.json").write_text("[]")
    assert read(tmp_path / "empty.json") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1} {"a": 2}]', r"a.json:1:11: not valid JSON \(Expecting ',' or ']'\)"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', r"a.json:2:1: not valid JSON \(Text after the array\)"),
        ("a.json", b'[{"a": 1},\n', "a.json:2:1: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n  {"a": nope}\n', "a.jsonl:2:9: not valid JSON"),
        ("a.csv", b'a,b\n1,"2\n', r"a.csv:2: not valid CSV"),
        ("a.csv", b"a,b,,a,\n1,2\n", "a.csv:1: the header names `a` twice"),
        ("a.parquet", b"PAR1 no", "a.parquet is not a whole Parquet file"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00cut", "a.jsonl.gz is not a whole gzip file"),
        ("a.jsonl.gz", b"plain", "a.jsonl.gz is not a whole gzip file"),
        ("a.jsonl", '{"a": "x"}\n{"a": "数据并行训练"}\n'.encode("gbk"), "a.jsonl:2: this is not UTF-8"),
        ("a.jsonl", '{"a": "数据"}'.encode("utf-16"), "this is not UTF-8 but UTF-16; read it with --encoding utf-16"),
    ],
)
def test_broken_files_are_errors_with_their_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_row_with_too_many_fields_is_left_out_alone(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nWhat, then?,x\ny,z\n")
    (_, bad), (_, good) = read(tmp_path / "a.csv")
    with pytest.raises(RowError, match="3 fields where the header has 2"):
        read_dialogue(bad)
    assert read_dialogue(good).messages == pair("y", "z")


@pytest.mark.parametrize("form", ["%s\n{}\n", "[%s, {}]"])
@pytest.mark.parametrize(
    ("row", "name"),
    [
        ('{"question": "q", "answer": "a", "answer": "b"}', "answer"),
        ('{"messages": [{"role": "user", "content": "q", "content": "p"}]}', "content"),
        ('{"question": "q", "answer": {"a": 1, "a": 2}}', "a"),
        ('{"question": [{"type": "text", "text": "q", "text": "p"}], "answer": "a"}', "text"),
    ],
)
def test_a_row_that_says_two_things_under_one_name_is_left_out(tmp_path, form, row, name):
    (tmp_path / "a.json").write_text(form % row)
    (_, bad), (_, empty) = read(tmp_path / "a.json")
    assert empty == {}
    with pytest.raises(RowError, match=f"the field `{name}` stands there twice"):
        read_dialogue(bad)


def test_inputs_that_are_not_there_are_named(tmp_path):
    (tmp_path / "questions.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"no such file or directory; did you mean questions.jsonl"):
        find_sources([str(tmp_path / "question.jsonl")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no file that is read"):
        find_sources([str(tmp_path / "empty")])


def test_a_directory_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.csv", "sub/c.json.gz", "notes.md"):
        (tmp_path / name).write_bytes(b"")
    assert [os.path.relpath(s.path, tmp_path) for s in find_sources([str(tmp_path)])[0]] == [
        "a.csv",
        "b.jsonl",
        "sub/c.json.gz",
    ]


def test_questions_that_differ_in_form_only_are_equal():
    for one, other in [
        ("What is HCCL?", "what is  hccl"),
        ("什么是ＮＰＵ？", "什么是 npu?"),
        ("Is it 1.5 GB?", "is it 1,5 gb"),
        ("???", "？？？"),
    ]:
        assert normalise_question(one) == normalise_question(other)
    for one, other in [("2+2", "2=2"), ("rank 0", "rank 1"), ("c++", "c"), ("क", "कि")]:
        assert normalise_question(one) != normalise_question(other)


def hashes(questions, seed=42) -> np.ndarray:
    return np.array([question_hash(question, seed) for question in questions], dtype=np.uint64)


def test_five_percent_of_380_are_19_and_depend_on_the_seed():
    questions = [f"q{i}" for i in range(380)]
    assert choose_held_out(hashes(questions), 0.05).sum() == 19
    assert choose_held_out(hashes(questions), 0.0).sum() == 0
    assert (choose_held_out(hashes(questions, 1), 0.05) != choose_held_out(hashes(questions, 2), 0.05)).any()
    assert np.flatnonzero(choose_held_out(hashes(questions), 0.01)).tolist() == [73, 181, 188, 265]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=80),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_equal_questions_stay_together_and_order_does_not_matter(questions, percent, random):
    fraction = percent / 100
    held_out = choose_held_out(hashes(map(str, questions)), fraction)
    sides = dict(zip(questions, held_out.tolist()))
    assert [sides[question] for question in questions] == held_out.tolist()
    room = round(fraction * len(questions)) - held_out.sum()
    assert room >= 0
    assert all(questions.count(question) > room for question, side in sides.items() if not side) or room == 0
    shuffled = random.sample(questions, len(questions))
    again = choose_held_out(hashes(map(str, shuffled)), fraction)
    assert [sides[question] for question in shuffled] == again.tolist()


@given(st.integers(20, 400), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_added_rows_move_few_others(rows, added):
    questions = [f"q{i}" for i in range(rows + added)]
    before = choose_held_out(hashes(questions[:rows]), 0.1)
    after = choose_held_out(hashes(questions), 0.1)[:rows]
    assert (before != after).sum() <= added  # each new row displaces one, or makes room for one


def near(pairs_of: list[tuple[str, bool]]) -> list[tuple[int, int]]:
    questions = [normalise_question(question) for question, _ in pairs_of]
    held_out = np.array([side for _, side in pairs_of])
    found = find_near(held_out, sketch(questions), lambda rows: [questions[row] for row in rows])
    assert all(score == similarity(questions[a], questions[b]) >= 0.75 for a, b, score in found)
    return [pair[:2] for pair in found]


def test_near_copies_are_found_and_other_questions_are_not():
    rows = [
        ("How do I enable gradient checkpointing in Accelerate?", True),
        ("How do I enable gradient checkpointing with Accelerate?", False),
        ("数据并行训练时梯度是在什么时候同步的？", True),
        ("数据并行训练时，梯度在什么时候同步的？", False),
        ("Which environment variable selects the visible NPUs?", True),
        ("Which command shows the HBM usage of each NPU?", False),
        ("How do I enable gradient clipping?", False),
    ]
    assert near(rows) == [(0, 1), (2, 3)]
    assert near([(question, True) for question, _ in rows]) == []
    assert near([(question, False) for question, _ in rows]) == []


def test_similarity_is_a_fraction_of_shared_trigrams():
    assert similarity("abc", "abc") == 1.0
    assert similarity("abc", "xyz") == 0.0
    assert similarity("abcd", "abce") == pytest.approx(2 / 6)  # ^ab abc | bcd cd$ bce ce$


def test_sketches_do_not_depend_on_their_neighbours():
    texts = ["a", "", "数据并行", "a longer question about ranks", "zz"]
    alone = np.concatenate([sketch([text]) for text in texts])
    assert sketch(texts).tolist() == alone.tolist()
    assert json.dumps(sketch(["x"]).tolist())  # plain whole numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "data": [{"question": "a", "answer": "b"}]\n}\n', "one JSON object over several lines"),
        ("[" * 100_000, "nested too deeply"),
        ('{"question": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_is_no_list_of_rows_is_said_to_be_so(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    (source,), _ = find_sources([str(path)])
    with pytest.raises(UserError, match=message):
        list(read_rows(source))


def test_what_shows_nothing_is_empty_and_nan_is_null():
    with pytest.raises(RowError, match="empty answer"):
        read_dialogue({"question": "a?", "answer": "\u200b \ufeff"})
    with pytest.raises(RowError, match="`answer` is null"):
        read_dialogue({"question": "a?", "answer": float("nan")})


def test_hidden_files_of_a_directory_are_not_read(tmp_path):
    for name in ("rows.jsonl", "._rows.jsonl", ".ipynb_checkpoints/rows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"question": "a?", "answer": "b"}\n')
    assert [source.path for source in find_sources([str(tmp_path)])[0]] == [str(tmp_path / "rows.jsonl")]
