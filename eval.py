"""A finished run → is the adapter better than its base? Losses, answers, scores, and intervals of their differences.

    accelerate launch --config_file accelerate_configs/npu_2.yaml eval.py --run_dir outputs/demo/run

Base and adapter score and answer the same held-out rows from one load of the weights. The numbers are the same, up
to rounding, for any number of ranks and any batch size; what has been scored is kept, so that an interrupted evaluation goes on.
"""

from sft import device, errors

if __name__ == "__main__":
    device.set_environment_defaults()  # torch reads them when it is imported

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from tqdm import tqdm

from evaluation import answering, markdown, metrics, report
from evaluation.report_directory import ReportDirectory
from sft import artifacts, checkpoint, dataset, encoding, held_out, hub, modeling, packing, run_directory, weights
from sft.batching import deal_by_tokens
from sft.config import option, parse, require
from sft.dataset import split_sha256
from sft.errors import RunFailed, UserError
from sft.tokenizer import load_tokenizer

SIDES = ("base", "adapter")
METRIC = Path(__file__).resolve().parent / "metrics" / "qa_generation"


@dataclass
class EvalConfig:
    """All settings of eval.py."""

    run_dir: str = option(help="run directory of train.py, finished")
    output_dir: str | None = option(None, "where the report goes; none: RUN_DIR/eval")
    batch_size: int = option(16, "rows that a rank answers at once; changes speed and memory only")
    max_new_tokens: int | None = option(
        None, "tokens of an answer, at most; none: as many as the longest reference answer of these rows has"
    )
    limit: int | None = option(None, "evaluate the first rows only, this many")
    generation: bool = option(True, "let both models answer; --no_generation scores losses only")
    dataset_dir: str | None = option(None, "where the data set is; none: where the run found it")
    eval_input: list[str] = option(
        default_factory=list,
        help="files with other questions and answers, each evaluated as a set of its own: does anything get lost?",
    )
    allow_other_dataset: bool = option(False, "accept a --dataset_dir that the run was not trained on")
    model_name_or_path: str | None = option(None, "where the base model is; none: where the run found it")
    trust_remote_code: bool = option(
        False, "run Python code that comes with the model (only if you trust its author)", flag_only=True
    )
    language: str = option("auto", "whose words and tokenisation count; auto: row by row", choices=metrics.LANGUAGES)
    seed: int = option(42, "of the bootstrap")
    ddp_timeout: int = option(7200, "seconds that a rank that has finished waits for the others")

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens", "limit", "ddp_timeout"):
            require(self, name, lambda value: value >= 1, "at least 1")
        require(self, "seed", lambda value: value >= 0, "0 or more")


def main(argv: list[str] | None = None) -> None:
    settings = parse(EvalConfig, argv, __doc__)
    started = time.perf_counter()
    run = open_run(settings)
    output = ReportDirectory(settings.run_dir, settings.output_dir)
    model_name = base_model(settings, run)
    tokenizer = load_tokenizer(model_name, settings.trust_remote_code)
    manifest, held_out = open_rows(settings, run, tokenizer)
    sets = {"": held_out, **open_other_rows(settings, manifest, tokenizer)}
    rows = datasets.concatenate_datasets(list(sets.values()))
    accelerator = device.start(settings.ddp_timeout)
    device.run_on_main(accelerator, output.claim)

    # One load serves both sides: the base is the adapted model with its adapter switched off.
    dtype = device.base_dtype(run.config["dtype"], accelerator.device)
    model = load_model(settings, run, model_name, dtype, accelerator)
    accelerator.print(
        f"{len(held_out)} held-out rows of {manifest['rows_written']['eval']}, base weights {dtype}, on this rank "
        f"{modeling.held_parameters(model):,} of {modeling.parameter_counts(model)[1]:,}."
    )

    # What results are made from; they are kept under its hash until the report is whole.
    adapter_sha256 = artifacts.sha256_file(run.directory / "adapter_model.safetensors")
    origin = {
        "model": run.provenance.get("model_sha256") or model_name,
        "dataset_sha256": manifest["dataset_sha256"],
        "others": [split_sha256(other.data.to_batches()) for name, other in sets.items() if name],
        "dtype": str(dtype),
        "mixed_precision": accelerator.mixed_precision,
    }
    origins = {"base": origin, "adapter": origin | {"adapter_sha256": adapter_sha256}}
    partial = answering.PartialResults(output.path, accelerator)

    nll = {}
    with accelerator.autocast():
        packing.choose_forward(model, accelerator, rows)
    for side in SIDES:
        with switched(model, side), explained_memory(settings):
            nll[side] = score_losses(side, model, rows, settings, partial, origins[side])
    if np.array_equal(nll["base"], nll["adapter"]):
        warn(accelerator, "the adapter changes nothing: every row has the base model's loss. Is it trained and loaded?")

    answers, decoding = None, {}
    losses_done = time.perf_counter()
    if settings.generation:
        model.causal.set_attn_implementation(modeling.generation_attention())
        decoding = choose_decoding(settings, tokenizer, model.causal, rows)
        answers = {}
        for side in SIDES:
            with switched(model, side), explained_memory(settings):
                answers[side] = answer_rows(side, model, tokenizer, rows, settings, decoding, partial, origins[side])
    times = {"losses_s": losses_done - started, "answers_s": time.perf_counter() - losses_done}

    def write_down() -> None:
        signature = answering.decoding_signature(decoding, tokenizer, dtype)
        predictions = score(rows, nll, answers, settings.language)
        lines = report.split_sets(predictions, {name: len(other) for name, other in sets.items()})
        built = report.build_report(
            run, lines.pop(""), manifest, settings.language, signature, settings.seed,
            simulated=device.is_simulated(accelerator.device), times=times, others=lines,
        )  # fmt: skip
        built["adapter_sha256"] = adapter_sha256
        output.write(built, predictions, run.metrics)
        for name, part in {"": built, **built["other_sets"]}.items():
            named = f"\n{name}:\n" if name else "\n"
            print(f"{named}{markdown.render_table(part)}\n\n{markdown.render_words(part).replace('**', '')}")
        print(
            f"\nThe report is {output.path / 'report.md'}; for a browser, with every answer and in Chinese too: {output.path / 'report.html'}."
        )

    device.run_on_main(accelerator, write_down)
    partial.remove()
    output.release()
    device.end(accelerator)


def open_run(settings: EvalConfig) -> report.RunResults:
    """The finished run. Raises: UserError when it is not one, saying what is there, or its base model has changed."""
    run = report.load_run(settings.run_dir)
    lack = run_directory.unfinished(run.directory)
    if lack:
        there = ", ".join(path.name for path in checkpoint.directories(run.directory)) or "no checkpoint"
        raise UserError(
            f"{run.directory} is not a finished run: {lack} ({there} there); the train.py command that began it goes on "
            "from its last checkpoint and finishes it"
        )
    model_name = base_model(settings, run)
    found, trained_on = artifacts.model_sha256(model_name), run.provenance.get("model_sha256")
    if found and trained_on and found != trained_on:
        raise UserError(
            f"{model_name} is not the base model that {run.directory} was trained on (model_sha256 {found[:12]}…, the "
            f"run's is {trained_on[:12]}…); give that model's place with --model_name_or_path"
        )
    return run


def base_model(settings: EvalConfig, run: report.RunResults) -> str:
    """Where the base model is: as the settings say, or what the run trained, of a hub the same commit."""
    if settings.model_name_or_path:
        return settings.model_name_or_path
    return hub.local_directory(run.config["model_name_or_path"], run.provenance.get("model_commit"))[0]


def open_rows(settings: EvalConfig, run: report.RunResults, tokenizer) -> tuple[dict, datasets.Dataset]:
    """The manifest and the held-out rows. Raises: UserError when they are missing, none, or not the run's."""
    directory = settings.dataset_dir or run.config["dataset_dir"]
    if not settings.dataset_dir and not Path(directory).is_dir():
        raise UserError(
            f"the data set of {run.directory}, {directory}, is not there (seen from {Path.cwd()}); give its place with "
            "--dataset_dir"
        )
    data = dataset.Dataset(directory, ("eval",))
    trained_on = run.provenance["dataset_sha256"]
    if data.sha256 != trained_on and not (settings.dataset_dir and settings.allow_other_dataset):
        raise UserError(
            f"{directory} is not the data set that {run.directory} was trained on (dataset_sha256 {data.sha256[:12]}…, the "
            f"run's is {trained_on[:12]}…), so its held-out rows may have been trained on; give the run's, or accept this "
            f"one with --dataset_dir {directory} --allow_other_dataset"
        )
    data.check_tokenizer(tokenizer)
    if any(run.provenance[f"{what}_sha256"] != data.manifest[f"{what}_sha256"] for what in ("tokenizer", "template")):
        raise UserError(
            f"{run.directory} was made with another tokenizer or template than {tokenizer.name_or_path} has; give the run's "
            "base model with --model_name_or_path, and a data set made with it"
        )
    manifest, rows = data.manifest, data.eval
    if not len(rows):
        raise UserError(
            f"{directory} holds no rows out (it was made with eval_fraction 0 or of too few rows): nothing to evaluate on; "
            "give another with --dataset_dir DIR --allow_other_dataset"
        )
    return manifest, rows.select(range(min(settings.limit or len(rows), len(rows))))


def open_other_rows(settings: EvalConfig, manifest: dict, tokenizer) -> dict[str, datasets.Dataset]:
    """The rows of each --eval_input, encoded as the run's were. Raises: UserError when one holds none that can be asked."""
    if not settings.eval_input:
        return {}
    from preparation.other_rows import read_other_rows  # not needed without

    if len(set(settings.eval_input)) < len(settings.eval_input):
        raise UserError(f"--eval_input names a file twice: {', '.join(settings.eval_input)}; name each once")
    return {name: read_other_rows(name, tokenizer, manifest["recipe"], settings.limit) for name in settings.eval_input}


def load_model(
    settings: EvalConfig, run: report.RunResults, model_name: str, dtype, accelerator
) -> modeling.TargetLoss:
    """The base with the run's adapter; under FSDP each rank reads and holds its part of it, as in training."""
    sharded = device.is_sharded(accelerator)
    base = modeling.load_base(
        model_name, dtype, accelerator.device, trust_remote_code=settings.trust_remote_code, empty=sharded
    )
    adapted = modeling.load_adapter(base, settings.run_dir, trainable=sharded)
    model = modeling.TargetLoss(adapted, run.config["loss_chunk_tokens"])
    if not sharded:
        return model.to(accelerator.device).eval()
    # Accelerate shards a model only together with an optimizer; this one is never asked to step.
    model, _ = accelerator.prepare(model, torch.optim.SGD(modeling.trainable_parameters(adapted).values(), lr=0.0))
    weights.fill_from_disk(model, model_name, accelerator.device)
    answering.let_shards_answer(model)
    return model.eval()


def switched(model: modeling.TargetLoss, side: str):
    """A context in which the adapter is off for the base side, and on for the other."""
    return model.model.disable_adapter() if side == "base" else contextlib.nullcontext()


@contextlib.contextmanager
def explained_memory(settings: EvalConfig):
    """Turns out of memory into one sentence. Raises: RunFailed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not device.is_out_of_memory(error):
            raise
        raise RunFailed(
            f"out of memory with {settings.batch_size} rows at once; give a smaller --batch_size: what has been scored is "
            "kept, and the numbers stay the same"
        ) from error


def progress_bar(accelerator, description: str, total: int) -> tqdm:
    """A bar on the main process; where no terminal shows it, a line every ten seconds."""
    return tqdm(
        total=total, desc=description, unit="row", disable=not accelerator.is_main_process,
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )  # fmt: skip


def warn(accelerator, text: str) -> None:
    if accelerator.is_main_process:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def score_losses(side: str, model, rows, settings: EvalConfig, partial, origin: dict) -> np.ndarray:
    """Σ nats over the target tokens of each row, (rows,) float64, on every rank; computed as train.py computes it."""
    accelerator = partial.accelerator
    key = artifacts.sha256_json({"what": "loss", **origin})
    if not all((key, row_id) in partial.found for row_id in rows["id"]):
        tokens = settings.batch_size * max(rows["length"])
        with accelerator.autocast(), progress_bar(accelerator, f"{side}: losses", len(rows)) as bar:
            nll = held_out.row_nll(model, rows, accelerator, tokens, bar)
        if accelerator.is_main_process:
            partial.add([{"key": key, "id": row_id, "nll": nats} for row_id, nats in zip(rows["id"], nll.tolist())])
        partial.share()
    nll = np.array([partial.found[key, row_id]["nll"] for row_id in rows["id"]])
    if not np.isfinite(nll).all():
        row_id = rows["id"][int(np.flatnonzero(~np.isfinite(nll))[0])]
        raise RunFailed(
            f"the {side} model's loss of row {row_id} is not finite, so nothing can be compared; evaluate an earlier "
            "checkpoint, or train with a smaller learning_rate"
        )
    return nll


def choose_decoding(settings: EvalConfig, tokenizer, base, rows) -> dict:
    """What decides an answer beside the model: where it stops."""
    longest = max(len(labels) - answering.prompt_length(labels) for labels in rows["labels"])
    return {
        "max_new_tokens": settings.max_new_tokens or longest,
        "stop_ids": encoding.stop_token_ids(tokenizer, base.generation_config),
    }


def answer_rows(
    side: str, model, tokenizer, rows, settings: EvalConfig, decoding: dict, partial, origin: dict
) -> list[dict]:
    """{"answer", "thought", "stopped"} of each row, on every rank. Rows are dealt evenly; ranks meet only when all have answered."""
    accelerator = partial.accelerator
    key = artifacts.sha256_json({"what": "answer after the thought", **decoding, **origin})
    missing = [index for index, row_id in enumerate(rows["id"]) if (key, row_id) not in partial.found]
    accelerator.print(
        f"{side}: {len(missing)} of {len(rows)} rows to answer, up to {decoding['max_new_tokens']} tokens each."
    )
    # Longest first: rows of like length share a batch, and little of it is padding.
    shares = deal_by_tokens(missing, np.asarray(rows["length"]), accelerator.num_processes, len(rows))
    mine, size = shares[accelerator.process_index], settings.batch_size
    with progress_bar(accelerator, f"{side}: answers", len(mine)) as bar:
        for start in range(0, max(map(len, shares)), size):  # as many batches on each rank, some of them empty
            batch = [rows[index] for index in mine[start : start + size]]
            prompts = [row["input_ids"][: answering.prompt_length(row["labels"])] for row in batch]
            with accelerator.autocast():
                for index, tokens in answering.generate(model, prompts, **decoding, accelerator=accelerator):
                    said = answering.read_answer(tokenizer, prompts[index], tokens, decoding["stop_ids"])
                    partial.add([{"key": key, "id": batch[index]["id"], **said}])
                    bar.update()
    partial.share()
    return [partial.found[key, row_id] for row_id in rows["id"]]


def score(rows, nll: dict[str, np.ndarray], answers: dict[str, list[dict]] | None, language: str) -> list[dict]:
    """The lines of predictions.jsonl, scored by the metric module that `evaluate` loads from this repository."""
    columns = rows.select_columns(["id", "question", "reference", "length", "target_tokens"]).to_list()
    target_tokens = rows["target_tokens"][:]
    if answers is None:
        scores = {side: metrics.evaluate_losses(nll[side], target_tokens)[1] for side in SIDES}
        return report.join_predictions(columns, scores["base"], scores["adapter"])
    import evaluate  # slow to import, and one process needs it

    metric = evaluate.load(str(METRIC), keep_in_memory=True)
    texts = {side: [answer["answer"] for answer in answers[side]] for side in SIDES}
    scores = {
        side: metric.compute(
            predictions=texts[side], references=rows["reference"][:], language=language, with_rows=True,
            stopped=[answer["stopped"] for answer in answers[side]], nll=nll[side], target_tokens=target_tokens,
        )["rows"]
        for side in SIDES
    }  # fmt: skip
    predictions = report.join_predictions(columns, scores["base"], scores["adapter"], texts["base"], texts["adapter"])
    for index, line in enumerate(predictions):
        line |= {f"{side}_thought": answers[side][index]["thought"] for side in SIDES}
    return predictions


if __name__ == "__main__":
    errors.run(main)
