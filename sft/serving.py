"""What servers need of a merged model: an Ollama Modelfile with the chat template's exact words, and launch lines."""

import contextlib
import json

from sft.errors import UserError
from sft.template import ChatTemplate, limited

WORDS = {"system": "\u2460S\u2460", "user": "\u2461U\u2461", "assistant": "\u2462A\u2462"}  # stand for contents


def modelfile(tokenizer, stop_ids: list[int]) -> str:
    """A Modelfile for Ollama: the weights after conversion, the template in Go's language, the stops.

    The template is left out, with the reason in a comment, where Go's text would not be that of the chat template.
    """
    stops = [f"PARAMETER stop {json.dumps(token)}" for token in stop_texts(tokenizer, stop_ids)]
    try:
        go = f'TEMPLATE """{go_template(tokenizer)}"""'
    except ValueError as error:
        go = f"# No TEMPLATE: {error}. Use `llama-server --jinja`, which runs the model's own."
    return "\n".join(
        [
            "# In this directory, with llama.cpp's converter and Ollama:",
            "#   python LLAMA_CPP/convert_hf_to_gguf.py . --outfile model.gguf",
            "#   ollama create NAME -f Modelfile",
            "FROM ./model.gguf",
            go,
            *stops,
            "",
        ]
    )


def stop_texts(tokenizer, stop_ids: list[int]) -> list[str]:
    """The tokens that end an answer, as text."""
    return [tokenizer.convert_ids_to_tokens(number) for number in stop_ids if number < len(tokenizer)]


def launch_lines(name: str, tokenizer, stop_ids: list[int]) -> str:
    """Commands that serve a merged model's directory `name` and ask it as it was trained."""
    template = ChatTemplate(tokenizer)
    asked = {"stop_token_ids": stop_ids}
    if template.switch:  # asked as rows without a thought are trained
        asked["chat_template_kwargs"] = {template.switch: False}
    return (
        f"vllm serve {name} --served-model-name NAME\n"
        f"# in each request, beside model and messages: {json.dumps(asked)[1:-1]}\n"
        f"python LLAMA_CPP/convert_hf_to_gguf.py {name} --outfile {name}/model.gguf   # llama.cpp, Ollama\n"
        f"llama-server --model {name}/model.gguf --jinja\n"
        f"ollama create NAME -f {name}/Modelfile"
    )


def go_template(tokenizer) -> str:
    """The chat template in the language of Ollama: what stands before the first content, and between two of them.

    Raises: ValueError when dialogues rendered with these pieces are not those of the chat template.
    """
    template = ChatTemplate(tokenizer)

    def render(*roles: str) -> str:
        messages = [{"role": role, "content": WORDS[role]} for role in roles]
        with limited():
            text = template.unmask(template.ask(messages, None, "auto"))
        bos = tokenizer.bos_token
        adds_bos = bos and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]  # then llama.cpp adds it as well
        return text.removeprefix(bos) if adds_bos else text

    first, _, asks = render("user").partition(WORDS["user"])
    dialogue = render("user", "assistant", "user")
    between = between_words(dialogue, ["user", "assistant", "user"])
    pieces = {"first": first, "asks": asks, "answers": between[1], "again": between[2], "system": None, "then": None}
    with contextlib.suppress(ValueError, UserError):  # no system turns in this template
        pieces["system"], pieces["then"] = between_words(render("system", "user"), ["system", "user"])[:2]
    for roles in [("user",), ("user", "assistant", "user"), ("user", "assistant", "user", "assistant", "user")]:
        for start in ((), ("system",)) if pieces["system"] is not None else ((),):
            if by_pieces(pieces, [*start, *roles]) != render(*start, *roles):
                raise ValueError("this chat template renders a turn in ways that depend on what follows")
    words = {name: f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else "" for name, text in pieces.items()}
    system = ""
    if pieces["system"] is not None:
        system = f'{{{{ if eq .Role "system" }}}}{words["system"]}{{{{ .Content }}}}{words["then"]}{{{{ end }}}}'
    after = words["asks"]
    if pieces["asks"] != pieces["answers"]:  # what asks says more than what stands before an earlier answer
        after = f"{{{{ if eq (len (slice $.Messages $i)) 1 }}}}{after}{{{{ else }}}}{words['answers']}{{{{ end }}}}"
    first = f"{{{{ if eq $i 0 }}}}{words['first']}{{{{ end }}}}"
    return (
        f"{{{{ range $i, $message := .Messages }}}}{{{{ with $message }}}}{system}"
        f'{{{{ if eq .Role "user" }}}}{first}{{{{ .Content }}}}{after}{{{{ end }}}}'
        f'{{{{ if eq .Role "assistant" }}}}{{{{ .Content }}}}{words["again"]}{{{{ end }}}}'
        "{{ end }}{{ end }}"
    )


def between_words(text: str, roles: list[str]) -> list[str]:
    """What stands before, between and after the contents of these turns. Raises: ValueError when one is missing."""
    parts = []
    for role in roles:
        part, found, text = text.partition(WORDS[role])
        if not found:
            raise ValueError(f"this chat template leaves out or moves a {role} turn")
        parts.append(part)
    return [*parts, text]


def by_pieces(pieces: dict, roles: list[str]) -> str:
    """What the Go template makes of such a dialogue that asks for an answer."""
    text = pieces["system"] if roles[0] == "system" else pieces["first"]
    for number, role in enumerate(roles):
        last = number == len(roles) - 1
        after = {"system": pieces["then"], "user": pieces["asks" if last else "answers"], "assistant": pieces["again"]}
        text += WORDS[role] + after[role]
    return text
