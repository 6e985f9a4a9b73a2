"""LoRA fine-tuning of a chat model on a data set made by data_prep.py, on any number of cards.

    accelerate launch --config_file accelerate_configs/npu_2.yaml train.py --config configs/qwen2.5-7b.yaml

One optimizer step trains the rows that `BatchPlan` names for it, whatever the number of cards; its loss is Σ nats /
Σ target tokens over all of them. `fine_tune` sets the run up, `train` is the loop, `finish` leaves the results.
"""

from sft import device, errors

if __name__ == "__main__":
    device.set_environment_defaults()  # torch reads them when it is imported
    device.follow_launcher()

import contextlib
import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from sft import batching, checkpoint, config, held_out, modeling, packing, speed
from sft.config import TrainConfig
from sft.journal import check_trackers
from sft.run_directory import RunDirectory, out_of_patience
from training import fused, micro_batch, results
from training.failures import explained_memory, explained_start, fail_on_non_finite
from training.inputs import read_inputs
from training.learner import build_learner
from training.optimizer import clip_grad_norm
from training.watchdog import Watchdog


def main() -> None:
    settings = config.parse(TrainConfig, description=__doc__)
    check_trackers(settings.report_to)
    device.check_mixed_precision()
    if settings.deterministic:
        device.make_deterministic()
    logs = str(Path(settings.output_dir) / "tensorboard")
    accelerator = device.start(settings.ddp_timeout, tuple(settings.report_to), logs)
    fine_tune(settings, accelerator)
    device.end(accelerator)


def fine_tune(settings: TrainConfig, accelerator) -> None:
    """One run from its data set to its results, or the rest of it."""
    inputs = device.run_on_all(lambda: read_inputs(settings, accelerator))
    directory = RunDirectory(settings, inputs.provenance, len(inputs.train_rows), accelerator)
    plan = plan_batches(settings, inputs.train_rows, directory)
    accelerator.print(
        f"{len(inputs.train_rows)} training rows, {len(inputs.eval_rows)} held out. Global batch {plan.global_batch_size} = "
        f"{plan.per_device_train_batch_size} per device × {plan.gradient_accumulation_steps} accumulation × "
        f"{plan.world_size} ranks on {accelerator.device.type}: {plan.steps_per_epoch} steps an epoch, "
        f"{directory.total_steps} in all."
    )
    for doubt in settings.doubts(directory.total_steps):
        accelerator.print(f"warning: {doubt}")
    if directory.start.complete:
        accelerator.print(
            f"{directory.path} is complete at step {directory.first_step}: nothing to do (overwrite_output_dir starts anew)."
        )
        return
    with explained_start(accelerator):
        learner = build_learner(settings, inputs, directory.start.checkpoint, accelerator)
        packing.choose_forward(learner.model, accelerator, inputs.train_rows)
        replaced = fused.use_fused_operators(learner.model, accelerator) if settings.fused == "auto" else []
    for line in replaced:
        accelerator.print(line)
    plan = micro_batch.choose(plan, learner.model, inputs.train_rows, settings, accelerator)
    directory.begin({**device.describe(accelerator), "micro_batch_tokens": plan.micro_batch_tokens, "fused": replaced})
    rank, ranks = accelerator.process_index, accelerator.num_processes
    where = directory.where_to_go_on()
    with Watchdog(directory.path, rank, ranks, settings.ddp_timeout, where) as watchdog:
        run = Run(settings, accelerator, directory, inputs, plan, learner, watchdog)
        if train(run, load_batches(run)):
            finish(run)
    directory.journal.close()


def plan_batches(settings: TrainConfig, train_rows, directory: RunDirectory) -> batching.BatchPlan:
    """Which rows make up each step, and how they are laid over the ranks."""
    return batching.BatchPlan(
        lengths=np.asarray(train_rows["length"], dtype=np.int64),
        target_tokens=np.asarray(train_rows["target_tokens"], dtype=np.int64),
        seed=settings.seed,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=directory.start.gradient_accumulation_steps,
        world_size=directory.accelerator.num_processes,
    )


def load_batches(run: "Run") -> DataLoader:
    """The micro-batches that are left, each rank's own, dealt out by Accelerate."""
    if resumed := run.directory.start.checkpoint:
        run.accelerator.print(f"Going on from {resumed.path} after step {resumed.step} of {run.total_steps}.")
    return run.accelerator.prepare(
        DataLoader(
            run.inputs.train_rows.with_format("numpy", columns=["input_ids", "labels"]),
            batch_sampler=batching.StepSampler(run.plan, run.directory.first_step, run.total_steps),
            collate_fn=partial(
                batching.collate,
                pad_to_multiple_of=run.settings.pad_to_multiple_of,
                pin=run.accelerator.device.type != "cpu",
            ),
        )
    )


def train(run: "Run", loader: DataLoader) -> bool:
    """The training loop over the steps that are left. Returns whether the last step was reached.

    Raises: RunFailed on all ranks together when a loss or gradient is not finite, before the optimizer is touched.
    """
    settings, accelerator = run.settings, run.accelerator
    last_step = min(run.total_steps, settings.stop_at_step or run.total_steps)
    if run.done == 0 and settings.eval_on_start:
        run.evaluate()
    if run.ended:  # by an earlier start, which was killed before it left its results
        return True
    if run.done >= last_step:
        accelerator.print(f"Already at step {run.done}, stop_at_step is {last_step}: nothing to do.")
        return False
    batches, stopping = iter(loader), False
    run.learner.model.train()
    while not stopping:
        asked_to_stop = take_step(run, run.done, batches)
        run.done += 1
        run.progress["eval_loss"] = None
        last = run.done == run.total_steps
        epoch_ends = last or run.done % run.plan.steps_per_epoch == 0
        evaluates = last or (run.done % settings.eval_steps == 0 if settings.eval_steps else epoch_ends)
        if evaluates:
            run.evaluate()
        stopping = asked_to_stop or run.ended or run.done == last_step
        saves = run.done % settings.save_steps == 0 if settings.save_steps else epoch_ends
        if saves or stopping:
            run.save()
    if not run.ended:
        accelerator.print(
            f"Stopped after step {run.done} of {run.total_steps}; everything is in {run.directory.last_checkpoint}. "
            f"{how_to_go_on(settings, run.done)}"
        )
    return run.ended


def take_step(run: "Run", step: int, batches) -> bool:
    """One optimizer step, counted from 0: all its micro-batches, then the update. Returns whether a rank was asked to stop."""
    plan, accelerator, learner = run.plan, run.accelerator, run.learner
    started = time.perf_counter()
    run.inputs.data.check_unchanged()
    target_count, layout = plan.target_count(step), plan.layout(step)
    device.clear_overflow(accelerator.device)
    nll_sum = torch.zeros((), device=accelerator.device)
    for index, rows_of_ranks in enumerate(layout):
        run.watchdog.reached(step + 1, "forward")
        batch = next(batches)
        rows = rows_of_ranks[accelerator.process_index]
        learner.dropout.begin(step, rows)
        last = index + 1 == len(layout)
        with (
            contextlib.nullcontext() if last else accelerator.no_sync(learner.model),
            explained_memory(run, step, rows),
        ):
            nll = learner.model(**batch).sum()
            run.watchdog.reached(step + 1, "backward")
            # DDP averages over the ranks: × world size makes it their sum, over the whole global batch's tokens.
            accelerator.backward(nll * (plan.world_size / target_count))
        nll_sum += nll.detach()

    grad_norm = clip_grad_norm(accelerator, learner.model, learner.optimizer, run.settings.max_grad_norm or math.inf)
    if device.overflowed(accelerator.device):  # a card that saturates, where no inf ever shows
        nll_sum.fill_(math.inf)
    ranks = exchange(accelerator, nll_sum, grad_norm, run.watchdog.stop_requested)
    if not np.isfinite(ranks).all():
        fail_on_non_finite(run, step, ranks, layout)
    learning_rate = learning_rate_at(step, run.total_steps, run.settings)
    for group in learner.optimizer.param_groups:
        group["lr"] = learning_rate
    learner.optimizer.step()
    learner.optimizer.zero_grad()

    step_time_s = time.perf_counter() - started
    run.progress["train_time_s"] += step_time_s
    done = step + 1
    if done % run.settings.logging_steps == 0 or done == run.total_steps:
        run.record(done, ranks[:, 0].sum() / target_count, learning_rate, ranks[0, 1], step_time_s)
    return bool(ranks[:, 2].any())


class Run:
    """A run under way: what it was given, and what it has reached."""

    def __init__(self, settings, accelerator, directory, inputs, plan, learner, watchdog):
        self.settings, self.accelerator, self.directory, self.inputs = settings, accelerator, directory, inputs
        self.plan, self.learner, self.watchdog = plan, learner, watchdog
        self.total_steps, self.done = directory.total_steps, directory.first_step
        self.progress = {  # what the next checkpoint says, beside its step; losses in nats per target token
            "best": None,  # {"step", "eval_loss"} of the lowest held-out loss so far
            "eval_loss": None,  # after the step that was just done, if it was measured there
            "evaluations_since_best": 0,
            "train_time_s": 0.0,
            **(directory.start.checkpoint.progress if directory.start.checkpoint else {}),
        }
        self.best_adapter = None  # its tensors, on the main process
        if settings.deliver == "best" and accelerator.is_main_process:
            self.best_adapter = checkpoint.read_best(directory.start.checkpoint)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train: the last step is done, or early stopping ends the run before it."""
        return self.done >= self.total_steps or out_of_patience(self.settings, self.progress)

    def record(self, step: int, loss: float, learning_rate: float, grad_norm: float, step_time_s: float) -> None:
        """Writes the numbers of an optimizer step, counted from 1; loss in nats per target token of its global batch."""
        rank_tokens = self.plan.rank_tokens(step - 1)
        self.directory.journal.write(
            {
                "step": step,
                "epoch": step / self.plan.steps_per_epoch,
                "loss": float(loss),
                "learning_rate": learning_rate,
                "grad_norm": float(grad_norm),
                "rows": len(self.plan.rows(step - 1)),
                "tokens": sum(rank_tokens),
                "target_tokens": self.plan.target_count(step - 1),
                "rank_tokens_min": min(rank_tokens),
                "rank_tokens_max": max(rank_tokens),
                "tokens_per_s": sum(rank_tokens) / step_time_s,
                "step_time_s": step_time_s,
                "peak_memory_bytes": device.peak_memory_bytes(self.accelerator.device),
                **self.utilisation(sum(rank_tokens), step_time_s),
            }
        )

    def utilisation(self, tokens: int, step_time_s: float) -> dict[str, float]:
        """{"mfu": share of the cards' peak that the step's products used}; {} where bf16 or the card's peak is not given."""
        if "bf16" not in (self.accelerator.mixed_precision, str(self.inputs.dtype).replace("torch.bfloat16", "bf16")):
            return {}
        names = [device.device_name(self.accelerator.device)] * self.plan.world_size
        mfu = speed.model_flops_utilisation(tokens, step_time_s, self.learner.multiplied_weights, names)
        return {} if mfu is None else {"mfu": mfu}

    def evaluate(self) -> None:
        """Writes the held-out loss, Σ nats / Σ target tokens over all held-out rows, and keeps the adapter if it is the
        lowest yet."""
        rows, learner = self.inputs.eval_rows, self.learner
        if len(rows) == 0:
            return
        tokens = max(self.plan.micro_batch_tokens, self.plan.per_device_train_batch_size * max(rows["length"]))
        self.watchdog.reached(self.done, "evaluation")
        nll = held_out.row_nll(learner.model, rows, self.accelerator, tokens, progress=self.watchdog)
        target_tokens = sum(rows["target_tokens"])
        measured = {"step": self.done, "eval_loss": float(nll.sum() / target_tokens)}
        self.directory.journal.write({**measured, "eval_target_tokens": target_tokens})
        if self.done == 0:
            return
        best = self.progress["best"]
        self.progress["eval_loss"] = measured["eval_loss"]
        if math.isfinite(measured["eval_loss"]) and (best is None or measured["eval_loss"] < best["eval_loss"]):
            self.progress |= {"best": measured, "evaluations_since_best": 0}
            if self.settings.deliver == "best":
                tensors = modeling.adapter_tensors(learner.model, learner.peft_model)
                self.best_adapter = {name: tensor.clone() for name, tensor in tensors.items()}
        else:
            self.progress["evaluations_since_best"] += 1

    def save(self) -> None:
        """Writes checkpoint-<step>; every rank waits until it is complete."""
        best = self.progress["best"]
        other_best = self.best_adapter if best and best["step"] != self.done else None
        self.watchdog.reached(self.done, "saving")
        self.directory.save(self.done, self.progress, self.learner, other_best)
        self.watchdog.last_checkpoint = self.directory.where_to_go_on()


def learning_rate_at(step: int, total_steps: int, settings: TrainConfig) -> float:
    """The learning rate of a step counted from 0: linear warm-up, then cosine or linear to 0, or constant."""
    warmup_steps = math.ceil(settings.warmup_ratio * total_steps)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    shape = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return settings.learning_rate * shape[settings.lr_scheduler_type]


def exchange(accelerator, nll_sum: torch.Tensor, grad_norm: torch.Tensor, stop: bool) -> np.ndarray:
    """(ranks, 3): each rank's Σ nats, gradient norm and stop request. The step's one collective beside the gradients'.

    It serves the log, the agreement to stop and the search for the rank whose numbers went wrong.
    """
    mine = torch.stack([nll_sum, modeling.local_value(grad_norm).to(nll_sum), torch.full_like(nll_sum, float(stop))])
    return accelerator.gather(mine[None]).cpu().double().numpy()


def how_to_go_on(settings: TrainConfig, done: int) -> str:
    """Words for the command that continues a run which these settings started and which has stopped after step `done`."""
    if settings.stop_at_step and done >= settings.stop_at_step:
        return "The same command without stop_at_step goes on from there."
    if settings.overwrite_output_dir:
        return "The same command without overwrite_output_dir goes on from there."
    if settings.resume_from_checkpoint != "auto":
        return "The same command with resume_from_checkpoint: auto goes on from there."
    return "The same command goes on from there."


def finish(run: Run) -> None:
    """Leaves the adapter, its card, the plot and summary.json at the top of the run directory."""
    run.watchdog.reached(run.done, "finishing")
    memory = [device.peak_memory_bytes(run.accelerator.device), run.learner.parameters[2]]
    peaks, held = run.accelerator.gather(torch.tensor([memory], device=run.accelerator.device)).T.tolist()
    device.run_on_main(run.accelerator, lambda: results.write(run, peaks, held))


if __name__ == "__main__":
    errors.run(main)
