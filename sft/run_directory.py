"""A run's directory: whether it may be begun, continued or replaced, and what is written into it.

RUN/provenance.json is the first file to be written and the last to be deleted: a directory with it holds a run.
"""

import itertools
import math
import os
import re
import shutil
import socket
import sys
import tempfile
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

from accelerate.utils import gather_object
from filelock import FileLock, Timeout

from sft import artifacts, batching, checkpoint, device, schemas
from sft.checkpoint import Checkpoint
from sft.config import TrainConfig
from sft.errors import UserError
from sft.journal import Journal

LOCK = ".lock"
RESULTS = ("adapter_config.json", "adapter_model.safetensors")  # what PEFT loads
OWN = (  # names of what train.py and eval.py write into a run's directory, as patterns; directories end with /
    "provenance.json", "config.json", "environment.json", "metrics.jsonl", "summary.json", "loss.png", "README.md", *RESULTS,
    "stack-rank-*.txt", "non_finite_step-*.jsonl", ".*.tmp-*", ".*.old-*",
    "checkpoint-*/", *(f"checkpoint-*/{name}" for name in checkpoint.FILES),
    "set-aside-*/", "set-aside-*/metrics.jsonl", *(f"set-aside-*/{name}" for name in checkpoint.FILES), "tensorboard/", "tensorboard/*",
    "eval/", "eval/report*", "eval/predictions.jsonl", "eval/*.png", "eval/.*.tmp-*", "eval/.partial-*.jsonl",
)  # fmt: skip
BATCH_SETTINGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
DECIDING_SETTINGS = (  # the settings that decide the numbers of a run, beside what it is made from
    "adapter_name_or_path", "seed", "learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay",
    "max_grad_norm", "lora_r", "lora_alpha", "lora_dropout", "target_modules",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """How a run starts: how its global batch is laid out, and the checkpoint that it goes on from, if any."""

    provenance: dict  # all that decides the run's numbers
    gradient_accumulation_steps: int
    known: bool  # the directory holds a run already
    checkpoint: Checkpoint | None
    complete: bool  # nothing is left to do


class RunDirectory:
    """The directory of one run, opened once on every rank; the main process alone reads and writes it.

    start: fresh, going on from a checkpoint, or complete; the constructor raises what refuses the run.
    journal: metrics.jsonl and the trackers, from `begin` on.
    """

    def __init__(self, settings: TrainConfig, provenance: dict, rows: int, accelerator):
        """Looks at what is there, on every rank, and changes nothing; `begin` does, once model and adapter are loaded.

        rows: of the training split. Raises: UserError on every rank when ranks differ in what they train with, when the
        directory holds something else or a run made from something else, or when the batch sizes disagree.
        """
        self.path, self.settings, self.accelerator = Path(settings.output_dir), settings, accelerator
        check_ranks_alike(settings, provenance)
        ranks = accelerator.num_processes
        self.start = device.run_on_main(accelerator, lambda: find_start(settings, provenance, rows, ranks))
        self.provenance = self.start.provenance
        self.total_steps = self.provenance["total_steps"]
        self.last_checkpoint = self.start.checkpoint.path if self.start.checkpoint else None
        self.journal = Journal(self.path, accelerator, self.total_steps, asdict(settings))

    @property
    def first_step(self) -> int:
        """How many steps have been trained."""
        return self.start.checkpoint.step if self.start.checkpoint else 0

    def begin(self, environment: dict) -> None:
        """Writes what the run is made from and on, and opens the journal. Call it on every rank."""
        device.run_on_main(self.accelerator, lambda: self._begin(environment))

    def _begin(self, environment: dict) -> None:
        claim(self.path)
        if is_run(self.path) and not self.start.known:
            raise UserError(f"another train.py has run in {self.path} meanwhile; the same command goes on from there")
        remove_leftovers(self.path)
        with artifacts.explained_writing(self.path):
            if self.settings.overwrite_output_dir:
                kept = remove_run(self.path)
                if kept:
                    print(f"Left in {self.path}, as train.py did not write it: {', '.join(kept)}.")
            if self.settings.resume_from_checkpoint != "auto" and self.start.checkpoint:
                self._go_back()
            (self.path / "summary.json").unlink(missing_ok=True)
        artifacts.write_json(self.path / "provenance.json", self.provenance)
        artifacts.write_json(self.path / "config.json", asdict(self.settings))
        artifacts.write_json(self.path / "environment.json", environment)
        self.journal.open(self.first_step)

    def _go_back(self) -> None:
        """Sets aside what lies after the checkpoint that the user has named, so that `auto` later means this run."""
        later = [path for path in checkpoint.directories(self.path) if checkpoint.step_of(path) > self.first_step]
        if not later:
            return
        numbers = (number for number in itertools.count(1) if not (self.path / f"set-aside-{number}").exists())
        aside = self.path / f"set-aside-{next(numbers)}"
        aside.mkdir()
        if (self.path / "metrics.jsonl").is_file():
            shutil.copy2(self.path / "metrics.jsonl", aside)
        for path in later:
            path.rename(aside / path.name)
        print(
            f"Going back to step {self.first_step}: {', '.join(path.name for path in later)} and the records as they were "
            f"are in {aside}."
        )

    def save(self, step: int, progress: dict, learner, best_adapter: dict | None) -> None:
        """Writes checkpoint-<step>, then removes what is no longer kept. Call it on every rank; all wait for it.

        best_adapter: the tensors of the adapter with the lowest held-out loss, when that is not this step's.
        """
        files = checkpoint.collect(learner.model, learner.peft_model, learner.optimizer.optimizer)
        files |= {checkpoint.BEST: best_adapter} if best_adapter else {}
        path = self.path / f"checkpoint-{step}"

        def write() -> None:
            self.journal.sync()
            checkpoint.write(path, {**progress, "step": step, "provenance": self.provenance}, files, learner.peft_model)
            checkpoint.remove_old(self.path, step, self.settings.save_total_limit)

        device.run_on_main(self.accelerator, write)
        self.last_checkpoint = path

    def deliver(self, best: bool) -> None:
        """Puts the last checkpoint's adapter, or the best one that it carries, at the top of the directory, where PEFT
        looks for it; on the main process."""
        files = {RESULTS[1]: checkpoint.BEST if best else RESULTS[1], RESULTS[0]: RESULTS[0]}
        with (
            artifacts.explained_writing(self.path),
            tempfile.TemporaryDirectory(dir=self.path, prefix=".adapter.tmp-") as folder,
        ):
            for name, source in files.items():
                shutil.copy2(self.last_checkpoint / source, Path(folder) / name)
                artifacts.sync_file(Path(folder) / name)
                os.replace(Path(folder) / name, self.path / name)
            artifacts.sync_directory(self.path)

    def where_to_go_on(self) -> str:
        """Words for where a failed run can go on from; known on every rank."""
        return (
            f"The last checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "There is no checkpoint yet"
        )


def describe_inputs(settings: TrainConfig, manifest: dict, dtype, mixed_precision: str) -> dict:
    """The settings that decide a run's numbers, and what its data set was made from, for provenance.json."""
    return {
        "model_name_or_path": settings.model_name_or_path,
        "dataset_sha256": manifest["dataset_sha256"],
        "tokenizer_sha256": manifest["tokenizer_sha256"],
        "template_sha256": manifest["template_sha256"],
        "base_dtype": str(dtype).removeprefix("torch."),
        "mixed_precision": mixed_precision,  # of the forward: no, bf16 or fp16
        **{name: getattr(settings, name) for name in DECIDING_SETTINGS},
    }


def adapter_sha256(directory: str) -> str:
    """Hash of an adapter's weights and of the settings that PEFT reads with them."""
    files = [Path(directory) / name for name in RESULTS]
    return artifacts.sha256_json([artifacts.sha256_file(file) for file in files if file.is_file()])


def check_ranks_alike(settings: TrainConfig, provenance: dict) -> None:
    """Refuses servers that would train on different files or with different settings. One object collective.

    Nothing else would tell: each rank reads rows and base weights from its own server's disk, and DDP sends only the
    adapter from rank 0. Raises: UserError on every rank, naming what differs and where.
    """
    mine = {**asdict(settings), **provenance}
    # The same files may lie elsewhere.
    elsewhere = ("dataset_dir", "output_dir", "resume_from_checkpoint")
    for name in (*elsewhere, *(("model_name_or_path", "model_commit", "revision") if mine["model_sha256"] else ())):
        mine.pop(name, None)
    ranks = gather_object([(socket.gethostname(), mine)])
    first_host, first = ranks[0]
    for rank, (host, other) in enumerate(ranks):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise UserError(
                    f"{name} is {first.get(name)} on rank 0 ({first_host}) but {other.get(name)} on rank {rank} ({host}); "
                    "every server needs the same data set, base model and settings"
                )


def find_start(settings: TrainConfig, provenance: dict, rows: int, world_size: int) -> Start:
    """How a run with these settings starts on this many ranks; locks a directory that holds a run.

    Raises: UserError when the directory holds something else, or a run made from something else.
    """
    run_dir, resume_from = Path(settings.output_dir), settings.resume_from_checkpoint
    known = is_run(run_dir)
    check_usable(settings, run_dir, known)
    artifacts.refuse_links(run_dir)
    accumulation, global_batch_size = choose_batch_size(settings, world_size)
    steps = settings.max_steps or math.ceil(settings.num_train_epochs * math.ceil(rows / global_batch_size))
    provenance = {**provenance, "global_batch_size": global_batch_size, "total_steps": steps}
    if settings.overwrite_output_dir:
        return Start(provenance, accumulation, known, None, False)
    if known:
        claim(run_dir)
        recorded = artifacts.read_json(run_dir / "provenance.json", schemas.PROVENANCE)
        provenance = lengthen(provenance, recorded, settings)
        refuse_another_run(recorded, provenance, f"output_dir {run_dir}")
        remove_leftovers(run_dir)
    if resume_from not in (None, "auto"):
        found, place = checkpoint.load(Path(resume_from)), "resume_from_checkpoint"
        provenance = lengthen(provenance, found.progress["provenance"], settings)
    else:
        found, place = checkpoint.newest(run_dir, warn=print_warning), "checkpoint"
    if found:
        refuse_another_run(found.progress["provenance"], provenance, f"{place} {found.path}")
    ended = found is not None and (found.step >= steps or out_of_patience(settings, found.progress))
    complete = ended and resume_from in (None, "auto") and not unfinished(run_dir)
    return Start(provenance, accumulation, known, found, complete)


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def lengthen(provenance: dict, before: dict, settings: TrainConfig) -> dict:
    """The provenance of a run that may have had fewer steps in all before: with train_longer, now or at an earlier start."""
    former = list(before.get("former_total_steps", []))
    if settings.train_longer and before.get("total_steps", math.inf) < provenance["total_steps"]:
        former.append(before["total_steps"])
    return {**provenance, "former_total_steps": former} if former else provenance


def out_of_patience(settings: TrainConfig, progress: dict) -> bool:
    """Whether so many evaluations have passed without a lower held-out loss that early stopping ends the run."""
    patience = settings.early_stopping_patience
    return patience is not None and progress.get("evaluations_since_best", 0) >= patience


def check_usable(settings: TrainConfig, run_dir: Path, known: bool) -> None:
    """Raises: UserError when the directory holds anything but a run, or a run that may not be touched."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"output_dir {run_dir} is a file; choose another directory")
    there = sorted(run_dir.iterdir()) if run_dir.exists() else []
    if not known and not all(is_leftover(path) for path in there):
        raise UserError(f"output_dir {run_dir} is not empty and holds no run of train.py; choose another directory")
    if known and settings.resume_from_checkpoint is None and not settings.overwrite_output_dir:
        raise UserError(
            f"output_dir {run_dir} holds a run; continue it with resume_from_checkpoint: auto, delete it with "
            "overwrite_output_dir: true, or choose another directory"
        )


def choose_batch_size(settings: TrainConfig, world_size: int) -> tuple[int, int]:
    """(accumulation, global batch size). A run that goes on keeps its global batch: the same settings give another
    accumulation on another number of cards. Raises: UserError when that cannot be."""
    kept = begun_global_batch_size(settings)
    try:
        return batching.resolve_batch_size(
            settings.per_device_train_batch_size,
            None if kept else settings.gradient_accumulation_steps,
            kept or settings.global_batch_size,
            world_size,
        )
    except UserError as error:
        if not kept:
            raise
        raise UserError(f"{settings.output_dir} began with {kept} rows per step and must keep them: {error}") from error


def begun_global_batch_size(settings: TrainConfig) -> int | None:
    """The global batch of the run that these settings go on with, when they ask for the same batch as it did."""
    resume_from = settings.resume_from_checkpoint
    begun = Path(settings.output_dir) if resume_from == "auto" else Path(resume_from or "").parent
    if settings.overwrite_output_dir or resume_from is None:
        return None
    if not is_run(begun) or not (begun / "config.json").is_file():  # none, or killed as it began
        return None
    asked = artifacts.read_json(begun / "config.json", schemas.CONFIG)
    provenance = artifacts.read_json(begun / "provenance.json", schemas.PROVENANCE)
    same = all(asked.get(name) == getattr(settings, name) for name in BATCH_SETTINGS)
    return provenance["global_batch_size"] if same else None


def refuse_another_run(before: dict, now: dict, place: str) -> None:
    """Compares what two runs were made from; a moved but identical base model is the same. Raises: UserError.

    What an earlier version of this program did not record is not compared.
    """
    same_model = before.get("model_sha256") == now["model_sha256"] is not None
    allowed = {"former_total_steps"} | ({"model_name_or_path"} if same_model else set())
    if before.get("total_steps") in now.get("former_total_steps", []):
        allowed.add("total_steps")
    if same_model and not now.get("model_commit"):  # a copy of what the hub has
        allowed.add("model_commit")
    unknown = {key for key in before if key.endswith(("_sha256", "_commit")) and before[key] is None}
    changed = [
        key for key in sorted(set(before) | set(now))
        if key in before and before[key] != now.get(key) and key not in allowed | unknown
    ]  # fmt: skip
    if not changed:
        return
    differences = "; ".join(f"{key} was {before[key]}, now {now.get(key)}" for key in changed)
    longer = changed == ["total_steps"] and before["total_steps"] < now["total_steps"]
    remedy = "train_longer: true to train on past its end (docs/running.md, Training on), " if longer else ""
    if "model_commit" in changed:
        remedy += f"revision: {before['model_commit']} to load the same model again, "
    raise UserError(
        f"{place} holds another run: {differences}. Give the same settings to continue it, {remedy}"
        "overwrite_output_dir: true to delete it, or another output_dir"
    )


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run of train.py, which a file of that name alone does not make it."""
    try:
        artifacts.read_json(directory / "provenance.json", schemas.PROVENANCE)
    except UserError:
        return False
    return True


def unfinished(run_dir: Path) -> str:
    """What a run's directory lacks of a finished run's results, in words; "" when nothing. Its adapter and the settings
    of it that PEFT reads must be those that train.py wrote."""
    missing = [name for name in ("provenance.json", *RESULTS, "summary.json") if not (run_dir / name).is_file()]
    if missing:
        return f"it has no {', '.join(missing)}"
    summary = artifacts.read_json(run_dir / "summary.json", schemas.SUMMARY)
    for key, name in (("adapter_config_sha256", RESULTS[0]), ("adapter_sha256", RESULTS[1])):
        if summary.get(key) not in (None, artifacts.sha256_file(run_dir / name)):
            return f"its {name} is damaged or not the one that it wrote"
    return ""


def remove_run(run_dir: Path) -> list[str]:
    """Deletes what train.py and eval.py wrote into a run's directory, provenance.json last. Returns what is left there."""
    for path in sorted(run_dir.rglob("*"), key=lambda path: (path.name == "provenance.json", -len(path.parts))):
        name = path.relative_to(run_dir).as_posix()
        if path.is_dir() and not path.is_symlink():
            if any(fnmatch(f"{name}/", pattern) for pattern in OWN) and not any(path.iterdir()):
                path.rmdir()
        elif any(fnmatch(name, pattern) for pattern in OWN):
            path.unlink()
    return sorted(path.name for path in run_dir.iterdir() if path.name != LOCK)


def is_leftover(path: Path) -> bool:
    """Whether a file or directory is what a killed process was writing, or the lock."""
    return path.name == LOCK or re.fullmatch(r"\..+\.(tmp|old)-\w+", path.name) is not None


def remove_leftovers(run_dir: Path) -> None:
    """Deletes the temporary directories and files that a killed run left in its run directory."""
    for path in run_dir.glob(".*.tmp-*"):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    for path in run_dir.glob(".*.old-*"):
        if path.is_symlink():
            path.unlink()
            continue
        for inside in path.iterdir():  # killed between the two renames of a replacement: put the old one back
            if not (run_dir / inside.name).exists():
                inside.rename(run_dir / inside.name)
        shutil.rmtree(path, ignore_errors=True)


_locks: dict[Path, FileLock] = {}  # held until the process ends; the kernel then lets go, however it ends


def claim(run_dir: Path, wait_s: float = 60.0) -> None:
    """Makes this process the only one that writes a run directory, until it ends.

    Ranks outlive a launcher that was killed and still save: a new start waits for them.
    Raises: UserError naming the process that has the directory.
    """
    if run_dir.resolve() in _locks:
        return
    file = run_dir / LOCK
    with artifacts.explained_writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(file), timeout=wait_s, fallback_to_soft=False)  # a soft lock outlives a killed process
    try:
        lock.acquire()
    except Timeout:
        holder = file.read_text(encoding="utf-8", errors="replace")[:200]
        raise UserError(
            f"{run_dir} is being written by {holder or 'another process'}; wait for it or end it, or choose another output_dir"
        ) from None
    except PermissionError as error:
        raise UserError(f"could not write {file}: {error.strerror}; choose another output_dir") from error
    except OSError as error:  # a file system without locks
        print(f"warning: {run_dir} cannot be locked ({error.strerror}): start one run in it at a time", file=sys.stderr)
    _locks[run_dir.resolve()] = lock
    with artifacts.explained_writing(file):
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
