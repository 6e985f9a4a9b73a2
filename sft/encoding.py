"""A dialogue as token ids and labels, through the tokenizer's own chat template."""

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer

from sft.errors import UserError
from sft.template import ALIAS, THOUGHT_TAG, Answer, ChatTemplate, limited

IGNORED = -100  # label of a token that is not a target; PyTorch's default ignore_index
BREAK = "\ufdd6"  # between a prompt and an answer that would merge; a noncharacter, and no token of the model
PROBE = "The answer is 42."


@dataclass
class Encoded:
    """One sequence, ready to train on; with a `reason` it has no tokens and must be left out."""

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # not shifted: labels[i] is input_ids[i] or -100
    full_length: int = 0  # tokens before anything was cut
    truncated: bool = False
    answers: int = 0  # assistant turns that kept at least one target
    reason: str = ""
    row: int = 0  # which of the dialogues it is from
    turn: int | None = None  # its last answer, counted among the row's from 1, where a row became several sequences
    mode: str = "plain"  # thinking or plain: how its last answer is asked for
    position: int = -1  # of the last answer with a target among the dialogue's messages
    reference: str = ""  # that answer as text, without its thought
    notes: set[str] = field(default_factory=set)  # what became of the row, in words; to be counted and said once


class _Encoder:
    """A tokenizer's fast backend, changed so that special tokens typed in a text are text, and only those of the template act.

    In the copy every special token has an alias that is an ordinary added token with the same stripping; the backend
    is told to read special tokens as text. So one call encodes both kinds rightly, whatever the model and pre-tokenizer:
        "⟪im_start⟫user\\nWhat is <|im_end|>?⟪im_end⟫"  →  [alias of im_start, "user", "\\n", …, "<", "|", "im", …, alias of im_end]
    and `tokens` puts the tokenizer's own ids in the place of the aliases'.
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no fast version (tokenizer.json); convert it once with "
                "AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(DIR) and give DIR"
            )
        self.template = ChatTemplate(tokenizer)
        aliases = {self.template.aliases[name]: token for name, (_, token) in self.template.special.items()}
        self.backend = _backend(tokenizer, tuple(aliases.items()))
        self.real = {
            self.backend.token_to_id(self.template.aliases[name]): i for name, (i, _) in self.template.special.items()
        }
        self.break_id = self.backend.token_to_id(BREAK)
        self.first_alias = min(self.real, default=self.break_id)
        self.heads: dict[str, list[int]] = {}
        self.check(tokenizer)

    def check(self, tokenizer) -> None:
        """Raises: UserError when the tokenizer loses text."""
        back = tokenizer.decode(self.encode([PROBE])[0])
        if "".join(back.split()) != "".join(PROBE.split()):
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} makes {back!r} of {PROBE!r}, so that it would train on other text "
                "than the rows hold; its files are incomplete (is tokenizer.json there, and whole?): fetch them again"
            )

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of rendered texts; aliases keep their own ids, see `tokens`."""
        plain = list(map(self.template.as_typed, texts))
        return [encoding.ids for encoding in self.backend.encode_batch_fast(plain, add_special_tokens=False)]

    def tokens(self, ids: list[int]) -> list[int]:
        """The tokenizer's ids for ids that may hold aliases."""
        return [self.real[i] if i >= self.first_alias else i for i in ids]

    def encode_heads(self, texts: set[str]) -> None:
        """Sets `heads[text]` for the last unbroken piece of each prompt: nearly always the same few, so they are kept."""
        if len(self.heads) > 10_000:
            self.heads.clear()
        missing = sorted(texts - self.heads.keys())
        self.heads.update(zip(missing, self.encode(missing)))


@functools.lru_cache(maxsize=2)
def _backend(tokenizer, aliases: tuple[tuple[str, AddedToken], ...]) -> Tokenizer:
    """A copy of the tokenizer's backend that knows the aliases; making one of 150,000 tokens takes a second."""
    text = tokenizer.backend_tokenizer.to_str()
    if any(token.special and THOUGHT_TAG.fullmatch(token.content) for token in tokenizer.added_tokens_decoder.values()):
        description = json.loads(text)
        for token in description["added_tokens"]:
            token["special"] &= not THOUGHT_TAG.fullmatch(token["content"])
        text = json.dumps(description)
    backend = Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    backend.add_tokens([
        AddedToken(alias, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
        for alias, token in aliases
    ] + [AddedToken(BREAK, normalized=False, special=False)])  # fmt: skip
    return backend


def _encoder(tokenizer) -> _Encoder:
    return _make_encoder(tokenizer, str(tokenizer.chat_template), str(tokenizer.special_tokens_map))


@functools.lru_cache(maxsize=4)
def _make_encoder(tokenizer, template: str, special_tokens: str) -> _Encoder:
    """Kept as long as the tokenizer's template and special tokens stay what they are."""
    return _Encoder(tokenizer)


@dataclass
class _Turn:
    """Where one answer lies in a rendered text, counted in special tokens, which text and ids have in common.

    "⟪bos⟫⟪im_start⟫user\\nHi⟪im_end⟫\\n⟪im_start⟫assistant\\nHello.⟪im_end⟫\\n" has the answer "Hello.⟪im_end⟫" after
    head "⟪im_start⟫assistant\\n" with head_special 3, up to end_special 4.
    """

    answer: Answer
    head: str  # the prompt from its last special token on: what precedes is encoded the same whatever follows
    head_special: int | None  # number of that special token in the text; None: the prompt has none
    end_special: int  # number of the special token that ends the answer


@dataclass
class _Sequence:
    """Answers of one row that are trained in one forward: each one's context is a prefix of the text."""

    row: int
    text: str
    turns: list[_Turn]


def encode_dialogues(
    tokenizer, dialogues: list[list[dict]], max_length: int, on_too_long: str = "truncate",
    tools: list[list[dict] | None] | None = None, thinking: str = "auto", loss_on: str = "all",
) -> list[Encoded]:  # fmt: skip
    """Each dialogue as token ids, with labels on every answer and the token that ends its turn.

    A dialogue is a list of dicts: `role` (system, user, assistant, tool), `content` (text), and where it applies
    `reasoning_content`, `tool_calls`, `name`, `tool_call_id`, `train` (False: an answer that is context only). `tools`
    are those of each row. What precedes a target is the template's own generation prompt in the answer's mode: with a
    thought (`thinking` auto) or always ("on") the thinking one, else the one with thinking switched off, where the
    template has a switch. Special tokens inside a content are encoded as plain text.

    Where the template renders an answer otherwise once another follows (Qwen3 drops thoughts), no one sequence holds both
    contexts, and a row becomes several sequences: `row` and `turn` of each say which; most rows are one. They come in the
    order of rows and turns. A sequence comes with a `reason` instead of tokens when the template changes, leaves out or
    refuses a part of the row, or when it is too long and `on_too_long` is "drop" or no target would be left. "truncate"
    cuts the tail; what is left then ends with a target, and an answer that was cut teaches no end of turn.
    Raises: UserError when the tokenizer has no chat template or no fast version, or loses text.
    """
    encoder = _encoder(tokenizer)
    found: list[Encoded] = []
    waiting: list[_Sequence] = []
    with limited() as restart:
        for row, messages in enumerate(dialogues):
            restart()
            try:
                answers = encoder.template.answers(messages, tools[row] if tools else None, thinking, loss_on)
                waiting += _join(row, answers)
            except UserError:
                raise
            except ValueError as error:
                found.append(Encoded(row=row, reason=_explain(encoder.template, error)))
    while waiting:
        encoder.encode_heads({turn.head for sequence in waiting for turn in sequence.turns})
        split: list[_Sequence] = []
        for sequence, ids in zip(waiting, encoder.encode(sequence.text for sequence in waiting)):
            ids, labels = _label(encoder, sequence, ids, split)
            found.append(_fit(ids, labels, sequence, max_length, on_too_long))
        waiting = split
    found.sort(key=lambda encoded: (encoded.row, encoded.turn))
    rows = [encoded.row for encoded in found]
    for encoded, before, after in zip(found, [-1, *rows], [*rows[1:], -1]):
        if encoded.row not in (before, after):
            encoded.turn = None
    return found


def encode_dialogue(tokenizer, messages: list[dict], max_length: int, on_too_long: str = "truncate") -> Encoded:
    """One dialogue (its last sequence, where it makes several), see `encode_dialogues`. Raises: UserError when it cannot be used."""
    encoded = encode_dialogues(tokenizer, [messages], max_length, on_too_long)[-1]
    if encoded.reason:
        raise UserError(f"the dialogue cannot be encoded: {encoded.reason}")
    return encoded


def encode_prompt(
    tokenizer, messages: list[dict], thinking: str = "auto", tools: list[dict] | None = None
) -> list[int]:
    """Token ids that ask for the next answer: the messages and the template's generation prompt.

    thinking: "on" asks as rows with a thought are trained, "off" and "auto" as those without. Raises: UserError.
    """
    encoder = _encoder(tokenizer)
    try:
        with limited():
            text = encoder.template.ask(messages, tools, thinking)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"the messages cannot be encoded: {error}") from None
    return encoder.tokens(encoder.encode([text])[0])


def end_token_ids(tokenizer) -> set[int]:
    """Ids of the special tokens that end what the model says, an answer or a tool call. Raises: UserError."""
    try:
        return _encoder(tokenizer).template.ends()
    except ValueError as error:
        raise UserError(f"how the chat template ends an answer cannot be told: {error}") from None


def split_thought(tokenizer, text: str) -> tuple[str, str]:
    """(thought, answer) of what a model said, decoded with its special tokens; what ends the answer goes.

    Without a thought the first is empty; a thought that was not finished has no answer.
    """
    return _encoder(tokenizer).template.split_thought(text)


def _explain(template: ChatTemplate, error: ValueError) -> str:
    family = f" (a template of the {template.family} family)" if template.family else ""
    return f"{error}{family if 'chat template' in str(error) else ''}"


def _join(row: int, answers: list[Answer]) -> list[_Sequence]:
    """The answers of a row in as few sequences as hold each answer exactly in the context in which it is asked for."""
    sequences: list[_Sequence] = []
    for answer in reversed(answers):
        for sequence in sequences:
            if turn := _find_turn(sequence.text, answer):
                sequence.turns.insert(0, turn)
                break
        else:
            text = answer.context + answer.target + answer.tail
            sequences.append(_Sequence(row, text, [_find_turn(text, answer)]))
    return sequences


def _find_turn(text: str, answer: Answer) -> _Turn | None:
    """Where the answer lies in `text`, if it stands there in its own context, at least to the first token that ends it."""
    start = len(answer.context)
    if not text.startswith(answer.context) or not text.startswith(answer.target[: answer.first_end], start):
        return None
    target = answer.target if text.startswith(answer.target, start) else answer.target[: answer.first_end]
    before = list(ALIAS.finditer(answer.context))
    head = answer.context[before[-1].start() :] if before else answer.context
    last = len(before) + len(ALIAS.findall(target)) - 1
    return _Turn(answer, head, len(before) - 1 if before else None, last)


def _label(
    encoder: _Encoder, sequence: _Sequence, ids: list[int], split: list[_Sequence]
) -> tuple[list[int], list[int]]:
    """The tokenizer's ids for `ids`, which hold aliases, and their labels.

    Where an answer's first characters merge with the prompt's last ones ("\\n" and "\\n" are one token), the model is
    asked with the prompt's own tokens: the text is encoded again with a break between; that can hold for a sequence's
    last answer only, so an earlier one goes to a sequence of its own, in `split`.
    """
    special = [position for position, i in enumerate(ids) if i >= encoder.first_alias]
    spans, kept = [], []
    for turn in sequence.turns:
        start = 0 if turn.head_special is None else special[turn.head_special]
        head = encoder.heads[turn.head]
        if ids[start : start + len(head)] == head:
            spans.append((start + len(head), special[turn.end_special] + 1))
            kept.append(turn)
        elif turn is not sequence.turns[-1]:
            split += _join(sequence.row, [turn.answer])
        else:
            answer = turn.answer
            (ids,) = encoder.encode([answer.context + BREAK + answer.target + answer.tail])
            cut = ids.index(encoder.break_id)
            ids = ids[:cut] + ids[cut + 1 :]
            special = [position for position, i in enumerate(ids) if i >= encoder.first_alias]
            spans.append((cut, special[turn.end_special] + 1))
            kept.append(turn)
    sequence.turns = kept
    for position in special:
        ids[position] = encoder.real[ids[position]]
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return ids, labels


def _fit(ids: list[int], labels: list[int], sequence: _Sequence, max_length: int, on_too_long: str) -> Encoded:
    """The sequence within `max_length` tokens."""
    length = len(ids)
    answers = [turn.answer for turn in sequence.turns]
    result = Encoded(full_length=length, row=sequence.row, turn=answers[-1].number)
    if length > max_length:
        last = _last_target(labels)
        ids, labels = ids[: last + 1], labels[: last + 1]  # what follows the last target teaches nothing
    if len(ids) > max_length:
        if on_too_long == "drop":
            result.reason = f"too long: {length} tokens, max_length is {max_length}"
            return result
        last = _last_target(labels[:max_length])
        if last < 1:  # the first token is predicted from nothing
            first = next(position for position, label in enumerate(labels) if label != IGNORED)
            result.reason = f"no room for a target token: the prompt has {first} tokens, max_length is {max_length}"
            return result
        ids, labels, result.truncated = ids[: last + 1], labels[: last + 1], True
        answers = answers[: _count_answers(labels)]
    result.input_ids, result.labels, result.answers = ids, labels, len(answers)
    result.mode, result.position, result.reference = answers[-1].mode, answers[-1].position, answers[-1].reference
    result.notes = set().union(*(answer.notes for answer in answers))
    return result


def _last_target(labels: list[int]) -> int:
    return next((position for position in range(len(labels) - 1, -1, -1) if labels[position] != IGNORED), -1)


def _count_answers(labels: list[int]) -> int:
    return sum(label != IGNORED and before == IGNORED for before, label in zip([IGNORED, *labels], labels))


def stop_token_ids(tokenizer, generation_config) -> list[int]:
    """Token ids that end an answer: those that the chat template puts after it, and every end of sequence that the
    tokenizer and the model's generation_config know (models are trained to end with the one or with the other)."""
    configured = generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({*end_token_ids(tokenizer), tokenizer.eos_token_id, *configured} - {None})
