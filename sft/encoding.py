"""A dialogue as token ids and labels, through the tokenizer's own chat template."""

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from sft.errors import UserError

IGNORED = -100  # label of a token that is not a target; PyTorch's default ignore_index

# Unicode noncharacters, never valid in text that is exchanged, stand for special tokens while a row is rendered:
# "\ufdd0 3 \ufdd1" for the 4th one where a user typed it, "\ufdd2 3 \ufdd3" where the template put it; \ufdd4 is a probe.
_NONCHARACTERS = re.compile("[\ufdd0-\ufddf]")
_TYPED = re.compile("\ufdd0(\\d+)\ufdd1")
_ALIAS = re.compile("\ufdd2\\d+\ufdd3")


@dataclass
class Encoded:
    """One row, ready to train on; with a `reason` it has no tokens and must be left out."""

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # not shifted: labels[i] is input_ids[i] or -100
    full_length: int = 0  # tokens before anything was cut
    truncated: bool = False
    answers: int = 0  # assistant turns that kept at least one target
    reason: str = ""


class _Encoder:
    """A tokenizer's fast backend, changed so that special tokens typed in a text are text, and only those of the template act.

    In the copy every special token has an alias that is an ordinary added token with the same stripping; the backend
    is told to read special tokens as text. So one call encodes both kinds rightly, whatever the model and pre-tokenizer.
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no fast version (tokenizer.json); convert it once with "
                "AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(DIR) and give DIR"
            )
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template, so it is not clear how a question is put to "
                "this model; use the instruct (chat) version, or put a chat_template.jinja into the model directory"
            )
        self.tokenizer = tokenizer
        added = {token.content: (i, token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.names = sorted(added, key=len, reverse=True)  # a pattern must try the longest first
        self.number = {name: number for number, name in enumerate(self.names)}
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or "(?!)")
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.backend.add_tokens([
            AddedToken(self.alias(name), single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                       normalized=False, special=False)
            for name, (_, token) in added.items()
        ])  # fmt: skip
        self.real = {self.backend.token_to_id(self.alias(name)): i for name, (i, _) in added.items()}
        self.first_alias = min(self.real, default=self.backend.get_vocab_size())
        self.heads: dict[str, list[int]] = {}
        self.leads = self.count_leads()

    def count_leads(self) -> tuple[int, int]:
        """How many special tokens the template puts between the prompt and an answer: an earlier one, and the last."""
        probe = [{"role": role, "content": "probe"} for role in ("user", "assistant")] * 2
        counts = []
        for position in (1, 3):
            messages = [dict(message) for message in probe]
            messages[position]["content"] = "\ufdd4"
            text, prompt = self.render([messages], False)[0], self.render([messages[:position]], True)[0]
            refused = isinstance(text, ValueError) or isinstance(prompt, ValueError) or not text.startswith(prompt)
            lead, found, _ = ("", "", "") if refused else text[len(prompt) :].partition("\ufdd4")
            counts.append(len(_ALIAS.findall(lead)) if found else 0)
        return counts[0], counts[1]

    def alias(self, name: str) -> str:
        return f"\ufdd2{self.number[name]}\ufdd3"

    def protect(self, messages: list[dict]) -> list[dict]:
        """The messages with the special tokens that a person typed replaced by placeholders. Raises: ValueError."""
        safe = []
        for message in messages:
            content = message["content"]
            if not content.isascii() and _NONCHARACTERS.search(content):
                raise ValueError("the text holds Unicode noncharacters (U+FDD0 to U+FDDF), which no text may contain")
            if self.pattern.search(content):
                content = self.pattern.sub(lambda match: f"\ufdd0{self.number[match[0]]}\ufdd1", content)
            safe.append({"role": message["role"], "content": content})
        return safe

    def render(self, conversations: list[list[dict]], add_generation_prompt: bool) -> list[str | ValueError]:
        """The template's text of each conversation, special tokens as placeholders and aliases; its complaint as the error."""
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        if not conversations:  # transformers 4.55 looks into the first one
            return []
        try:
            texts = self.tokenizer.apply_chat_template(conversations, **options)
        except (TemplateError, TypeError, ValueError) as error:
            if len(conversations) == 1:
                return [ValueError(f"the chat template refuses it: {error}")]
            return [self.render([one], add_generation_prompt)[0] for one in conversations]
        return [self.pattern.sub(lambda match: self.alias(match[0]), text) for text in texts]

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of rendered texts; aliases keep their own ids, see `tokens`."""
        plain = [_TYPED.sub(lambda match: self.names[int(match[1])], text) for text in texts]
        encodings = self.backend.encode_batch_fast(plain, add_special_tokens=False)  # without offsets
        return [encoding.ids for encoding in encodings]

    def tokens(self, ids: list[int]) -> list[int]:
        """The tokenizer's ids for ids that may hold aliases."""
        return [self.real[i] if i >= self.first_alias else i for i in ids]

    def encode_heads(self, texts: set[str]) -> None:
        """Sets `heads[text]` for the last unbroken piece of each prompt: nearly always the same few, so they are kept."""
        if len(self.heads) > 10_000:
            self.heads.clear()
        missing = sorted(texts - self.heads.keys())
        self.heads.update(zip(missing, self.encode(missing)))


@functools.lru_cache(maxsize=4)
def _encoder(tokenizer) -> _Encoder:
    return _Encoder(tokenizer)


@dataclass
class _Turn:
    """Where one answer lies in the rendered text, counted in special tokens, which text and ids have in common."""

    head: str  # the prompt from its last special token on: what precedes is encoded the same whatever follows
    head_special: int | None  # number of that special token in the text; None: the prompt has none
    end_special: int  # number of the special token that ends the answer


def encode_dialogues(
    tokenizer, dialogues: list[list[dict]], max_length: int, on_too_long: str = "truncate"
) -> list[Encoded]:
    """Each dialogue as token ids, with labels on every answer and the token that ends its turn.

    A dialogue is [system]? (user assistant)+, dicts with `role` and `content`. The ids are those of the tokenizer's own
    template on the whole dialogue, except that special tokens inside a content are encoded as plain text. A row comes
    back with a `reason` instead of tokens when the prompt is not a token prefix of the whole, when the template changes
    or refuses a turn, or when it is too long and `on_too_long` is "drop" or no target would be left. "truncate" cuts the
    tail; what is left then ends with a target, and an answer that was cut teaches no end of turn.
    Raises: UserError when the tokenizer has no chat template or no fast version.
    """
    encoder = _encoder(tokenizer)
    reasons: dict[int, str] = {}
    safe: dict[int, list[dict]] = {}
    for row, messages in enumerate(dialogues):
        try:
            safe[row] = encoder.protect(messages)
        except ValueError as error:
            reasons[row] = str(error)
    asked = [
        (row, position)
        for row, messages in safe.items()
        for position, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    texts = dict(zip(safe, encoder.render(list(safe.values()), add_generation_prompt=False)))
    prompts = encoder.render([safe[row][:position] for row, position in asked], add_generation_prompt=True)
    turns: dict[int, list[_Turn]] = {row: [] for row in safe}
    for (row, position), prompt in zip(asked, prompts):
        try:
            lead = encoder.leads[position == len(safe[row]) - 1]
            turns[row].append(_find_turn(texts[row], prompt, safe[row][position]["content"], lead))
        except ValueError as error:
            reasons.setdefault(row, str(error))
    good = [row for row in safe if row not in reasons]
    encoder.encode_heads({turn.head for row in good for turn in turns[row]})
    results = {row: Encoded(reason=reason) for row, reason in reasons.items()}
    for row, ids in zip(good, encoder.encode(texts[row] for row in good)):
        try:
            labels = _label(encoder, ids, turns[row])
            results[row] = _fit(encoder.tokens(ids), labels, len(turns[row]), max_length, on_too_long)
        except ValueError as error:
            results[row] = Encoded(reason=str(error))
    return [results[row] for row in range(len(dialogues))]


def encode_dialogue(tokenizer, messages: list[dict], max_length: int, on_too_long: str = "truncate") -> Encoded:
    """One dialogue, see `encode_dialogues`. Raises: UserError when the row cannot be used."""
    (encoded,) = encode_dialogues(tokenizer, [messages], max_length, on_too_long)
    if encoded.reason:
        raise UserError(f"the dialogue cannot be encoded: {encoded.reason}")
    return encoded


def encode_prompt(tokenizer, messages: list[dict]) -> list[int]:
    """Token ids that ask for the next answer: the messages and the template's generation prompt. Raises: UserError."""
    encoder = _encoder(tokenizer)
    try:
        (text,) = encoder.render([encoder.protect(messages)], add_generation_prompt=True)
        if isinstance(text, ValueError):
            raise text
    except ValueError as error:
        raise UserError(f"the messages cannot be encoded: {error}") from None
    return encoder.tokens(encoder.encode([text])[0])


def _find_turn(text: str | ValueError, prompt: str | ValueError, content: str, lead: int) -> _Turn:
    """Where the answer `content` lies in `text`; the template puts `lead` special tokens before it.

    Raises: ValueError with the reason why that cannot be told.
    """
    for refusal in (text, prompt):
        if isinstance(refusal, ValueError):
            raise refusal
    if not text.startswith(prompt):
        raise ValueError("the chat template renders the prompt differently once an answer follows")
    end = next(itertools.islice(_ALIAS.finditer(text, len(prompt)), lead, None), None)
    if end is None:
        raise ValueError("the chat template puts no special token after the answer, so no end of turn can be learnt")
    if content.strip() not in text[len(prompt) : end.start()]:  # some templates strip
        raise ValueError("the chat template rewrites or leaves out a part of the answer")
    before = list(_ALIAS.finditer(prompt))
    head = prompt[before[-1].start() :] if before else prompt
    return _Turn(head, len(before) - 1 if before else None, len(before) + lead)


def _label(encoder: _Encoder, ids: list[int], turns: list[_Turn]) -> list[int]:
    """Labels for ids that still hold aliases. Raises: ValueError when a prompt is not a token prefix."""
    special = [position for position, i in enumerate(ids) if i >= encoder.first_alias]
    labels = [IGNORED] * len(ids)
    for turn in turns:
        start = 0 if turn.head_special is None else special[turn.head_special]
        head = encoder.heads[turn.head]
        if ids[start : start + len(head)] != head:
            raise ValueError(
                "the prompt is not a token prefix of the whole: the first characters of the answer merge with the last "
                "ones of the prompt (does the answer begin with a space or a line break?)"
            )
        span = slice(start + len(head), special[turn.end_special] + 1)
        labels[span] = encoder.tokens(ids[span])
    return labels


def _fit(ids: list[int], labels: list[int], answers: int, max_length: int, on_too_long: str) -> Encoded:
    """The row within `max_length` tokens."""
    length = len(ids)
    if length > max_length:
        last = _last_target(labels)
        ids, labels = ids[: last + 1], labels[: last + 1]  # what follows the last target teaches nothing
    if len(ids) <= max_length:
        return Encoded(ids, labels, length, False, answers)
    if on_too_long == "drop":
        return Encoded(reason=f"too long: {length} tokens, max_length is {max_length}", full_length=length)
    last = _last_target(labels[:max_length])
    if last < 1:  # the first token is predicted from nothing
        first = next(position for position, label in enumerate(labels) if label != IGNORED)
        return Encoded(
            reason=f"no room for a target token: the prompt has {first} tokens, max_length is {max_length}",
            full_length=length,
        )
    return Encoded(ids[: last + 1], labels[: last + 1], length, True, _count_answers(labels[: last + 1]))


def _last_target(labels: list[int]) -> int:
    return next((position for position in range(len(labels) - 1, -1, -1) if labels[position] != IGNORED), -1)


def _count_answers(labels: list[int]) -> int:
    return sum(label != IGNORED and before == IGNORED for before, label in zip([IGNORED, *labels], labels))
