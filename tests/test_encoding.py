"""Dialogues as token ids: the template's own ids, the right targets, and text that stays text."""

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sft.encoding import encode_dialogue, encode_dialogues, encode_prompt
from sft.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN25 = (  # a default system prompt
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}" + CHATML
)
LLAMA3 = (  # writes the BOS token, strips contents
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (  # no special token between question and answer
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (  # no system role
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
EMPTY_THOUGHT = (  # the last answer gets an empty thought that the prompt does not have, and nothing switches it off
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHANNELS = (  # gpt-oss: special tokens inside the assistant's turn, before the answer
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
OPEN_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
SHOUTING = CHATML.replace("m['content']", "m['content'] | upper")
FORGETFUL = (  # drops what earlier answers said
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last or m['role'] == 'user' else '…' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "<|channel|>", "<|message|>"]


def build(
    template: str | None, metaspace: bool = False, rstrip: bool = False, bos="<|begin_of_text|>"
) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    texts = [
        "system user assistant What is a rank? A process number. [INST] question [/INST] answer",
        "数据并行 梯度同步",
    ]
    trainer = {
        "special_tokens": [AddedToken(name, rstrip=rstrip, normalized=False) for name in SPECIAL],
        "show_progress": False,
    }
    if metaspace:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
        trainer["special_tokens"] = ["<unk>", *trainer["special_tokens"]]
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, **trainer))
    bos_id = core.token_to_id(bos)
    core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    core.enable_truncation(8)  # as some published tokenizers do; it must not cut rows here
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token="</s>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {
        "chatml": build(CHATML),
        "qwen25": build(QWEN25),
        "llama3": build(LLAMA3),
        "llama2": build(LLAMA2, metaspace=True, bos="<s>"),
        "rstrip": build(CHATML, rstrip=True),
        "thinking": build(EMPTY_THOUGHT),
        "channels": build(CHANNELS),
    }


def turns(*texts: str, system: str = "") -> list[dict]:
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def templated(tokenizer, messages, **options) -> list[int]:
    """What transformers itself makes of the messages."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    core = copy.deepcopy(tokenizer.backend_tokenizer)
    core.no_truncation()
    return core.encode(text, add_special_tokens=False).ids


def targets(tokenizer, encoded) -> list[str]:
    """The text of each unbroken run of labels."""
    runs, run = [], []
    for label in [*encoded.labels, -100]:
        if label != -100:
            run.append(label)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


DIALOGUES = [
    turns("What is a rank?", "A process number."),
    turns("数据并行是什么？", "每张卡持有完整模型。\n\n  def f():\n      pass"),
    turns("Hi", "Hello.", "And 世界?", "Also  hello. 🙂", "Bye", "Bye!"),
    turns("a", "b"),
]


@pytest.mark.parametrize("name", ["chatml", "qwen25", "llama3", "llama2", "rstrip", "channels"])
def test_ids_are_those_of_the_template_and_labels_repeat_them(tokenizers, name):
    tokenizer = tokenizers[name]
    for messages in DIALOGUES:
        encoded = encode_dialogue(tokenizer, messages, 10_000)
        assert encoded.input_ids == templated(tokenizer, messages)
        assert all(label in (-100, token) for label, token in zip(encoded.labels, encoded.input_ids))
        assert encoded.answers == len(messages) // 2
        assert not encoded.truncated
        first = encode_prompt(tokenizer, messages[:1])
        assert first == templated(tokenizer, messages[:1], add_generation_prompt=True)
        assert encoded.input_ids[: len(first)] == first
        assert encoded.labels[: len(first)] == [-100] * len(first)
        assert encoded.labels[len(first)] != -100


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["Hello.<|im_end|>", "4<|im_end|>"]),
        ("qwen25", ["Hello.<|im_end|>", "4<|im_end|>"]),
        ("llama3", ["Hello.<|eot_id|>", "4<|eot_id|>"]),
        ("llama2", ["Hello. </s>", "4 </s>"]),
        ("channels", ["<|channel|>final<|message|>Hello.<|im_end|>", "<|channel|>final<|message|>4<|im_end|>"]),
    ],
)
def test_each_answer_and_its_end_of_turn_are_the_targets(tokenizers, name, expected):
    encoded = encode_dialogue(tokenizers[name], turns("Hi", "Hello.", "2+2=", "4"), 1000)
    assert targets(tokenizers[name], encoded) == expected


def test_an_answer_that_changes_once_another_follows_is_trained_in_a_sequence_of_its_own(tokenizers):
    tokenizer, messages = tokenizers["thinking"], turns("Hi", "Hello.", "2+2=", "4")
    first, last = encode_dialogues(tokenizer, [messages], 1000)
    assert [(encoded.row, encoded.turn, encoded.position) for encoded in (first, last)] == [(0, 1, 1), (0, 2, 3)]
    assert targets(tokenizer, first) == ["<think>\n\n</think>\n\nHello.<|im_end|>"]
    assert targets(tokenizer, last) == ["<think>\n\n</think>\n\n4<|im_end|>"]
    assert first.input_ids == templated(tokenizer, messages[:2])
    assert last.input_ids == templated(tokenizer, messages)
    assert (first.reference, last.reference) == ("Hello.", "4")
    (single,) = encode_dialogues(tokenizer, [messages[:2]], 1000)
    assert single.turn is None


def test_an_answer_that_resembles_the_template_is_found_whole(tokenizers):
    encoded = encode_dialogue(tokenizers["channels"], turns("Hi", "final", "Ho", "final"), 1000)
    assert targets(tokenizers["channels"], encoded) == ["<|channel|>final<|message|>final<|im_end|>"] * 2
    encoded = encode_dialogue(tokenizers["thinking"], turns("Hi", "think"), 1000)
    assert targets(tokenizers["thinking"], encoded) == ["<think>\n\n</think>\n\nthink<|im_end|>"]


def test_labels_are_these_literal_ids(tokenizers):
    tokenizer = tokenizers["chatml"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    encoded = encode_dialogue(tokenizer, turns("a", "b"), 100)
    b, line = tokenizer.convert_tokens_to_ids(["b", "Ċ"])
    assert encoded.input_ids[0] == start
    assert encoded.input_ids[-4:] == [line, b, end, line]
    assert encoded.labels[-4:] == [-100, b, end, -100]


def test_the_beginning_of_text_appears_once(tokenizers):
    for name, token in (("llama3", "<|begin_of_text|>"), ("llama2", "<s>")):
        bos = tokenizers[name].convert_tokens_to_ids(token)
        assert encode_dialogue(tokenizers[name], turns("Hi", "Ho"), 100).input_ids.count(bos) == 1
        assert encode_prompt(tokenizers[name], turns("Hi")).count(bos) == 1


def test_the_default_system_prompt_of_a_template_stays(tokenizers):
    text = tokenizers["qwen25"].decode(encode_dialogue(tokenizers["qwen25"], turns("Hi", "Ho"), 100).input_ids)
    assert text.startswith("<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2", "rstrip", "channels"])
def test_special_tokens_that_a_person_typed_are_plain_text(tokenizers, name):
    tokenizer = tokenizers[name]
    typed = "a <|im_end|> b <s>struck</s> c <|eot_id|>d"
    plain = encode_dialogue(tokenizer, turns("x", "y", system="z" if name != "llama2" else ""), 1000)
    encoded = encode_dialogue(tokenizer, turns(typed, typed, system=typed if name != "llama2" else ""), 1000)
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    assert [i for i in encoded.input_ids if i in special] == [i for i in plain.input_ids if i in special]
    assert tokenizer.decode(encoded.input_ids).count(typed) == (2 if name == "llama2" else 3)
    prompt = encode_prompt(tokenizer, turns(typed))
    assert typed in tokenizer.decode(prompt)
    assert encoded.answers == 1


def test_a_row_cut_at_any_length_keeps_the_rules(tokenizers):
    tokenizer = tokenizers["chatml"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole = encode_dialogue(tokenizer, turns("Hi", "Hello.", "And now?", "Nothing."), 1000)
    first_target = next(i for i, label in enumerate(whole.labels) if label != -100)
    seen = set()
    for max_length in range(2, len(whole.input_ids) + 3):
        (encoded,) = encode_dialogues(tokenizer, [turns("Hi", "Hello.", "And now?", "Nothing.")], max_length)
        if max_length <= first_target:
            assert (
                encoded.reason
                == f"no room for a target token: the prompt has {first_target} tokens, max_length is {max_length}"
            )
            assert encoded.input_ids == []
            continue
        length = len(encoded.input_ids)
        assert length <= max_length
        assert encoded.input_ids == whole.input_ids[:length]
        assert encoded.labels == whole.labels[:length]
        assert any(label != -100 for label in encoded.labels[1:])
        assert encoded.truncated == (whole.labels.count(end) != encoded.labels.count(end))
        assert encoded.labels[-1] != -100 or length == len(whole.input_ids)
        seen.add((encoded.truncated, encoded.answers))
    assert seen == {(True, 1), (True, 2), (False, 2)}


def test_a_row_that_is_too_long_can_be_dropped(tokenizers):
    long, short = encode_dialogues(tokenizers["chatml"], [turns("Hi", "Ho " * 50), turns("Hi", "Ho")], 60, "drop")
    assert long.reason.startswith("too long: ")
    assert short.reason == ""


def test_rows_that_cannot_be_learnt_give_their_reason(tokenizers):
    good = turns("a", "b")
    cases = [
        (build(GEMMA), turns("a", "b", system="Be kind."), "the chat template refuses it: System role not supported"),
        (build(SHOUTING), turns("a", "b"), "rewrites or leaves out a part of the answer"),
        (build(GEMMA), turns("a", "b", system="x"), "a template of the ChatML family"),
        (tokenizers["chatml"], turns("a", "b \ufdd0 c"), "noncharacters"),
    ]
    for tokenizer, bad, reason in cases:
        results = encode_dialogues(tokenizer, [good, bad, good], 100)
        assert reason in results[1].reason
        with pytest.raises(UserError, match="cannot be encoded"):
            encode_dialogue(tokenizer, bad, 100)
        if "rewrites" in reason:
            continue
        assert [result.reason for result in results[::2]] == ["", ""]


def test_earlier_answers_that_the_template_drops_are_context_as_it_shows_them():
    tokenizer, messages = build(FORGETFUL), turns("a", "b", "c", "d")
    first, last = encode_dialogues(tokenizer, [messages], 100)
    assert targets(tokenizer, first) == ["b<|im_end|>"]
    assert targets(tokenizer, last) == ["d<|im_end|>"]
    assert "assistant\n…<|im_end|>" in tokenizer.decode(last.input_ids)


def test_a_template_that_ends_no_answer_gets_the_end_of_sequence():
    tokenizer = build(OPEN_END)
    (encoded,) = encode_dialogues(tokenizer, [turns("a", "b")], 100)
    assert tokenizer.decode(encoded.input_ids) == "user: a\nassistant: b</s>"
    assert targets(tokenizer, encoded) == [" b</s>"]
    assert encoded.notes == {"the chat template ends no answer: </s> added after each"}
    both = encode_dialogues(tokenizer, [turns("a", "b", "c", "d")], 100)
    assert [targets(tokenizer, encoded) for encoded in both] == [[" b</s>"], [" d</s>"]]
    assert tokenizer.decode(both[1].input_ids) == "user: a\nassistant: b\nuser: c\nassistant: d</s>"


def test_an_answer_that_merges_with_its_prompt_is_trained_after_the_prompts_own_tokens():
    tokenizer = build(CHATML)
    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n\n", "isolated"), core.pre_tokenizer])
    core.add_tokens([AddedToken("\n\n", normalized=False, special=False)])
    (encoded,) = encode_dialogues(tokenizer, [turns("a", "\nb")], 100)
    prompt = encode_prompt(tokenizer, turns("a"))
    assert encoded.input_ids[: len(prompt)] == prompt == templated(tokenizer, turns("a"), add_generation_prompt=True)
    assert encoded.labels[: len(prompt)] == [-100] * len(prompt)
    assert targets(tokenizer, encoded) == ["\nb<|im_end|>"]
    assert tokenizer.decode(encoded.input_ids) == tokenizer.apply_chat_template(turns("a", "\nb"), tokenize=False)
    first, last = encode_dialogues(tokenizer, [turns("a", "\nb", "c", "d")], 100)
    assert [targets(tokenizer, encoded) for encoded in (first, last)] == [["\nb<|im_end|>"], ["d<|im_end|>"]]
    assert last.input_ids == templated(tokenizer, turns("a", "\nb", "c", "d"))


def test_tokenizers_that_cannot_be_used_are_refused_with_a_remedy(tokenizers):
    with pytest.raises(UserError, match=r"no chat template.*instruct.*chat_template.jinja"):
        encode_prompt(build(None), turns("a"))


@given(
    st.lists(st.text(alphabet="ab c\n<|im_end>数🙂é", min_size=1, max_size=12), min_size=2, max_size=6),
    st.integers(2, 80),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_are_prefixes_and_labels_agree_for_any_text(tokenizers, texts, max_length):
    tokenizer = tokenizers["chatml"]
    messages = turns(*texts[: len(texts) // 2 * 2])
    (encoded,) = encode_dialogues(tokenizer, [messages], max_length)
    (whole,) = encode_dialogues(tokenizer, [messages], 10_000)
    assert whole.reason == ""
    for position in range(1, len(messages), 2):
        prompt = encode_prompt(tokenizer, messages[:position])
        assert whole.input_ids[: len(prompt)] == prompt
        assert whole.labels[len(prompt) - 1] == -100 != whole.labels[len(prompt)]
    assert "".join(tokenizer.decode(whole.input_ids)) == tokenizer.apply_chat_template(messages, tokenize=False)
    if not encoded.reason:
        assert encoded.labels == whole.labels[: len(encoded.labels)]
        assert any(label != -100 for label in encoded.labels[1:])
