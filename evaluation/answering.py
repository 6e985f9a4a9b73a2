"""Answers of a model to the held-out questions, dealt to the ranks, the same for any number of them."""

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import gather_object

from sft import modeling, schemas
from sft.artifacts import explained_writing, read_json, read_json_lines
from sft.device import is_sharded
from sft.encoding import IGNORED, encode_prompt, split_thought, stop_token_ids
from sft.template import OPENED as OPENED_THOUGHT
from sft.tokenizer import load_tokenizer


def prompt_length(labels: list[int]) -> int:
    """How many tokens of a row precede its last answer; the model is asked with these and answers from there."""
    last = max(position for position, label in enumerate(labels) if label != IGNORED)
    return next((position + 1 for position in range(last, -1, -1) if labels[position] == IGNORED), 0)


def decoding_signature(decoding: dict, tokenizer, dtype) -> str:
    """The decoding as the signature of the report names it."""
    if not decoding:
        return "none"
    stops = "+".join(tokenizer.convert_ids_to_tokens(decoding["stop_ids"]))
    return (
        f"greedy|max_new_tokens:{decoding['max_new_tokens']}|stop:{stops}|weights:{str(dtype).removeprefix('torch.')}|"
        "asked:as trained|scored:what stands after the thought"
    )


def read_answer(tokenizer, prompt: list[int], tokens: list[int], stop_ids: list[int]) -> dict:
    """{"answer", "thought", "stopped"}: what a model said to a prompt, in its parts. An answer is what stands after the
    thought, which the prompt may have opened; where the thought does not end, the answer is empty."""
    stopped = tokens[-1] in stop_ids
    opened = OPENED_THOUGHT.search(tokenizer.decode(prompt[-16:]))
    opening = opened[0].strip() if opened else ""
    thought, answer = split_thought(tokenizer, opening + tokenizer.decode(tokens[: len(tokens) - stopped]))
    if opening and answer.startswith(opening):  # not closed
        thought, answer = answer, ""
    thought = thought.removeprefix(opening)
    special = [number for number in tokens if number in tokenizer.all_special_ids]
    for name in tokenizer.convert_ids_to_tokens(special):  # in the middle of what it said
        thought, answer = thought.replace(name, ""), answer.replace(name, "")
    return {"answer": answer.strip(), "thought": thought.strip(), "stopped": stopped}


def let_shards_answer(model: modeling.TargetLoss) -> None:
    """Makes `model.answer` gather the weights of a sharded model, as its forward does."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, "answer")


@torch.no_grad()
def generate(
    model: modeling.TargetLoss, prompts: list[list[int]], max_new_tokens: int, stop_ids: list[int], accelerator=None
) -> Iterator[tuple[int, list[int]]]:
    """Yields (index of the prompt, tokens of its answer) as soon as an answer ends, greedily, all prompts at once.

    model: in eval mode, with an attention that takes a padding mask. An answer ends with a stop token, which is kept, or at
    max_new_tokens; its row then leaves the batch and its cache. Prompts are padded on the left; padding is masked and
    positions count from the first real token, so the others in the batch move a row's logits by rounding only (about 1e-6
    in fp32: a choice changes only where two tokens are that close). Settings of the model's generation_config (temperature,
    repetition penalty) are left out: this is the plain argmax.
    accelerator: of a sharded model, whose every forward is a collective: a rank without prompts, or whose answers have
    ended, goes on with a token of no meaning until those of all ranks have.
    """
    # transformers renamed the argument, and the field of the output with it.
    cache_name = "cache" if "cache" in inspect.signature(model.causal.forward).parameters else "past_key_values"
    width = max(map(len, prompts), default=0)
    device = model.causal.device
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    position_ids = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    running = list(range(len(prompts)))
    answers: list[list[int]] = [[] for _ in prompts]
    cache = None
    while any_left(len(running), accelerator):
        if not running:
            model.answer(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
            continue
        output = model.answer(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True, logits_to_keep=1,
            **{cache_name: cache},
        )  # fmt: skip
        cache = output[cache_name]
        input_ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        stay = []
        for place, (index, token) in enumerate(zip(running, input_ids[:, 0].tolist())):
            answers[index].append(token)
            if token in stop_ids or len(answers[index]) == max_new_tokens:
                yield index, answers[index]
            else:
                stay.append(place)
        mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=1)
        position_ids = position_ids[:, -1:] + 1
        if stay and len(stay) < len(running):
            chosen = torch.tensor(stay, device=device)
            cache.batch_select_indices(chosen)
            input_ids, mask, position_ids = input_ids[chosen], mask[chosen], position_ids[chosen]
        running = [running[place] for place in stay]


def any_left(running: int, accelerator) -> bool:
    """Whether any answer has not ended: on this rank, or, of a sharded model, on any; a collective then."""
    if accelerator is None or not is_sharded(accelerator):
        return running > 0
    return accelerator.reduce(torch.tensor([float(running)], device=accelerator.device), reduction="sum").item() > 0


class PartialResults:
    """What has been scored so far, on disk: one line per row, appended at once, one file per rank.

    After an interruption all ranks, of whatever number, find the union of these files; `key` names what a result was
    made with, so that a result is never taken for another adapter, data set or way of decoding.
    """

    def __init__(self, directory: Path, accelerator):
        """Reads the files that are there; a collective, so that files on the disks of several servers are all found."""
        self.directory, self.accelerator = directory, accelerator
        self.path = directory / f".partial-{accelerator.process_index}.jsonl"
        records = read_records(directory) if accelerator.is_local_main_process else []
        self.found = {(record["key"], record["id"]): record for record in gather_object(records)}
        self.added: list[dict] = []

    def add(self, records: list[dict]) -> None:
        """Appends new results of this rank, {"key", "id", …} each. Raises: UserError on a full disk."""
        with explained_writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A link that somebody put here would lead the writing elsewhere.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with open(descriptor, "a", encoding="utf-8") as file:
                # The line break comes first: a last line that a kill has cut off then spoils no other.
                file.write("".join("\n" + json.dumps(record, ensure_ascii=False) for record in records))
        self.added += records

    def share(self) -> None:
        """Makes what was added on any rank known to all; a collective."""
        self.found |= {(record["key"], record["id"]): record for record in gather_object(self.added)}
        self.added = []

    def remove(self) -> None:
        """Deletes the files, when all is written elsewhere."""
        if self.accelerator.is_local_main_process:
            for path in self.directory.glob(".partial-*.jsonl"):
                path.unlink()


def read_records(directory: Path) -> list[dict]:
    """The records in a directory's files of partial results, without lines that were cut off."""
    paths = sorted(directory.glob(".partial-*.jsonl"))
    return [record for path in paths for record in read_json_lines(path, schemas.RESULT)]


def ask(
    run_dir: str | Path,
    question: str,
    max_new_tokens: int = 200,
    base_only: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """The greedy answer of a run's adapted model (or of its base alone) to one question, for a notebook or a shell.

    It is asked in the mode, with a thought or without, in which most of its rows were trained, and answers after the thought.
    Loads the model each time, in fp32 on the CPU; eval.py is for many questions. trust_remote_code: whether Python code in
    the base model's directory may run; what the run's config.json says of it is ignored.
    """
    settings = read_json(Path(run_dir) / "config.json", schemas.CONFIG)
    name = settings["model_name_or_path"]
    tokenizer = load_tokenizer(name, trust_remote_code)
    model = modeling.load_base(
        name, torch.float32, attn_implementation=modeling.generation_attention(), trust_remote_code=trust_remote_code
    )
    stop_ids = stop_token_ids(tokenizer, model.generation_config)
    adapted = model if base_only else modeling.load_adapter(model, str(run_dir))
    model = modeling.TargetLoss(adapted).eval()
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": question}], trained_mode(settings["dataset_dir"]))
    ((_, tokens),) = generate(model, [prompt], max_new_tokens, stop_ids)
    return read_answer(tokenizer, prompt, tokens, stop_ids)["answer"]


def trained_mode(dataset_dir: str | Path) -> str:
    """ "on" when most rows of a data set were asked for with a thought, else "off", also when it is not there any more."""
    manifest = Path(dataset_dir) / "manifest.json"
    modes = (read_json(manifest, schemas.MANIFEST).get("modes") or {}) if manifest.is_file() else {}
    return "on" if modes.get("thinking", 0) > modes.get("plain", 0) else "off"
