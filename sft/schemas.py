"""What the JSON files that the programs read back must hold. Files may hold more; what is named here has its type."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of value: its name in a sentence, and whether a value is of it."""

    name: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


TEXT = Kind("text", lambda value: isinstance(value, str))
NAME = Kind("text that is not empty", lambda value: isinstance(value, str) and value != "" and "\0" not in value)
BOOL = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number from 0 on", _is_count)
POSITIVE = Kind("a whole number from 1 on", lambda value: _is_count(value) and value > 0)
SIZE = Kind("a whole number from 1 to 10,000,000", lambda value: _is_count(value) and 0 < value <= 10_000_000)
NUMBER = Kind("a number", lambda value: _is_number(value) or value != value)  # a loss may be NaN
FIGURE = Kind("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
ANY = Kind("anything", lambda value: True)

# A key that ends in "?" may be missing or null. {str: kind} is an object whose keys are free, [kind] a list.
SPLITS = {"train": COUNT, "eval": COUNT}
MANIFEST = {
    "rows_read": COUNT, "rows_written": SPLITS, "tokens": SPLITS, "target_tokens": SPLITS, "max_length": POSITIVE,
    "dataset_sha256": TEXT, "tokenizer_sha256": TEXT, "template_sha256": TEXT, "split_sha256?": {str: TEXT},
    "modes?": {str: COUNT}, "recipe?": OBJECT, "rejected": ANY, "truncated": ANY,
    "duplicates": ANY, "leaks?": ANY,
}  # fmt: skip
PROVENANCE = {
    "model_name_or_path": NAME, "model_sha256?": TEXT, "dataset_sha256": TEXT, "tokenizer_sha256": TEXT,
    "template_sha256": TEXT, "base_dtype": TEXT, "global_batch_size": POSITIVE, "total_steps": POSITIVE,
    "former_total_steps?": [POSITIVE],
}  # fmt: skip
ORIGIN = {"model_name_or_path": NAME, "model_sha256?": TEXT, "dataset_sha256?": TEXT}  # what export needs of it
CONFIG = {
    "model_name_or_path": NAME, "dataset_dir": NAME, "dtype": TEXT, "loss_chunk_tokens": COUNT, "trust_remote_code?": BOOL,
    "per_device_train_batch_size": POSITIVE, "gradient_accumulation_steps?": POSITIVE, "global_batch_size?": POSITIVE,
}  # fmt: skip
SUMMARY = {
    "adapter_sha256?": TEXT, "adapter_config_sha256?": TEXT, "trainable_parameters": COUNT, "total_parameters": COUNT, "peak_memory_bytes": [COUNT],
    "world_size": POSITIVE, "backend?": TEXT,
    "first_loss?": NUMBER, "last_loss?": NUMBER, "first_eval_loss?": NUMBER, "eval_loss?": NUMBER, "train_time_s?": NUMBER,
    "tokens_per_s?": NUMBER, "epochs?": NUMBER, "steps?": COUNT, "global_batch_size?": COUNT, "device?": TEXT,
    "delivered?": {"step": COUNT, "eval_loss?": NUMBER}, "best?": {"step": COUNT, "eval_loss": NUMBER},
}  # fmt: skip
ENVIRONMENT = {"device_name": TEXT}
PROGRESS = {
    "step": COUNT, "provenance": OBJECT, "eval_loss?": NUMBER, "train_time_s?": NUMBER,
    "best?": {"step": COUNT, "eval_loss": NUMBER}, "evaluations_since_best?": COUNT,
}  # fmt: skip
CHECKSUMS = {str: TEXT}
RECORD = {"step": COUNT, "loss?": NUMBER, "eval_loss?": NUMBER, "learning_rate?": NUMBER, "grad_norm?": NUMBER}
RESULT = {
    "key": TEXT,
    "id": TEXT,
    "nll?": NUMBER,
    "answer?": TEXT,
    "thought?": TEXT,
    "stopped?": BOOL,
}  # of an evaluation under way
SCORES = {str: ANY}
PREDICTION = {
    "id": TEXT, "question": TEXT, "reference": TEXT, "length": COUNT, "target_tokens": COUNT, "base?": TEXT,
    "adapter?": TEXT, "base_nll": NUMBER, "adapter_nll": NUMBER, "base_scores": SCORES, "adapter_scores": SCORES,
}  # fmt: skip
REPORT = {
    "base": {str: FIGURE}, "adapter": {str: FIGURE}, "difference": {str: {"mean": FIGURE, "ci95": [FIGURE]}},
    "signature": {str: ANY}, "run": OBJECT, "simulated?": BOOL, "rows?": COUNT, "rows_needed?": COUNT,
    "conclusion?": TEXT, "verdicts?": {str: TEXT}, "warnings?": [TEXT], "other_sets?": {str: OBJECT}, "examples?": {str: [OBJECT]},
}  # fmt: skip
LENGTHS = {"max_length": POSITIVE, "tokens": {"train": COUNT}, "target_tokens": {"train": COUNT}}  # of a manifest
ADAPTER = {
    "peft_type": TEXT, "r": POSITIVE, "lora_alpha": NUMBER, "lora_dropout": NUMBER, "base_model_name_or_path?": TEXT,
    "target_modules?": ANY, "use_dora?": BOOL, "use_rslora?": BOOL, "fan_in_fan_out?": BOOL,
}  # fmt: skip


def mismatch(value: Any, shape: Any, place: str = "") -> str | None:
    """What is first seen not to be of the shape, in words: "tokens.train is 'x'; expected a whole number …"."""
    if isinstance(shape, Kind):
        return None if shape.holds(value) else f"{place or 'it'} is {_shown(value)}; expected {shape.name}"
    expected = dict if isinstance(shape, dict) else list
    if not isinstance(value, expected):
        return f"{place or 'it'} is {_shown(value)}; expected {'an object' if expected is dict else 'a list'}"
    if isinstance(shape, list):
        parts = [(item, shape[0], f"{place}[{index}]") for index, item in enumerate(value)]
    elif str in shape:
        parts = [(item, shape[str], f"{place}.{key}".lstrip(".")) for key, item in value.items()]
    else:
        parts = []
        for key, inner in shape.items():
            name = f"{place}.{key.rstrip('?')}".lstrip(".")
            if value.get(key.rstrip("?")) is not None:
                parts.append((value[key.rstrip("?")], inner, name))
            elif not key.endswith("?"):
                return f"{name} is missing" if key not in value else f"{name} is null; expected a value"
    return next(filter(None, (mismatch(*part) for part in parts)), None)


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
