"""What a finished run leaves: adapter, loss curve, model card and summary.json, which comes last."""

import sys
from dataclasses import asdict

from sft import artifacts, checkpoint, device
from sft.card import model_card
from sft.errors import UserError
from sft.journal import read_metrics


def write(run, peaks: list[int], held: list[int]) -> None:
    """Writes the results of a run that has ended, on the main process, and says how it went.

    peaks, held: bytes of memory and numbers of parameters, per rank.
    """
    from sft.loss_plot import plot_loss  # matplotlib is slow to import, and one process needs it

    run_dir = run.directory.path
    best = delivers_best(run)
    run.directory.deliver(best)
    metrics = read_metrics(run_dir)
    summary = summarize(run, metrics, peaks, held)
    summary["delivered"] = summary["best"] if best else {"step": run.done, "eval_loss": run.progress["eval_loss"]}
    with artifacts.explained_writing(run_dir / "loss.png", also_reads=True):
        plot_loss(metrics, run_dir / "loss.png")
    card = model_card(asdict(run.settings), run.directory.provenance, summary)
    artifacts.write_text(run_dir / "README.md", card)
    artifacts.write_json(run_dir / "summary.json", summary)
    first, last = summary["first_eval_loss"], summary["eval_loss"]
    fell = f", held-out loss {first:.4f} → {last:.4f}" if first != last else ""
    early = f" Ended early, at step {run.done} of {run.total_steps}." if run.done < run.total_steps else ""
    print(
        f"Done: loss {summary['first_loss']:.4f} → {summary['last_loss']:.4f}{fell} in {summary['train_time_s']:.0f} s."
        f"{early} {describe_delivered(summary)} Adapter and plot in {run_dir}."
    )


def delivers_best(run) -> bool:
    """Whether another adapter than the last is delivered: the one with the lowest held-out loss."""
    best = run.progress["best"]
    if run.settings.deliver == "last" or not best or best["step"] == run.done:
        return False
    if (run.directory.last_checkpoint / checkpoint.BEST).is_file():
        return True
    print(
        f"warning: the adapter of step {best['step']}, with the lowest held-out loss, was not kept, as a start with deliver: "
        "last wrote the checkpoints: the last one is delivered",
        file=sys.stderr,
    )
    return False


def describe_delivered(summary: dict) -> str:
    """A sentence on which adapter is at the top of the run directory, and how it compares with the last."""
    delivered, last = summary["delivered"], summary["eval_loss"]
    if delivered["step"] == summary["steps"]:
        return f"The adapter is that of the last step, {delivered['step']}."
    return (
        f"The adapter is that of step {delivered['step']}, with the lowest held-out loss, {delivered['eval_loss']:.4f} (last "
        f"step: {last:.4f})."
    )


def summarize(run, metrics: list[dict], peaks: list[int], held: list[int]) -> dict:
    """The content of summary.json. Raises: UserError when the run's records are lost."""
    run_dir, plan, accelerator = run.directory.path, run.plan, run.accelerator
    losses = [record["loss"] for record in metrics if "loss" in record]
    held_out = [record["eval_loss"] for record in metrics if "eval_loss" in record]
    if not losses:
        raise UserError(f"{run_dir / 'metrics.jsonl'} was lost: copy it back, or begin anew with overwrite_output_dir")
    if metrics[0]["step"] > run.settings.logging_steps:  # lost on the way: its first line is not the run's first
        losses, held_out = losses[-1:], held_out[-1:]
    tokens = sum(int(plan.lengths[plan.rows(step)].sum()) for step in range(run.done))
    trainable, total, _ = run.learner.parameters
    return {
        "world_size": accelerator.num_processes,
        "backend": device.backend(),
        "device": accelerator.device.type,
        "distributed_type": str(accelerator.distributed_type.value),
        "simulated": device.is_simulated(accelerator.device),
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "global_batch_size": plan.global_batch_size,
        "epochs": run.done / plan.steps_per_epoch,
        "steps": run.done,
        "ended_early": run.done < run.total_steps,
        "trainable_parameters": trainable,
        "total_parameters": total,
        "held_parameters": held,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "first_eval_loss": held_out[0] if held_out else None,
        "eval_loss": held_out[-1] if held_out else None,
        "best": run.progress["best"],
        "train_time_s": run.progress["train_time_s"],
        "tokens_per_s": tokens / run.progress["train_time_s"],
        "peak_memory_bytes": peaks,
        "adapter_sha256": artifacts.sha256_file(run_dir / "adapter_model.safetensors"),
        "adapter_config_sha256": artifacts.sha256_file(run_dir / "adapter_config.json"),
    }
