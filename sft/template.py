"""A dialogue as text, by the tokenizer's own chat template: what the model is asked with, and what it is to answer."""

import contextlib
import json
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from sft.errors import UserError

# Unicode noncharacters, never valid in text that is exchanged, stand for special tokens while a row is rendered:
# "\ufdd0 3 \ufdd1" for the 4th one where a user typed it, "\ufdd2 3 \ufdd3" where the template put it. A row
#     user: "What is <|im_end|>?"                       and a template that writes <|im_start|>user\n…<|im_end|>\n
# is rendered as "⟪im_start⟫user\nWhat is ⟨im_end⟩?⟪im_end⟫\n": both kinds are told apart whatever the template does.
_NONCHARACTERS = re.compile("[\ufdd0-\ufddf]")
_TYPED = re.compile("\ufdd0(\\d+)\ufdd1")
ALIAS = re.compile("\ufdd2(\\d+)\ufdd3")

SWITCHES = ("enable_thinking", "thinking", "reasoning")  # variables by which templates turn thinking on and off
# What a template may take for one row: seconds, characters, bytes. Real ones take under a millisecond.
TIME_S, SIZE, MEMORY = 5.0, 20_000_000, 1 << 30
LOOK_S = 0.2  # how often time and memory are looked at
# A thought as data sets write it; those made with a model whose prompt opens it have no opening tag.
THOUGHT = re.compile(r"\s*(?:<(think|thinking|thought)>)?(.*?)</(?(1)\1|think)>\s*(.*)", re.DOTALL)
OPENED = re.compile(r"<(think|thinking|thought)>(\s*)\Z")  # a prompt that opens a thought
THOUGHT_TAG = re.compile(r"</?(think|thinking|thought)>")
CONTROL = re.compile(r"<[|｜].*[|｜]>")  # what control tokens look like, also where the tokenizer calls them ordinary

PROBED_CALL = {"type": "function", "function": {"name": "voca", "arguments": {"a": "b"}}}

FAMILIES = {  # what only one family's templates write → its name
    "<｜Assistant｜>": "DeepSeek", "[gMASK]": "GLM", "<|START_OF_TURN_TOKEN|>": "Cohere", "<|turn>": "Gemma 4",
    "<start_of_turn>": "Gemma", "<|start_header_id|>": "Llama 3", "<|channel|>": "gpt-oss", "<|im_sep|>": "Phi-4",
    "[INST]": "Llama 2 or Mistral", "<用户>": "MiniCPM", "<reserved_106>": "Baichuan", "<|im_start|>": "ChatML",
}  # fmt: skip


@dataclass
class Answer:
    """One answer as it is asked for; special tokens are placeholders and aliases in all texts."""

    context: str  # what precedes: the template's own generation prompt
    target: str  # thought, answer, end of turn
    tail: str  # what the template writes after it
    first_end: int  # length of `target` up to its first special token after the answer
    reference: str  # the answer alone, as text
    notes: set[str]  # what became of the row, in words
    position: int = 0  # of the turn in its dialogue
    number: int = 0  # among the dialogue's answers, from 1
    mode: str = "plain"  # or thinking


class ChatTemplate:
    """A tokenizer's chat template: how it turns thinking on and off, and in which form it takes thoughts and tool calls.

    These are found by trial on a probe, so that no list of models is needed.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        source = tokenizer.chat_template
        if not source:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template, so it is not clear how a question is put to "
                "this model; use the instruct (chat) version, or put a chat_template.jinja into the model directory"
            )
        self.source = source if isinstance(source, str) else "\n".join(map(str, source.values()))
        self.family = next((name for mark, name in FAMILIES.items() if mark in self.source), "")
        added = tokenizer.added_tokens_decoder.items()
        self.special = {
            token.content: (i, token)
            for i, token in added
            if not THOUGHT_TAG.fullmatch(token.content)  # these a person may write: they are how thoughts are given
            and (
                token.special
                or token.content == tokenizer.eos_token
                or (token.content in self.source and CONTROL.fullmatch(token.content))
            )
        }
        self.names = sorted(self.special, key=len, reverse=True)  # a pattern must try the longest first
        self.number = {name: number for number, name in enumerate(self.names)}
        self.aliases = {name: f"\ufdd2{number}\ufdd3" for name, number in self.number.items()}
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or "(?!)")
        self.ended = re.compile(rf"(?:\s|{self.pattern.pattern})+\Z")
        self.constants = {"documents": None, **tokenizer.special_tokens_map}
        self.switch = ""  # the variable that turns thinking on and off
        self.place = ""  # of thoughts: a field of the message, tags in the content, the opened prompt, or nowhere
        self.opening = self.closing = ""  # what stands around a thought that the model says
        self.header = ""  # what the model says before an answer without one
        self.content_parts = self.arguments_as_text = self.knows_tools = False
        self.tail = ""  # what stands after every answer, in a template that renders each turn by itself
        with limited():
            self.compiled = {with_tools: _compile(tokenizer, with_tools) for with_tools in (False, True)}
            self.find_forms()

    def find_forms(self) -> None:
        """Sets how this template switches thinking, and the forms in which it shows contents, thoughts and tool calls."""
        question, answer = {"role": "user", "content": "Quero"}, {"role": "assistant", "content": "Respondeo"}
        prompt = self.probe([question], "plain")
        if "Quero" not in prompt and "type" in self.source:  # vision-language templates want a list of parts
            self.content_parts = True
            self.content_parts = "Quero" in (prompt := self.probe([question], "plain"))
        for name in SWITCHES:
            if re.search(rf"\b{name}\b", self.source):
                self.switch = name
                if self.probe([question], "thinking") != (prompt := self.probe([question], "plain")):
                    break
                self.switch = ""
        plain = self.probe([question, answer], "plain", False)
        if plain.startswith(prompt) and "Respondeo" in plain:
            self.header = self.unmask(plain[len(prompt) :].partition("Respondeo")[0]).strip()
        prompt = self.probe([question], "thinking")
        for place in ("field", "tags") if "</think>" in self.source else ("field",):
            self.place = place
            text = self.probe([question, {**answer, "thought": "Cogito"}], "thinking", False)
            said = text[len(prompt) :] if text.startswith(prompt) else ""
            if found := re.search("(.*?)Cogito(.*?)Respondeo", said, re.DOTALL):
                self.opening, self.closing = self.unmask(found[1]).strip(), self.unmask(found[2]).strip()
                break
        else:
            opened = OPENED.search(prompt)
            self.place, self.closing = ("prompt", f"</{opened[1]}>") if opened else ("", "")
        after = plain.rpartition("Respondeo")[2]
        longer = self.probe([question, answer] * 2, "plain", False)
        if not self.place and not self.switch and longer.startswith(plain) and ALIAS.search(after):
            self.tail = after
        asked = [question, {"role": "assistant", "content": "", "tool_calls": [PROBED_CALL]}]
        for self.arguments_as_text in (False, True):
            if shows_calls := "voca" in self.probe(asked, "plain", False):
                break
        tool = {"type": "function", "function": {"name": "voca", "description": "", "parameters": {}}}
        self.knows_tools = shows_calls or "voca" in self.probe([question], "plain", tools=[tool])

    def probe(self, messages: list[dict], mode: str, ask: bool = True, tools: list[dict] | None = None) -> str:
        try:
            return self.render(list(map(self.shape, messages)), tools, mode, ask)
        except ValueError:
            return ""

    def render(self, messages: list[dict], tools: list[dict] | None, mode: str, ask: bool) -> str:
        """The template's text of shaped messages, with aliases for its special tokens; `ask`: with the generation prompt.

        Raises: ValueError with the template's complaint.
        """
        values = {**self.constants, "messages": messages, "tools": tools}
        if self.switch:
            values[self.switch] = mode == "thinking"
        try:
            text = self.compiled[bool(tools)].render(add_generation_prompt=ask, **values)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
                ValueError) as error:  # fmt: skip
            words = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error)[:300]) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {words}") from None
        if len(text) > SIZE:
            raise ValueError(f"the chat template makes {len(text):,} characters of it; at most {SIZE:,} are taken")
        return self.pattern.sub(lambda match: self.aliases[match[0]], text)

    def shape(self, message: dict) -> dict:
        """The message in the form that this template takes."""
        content, thought = message["content"], message.get("thought", "")
        if thought and self.place == "tags":
            content = f"<think>\n{thought}\n</think>\n\n{content}"
        if self.content_parts:
            content = [{"type": "text", "text": content}]
        shaped = {"role": message["role"], "content": content}
        if thought and self.place == "field":
            shaped |= {"reasoning_content": thought, "thinking": thought}  # gpt-oss and LFM2 call it so
        if calls := message.get("tool_calls"):
            if self.arguments_as_text:
                calls = [
                    {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                    for call in calls
                ]  # fmt: skip
            shaped["tool_calls"] = calls
        return shaped | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}

    def as_typed(self, text: str) -> str:
        """The text with what a person typed as it was typed."""
        return _TYPED.sub(lambda match: self.names[int(match[1])], text) if "\ufdd0" in text else text

    def unmask(self, text: str) -> str:
        """The text with all special tokens by their names."""
        text = ALIAS.sub(lambda match: self.names[int(match[1])], text) if "\ufdd2" in text else text
        return self.as_typed(text)

    def protect(self, value):
        """The value (messages, tools, texts) with special tokens that a person typed as placeholders. Raises: ValueError."""
        if isinstance(value, str):
            if not value.isascii() and _NONCHARACTERS.search(value):
                raise ValueError("the text holds Unicode noncharacters (U+FDD0 to U+FDDF), which no text may contain")
            return self.pattern.sub(lambda match: f"\ufdd0{self.number[match[0]]}\ufdd1", value)
        if isinstance(value, dict):
            return {name: self.protect(part) for name, part in value.items()}
        return [self.protect(part) for part in value] if isinstance(value, list) else value

    def split_thought(self, text: str) -> tuple[str, str]:
        """(thought, answer) of what the model said; without a thought the first is empty, unfinished the second."""
        text = self.ended.sub("", text).strip()
        for closing in filter(None, (self.closing, self.header)):
            thought, found, answer = text.partition(closing)
            if found:
                return thought.strip().removeprefix(self.opening).strip(), answer.strip()
        if self.opening and text.startswith(self.opening):
            return text.removeprefix(self.opening).strip(), ""
        return "", text

    def read(self, messages: list[dict]) -> list[dict]:
        """The messages with special tokens masked and thoughts in `thought`, where the template has a place for thoughts."""
        read = []
        for message in messages:
            if message["role"] == "assistant":
                thought = message.get("reasoning_content") or ""
                if not thought and self.place and (found := THOUGHT.fullmatch(message["content"])):
                    if found[1] or "</think>" in self.source:  # else what stands before the closing tag is text
                        thought, message = found[2], {**message, "content": found[3]}
                    if not found[3] and not message.get("tool_calls"):
                        raise ValueError("an answer holds a thought and nothing after it")
                message = {**message, "thought": thought.strip()}
            read.append(self.protect(message))
        return read

    def ask(self, messages: list[dict], tools: list[dict] | None, thinking: str) -> str:
        """The text that asks for the next answer, plain unless `thinking` is "on". Raises: ValueError."""
        shaped = [self.shape(message) for message in self.read(messages)]
        return self.render(shaped, self.protect(tools) or None, "thinking" if thinking == "on" else "plain", ask=True)

    def answers(
        self, messages: list[dict], tools: list[dict] | None, thinking: str = "auto", loss_on: str = "all"
    ) -> list[Answer]:
        """The answers of a dialogue that are to be learnt, each in the context in which it is asked for.

        Raises: ValueError when the dialogue cannot be rendered, or something of it would be lost.
        """
        messages, tools = self.read(messages), self.protect(tools) or None
        places = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
        numbers = {position: number for number, position in enumerate(places, 1)}
        places = places[-1:] if loss_on == "last" else places
        places = [position for position in places if messages[position].get("train", True)]
        if not places:
            raise ValueError("nothing to learn: no answer of this row is to be trained")
        notes = set()
        if thinking == "off":
            for message in messages:
                if message.pop("thought", ""):
                    notes.add("thoughts left out, as --thinking off says")
        shaped = [self.shape(message) for message in messages]
        has_tools = tools or any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if has_tools and not self.knows_tools:
            raise ValueError("the chat template knows no tools, and the row brings some")
        answers, row = [], ""
        for position in reversed(places):
            thought = messages[position].get("thought", "")
            always = thinking == "on" and (self.place or self.switch)
            mode = "thinking" if always or (thought and thinking == "auto") else "plain"
            context = self.render(shaped[:position], tools, mode, ask=True)
            if tools and context == self.render(shaped[:position], None, mode, ask=True):
                raise ValueError("the chat template leaves out the row's `tools`")
            self.check_context(context, messages[:position])
            if row and self.tail and not has_tools and row.startswith(context):
                whole = row[: row.index(self.tail, len(context)) + len(self.tail)]
            else:
                whole = self.render(shaped[: position + 1], tools, mode, ask=False)
            row = row or whole
            answer = self.find_answer(context, whole, messages[position])
            answer.position, answer.number, answer.mode = position, numbers[position], mode
            if any(message.get("thought", "") not in context for message in messages[:position]):
                notes.add("thoughts of earlier turns are no context of later ones, as the template leaves them out")
            answers.insert(0, answer)
        answers[-1].notes |= notes
        return answers

    def find_answer(self, context: str, whole: str, message: dict) -> Answer:
        """The answer `message` in the template's text `whole` of the dialogue up to it. Raises: ValueError."""
        thought, eos = message.get("thought", ""), self.tokenizer.eos_token
        if thought and not self.place:
            raise ValueError("the chat template has no place for a thought (--thinking off trains the answers alone)")
        said = find_said(context, whole, thought)
        end = self.check_answer(said, message)
        notes, ends = set(), list(ALIAS.finditer(said, end))
        if not ends:
            if eos not in self.number:
                raise ValueError(
                    "the chat template ends no answer, and the tokenizer names no end of sequence (eos_token)"
                )
            said = said.rstrip() + self.aliases[eos]
            ends = [*ALIAS.finditer(said)][-1:]
            notes.add(f"the chat template ends no answer: {eos} added after each")
        last = next((found for found in ends if self.names[int(found[1])] == eos), ends[-1])
        target, tail = said[: last.end()], said[last.end() :]
        return Answer(context, target, tail, ends[0].end(), self.refer(target, message), notes)

    def ends(self) -> set[int]:
        """Ids of the special tokens that end an answer (the first after it, and the last) or a call. Raises: ValueError."""
        question, answer = {"role": "user", "content": "Quero"}, {"role": "assistant", "content": "Respondeo"}
        (found,) = self.answers([question, answer], None)
        names = {ALIAS.findall(found.target[: found.first_end])[-1], ALIAS.findall(found.target)[-1]}
        with contextlib.suppress(ValueError):
            (found,) = self.answers([question, {**answer, "content": "", "tool_calls": [PROBED_CALL]}], None)
            names.add(ALIAS.findall(found.target)[-1])
        return {self.special[self.names[int(number)]][0] for number in names}

    def refer(self, target: str, message: dict) -> str:
        """What the model should say after its thought, as text: the answer and the calls."""
        if message.get("tool_calls"):
            return self.split_thought(self.unmask(target))[1]
        return self.as_typed(message["content"]).strip()

    def check_context(self, context: str, messages: list[dict]) -> None:
        """Raises: ValueError when the template leaves out what the answer depends on."""
        for message in messages:
            content = message["content"].strip()
            if message["role"] != "assistant" and content not in context and _json(content)[1:-1] not in context:
                raise ValueError(f"the chat template leaves out or rewrites a {message['role']} turn")
            for call in message.get("tool_calls") or ():
                if call["function"]["name"] not in context:
                    raise ValueError("the chat template leaves out tool calls")

    def check_answer(self, said: str, message: dict) -> int:
        """Where the answer in `said` ends. Raises: ValueError when a part of it is not there."""
        content, thought = message["content"].strip(), message.get("thought", "")
        said = ALIAS.sub(lambda match: "\ufdd4" * len(match[0]), said)  # their numbers are no text
        end = said.rfind(content)
        if end < 0:
            raise ValueError("the chat template rewrites or leaves out a part of the answer")
        if thought not in (said[:end] if content else said):
            raise ValueError(
                "the chat template has no place for a thought before this answer (--thinking off trains the answers alone)"
            )
        end = end + len(content) if content else 0
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            parts = [(name,), *((str(part), _json(part), _json(part)[1:-1]) for part in leaves(arguments))]
            if not all(any(form in said for form in forms) for forms in parts):
                raise ValueError("the chat template leaves out tool calls, or a part of them")
            end = max(end, said.rfind(name) + len(name))
        return end


def find_said(context: str, whole: str, thought: str) -> str:
    """What the model says after `context`, where the template renders the answered turn as `whole`.

    Mostly it is the rest. Some templates ask with an opened thought and drop thoughts when they render (DeepSeek-R1):
        context "…<｜Assistant｜><think>\\n", whole "…<｜Assistant｜>It is 4.<eos>", thought "two and two"
    gives "two and two\\n</think>\\n\\nIt is 4.<eos>"; without a thought the model is to close it at once.
    Raises: ValueError when the template asks with other text than it writes before an answer.
    """
    if whole.startswith(context) and thought in whole[len(context) :]:
        return whole[len(context) :]
    opened = OPENED.search(context)
    if not opened or not whole.startswith(context[: opened.start()]):
        if whole.startswith(context):
            return whole[len(context) :]
        raise ValueError("the chat template renders the prompt differently once an answer follows")
    opening, closing = f"<{opened[1]}>", f"</{opened[1]}>"
    rest = whole[opened.start() :].lstrip().removeprefix(opening).lstrip()
    if rest.startswith(closing):  # DeepSeek-V3.1, Nemotron: an empty block, or its end
        return f"{thought}{closing}{rest.removeprefix(closing)}"
    line = opened[2]
    return f"{thought}{line}{closing}{line * 2}{rest}"


def leaves(value) -> Iterator:
    """The texts and numbers in nested arguments of a call."""
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _compile(tokenizer, with_tools: bool):
    """The template in transformers' own environment (its filters, functions and sandbox), with bounds on one operation.

    The sandbox itself bounds `range`, and lets Jinja compute no bounded operation while it compiles. Raises: UserError when the template is no valid Jinja.
    """
    try:
        source = tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        environment = _compile_jinja_template("").environment.overlay()
        environment.intercepted_binops = frozenset(["*", "**"])
        environment.call_binop = _bounded
        return environment.from_string(source)
    except (TemplateError, ValueError, RecursionError) as error:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} cannot be used ({error}); put the model's own "
            "chat_template.jinja into its directory"
        ) from None


def _bounded(context, operator: str, left, right):
    """left * right and left ** right in a template, unless that alone would fill the memory. Raises: OverflowError."""
    if operator == "**":
        if not isinstance(right, (int, float)) or abs(right) > 64:
            raise OverflowError("a power above 64")
        return left**right
    is_text = any(hasattr(part, "__len__") for part in (left, right))
    if is_text and any(isinstance(part, int) and part > 100_000 for part in (left, right)):
        raise OverflowError("a text repeated more than 100,000 times")
    return left * right


@contextlib.contextmanager
def limited() -> Iterator[Callable[[], None]]:
    """Ends what a template does without end, TIME_S seconds after the start or the last call of the function that it
    gives, or when the process has grown by MEMORY bytes.

    Only the main thread of a process can be interrupted (workers have one too). Raises: UserError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    started, most = [time.monotonic()], _peak_memory() + MEMORY

    def look(number, frame):
        if time.monotonic() - started[0] > TIME_S:
            raise TimeoutError(f"has not come to an end after {TIME_S:.0f} seconds on one row")
        if _peak_memory() > most:
            raise TimeoutError(f"makes texts of more than {MEMORY >> 20:,} MiB of a row")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    try:
        yield lambda: started.__setitem__(0, time.monotonic())
    except TimeoutError as error:
        raise UserError(
            f"the chat template {error}; put the model's own chat_template.jinja into its directory"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts in KiB
