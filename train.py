"""LoRA fine-tuning of a chat model on a data set made by data_prep.py, on any number of cards.

    accelerate launch --config_file accelerate_configs/npu_2.yaml train.py --config configs/qwen2.5-7b.yaml

One optimizer step trains the rows that `BatchPlan` names for it, whatever the number of cards; its loss is Σ nats /
Σ target tokens over all of them. `main` sets the run up, `train` is the loop, `finish` leaves the results.
"""

from sft import device, errors

if __name__ == "__main__":
    device.set_environment_defaults()  # torch reads them when it is imported
    device.follow_launcher()

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from sft import artifacts, batching, checkpoint, config, evaluation, modeling, origin, weights
from sft.card import model_card
from sft.config import TrainConfig
from sft.errors import RunFailed, UserError
from sft.journal import Journal, check_trackers, read_metrics
from sft.tokenizer import load_tokenizer
from sft.watchdog import Watchdog


def main() -> None:
    settings = config.parse(TrainConfig, description=__doc__)
    check_trackers(settings.report_to)
    run_dir = Path(settings.output_dir)
    accelerator = device.start(settings.ddp_timeout, tuple(settings.report_to), str(run_dir / "tensorboard"))
    fine_tune(settings, run_dir, accelerator)
    device.end(accelerator)


def fine_tune(settings: TrainConfig, run_dir: Path, accelerator) -> None:
    """One run from its data set to its results, or the rest of it."""
    # What the run is made from decides whether an earlier run in the same directory may be continued.
    begun_with = device.run_on_main(accelerator, lambda: origin.begun_global_batch_size(settings, run_dir))
    train_rows, eval_rows, plan, total_steps, dtype, provenance = device.run_on_all(
        lambda: read_inputs(settings, accelerator, begun_with)
    )
    accelerator.print(
        f"{len(train_rows)} training rows, {len(eval_rows)} held out. Global batch {plan.global_batch_size} = "
        f"{plan.per_device_train_batch_size} per device × {plan.gradient_accumulation_steps} accumulation × "
        f"{plan.world_size} ranks on {accelerator.device.type}: {plan.steps_per_epoch} steps an epoch, {total_steps} in all."
    )
    origin.check_ranks_alike(settings, provenance)
    known = origin.is_run(run_dir)
    resumed = device.run_on_main(accelerator, lambda: origin.find_progress(settings, run_dir, provenance, total_steps))
    if resumed == "complete":
        accelerator.print(
            f"{run_dir} is complete at step {total_steps}: nothing to do (overwrite_output_dir starts anew)."
        )
        return

    # The frozen base with its adapter. Accelerate wraps model and optimizer for the ranks and deals out the batches.
    base = modeling.load_base(
        settings.model_name_or_path, dtype, accelerator.device, settings.attn_implementation, settings.trust_remote_code,
        empty=device.is_sharded(accelerator),
    )  # fmt: skip
    peft_model = put_adapter_on(base, settings)
    if resumed:
        checkpoint.restore_adapter(resumed, peft_model)
    sizes = modeling.parameter_counts(peft_model)
    accelerator.print(f"{sizes[0]:,} trainable of {sizes[1]:,} parameters, base weights {dtype}.")
    optimizer = torch.optim.AdamW(
        modeling.trainable_parameters(peft_model).values(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )
    model = modeling.TargetLoss(peft_model, settings.loss_chunk_tokens)
    model, optimizer = accelerator.prepare(model, optimizer)
    weights.fill_from_disk(model, settings.model_name_or_path, accelerator.device)
    sizes += (modeling.held_parameters(model),)
    if settings.auto_micro_batch:
        plan = fit_micro_batch(plan, model, train_rows, accelerator)
    first_step = resumed.step if resumed else 0
    loader = accelerator.prepare(
        DataLoader(
            train_rows.with_format("numpy", columns=["input_ids", "labels"]),
            batch_sampler=batching.StepSampler(plan, first_step, total_steps),
            collate_fn=partial(batching.collate, pad_to_multiple_of=settings.pad_to_multiple_of),
        )
    )
    if resumed:
        checkpoint.restore_optimizer(resumed, model, optimizer.optimizer)
        accelerator.print(f"Going on from {resumed.path} after step {first_step} of {total_steps}.")

    environment = device.describe(accelerator)
    device.run_on_main(accelerator, lambda: origin.begin_run(settings, run_dir, provenance, environment, known))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    saved = origin.last_checkpoint(resumed.path if resumed else None)
    with Watchdog(run_dir, rank, ranks, settings.ddp_timeout, saved) as watchdog:
        run = Run(
            settings, run_dir, accelerator, plan, provenance, model, peft_model, optimizer, eval_rows, total_steps,
            resumed, watchdog,
        )  # fmt: skip
        if train(run, loader, train_rows, first_step):
            finish(run, sizes)
    run.journal.close()


def read_inputs(settings: TrainConfig, accelerator, begun_with: int | None):
    """Training rows, held-out rows, which rows make up each step, how many steps, the base's dtype, and the provenance.

    Raises: UserError when this rank's data set, model or settings cannot be used.
    """
    manifest = artifacts.read_manifest(settings.dataset_dir)
    train_rows = artifacts.load_split(settings.dataset_dir, "train")
    eval_rows = artifacts.load_split(settings.dataset_dir, "eval")
    plan = plan_batches(settings, train_rows, accelerator.num_processes, begun_with)
    total_steps = settings.max_steps or math.ceil(settings.num_train_epochs * plan.steps_per_epoch)
    tokenizer = load_tokenizer(settings.model_name_or_path, settings.trust_remote_code)
    dtype = device.base_dtype(settings.dtype, accelerator.device)
    for name, rows in (("train", train_rows), ("eval", eval_rows)):
        artifacts.check_split(rows, manifest, name, settings.dataset_dir, len(tokenizer))
    provenance = origin.describe(settings, manifest, tokenizer, plan, total_steps, dtype)
    return train_rows, eval_rows, plan, total_steps, dtype, provenance


def train(run: "Run", loader: DataLoader, train_rows, first_step: int) -> bool:
    """The training loop, steps first_step … total_steps. Returns whether the last step was reached.

    Raises: RunFailed on all ranks together when a loss or gradient is not finite, before the optimizer is touched.
    """
    settings, plan, accelerator, model, optimizer = run.settings, run.plan, run.accelerator, run.model, run.optimizer
    watchdog = run.watchdog
    if first_step == 0 and settings.eval_on_start:
        run.evaluate(0)
    last_step = min(run.total_steps, settings.stop_at_step or run.total_steps)
    if first_step >= last_step:
        if first_step < run.total_steps:
            accelerator.print(f"Already at step {first_step}, stop_at_step is {last_step}: nothing to do.")
        return first_step == run.total_steps
    batches = iter(loader)
    model.train()
    for step in range(first_step, last_step):
        started = time.perf_counter()
        target_count, layout = plan.target_count(step), plan.layout(step)
        device.clear_overflow(accelerator.device)
        nll_sum = torch.zeros((), device=accelerator.device)
        for index, micro_batch in enumerate(layout):
            watchdog.reached(step + 1, "forward")
            batch = next(batches)
            seed_dropout(settings, step, micro_batch[accelerator.process_index])
            no_sync = accelerator.no_sync(model) if index + 1 < len(layout) else contextlib.nullcontext()
            with no_sync, run.explained_memory(step, micro_batch):
                nll = model(**batch).sum()
                watchdog.reached(step + 1, "backward")
                # DDP averages over the ranks: × world size makes it their sum, over the whole global batch's tokens.
                accelerator.backward(nll * (plan.world_size / target_count))
            nll_sum += nll.detach()

        grad_norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm or math.inf)
        if device.overflowed(accelerator.device):  # a card that saturates, where no inf ever shows
            nll_sum.fill_(math.inf)
        ranks = exchange(accelerator, nll_sum, grad_norm, watchdog.stop_requested)
        if not np.isfinite(ranks).all():
            run.fail_on_non_finite(step, ranks, layout, train_rows)
        learning_rate = learning_rate_at(step, run.total_steps, settings)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()

        done = step + 1
        run.train_time_s += time.perf_counter() - started
        stopping = bool(ranks[:, 2].any()) or done == last_step
        if done % settings.logging_steps == 0 or done == run.total_steps:
            run.record(
                done, ranks[:, 0].sum() / target_count, learning_rate, ranks[0, 1], time.perf_counter() - started
            )
        epoch_ends = done % plan.steps_per_epoch == 0 or done == run.total_steps
        if done % settings.eval_steps == 0 if settings.eval_steps else epoch_ends:
            run.evaluate(done)
        if stopping or (done % settings.save_steps == 0 if settings.save_steps else epoch_ends):
            run.save(done)
        if stopping and done < run.total_steps:
            accelerator.print(
                f"Stopped after step {done} of {run.total_steps}; everything is in {run.run_dir / f'checkpoint-{done}'}. "
                f"{how_to_go_on(settings, done)}"
            )
            return False
    return True


class Run:
    """What a run has at hand: settings, plan, the prepared model and optimizer, its directory and its journal."""

    def __init__(
        self, settings, run_dir, accelerator, plan, provenance, model, peft_model, optimizer, eval_rows, total_steps, resumed,
        watchdog,
    ):  # fmt: skip
        self.settings, self.run_dir, self.accelerator, self.plan = settings, run_dir, accelerator, plan
        self.provenance, self.model, self.peft_model, self.optimizer = provenance, model, peft_model, optimizer
        self.eval_rows, self.total_steps, self.watchdog = eval_rows, total_steps, watchdog
        progress = resumed.progress if resumed else {}
        self.best = progress.get("best")  # {"step", "eval_loss"} of the lowest held-out loss so far
        self.last_eval = (0, math.nan)  # step and loss
        self.train_time_s = progress.get("train_time_s", 0.0)
        self.journal = Journal(run_dir, accelerator, resumed.step if resumed else 0, total_steps, asdict(settings))

    def record(self, step: int, loss: float, learning_rate: float, grad_norm: float, step_time_s: float) -> None:
        """Writes the numbers of an optimizer step, counted from 1; loss in nats per target token of its global batch."""
        rows = self.plan.rows(step - 1)
        rank_tokens = self.plan.rank_tokens(step - 1)
        self.journal.write(
            {
                "step": step,
                "epoch": step / self.plan.steps_per_epoch,
                "loss": float(loss),
                "learning_rate": learning_rate,
                "grad_norm": float(grad_norm),
                "rows": len(rows),
                "tokens": sum(rank_tokens),
                "target_tokens": self.plan.target_count(step - 1),
                "rank_tokens_min": min(rank_tokens),
                "rank_tokens_max": max(rank_tokens),
                "tokens_per_s": sum(rank_tokens) / step_time_s,
                "step_time_s": step_time_s,
                "peak_memory_bytes": device.peak_memory_bytes(self.accelerator.device),
            }
        )

    def evaluate(self, step: int) -> None:
        """Writes the held-out loss, Σ nats / Σ target tokens over all held-out rows, and remembers the lowest."""
        if len(self.eval_rows) == 0:
            return
        tokens = self.plan.per_device_train_batch_size * max(self.eval_rows["length"])
        self.watchdog.reached(step, "evaluation")
        nll = evaluation.row_nll(self.model, self.eval_rows, self.accelerator, tokens, progress=self.watchdog)
        target_tokens = sum(self.eval_rows["target_tokens"])
        loss = float(nll.sum() / target_tokens)
        self.last_eval = (step, loss)
        if step and math.isfinite(loss) and (self.best is None or loss < self.best["eval_loss"]):
            self.best = {"step": step, "eval_loss": loss}
        self.journal.write({"step": step, "eval_loss": loss, "eval_target_tokens": target_tokens})

    def save(self, step: int) -> None:
        """Writes checkpoint-<step>, then removes what is no longer kept. Every rank waits until it is complete."""
        eval_loss = self.last_eval[1] if self.last_eval[0] == step else None
        progress = {
            "eval_loss": eval_loss, "best": self.best, "train_time_s": self.train_time_s, "provenance": self.provenance
        }  # fmt: skip
        self.watchdog.reached(step, "saving")
        self.accelerator.wait_for_everyone()
        is_main = self.accelerator.is_main_process
        self.journal.sync()
        checkpoint.save(self.run_dir, step, progress, self.model, self.peft_model, self.optimizer.optimizer, is_main)
        if is_main:
            checkpoint.remove_old(self.run_dir, step, self.settings.save_total_limit)
        self.accelerator.wait_for_everyone()
        self.watchdog.last_checkpoint = origin.last_checkpoint(self.run_dir / f"checkpoint-{step}")

    @contextlib.contextmanager
    def explained_memory(self, step: int, micro_batch: list[list[int]]):
        """Turns running out of memory into a sentence with rank, step and rows. Raises: RunFailed."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not device.is_out_of_memory(error):
                raise
            rows = micro_batch[self.accelerator.process_index]
            raise RunFailed(
                f"out of memory on rank {self.accelerator.process_index} ({self.accelerator.device}) in step {step + 1}, rows "
                f"{rows} of {[int(self.plan.lengths[row]) for row in rows]} tokens; set gradient_checkpointing: true, or a "
                f"smaller per_device_train_batch_size with global_batch_size: {self.plan.global_batch_size} (same result), or "
                f"auto_micro_batch: true. {self.watchdog.last_checkpoint}. The allocator said: {(str(error).splitlines() or [''])[0]}",
                here_only=True,
            ) from error

    def fail_on_non_finite(self, step: int, ranks: np.ndarray, layout: list[list[list[int]]], train_rows) -> None:
        """Ends the run on every rank; the main process first writes the rows concerned to a file. Raises: RunFailed."""
        bad = [rank for rank in range(len(ranks)) if not np.isfinite(ranks[rank, 0])] or list(range(len(ranks)))
        rows = [row for micro_batch in layout for rank in bad for row in micro_batch[rank]]
        path = self.run_dir / f"non_finite_step-{step + 1}.jsonl"
        if self.accelerator.is_main_process:
            lines = [json.dumps({"row": row, **train_rows[row]}, ensure_ascii=False) for row in rows]
            artifacts.write_text(path, "\n".join(lines) + "\n")
        raise RunFailed(
            f"step {step + 1}: Σ loss per rank is {ranks[:, 0].tolist()}, gradient norm {ranks[0, 1]}; not finite on rank "
            f"{', '.join(map(str, bad))}. The optimizer was not touched. Rows {rows} (ids "
            f"{', '.join(train_rows[row]['id'] for row in rows)}) of {[int(self.plan.lengths[row]) for row in rows]} tokens are "
            f"in {path}. {self.watchdog.last_checkpoint}. Look at the rows; lower learning_rate"
            f"{'' if self.provenance['base_dtype'] == 'float32' else ' or use dtype: float32'}"
        )


def plan_batches(
    settings: TrainConfig, train_rows, world_size: int, begun_with: int | None = None
) -> batching.BatchPlan:
    """The batch plan of these settings on this many ranks. A run that began with a global batch keeps it: the same
    settings give another accumulation on another number of cards. Raises: UserError when it cannot be made."""
    per_device, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    try:
        accumulation, _ = batching.resolve_batch_size(
            per_device, None if begun_with else accumulation, begun_with or settings.global_batch_size, world_size
        )
    except UserError as error:
        if not begun_with:
            raise
        raise UserError(
            f"{settings.output_dir} began with {begun_with} rows per step and must keep them: {error}"
        ) from error
    target_tokens = np.asarray(train_rows["target_tokens"], dtype=np.int64)
    if len(target_tokens) == 0 or target_tokens.min() < 1:
        raise UserError(
            f"{settings.dataset_dir}: {len(target_tokens)} training rows, some without target tokens; make the data set "
            "with data_prep.py, which leaves out rows that have nothing to learn"
        )
    return batching.BatchPlan(
        lengths=np.asarray(train_rows["length"], dtype=np.int64),
        target_tokens=target_tokens,
        seed=settings.seed,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation,
        world_size=world_size,
    )


def put_adapter_on(base, settings: TrainConfig):
    """The base with a trainable adapter: a new one, or the one that the settings name."""
    if settings.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    if settings.adapter_name_or_path:
        model = modeling.load_adapter(base, settings.adapter_name_or_path, trainable=True)
        loaded = model.peft_config["default"]
        shape = {"lora_r": loaded.r, "lora_alpha": loaded.lora_alpha, "target_modules": sorted(loaded.target_modules)}
        asked = {**asdict(settings), "target_modules": sorted(settings.target_modules)}
        differs = [f"{name} {shape[name]}" for name in shape if shape[name] != asked[name]]
        if differs:
            raise UserError(
                f"adapter_name_or_path {settings.adapter_name_or_path} has {', '.join(differs)}, the settings say otherwise; "
                "set them to the adapter's values"
            )
        return model
    return modeling.add_lora(
        base, settings.lora_r, settings.lora_alpha, settings.lora_dropout, settings.target_modules, settings.seed
    )


def fit_micro_batch(plan: batching.BatchPlan, model, train_rows, accelerator) -> batching.BatchPlan:
    """A plan whose largest possible micro-batch fits into memory on every rank; the global batch stays.

    Tries forward and backward on the longest rows and, while any rank runs out of memory, divides the micro-batch and
    multiplies the accumulation. Raises: RunFailed when a single row does not fit.
    """
    if device.is_sharded(accelerator):
        raise UserError(
            "auto_micro_batch does not work with FSDP: the ranks that do not run out of memory would wait for the others' "
            "weights; choose per_device_train_batch_size by hand (`python doctor.py` estimates what fits)"
        )
    while True:
        longest = np.argsort(-plan.lengths, kind="stable")[: plan.per_device_train_batch_size]
        batch = send_to_device(batching.collate([train_rows[int(row)] for row in longest]), accelerator.device)
        failed = torch.zeros(1, device=accelerator.device)
        try:
            with accelerator.no_sync(model):
                accelerator.backward(model(**batch).sum())
        except (RuntimeError, MemoryError) as error:
            if not device.is_out_of_memory(error):
                raise
            failed += 1
        model.zero_grad(set_to_none=True)
        if not accelerator.reduce(failed, reduction="sum").item():
            return plan
        size = plan.per_device_train_batch_size
        smaller = max((n for n in range(1, size) if size % n == 0), default=0)
        if not smaller:
            raise RunFailed(
                f"out of memory with a single row of {int(plan.lengths.max())} tokens; set gradient_checkpointing: true or "
                "make the data set with a smaller --max_length"
            )
        plan = replace(
            plan,
            per_device_train_batch_size=smaller,
            gradient_accumulation_steps=plan.gradient_accumulation_steps * (size // smaller),
        )
        accelerator.print(
            f"Out of memory with {size} rows at once: going on with per_device_train_batch_size {smaller} × accumulation "
            f"{plan.gradient_accumulation_steps}; the global batch stays {plan.global_batch_size}."
        )


def learning_rate_at(step: int, total_steps: int, settings: TrainConfig) -> float:
    """The learning rate of a step counted from 0: linear warm-up, then cosine or linear to 0, or constant."""
    warmup_steps = math.ceil(settings.warmup_ratio * total_steps)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    shape = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return settings.learning_rate * shape[settings.lr_scheduler_type]


def seed_dropout(settings: TrainConfig, step: int, rows: list[int]) -> None:
    """Makes dropout a function of (seed, step, first row), so that resuming needs no generator state of any device."""
    if settings.lora_dropout:
        key = f"{settings.seed} {step} {rows[:1]}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "big"))


def exchange(accelerator, nll_sum: torch.Tensor, grad_norm: torch.Tensor, stop: bool) -> np.ndarray:
    """(ranks, 3): each rank's Σ nats, gradient norm and stop request. The step's one collective beside the gradients'.

    It serves the log, the agreement to stop and the search for the rank whose numbers went wrong.
    """
    mine = torch.stack([nll_sum, modeling.local_value(grad_norm).to(nll_sum), torch.tensor(float(stop)).to(nll_sum)])
    return accelerator.gather(mine[None]).double().cpu().numpy()


def how_to_go_on(settings: TrainConfig, done: int) -> str:
    """Words for the command that continues a run which these settings started and which has stopped after step `done`."""
    if settings.stop_at_step and done >= settings.stop_at_step:
        return "The same command without stop_at_step goes on from there."
    if settings.overwrite_output_dir:
        return "The same command without overwrite_output_dir goes on from there."
    if settings.resume_from_checkpoint != "auto":
        return "The same command with resume_from_checkpoint: auto goes on from there."
    return "The same command goes on from there."


def finish(run: Run, sizes: tuple[int, int, int]) -> None:
    """Leaves the adapter, its card, the plot and summary.json at the top of the run directory."""
    accelerator, run_dir = run.accelerator, run.run_dir
    run.watchdog.reached(run.total_steps, "finishing")
    tensors = modeling.adapter_tensors(run.model, run.peft_model)
    mine = [[device.peak_memory_bytes(accelerator.device), sizes[2]]]
    peaks, held = accelerator.gather(torch.tensor(mine, device=accelerator.device)).T.tolist()
    if accelerator.is_main_process:
        from sft.report import plot_loss  # matplotlib is slow to import, and one process needs it

        with (
            artifacts.explained_writing(run_dir),
            tempfile.TemporaryDirectory(dir=run_dir, prefix=".adapter.tmp-") as folder,
        ):
            modeling.write_adapter(Path(folder), tensors, run.peft_model)
            for name in ("adapter_model.safetensors", "adapter_config.json"):
                os.replace(Path(folder) / name, run_dir / name)
        metrics = read_metrics(run_dir)
        losses = [record["loss"] for record in metrics if "loss" in record]
        held_out = [record["eval_loss"] for record in metrics if "eval_loss" in record]
        if not losses:
            raise UserError(
                f"{run_dir / 'metrics.jsonl'} was lost: copy it back, or begin anew with overwrite_output_dir"
            )
        if metrics[0]["step"] > run.settings.logging_steps:  # lost on the way: its first line is not the run's first
            losses, held_out = losses[-1:], held_out[-1:]
        tokens = sum(int(run.plan.lengths[run.plan.rows(step)].sum()) for step in range(run.total_steps))
        summary = {
            "world_size": accelerator.num_processes,
            "backend": device.backend(),
            "device": accelerator.device.type,
            "distributed_type": str(accelerator.distributed_type.value),
            "simulated": device.is_simulated(accelerator.device),
            "per_device_train_batch_size": run.plan.per_device_train_batch_size,
            "gradient_accumulation_steps": run.plan.gradient_accumulation_steps,
            "global_batch_size": run.plan.global_batch_size,
            "epochs": run.total_steps / run.plan.steps_per_epoch,
            "steps": run.total_steps,
            "trainable_parameters": sizes[0],
            "total_parameters": sizes[1],
            "held_parameters": held,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "first_eval_loss": held_out[0] if held_out else None,
            "eval_loss": held_out[-1] if held_out else None,
            "best": run.best,
            "train_time_s": run.train_time_s,
            "tokens_per_s": tokens / run.train_time_s,
            "peak_memory_bytes": peaks,
            "adapter_sha256": artifacts.sha256_file(run_dir / "adapter_model.safetensors"),
        }
        with artifacts.explained_writing(run_dir / "loss.png"):
            plot_loss(metrics, run_dir / "loss.png")
        artifacts.write_text(run_dir / "README.md", model_card(asdict(run.settings), run.provenance, summary))
        artifacts.write_json(run_dir / "summary.json", summary)
        fell = f", held-out loss {held_out[0]:.4f} → {held_out[-1]:.4f}" if len(held_out) > 1 else ""
        print(
            f"Done: loss {losses[0]:.4f} → {losses[-1]:.4f}{fell} in {run.train_time_s:.0f} s. Adapter and plot in {run_dir}."
        )
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    errors.run(main)
