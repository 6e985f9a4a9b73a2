"""What a run is made from, and whether its directory may be begun, continued or replaced."""

import shutil
import socket
import sys
from dataclasses import asdict
from pathlib import Path

from accelerate.utils import gather_object

from sft import artifacts, checkpoint
from sft.config import TrainConfig
from sft.errors import UserError


def begun_global_batch_size(settings: TrainConfig, run_dir: Path) -> int | None:
    """The global batch of the run that these settings go on with, when they ask for the same batch as it did."""
    begun = run_dir if settings.resume_from_checkpoint == "auto" else Path(settings.resume_from_checkpoint or "").parent
    if settings.overwrite_output_dir or settings.resume_from_checkpoint is None:
        return None
    if not is_run(begun) or not (begun / "config.json").is_file():  # none, or killed as it began
        return None
    asked, provenance = artifacts.read_json(begun / "config.json"), artifacts.read_json(begun / "provenance.json")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
    same = all(asked.get(name) == getattr(settings, name) for name in names)
    return provenance["global_batch_size"] if same else None


def describe(settings, manifest, tokenizer, plan, total_steps: int, dtype) -> dict:
    """All that decides the numbers of a run, for provenance.json and for refusing to continue a different one.

    Raises: UserError when the data set was made with another tokenizer or chat template.
    """
    for what, found in (
        ("tokenizer", artifacts.tokenizer_sha256(tokenizer)),
        ("template", artifacts.template_sha256(tokenizer)),
    ):
        if manifest[f"{what}_sha256"] != found:
            raise UserError(
                f"{settings.dataset_dir} was made with another {what} than {settings.model_name_or_path} has "
                f"({what}_sha256 {manifest[f'{what}_sha256'][:12]}… and {found[:12]}…); make the data set again with "
                f"data_prep.py --model_name_or_path {settings.model_name_or_path}"
            )
    return {
        "model_name_or_path": settings.model_name_or_path,
        "model_sha256": artifacts.model_sha256(settings.model_name_or_path),
        "dataset_sha256": manifest["dataset_sha256"],
        "tokenizer_sha256": manifest["tokenizer_sha256"],
        "template_sha256": manifest["template_sha256"],
        "global_batch_size": plan.global_batch_size,
        "total_steps": total_steps,
        "base_dtype": str(dtype).removeprefix("torch."),
        **{
            name: getattr(settings, name)
            for name in (
                "adapter_name_or_path", "seed", "learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay",
                "max_grad_norm", "lora_r", "lora_alpha", "lora_dropout", "target_modules",
            )
        },
    }  # fmt: skip


def check_ranks_alike(settings: TrainConfig, provenance: dict) -> None:
    """Refuses servers that would train on different files or with different settings. One object collective.

    Nothing else would tell: each rank reads rows and base weights from its own server's disk, and DDP sends only the
    adapter from rank 0. Raises: UserError on every rank, naming what differs and where.
    """
    mine = {**asdict(settings), **provenance}
    if mine["model_sha256"]:  # the same files may lie elsewhere
        del mine["model_name_or_path"]
    for name in ("dataset_dir", "output_dir", "resume_from_checkpoint"):
        del mine[name]
    ranks = gather_object([(socket.gethostname(), mine)])
    for rank, (host, other) in enumerate(ranks):
        first_host, first = ranks[0]
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise UserError(
                    f"{name} is {first.get(name)} on rank 0 ({first_host}) but {other.get(name)} on rank {rank} ({host}); "
                    "every server needs the same data set, base model and settings"
                )


def find_progress(settings: TrainConfig, run_dir: Path, provenance: dict, total_steps: int):
    """The checkpoint to go on from, None for a fresh start, or "complete"; changes nothing on disk.

    Raises: UserError when the directory holds something else, or a run made from something else.
    """
    found_run = is_run(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"output_dir {run_dir} is a file; choose another directory")
    if run_dir.exists() and not found_run and not all(checkpoint.is_leftover(path) for path in run_dir.iterdir()):
        raise UserError(f"output_dir {run_dir} is not empty and holds no run; choose another directory")
    if settings.overwrite_output_dir:
        return None
    if found_run and settings.resume_from_checkpoint is None:
        raise UserError(
            f"output_dir {run_dir} holds a run; continue it with resume_from_checkpoint: auto, delete it with "
            "overwrite_output_dir: true, or choose another directory"
        )
    if found_run:
        checkpoint.claim(run_dir)
        refuse_another_run(artifacts.read_json(run_dir / "provenance.json"), provenance, f"output_dir {run_dir}")
        checkpoint.remove_leftovers(run_dir)
    if settings.resume_from_checkpoint not in (None, "auto"):
        found = checkpoint.load(Path(settings.resume_from_checkpoint))
        refuse_another_run(found.progress["provenance"], provenance, f"resume_from_checkpoint {found.path}")
        return found
    found = checkpoint.newest(run_dir, warn=lambda text: print(f"warning: {text}", file=sys.stderr, flush=True))
    if found:
        refuse_another_run(found.progress["provenance"], provenance, f"checkpoint {found.path}")
    return "complete" if found and found.step >= total_steps and not unfinished(run_dir) else found


def unfinished(run_dir: Path) -> str:
    """What a run's directory lacks of a finished run's results, in words; "" when nothing."""
    names = ("provenance.json", "adapter_config.json", "adapter_model.safetensors", "summary.json")
    missing = [name for name in names if not (run_dir / name).is_file()]
    if missing:
        return f"it has no {', '.join(missing)}"
    found = artifacts.sha256_file(run_dir / "adapter_model.safetensors")
    if artifacts.read_json(run_dir / "summary.json").get("adapter_sha256", found) != found:
        return "its adapter_model.safetensors is damaged or not the one that it wrote"
    return ""


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run of this script; the file is the first to be written and the last to be deleted."""
    return (directory / "provenance.json").is_file()


def refuse_another_run(before: dict, now: dict, place: str) -> None:
    """Compares what two runs were made from; a moved but identical base model is the same. Raises: UserError."""
    same_model = before.get("model_sha256") == now["model_sha256"] is not None
    changed = [
        f"{key} was {before.get(key)}, now {now.get(key)}"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key) and not (key == "model_name_or_path" and same_model)
    ]
    if changed:
        raise UserError(
            f"{place} holds another run: {'; '.join(changed)}. Give the same settings to continue it, "
            "overwrite_output_dir: true to delete it, or another output_dir"
        )


def begin_run(settings: TrainConfig, run_dir: Path, provenance: dict, environment: dict, known: bool) -> None:
    """Makes the run directory and writes what the run is made from and on.

    known: whether it held a run when `find_progress` looked. Raises: UserError when another process has begun one since.
    """
    checkpoint.claim(run_dir)
    if is_run(run_dir) and not known:
        raise UserError(f"another train.py has run in {run_dir} meanwhile; the same command goes on from there")
    checkpoint.remove_leftovers(run_dir)
    with artifacts.explained_writing(run_dir):
        if settings.overwrite_output_dir:
            for path in sorted(run_dir.iterdir(), key=lambda path: path.name == "provenance.json"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != checkpoint.LOCK:
                    path.unlink()
        (run_dir / "summary.json").unlink(missing_ok=True)
    artifacts.write_json(run_dir / "provenance.json", provenance)
    artifacts.write_json(run_dir / "config.json", asdict(settings))
    artifacts.write_json(run_dir / "environment.json", environment)


def last_checkpoint(path: Path | None) -> str:
    """Words for where a failed run can go on from; known on every rank, also where the directory is on another server."""
    return f"The last checkpoint is {path}" if path else "There is no checkpoint yet"
