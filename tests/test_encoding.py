"""Dialogues as token ids: the template's own ids, the right targets, and text that stays text."""

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sft import template
from sft.encoding import encode_dialogue, encode_dialogues, encode_prompt, split_thought
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
SWITCHED = (  # Qwen3: thoughts in the last turn only, and a switch that puts an empty one into the prompt
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = (  # DeepSeek-R1: the prompt opens a thought, and what is rendered has none
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
EITHER = (  # DeepSeek-V3.1: the prompt opens or closes a thought
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '<think>' if thinking else '</think>' }}{% endif %}"
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


def thought(text: str, answer: str) -> dict:
    return {"role": "assistant", "content": answer, "reasoning_content": text}


@pytest.mark.parametrize(
    ("chat_template", "with_thought", "without", "always"),
    [
        (SWITCHED, "<think>\ntwo\n</think>\n\n4<|im_end|>", "4<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"),
        (OPENED, "two\n</think>\n\n4<|im_end|>", "\n</think>\n\n4<|im_end|>", "\n</think>\n\n4<|im_end|>"),
        (EITHER, "two</think>4<|im_end|>", "4<|im_end|>", "</think>4<|im_end|>"),
    ],
    ids=["switched", "opened", "either"],
)
def test_an_answer_is_asked_for_in_the_mode_of_its_row(chat_template, with_thought, without, always):
    tokenizer = build(chat_template)
    question = turns("2+2?")
    rows = [[*question, thought("two", "4")], [*question, *turns("", "4")[1:]], turns("2+2?", "<think>two</think>4")]
    encoded = encode_dialogues(tokenizer, rows, 1000)
    assert [(targets(tokenizer, one), one.mode, one.reference) for one in encoded] == [
        ([with_thought], "thinking", "4"),
        ([without], "plain", "4"),
        ([with_thought], "thinking", "4"),
    ]
    for one, mode in zip(encoded, ("on", "off", "on")):
        prompt = encode_prompt(tokenizer, question, mode)
        assert one.input_ids[: len(prompt)] == prompt
        assert one.labels[len(prompt) - 1] == -100 != one.labels[len(prompt)]
        assert split_thought(tokenizer, targets(tokenizer, one)[0]) == ("two" if mode == "on" else "", "4")
    off = encode_dialogues(tokenizer, rows, 1000, thinking="off")
    assert [targets(tokenizer, one) for one in off] == [[without]] * 3
    assert [bool(one.notes) for one in off] == [True, False, True]
    on = encode_dialogues(tokenizer, rows, 1000, thinking="on")
    assert [targets(tokenizer, one) for one in on] == [[with_thought], [always], [with_thought]]
    assert {one.mode for one in on} == {"thinking"}


def test_a_thought_whose_opening_tag_stands_in_the_prompt_is_found():
    tokenizer = build(OPENED)
    (encoded,) = encode_dialogues(tokenizer, [turns("2+2?", "two\n</think>\n\n4")], 1000)
    assert (targets(tokenizer, encoded), encoded.mode) == (["two\n</think>\n\n4<|im_end|>"], "thinking")
    (encoded,) = encode_dialogues(build(CHATML), [turns("2+2?", "two</think>4")], 1000)
    assert (targets(tokenizer, encoded), encoded.mode) == (["two</think>4<|im_end|>"], "plain")


def test_tags_of_a_thought_that_are_special_tokens_still_act():
    tokenizer = build(SWITCHED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    open_id, close_id = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    (encoded,) = encode_dialogues(tokenizer, [turns("2+2?", "<think>two</think>4")], 1000)
    assert targets(tokenizer, encoded) == ["<think>\ntwo\n</think>\n\n4<|im_end|>"]
    assert [i for i in encoded.labels if i in (open_id, close_id)] == [open_id, close_id]


def test_thoughts_that_cannot_be_trained_are_refused_or_said():
    row = [*turns("2+2?"), thought("two", "4")]
    (encoded,) = encode_dialogues(build(CHATML), [row], 1000)
    assert "the chat template has no place for a thought" in encoded.reason
    (encoded,) = encode_dialogues(build(CHATML), [row], 1000, thinking="off")
    assert targets(build(CHATML), encoded) == ["4<|im_end|>"]
    assert encoded.notes == {"thoughts left out, as --thinking off says"}
    (encoded,) = encode_dialogues(build(SWITCHED), [turns("2+2?", "<think>two</think>")], 1000)
    assert encoded.reason == "an answer holds a thought and nothing after it"
    first, last = encode_dialogues(build(SWITCHED), [[*row, *turns("3+3?", "6")]], 1000)
    assert [(one.mode, *targets(build(SWITCHED), one)) for one in (first, last)] == [
        ("thinking", "<think>\ntwo\n</think>\n\n4<|im_end|>"),
        ("plain", "6<|im_end|>"),
    ]
    assert "thoughts of earlier turns" in "".join(last.notes)
    assert "two" not in build(SWITCHED).decode(last.input_ids)


def test_only_answers_that_are_to_be_learnt_are_targets(tokenizers):
    tokenizer = tokenizers["chatml"]
    messages = turns("Hi", "SECRET", "And?", "Yes.", "So?", "No.")
    messages[1]["train"] = False
    (encoded,) = encode_dialogues(tokenizer, [messages], 1000)
    assert targets(tokenizer, encoded) == ["Yes.<|im_end|>", "No.<|im_end|>"]
    assert encoded.input_ids == templated(tokenizer, messages)
    (encoded,) = encode_dialogues(tokenizer, [messages], 1000, loss_on="last")
    assert targets(tokenizer, encoded) == ["No.<|im_end|>"]
    messages[3]["train"] = messages[5]["train"] = False
    (encoded,) = encode_dialogues(tokenizer, [messages], 1000)
    assert encoded.reason == "nothing to learn: no answer of this row is to be trained"


def test_what_the_template_leaves_out_is_refused_by_name(tokenizers):
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    calling = [*turns("Hi"), {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    after = [*calling, {"role": "tool", "content": "sky"}, {"role": "assistant", "content": "Blue."}]
    hearing = build("{{ tools[0].function.name if tools }}" + CHATML)  # of tools, not of calls
    deaf = build(CHATML.replace("{{ m['content'] }}", "{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}"))
    for tokenizer, row, brought, reason in (
        (tokenizers["chatml"], calling, None, "knows no tools"),
        (tokenizers["chatml"], after, None, "knows no tools"),
        (hearing, calling, tools, "leaves out tool calls"),
        (hearing, after, tools, "leaves out tool calls"),
        (tokenizers["chatml"], turns("a", "b"), tools, "knows no tools"),
        (deaf, turns("a", "b", system="Be kind."), None, "leaves out or rewrites a system turn"),
    ):
        (encoded,) = encode_dialogues(tokenizer, [row], 1000, tools=[brought])
        assert reason in encoded.reason
        assert encoded.input_ids == []


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

DOUBLING = "{% set n = namespace(x='a') %}{% for a in range(32) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        (ENDLESS, "has not come to an end after 1 seconds"),
        ("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}", "has not come to an end after 1 seconds"),
        (DOUBLING, "makes texts of more than 64 MiB of a row"),
        ("{{ broken", "cannot be used"),
    ],
)
def test_templates_that_never_end_or_are_no_templates_stop_with_a_sentence(monkeypatch, addition, message):
    monkeypatch.setattr(template, "TIME_S", 1.0 if "range(32)" not in addition else 60)
    monkeypatch.setattr(template, "MEMORY", 64 << 20)
    monkeypatch.setattr(template, "LOOK_S", 0.01)
    with pytest.raises(UserError, match=message):
        encode_dialogues(build(addition + CHATML), [turns("a", "b")], 100)


@pytest.mark.parametrize(
    "addition",
    [
        "{% for a in range(10**9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}",
    ],
)
def test_what_a_template_does_wrong_is_a_reason_in_plain_characters(addition):
    tokenizer = build("{% if messages[0]['content'] == 'bad' %}" + addition + "{% endif %}" + CHATML)
    bad, good = encode_dialogues(tokenizer, [turns("bad", "b"), turns("a", "b")], 100)
    assert bad.reason.startswith("the chat template refuses it: ")
    assert bad.reason.isprintable()
    assert targets(tokenizer, good) == ["b<|im_end|>"]


def test_a_tokenizer_that_loses_text_is_refused():
    lossy = build(CHATML)
    lossy.backend_tokenizer.normalizer = normalizers.Replace("answer", "")
    with pytest.raises(UserError, match=r"makes 'The  is 42\.' of 'The answer is 42\.'"):
        encode_prompt(lossy, turns("a"))


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
