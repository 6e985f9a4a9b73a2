"""Checkpoints: adapter, optimizer and progress, each file with its checksum. Never the frozen base.

A checkpoint is a directory checkpoint-<step> that appears complete, by rename, or not at all.
"""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from sft import schemas
from sft.artifacts import new_directory, read_json, sha256_file, write_json
from sft.errors import UserError
from sft.modeling import adapter_tensors, full_tensor, read_adapter, trainable_parameters, write_adapter, write_tensors

CHECKSUMS = "checksums.json"
ADAPTER, OPTIMIZER, BEST = "adapter_model.safetensors", "optimizer.safetensors", "best_adapter.safetensors"
FILES = ("adapter_config.json", ADAPTER, OPTIMIZER, BEST, "progress.json", CHECKSUMS)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `progress` is the JSON that the run put into it."""

    path: Path
    step: int
    progress: dict


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name, whole tensors on CPU ({} before the first step). Call it on every rank."""
    tensors = {}
    for name, parameter in trainable_parameters(model).items():
        state = optimizer.state.get(parameter)
        if state:
            for moment in MOMENTS:
                tensors[f"{name}.{moment}"] = full_tensor(state[moment]).contiguous()
    return tensors


def restore_optimizer(checkpoint: "Checkpoint", model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives every rank the optimizer state that `save` wrote, cut to its shard where parameters are sharded.

    The main process reads the file, which may lie on a disk of the first server, and broadcasts it: call it on every rank.
    """
    tensors = {}
    if PartialState().is_main_process:
        tensors = load_file(str(checkpoint.path / "optimizer.safetensors"))
        expected = {
            f"{name}.{moment}": tuple(parameter.shape)
            for name, parameter in trainable_parameters(model).items()
            for moment in MOMENTS
        }
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != expected:
            raise RuntimeError(f"{checkpoint.path / 'optimizer.safetensors'} does not fit the model's adapter")
    for name, parameter in trainable_parameters(model).items():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(checkpoint.step))
        for moment in MOMENTS:
            whole = tensors.get(f"{name}.{moment}", torch.empty(parameter.shape, dtype=parameter.dtype))
            state[moment] = shard_like(broadcast(whole.to(parameter.device)), parameter)


def restore_adapter(checkpoint: "Checkpoint", peft_model: PeftModel) -> None:
    """Loads a checkpoint's adapter on the main process and broadcasts it, before the model is wrapped for the ranks."""
    if PartialState().is_main_process:
        read_adapter(checkpoint.path / "adapter_model.safetensors", peft_model)
    for parameter in trainable_parameters(peft_model).values():
        parameter.data.copy_(broadcast(parameter.data.to(PartialState().device)))


def shard_like(whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """`whole`, or this rank's shard of it when the parameter is a DTensor."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def collect(model: torch.nn.Module, peft_model: PeftModel, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """The tensors of a checkpoint by file and name, whole and on the CPU. Call it on every rank."""
    return {ADAPTER: adapter_tensors(model, peft_model), OPTIMIZER: optimizer_tensors(model, optimizer)}


def write(path: Path, progress: dict, files: dict[str, dict], peft_model: PeftModel) -> None:
    """Writes the checkpoint directory `path`, on the main process; files: what `collect` gave, and perhaps BEST.

    Raises: UserError when the file system refuses.
    """
    with new_directory(path, replace=True) as directory:
        write_adapter(directory, files[ADAPTER], peft_model)
        for name, tensors in files.items():
            if name != ADAPTER:
                write_tensors(directory / name, tensors)
        write_json(directory / "progress.json", progress)
        names = sorted(p.name for p in directory.iterdir())
        write_json(directory / CHECKSUMS, {name: sha256_file(directory / name) for name in names})


def read_best(checkpoint: "Checkpoint | None") -> dict | None:
    """The adapter with the lowest held-out loss up to a checkpoint, which it holds itself; None when it does not, as when
    there was no evaluation yet or the run was to deliver its last adapter. On the main process."""
    best = checkpoint.progress.get("best") if checkpoint else None
    if not best:
        return None
    file = checkpoint.path / (ADAPTER if best["step"] == checkpoint.step else BEST)
    return load_file(str(file)) if file.is_file() else None


def problem(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, in words; None when every file has its checksum."""
    if not (path / CHECKSUMS).is_file():
        return f"{path} has no {CHECKSUMS}"
    try:
        checksums = read_json(path / CHECKSUMS, schemas.CHECKSUMS)
    except UserError as error:
        return str(error)
    expected_files = {"progress.json", "adapter_model.safetensors", "optimizer.safetensors"}
    if not expected_files <= set(checksums):
        return f"{path / CHECKSUMS} does not list the files of a checkpoint"
    for name, expected in checksums.items():
        if Path(name).name != name:
            return f"{path / CHECKSUMS} names a file outside the checkpoint: {name}"
        if not (path / name).is_file():
            return f"{path / name} is missing"
        if sha256_file(path / name) != expected:
            return f"{path / name} does not have its checksum: it is damaged"
        if name.endswith(".safetensors") and not is_safetensors(path / name):
            return f"{path / name} is not a safetensors file; nothing else is loaded, as unpickling runs code"
    try:
        read_json(path / "progress.json", schemas.PROGRESS)
    except UserError as error:
        return str(error)
    return None


def is_safetensors(path: Path) -> bool:
    """Whether a file has a valid safetensors header."""
    try:
        with safe_open(str(path), framework="pt"):
            return True
    except SafetensorError:
        return False


def step_of(path: Path) -> int:
    """The step that a checkpoint's directory is named after."""
    return int(path.name.split("-")[1])


def directories(run_dir: Path) -> list[Path]:
    """Checkpoint directories of a run, by rising step, complete or not."""
    return sorted((p for p in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)), key=step_of)


def load(path: Path) -> Checkpoint:
    """Reads and verifies one checkpoint. Raises: UserError saying what is missing or damaged."""
    if not path.is_dir():
        raise UserError(f"resume_from_checkpoint {path} is not a directory; give a checkpoint-<step> directory or auto")
    if wrong := problem(path):
        raise UserError(f"cannot resume: {wrong}; choose an earlier checkpoint, or auto for the newest complete one")
    progress = read_json(path / "progress.json", schemas.PROGRESS)
    return Checkpoint(path, progress["step"], progress)


def newest(run_dir: Path, warn=print) -> Checkpoint | None:
    """The newest complete checkpoint of a run; damaged ones are named through `warn` and passed over."""
    for path in reversed(directories(run_dir)):
        if wrong := problem(path):
            warn(f"skipping a damaged checkpoint: {wrong}")
        else:
            return load(path)
    if directories(run_dir):
        warn(f"no usable checkpoint is left in {run_dir}: starting again from step 0")
    return None


def remove_old(run_dir: Path, step: int, keep: int) -> None:
    """Deletes the oldest checkpoints beyond `keep`, sparing the one with the lowest eval_loss.

    Call it after checkpoint-<step> is complete. Later ones, which a run that goes on from an earlier checkpoint leaves
    behind it or damaged ones, count as nothing and stay until they are written again.
    """
    paths = [path for path in directories(run_dir) if step_of(path) <= step]
    losses = {path: loss for path in paths if (loss := eval_loss(path)) is not None}
    best = min(losses, key=lambda path: losses[path], default=None)
    for path in paths[:-keep]:
        if path != best:
            doomed = run_dir / f".{path.name}.tmp-deleted"  # a name that remove_leftovers knows, should this be killed
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)


def eval_loss(path: Path) -> float | None:
    """The held-out loss that was measured at the step of a checkpoint, if it was."""
    try:
        loss = read_json(path / "progress.json", schemas.PROGRESS).get("eval_loss")
    except UserError:  # damaged: never the best
        return None
    return loss if loss is not None and math.isfinite(loss) else None
