"""What the user chooses: command-line flags and YAML keys, one dataclass field each."""

import argparse
import contextlib
import dataclasses
import os
import reprlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from sft.errors import UserError, did_you_mean

Config = TypeVar("Config")
PATHS = ("path", "dir", "input", "output", "checkpoint")  # the last word of settings that are places of files
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NAME_BYTES = 255  # of one name in a path (Linux, NAME_MAX)
LARGEST = (1 << 31) - 1  # of a count

_short = reprlib.Repr()  # for values in messages: a file may hold anything
_short.maxlevel, _short.maxlist, _short.maxstring, _short.maxother = 2, 4, 80, 80


def option(
    default: Any = dataclasses.MISSING, help: str = "", choices: tuple = (), flag_only: bool = False, **kwargs
) -> Any:
    """A dataclass field with its one-line help and, where the values are few, its choices.

    flag_only: only the command line may set it, because a file may come from somebody else.
    """
    if isinstance(default, list):
        kwargs["default_factory"] = lambda: list(default)
    elif default is not dataclasses.MISSING:
        kwargs["default"] = default
    return dataclasses.field(metadata={"help": help, "choices": choices, "flag_only": flag_only}, **kwargs)


@dataclass
class TrainConfig:
    """All settings of train.py. A field is a flag, a YAML key and a key of the run's config.json, same name."""

    # what is learnt, from what, to where
    model_name_or_path: str = option(help="base model: a local directory or a hub name")
    dataset_dir: str = option(help="data set made by data_prep.py")
    output_dir: str = option(help="run directory, made by this script")
    revision: str | None = option(None, "commit, tag or branch of a base model that has a hub name; none: its newest")
    adapter_name_or_path: str | None = option(None, "start from this LoRA adapter instead of a new one")
    adapter_revision: str | None = option(None, "commit, tag or branch of an adapter that has a hub name")
    trust_remote_code: bool = option(
        False, "run Python code that comes with the model (only if you trust its author)", flag_only=True
    )
    # batch: global batch = per-device batch × accumulation × world size
    per_device_train_batch_size: int = option(1, "rows per micro-batch and rank; more when they are short")
    gradient_accumulation_steps: int | None = option(None, "micro-batches per step and rank, at most; none: 1")
    global_batch_size: int | None = option(None, "rows per optimizer step over all ranks; derives the accumulation")
    micro_batch_tokens: int | None = option(None, "tokens that a card computes at once; none: what its memory allows")
    auto_micro_batch: bool = option(False, "out of memory: halve the micro-batch, double the accumulation, go on")
    # optimisation
    learning_rate: float = option(2e-4, "peak learning rate of AdamW")
    lr_scheduler_type: str = option("cosine", "shape after warm-up", choices=("cosine", "linear", "constant"))
    warmup_ratio: float = option(0.03, "share of all steps with rising learning rate")
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0 leaves them")
    num_train_epochs: float = option(1.0, "passes over the training rows")
    max_steps: int | None = option(None, "end after this many optimizer steps instead of num_train_epochs")
    train_longer: bool = option(False, "go on past the end of a run with a larger num_train_epochs or max_steps")
    early_stopping_patience: int | None = option(
        None, "end after this many evaluations in a row without a lower held-out loss; none: never"
    )
    deliver: str = option(
        "best", "adapter that the run leaves: best = lowest held-out loss, last = last step", choices=("best", "last")
    )
    seed: int = option(42, "decides adapter start, row order and dropout")
    # LoRA
    lora_r: int = option(8, "rank of the update")
    lora_alpha: int = option(16, "the update is scaled by lora_alpha / lora_r")
    lora_dropout: float = option(0.0, "dropout on the input of the update")
    target_modules: list[str] = option(["q_proj", "k_proj", "v_proj", "o_proj"], "linear layers that get an update")
    # numbers and memory
    dtype: str = option("auto", "of the base weights", choices=("auto", "float32", "bfloat16", "float16"))
    attn_implementation: str = option(
        "packed_sdpa", "attention over packed rows", choices=("packed_sdpa", "flash_attention_2")
    )
    fused: str = option(
        "auto",
        "auto: fewer, larger operators where the card has them, each compared at start; off: plain ones",
        choices=("auto", "off"),
    )
    deterministic: bool = option(False, "the same bits for the same work on the same cards; slower on some")
    gradient_checkpointing: bool = option(False, "recompute activations in backward: less memory, about a third slower")
    loss_chunk_tokens: int = option(1024, "target tokens whose logits are in memory at once; 0: all")
    pad_to_multiple_of: int = option(1, "round micro-batch lengths up (fewer shapes to compile on some cards)")
    # records and checkpoints, counted in optimizer steps
    logging_steps: int = option(1, "steps between lines of metrics.jsonl")
    eval_steps: int | None = option(None, "steps between evaluations; none: after each epoch")
    eval_on_start: bool = option(True, "evaluate before the first step, to have something to compare with")
    save_steps: int | None = option(None, "steps between checkpoints; none: after each epoch")
    save_total_limit: int = option(2, "newest checkpoints kept (the best one by eval_loss is kept as well)")
    resume_from_checkpoint: str | None = option("auto", "auto: newest complete one, if any; a path: that one")
    stop_at_step: int | None = option(None, "save and end at this step as a signal would; the schedule stays")
    overwrite_output_dir: bool = option(False, "delete the run that output_dir holds")
    report_to: list[str] = option(["tensorboard"], "trackers: tensorboard, wandb, swanlab, trackio or none")
    ddp_timeout: int = option(1860, "seconds after which a collective is an error; at 9/10, stacks and missing ranks")

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "max_steps",
                     "lora_alpha", "logging_steps", "eval_steps", "save_steps", "save_total_limit", "stop_at_step",
                     "early_stopping_patience", "micro_batch_tokens"):  # fmt: skip
            require(self, name, lambda value: 1 <= value <= LARGEST, f"from 1 to {LARGEST}")
        for name in ("lora_r", "pad_to_multiple_of"):
            require(self, name, lambda value: 1 <= value <= 65536, "from 1 to 65536")
        require(self, "ddp_timeout", lambda value: 1 <= value <= 2592000, "from 1 to 2592000 (30 days)")
        for name in ("learning_rate", "num_train_epochs"):
            require(self, name, lambda value: 0 < value < float("inf"), "above 0")
        for name in ("weight_decay", "max_grad_norm", "loss_chunk_tokens", "seed"):
            require(self, name, lambda value: 0 <= value < float("inf"), "0 or more")
        require(self, "seed", lambda value: value < 1 << 63, "below 2^63")
        require(self, "num_train_epochs", lambda value: value <= LARGEST, f"at most {LARGEST}")
        for name in ("lora_dropout", "warmup_ratio"):
            require(self, name, lambda value: 0 <= value < 1, "at least 0 and below 1")
        if not self.target_modules:
            raise UserError("target_modules is empty; name at least one linear layer, for example q_proj")
        trackers = ("tensorboard", "wandb", "swanlab", "trackio", "none")
        for tracker in self.report_to:
            if tracker not in trackers:
                raise UserError(
                    f"report_to: {tracker!r} is not one of {', '.join(trackers)}{did_you_mean(tracker, trackers)}"
                )

    def doubts(self, total_steps: int) -> list[str]:
        """What is allowed but seldom meant, one sentence each."""
        found = []
        if self.learning_rate >= 3e-3:
            found.append(
                f"learning_rate is {self.learning_rate:g}; LoRA runs at 3e-3 and above mostly diverge, the best ones are "
                "usually between 1e-4 and 1e-3"
            )
        if total_steps < 100 and not self.max_steps:
            found.append(
                f"{total_steps} steps are few: below about 100 an adapter is often still improving; raise num_train_epochs, "
                "or lower global_batch_size, and watch the held-out loss"
            )
        return found


def require(config: Any, name: str, holds: Callable[[Any], bool], expected: str) -> None:
    """Checks a setting that is not None. Raises: UserError with the name, the value and what was expected."""
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise UserError(f"{name} is {value}; it must be {expected}")


def _convert(name: str, value: Any, hint: Any, place: str) -> Any:
    """`value` (from YAML or the command line) as the type that a field declares. Raises: UserError."""
    optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if optional else [hint]
    if value is None or (optional and isinstance(value, str) and value.lower() in ("none", "null")):
        if optional:
            return None
        raise UserError(f"{place}: {name} has no value; expected {_type_name(hint)}")
    kind = kinds[0]
    if typing.get_origin(kind) is list:
        values = value if isinstance(value, (list, tuple)) else [value]
        (item,) = typing.get_args(kind)
        return [_convert(name, one, item, place) for one in values]
    if not isinstance(value, str):  # files and flags give text; lists and mappings have no place here
        raise UserError(f"{place}: {name} is {_short.repr(value)}; expected {_type_name(hint)}")
    if kind is str:
        return _check_text(name, value, place)
    convert = {bool: SWITCH.__getitem__, int: _whole_number, float: float}[kind]
    with contextlib.suppress(KeyError, ValueError):
        return convert(value.lower())
    raise UserError(f"{place}: {name} is {_short.repr(value)}; expected {_type_name(hint)}")


def _whole_number(text: str) -> int:
    """The number that a text like 8, 1e3 or 8.0 stands for, exactly. Raises: ValueError."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer() or abs(number) >= 1 << 53:  # beyond, a float is not exact
            raise
        return int(number)


def _check_text(name: str, text: str, place: str) -> str:
    """A text setting, `~` expanded where it is a path. Raises: UserError when no file could have that name."""
    if "\0" in text:
        raise UserError(f"{place}: {name} holds a NUL character, which no text may; type it again")
    if name.rsplit("_", 1)[-1] not in PATHS:
        return text
    if not text.strip():
        raise UserError(f"{place}: {name} is empty; give a path, or leave it out")
    if too_long := [part for part in text.split("/") if len(os.fsencode(part)) > NAME_BYTES]:
        raise UserError(
            f"{place}: {name} holds a name of {len(too_long[0])} characters ({_short.repr(too_long[0])}); file systems "
            f"allow {NAME_BYTES} bytes: give a shorter one"
        )
    return os.path.expanduser(text)


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    if typing.get_origin(hint) is list or typing.get_origin(kinds[0]) is list:
        return "a list"
    return names[kinds[0]] + (" or none" if len(typing.get_args(hint)) > 1 else "")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message} (--help lists all flags)")


def _parser(config_type: type, description: str) -> argparse.ArgumentParser:
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE.yaml", help="settings as YAML keys named like the flags; flags win")
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        is_list = "list" in str(hints[field.name])
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        text = field.metadata.get("help", "")
        shown = " ".join(default) if isinstance(default, list) else default
        text += " (required)" if required else f" (default: {shown})"
        if field.metadata.get("choices"):
            text += f" [{'|'.join(field.metadata['choices'])}]"
        arguments = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS, "metavar": "X"}
        if is_list:
            arguments["nargs"] = "+"
        elif hints[field.name] is bool:
            arguments.update(nargs="?", const=True, metavar="true|false")
            parser.add_argument(
                f"--no_{field.name}", dest=field.name, action="store_false", default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip
        parser.add_argument(f"--{field.name}", **arguments)
    return parser


class _Loader(yaml.SafeLoader):
    """YAML without keys that stand twice, of which PyYAML takes the last without a word."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below, as no setting has such a name
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _TextLoader(_Loader):
    """YAML whose values are the text as it was typed: `_convert` knows what each is to be, and loses nothing."""

    def construct_object(self, node, deep=False):
        if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null":
            return node.value
        return super().construct_object(node, deep=True)


def read_yaml(path: str | Path, loader: type = _Loader) -> dict[str, Any]:
    """The mapping in a YAML file. Raises: UserError with line and column when it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"config file {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        values = yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise UserError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"config file {path} is nested too deeply; expected lines of the form `key: value`") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config file {path} holds a {type(values).__name__}; expected lines of the form `key: value`")
    return values


def parse(config_type: type[Config], argv: list[str] | None = None, description: str = "") -> Config:
    """The settings in `argv` (default: the command line) and in the YAML file that its --config names; flags win.

    Raises: UserError for an unknown flag or key (the nearest name is suggested), a value of the wrong type or outside
    the choices, a missing required one. --help prints all flags and exits with status 0.
    """
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    hints = typing.get_type_hints(config_type)
    arguments, unknown = _parser(config_type, description).parse_known_args(argv)
    unknown = [word for word in unknown if word.startswith("--")] or unknown
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-").replace("-", "_")
        raise UserError(f"unknown argument {unknown[0]}{did_you_mean(name, fields)} (--help lists all flags)")
    given = vars(arguments)
    path = given.pop("config", None)
    values = {}
    if path is not None:
        for name, value in read_yaml(_check_text("config_path", path, "command line"), _TextLoader).items():
            if name not in fields:
                raise UserError(f"{path}: unknown key {_short.repr(name)}{did_you_mean(str(name), fields)}")
            if fields[name].metadata.get("flag_only"):
                raise UserError(
                    f"{path}: {name} may only stand on the command line, as a file may come from somebody else; take it "
                    f"out and give --{name}"
                )
            values[name] = _convert(name, value, hints[name], str(path))
    for name, value in given.items():
        value = str(value).lower() if isinstance(value, bool) else value
        values[name] = _convert(name, value, hints[name], "command line")
    for name, field in fields.items():
        choices = field.metadata.get("choices")
        if choices and name in values and values[name] not in (*choices, None):
            close = did_you_mean(str(values[name]), choices)
            raise UserError(f"{name} is {_short.repr(values[name])}; expected one of {', '.join(choices)}{close}")
    missing = [
        name for name, field in fields.items() if name not in values
        and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise UserError(
            f"missing: {', '.join('--' + name for name in missing)}; give flags, or keys of a --config file"
        )
    return config_type(**values)
