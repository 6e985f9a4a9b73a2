"""A row of any known schema as a dialogue: what is taken, under which names, and why a row cannot be used."""

import difflib
import json
import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

PAIRS = [("question", "answer"), ("query", "response"), ("instruction", "output"), ("prompt", "completion")]
LISTS = ["messages", "conversations"]
SCHEMAS = "question/answer, query/response, instruction(+input)/output, prompt/completion, messages, conversations"
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
FOLLOWS = {  # what may come after a turn; the first turn may also be a greeting by the assistant
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant", "user"),
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
FLAGS = ("weight", "loss", "train")  # of a turn: 0 or false makes it context
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
PLACEHOLDERS = re.compile("<(image|audio|video)>")
PAIRS_OF_ANSWERS = ("chosen", "rejected")  # what preference training learns from
VERDICTS = ("label", "kto_tag")  # of a row: false marks an answer that must not be learnt
DEEPEST = 50  # levels of nesting in tools and arguments


class RowError(ValueError):
    """Why one row is left out while the others go on."""


class UnknownFields(RowError):
    """The row has none of the known schemas."""


@dataclass
class Dialogue:
    """A row in the one form that all schemas are turned into.

    Each message has `role` (system, user, assistant, tool) and `content`. An assistant turn may have `reasoning_content`,
    `tool_calls` ([{"type": "function", "function": {"name", "arguments": dict}}]) and `train` (False: context only), a tool
    turn `name` and `tool_call_id`.
    """

    messages: list[dict]
    tools: list[dict] | None = None  # as the API of OpenAI describes functions
    id: str = ""  # the row's own, if it has one
    cut_turns: int = 0  # turns at the end that no answer follows
    unused: list[str] = field(default_factory=list)  # names of filled fields that are not part of the dialogue


def read_dialogue(row: Any, question_column: str = "", answer_column: str = "", system_prompt: str = "") -> Dialogue:
    """A row of any known schema as a dialogue; a system text of its own wins over `system_prompt`.

    Surrounding blank lines and trailing spaces of each text go, and line ends become \\n; nothing else is changed.
    Raises: RowError with the reason why the row cannot be used, UnknownFields when no schema fits.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError(f"the row is {_describe(row)}; expected an object with fields")
    filled = {str(name): value for name, value in row.items() if not _is_empty(value)}
    _refuse_other_trainings(row, filled, {question_column, answer_column})
    names = _choose_fields(row, question_column, answer_column)
    unused = filled.keys() - {*names, "id", "system", "tools"}
    if len(names) == 1:
        turns = row[names[0]]
        if not isinstance(turns, list):
            raise RowError(f"`{names[0]}` is {_describe(turns)}; expected a list of turns")
    else:
        turns, taken = _pair_as_turns(row, *names)
        unused -= taken
    messages, cut, unused_of_turns = _read_turns(turns, names[0] if len(names) == 1 else "history")
    if messages[0]["role"] != "system":
        system = _text(row.get("system") or "", "system").strip() or system_prompt
        messages = ([{"role": "system", "content": system}] if system else []) + messages
    elif "system" in filled:
        unused.add("system")
    if row.keys() & set(MEDIA) and any(PLACEHOLDERS.search(message["content"]) for message in messages):
        raise RowError("a text has a place for an image, audio or video: this trains text only")
    own_id = row.get("id")
    return Dialogue(
        messages,
        _read_tools(row.get("tools")),
        str(own_id).strip() if isinstance(own_id, (str, int)) else "",
        cut,
        sorted(unused | unused_of_turns),
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value) or value != value


def _refuse_other_trainings(row: dict, filled: dict, names: set[str]) -> None:
    """Raises: RowError when fields say that the answer is not simply to be learnt from the text."""
    for name in MEDIA:
        if name in filled and name not in names:
            raise RowError(f"`{name}` is not empty: this trains text only")
    for name in PAIRS_OF_ANSWERS:
        if name in filled and not names & set(PAIRS_OF_ANSWERS):
            raise RowError(
                f"`{name}` holds an answer to compare with: this trains on single answers; leave the field out, or train on "
                "the better ones: --answer_column chosen"
            )
    for name in VERDICTS:
        if row.get(name) is False and name not in names:
            raise RowError(f"`{name}` is false, which marks an answer that is not to be learnt")
    if row.get("train") is False or row.get("loss") is False or row.get("weight") in (0, False):
        raise RowError("nothing to learn: the row's weight is 0, or its loss or train is false")


def _choose_fields(row: dict, question_column: str, answer_column: str) -> tuple[str, ...]:
    """The names of the row's question and answer, or the one name of its list of turns."""
    if question_column or answer_column:
        pairs = [(question_column or q, answer_column or a) for q, a in PAIRS]
        pairs, lists = [pair for pair in pairs if pair[0] != pair[1]], []
    else:
        pairs, lists = PAIRS, LISTS
    for name in lists:
        if not _is_empty(row.get(name)):
            return (name,)
    for pair in pairs:
        if row.get(pair[0]) is not None and row.get(pair[1]) is not None:
            return pair
    for pair in pairs:
        if pair[0] in row and pair[1] in row:
            return pair
    for name in lists:
        if row.get(name) is not None:
            return (name,)
    found = ", ".join(map(str, row)) or "none"
    for pair in pairs:
        for have, lacking in (pair, pair[::-1]):
            if have in row:
                close = difflib.get_close_matches(lacking, [str(name) for name in row if name != have], n=1, cutoff=0.6)
                hint = f"; `{close[0]}` resembles `{lacking}`" if close else ""
                raise UnknownFields(f"the field `{lacking}` is missing (fields found: {found}){hint}")
    raise UnknownFields(f"no known schema (fields found: {found}){_hint_at_schema(row, pairs, lists)}")


def _hint_at_schema(row: dict, pairs: list[tuple[str, str]], lists: list[str]) -> str:
    for name, value in row.items():
        if name in lists:
            return f"; `{name}` is null"
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            return f"; if the {len(value)} objects in `{name}` are the rows, put that list alone into the file"
    for known in [name for pair in pairs for name in pair] + lists:
        if close := difflib.get_close_matches(known, map(str, row), n=1, cutoff=0.75):
            return f"; `{close[0]}` resembles `{known}`"
    return ""


def _pair_as_turns(row: dict, question_name: str, answer_name: str) -> tuple[list, set[str]]:
    """Turns that a question and an answer stand for, history included, and which other fields they were made from."""
    question, answer, taken = row[question_name], row[answer_name], {"history"}
    if _are_turns(question):
        before = [{**turn, "train": False} for turn in question]  # what the row's writer gives, not what is learnt
    else:
        question = _text(question, question_name)
        if question_name == "instruction" and row.get("input") not in (None, ""):
            question = f"{question}\n{_text(row['input'], 'input')}".strip("\n")
        if not question.strip():
            raise RowError(f"empty question (field `{question_name}`)")
        before = [{"role": "user", "content": question}]
    if question_name == "instruction":
        taken.add("input")
    if _are_turns(answer):
        after = answer
    else:
        answer = _text(answer, answer_name)
        if not answer.strip():
            raise RowError(f"empty answer (field `{answer_name}`)")
        thought = {name: row[name] for name in THOUGHTS if name in row and name not in (question_name, answer_name)}
        taken |= thought.keys()
        after = [{"role": "assistant", "content": answer, **thought}]
    return _history(row.get("history")) + before + after, taken


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def _history(history: Any) -> list:
    if not isinstance(history, list):
        if _is_empty(history):
            return []
        raise RowError(f"history is {_describe(history)}; expected a list of [question, answer] pairs")
    turns = []
    for turn in history:
        if isinstance(turn, dict):
            turns.append(turn)
        elif isinstance(turn, (list, tuple)) and len(turn) == 2:
            turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        else:
            raise RowError(f"history holds {_describe(turn)}; expected [question, answer] pairs")
    return turns


def _read_turns(turns: list, name: str) -> tuple[list[dict], int, set[str]]:
    """The turns as messages, how many unanswered ones at the end were cut, and the names of fields that are not used."""
    messages: list[dict] = []
    unused: set[str] = set()
    for turn in turns:
        message, others = _read_turn(turn, name)
        unused |= others
        if message["role"] == "system" and not message["content"] and not messages:
            continue
        last = messages[-1] if messages else {"role": "system"}
        if message.get("tool_calls") and last["role"] == "assistant":  # ShareGPT tells text and calls apart
            _join(last, message)
            continue
        _refuse_order(messages, message)
        if last["role"] == "system" and message["role"] == "assistant":
            message["train"] = False  # a greeting answers nothing
        messages.append(message)
    whole = len(messages)
    while messages and messages[-1]["role"] in ("user", "tool"):
        messages.pop()
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any(message["role"] == "user" for message in messages) or not answers:
        raise RowError("nothing to learn: no assistant turn")
    if not any(message.get("train", True) for message in answers):
        raise RowError("nothing to learn: all answers are marked as context")
    return messages, whole - len(messages), unused


def _refuse_order(messages: list[dict], message: dict) -> None:
    """Raises: RowError when the turn cannot follow those before it."""
    role, before = message["role"], messages[-1]["role"] if messages else ""
    calls = bool(messages) and bool(messages[-1].get("tool_calls"))
    expected = ("tool",) if calls else FOLLOWS[before] if before else ("system", *FOLLOWS["system"])
    if role not in expected:
        named = "user" if expected[0] in ("system", "user") else expected[0]
        raise RowError(f"roles do not alternate: turn {len(messages) + 1} is {role}, expected {named}")


def _join(answer: dict, calls: dict) -> None:
    answer["tool_calls"] = answer.get("tool_calls", []) + calls["tool_calls"]
    for name in ("content", "reasoning_content"):
        if calls.get(name):
            answer[name] = "\n".join(text for text in (answer.get(name), calls[name]) if text)
    if calls.get("train") is False:
        answer["train"] = False


TURN_FIELDS = {"role", "from", "content", "value", "tool_calls", "function_call", *THOUGHTS, *FLAGS}


def _read_turn(turn: Any, name: str) -> tuple[dict, set[str]]:
    """A turn as a message, and the names of its filled fields that are not used."""
    if isinstance(turn, RowError):
        raise turn
    if not isinstance(turn, dict):
        raise RowError(f"`{name}` holds {_describe(turn)}; expected turns with role and content (or from and value)")
    given = turn.get("role", turn.get("from"))
    if not isinstance(given, str) or given not in ROLES:
        raise RowError(f"the role {given!r} is unknown; expected system, user (human), assistant (gpt) or tool")
    role = ROLES[given]
    filled = {str(key): value for key, value in turn.items() if not _is_empty(value)}
    for key in (*MEDIA, "tools"):
        if key in filled:
            remedy = "put them beside the list of turns" if key == "tools" else "this trains text only"
            raise RowError(f"the {role} turn has `{key}`: {remedy}")
    taken = TURN_FIELDS | ({"name", "tool_call_id"} if role == "tool" else set())
    unused = {f"{name}[].{key}" for key in filled.keys() - taken}
    raw = turn.get("content", turn.get("value"))
    message = {"role": role, "content": ""}
    if role == "assistant":
        calls, raw = _calls_of(turn, given, raw)
        content, thought = _content(raw, "assistant turn", may_be_empty=bool(calls))
        thought = "\n".join(
            text for text in [thought, *(_text(filled[key], f"{key}") for key in THOUGHTS if key in filled)] if text
        )
        if not content and not calls:
            raise RowError("empty answer")
        message["content"] = content
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        if not _is_trained(turn):
            message["train"] = False
        return message, unused
    unused |= {f"{name}[].{key}" for key in filled.keys() & {*THOUGHTS, "tool_calls", "function_call"}}
    if role == "tool":
        if isinstance(raw, dict):
            raw = _json_text(raw, "tool turn")
        message["content"] = _content(raw, "tool turn", may_be_empty=True)[0]
        message.update({key: str(filled[key]) for key in ("name", "tool_call_id") if key in filled})
        return message, unused
    message["content"] = _content(raw, f"{role} turn", may_be_empty=role == "system")[0]
    if role == "user" and not message["content"].strip():
        raise RowError("empty user turn")
    return message, unused


def _is_trained(turn: dict) -> bool:
    """Whether the turn's flags leave it a target. Raises: RowError when they say more than yes or no."""
    for name in FLAGS:
        value = turn.get(name)
        if value is None:
            continue
        if value not in (0, 1):
            raise RowError(f"`{name}` of a turn is {value!r}; expected 0 or 1, as answers are trained or not")
        if not value:
            return False
    return True


def _content(value: Any, name: str, may_be_empty: bool = False) -> tuple[str, str]:
    """Text and thought of a turn's content: a text, or a list of parts. Raises: RowError."""
    if value is None and may_be_empty:
        return "", ""
    if not isinstance(value, list) or not value:
        return _text(value, name), ""
    texts, thoughts = [], []
    for part in value:
        if isinstance(part, RowError):
            raise part
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(_text(part.get("text", part.get("value")), name))
        elif kind in ("thinking", "reasoning"):
            thoughts.append(_text(part.get(kind, part.get("text")), name))
        elif isinstance(part, dict):
            raise RowError(f"`{name}` has a part of type {kind!r}: this trains text only")
        else:
            raise RowError(f"`{name}` is {_describe(value)}; expected text")
    return "\n".join(texts), "\n".join(thoughts)


def _calls_of(turn: dict, role: str, content: Any) -> tuple[list[dict], Any]:
    """The calls of an assistant turn in one form, and what is left as its content."""
    calls = turn.get("tool_calls")
    if _is_empty(calls):
        calls = []
    if isinstance(calls, str):
        calls = _parsed(calls, "tool_calls")
    if not isinstance(calls, list):
        calls = [calls]
    if not _is_empty(turn.get("function_call")):
        calls = [*calls, turn["function_call"]]
    found = [_read_call(call) for call in calls]
    if role == "function_call" and not found:
        said = _parsed(content, "function_call") if isinstance(content, str) else content
        said = said if isinstance(said, list) else [said]
        if not all(isinstance(call, dict) and call for call in said):
            return [], content  # no call in the known form: the text itself is the answer
        return [_read_call(call) for call in said], None
    return found, content


def _read_call(call: Any) -> dict:
    if isinstance(call, RowError):
        raise call
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise RowError('a tool call has no name; expected {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"the arguments of the call of {call['name']} are {_describe(arguments)}; expected an object")
    return {"type": "function", "function": {"name": call["name"], "arguments": _plain(arguments, "arguments")}}


def _read_tools(tools: Any) -> list[dict] | None:
    """The row's tools as [{"type": "function", "function": {…}}], given as objects or as JSON text. Raises: RowError."""
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if _is_empty(tools):
        return None
    found = []
    for tool in tools if isinstance(tools, list) else [tools]:
        if isinstance(tool, str):
            tool = _parsed(tool, "tools")
        if not isinstance(tool, dict) or not tool:
            raise RowError(f"`tools` holds {_describe(tool)}; expected objects that describe functions")
        tool = _plain(tool, "tools")
        found.append(tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool})
    return found


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowError(f"`{name}` is a text that is no JSON: {text[:60]!r}") from None


def _json_text(value: Any, name: str) -> str:
    return json.dumps(_plain(value, name), ensure_ascii=False)


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """The value, if JSON can hold it. Raises: RowError."""
    if isinstance(value, RowError):
        raise value
    if value is None:
        return None
    if depth > DEEPEST:
        raise RowError(f"`{name}` is nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        return {str(key): _plain(inner, name, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, name, depth + 1) for inner in value]
    if isinstance(value, str):
        return _whole(value, name)
    if not isinstance(value, (bool, int, float)) or value != value or value in (math.inf, -math.inf):
        raise RowError(f"`{name}` holds {_describe(value)} that JSON cannot hold")
    return value


def _whole(text: str, name: str) -> str:
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise RowError(f"`{name}` holds half a character (a lone surrogate); the file was cut or converted wrongly")
    return text


def _text(value: Any, name: str) -> str:
    """The value as clean text."""
    if isinstance(value, RowError):
        raise value
    if isinstance(value, list):
        value, thought = _content(value, name) if value else (value, "")
        if thought:
            raise RowError(f"`{name}` has a part of type 'thinking'; expected it in an answer")
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
    value = _whole(value, name).rstrip()
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
