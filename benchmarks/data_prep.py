"""Rows per second and peak memory of data_prep.py against TRL's preparation, on the same rows and tokenizer.

    python benchmarks/data_prep.py

The rows are the embedded pairs with a number added to each question, so that none is a duplicate. Both run as commands of
their own, imports included, with the same number of workers; "again" is a second run on unchanged files.
"""

import itertools
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.measure import read_lines, run_watched, write_result  # noqa: E402
from sft import errors  # noqa: E402
from sft.config import option, parse  # noqa: E402

# What SFTTrainer does with conversational rows before it trains; the model is as small as a model can be.
TRL_PREPARATION = """
import sys
import datasets
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
source, name, folder, workers = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=folder)
def conversational(row):
    return {"prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}]}
rows = rows.map(conversational, remove_columns=rows.column_names, num_proc=int(workers))
size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
trainer = SFTTrainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)), train_dataset=rows, processing_class=tokenizer,
    args=SFTConfig(output_dir=folder, max_length=512, dataset_num_proc=int(workers), bf16=False, use_cpu=True,
                   report_to="none"),
)
assert "labels" in trainer.train_dataset.column_names, trainer.train_dataset
print(f"rows {len(trainer.train_dataset)}")
"""


@dataclass
class PrepBenchmark:
    """All settings of this benchmark."""

    model_name_or_path: str = option("models/SmolLM2-135M-Instruct", "whose tokenizer is used")
    input: str = option("data/ascend_qa_en.jsonl", "jsonl file with question and answer, repeated as often as needed")
    rows: list[str] = option(["380", "10000", "100000", "1000000"], "sizes to prepare with data_prep.py")
    trl_rows: list[str] = option(["380", "10000", "100000"], "sizes to prepare with TRL as well")
    num_proc: int = option(2, "workers of both")
    quick: bool = option(False, "380 rows only, to see that it runs")
    output: str = option("outputs/benchmarks/data_prep.json", "where the figures go")


def main() -> None:
    settings = parse(PrepBenchmark, description=__doc__)
    if settings.quick:
        settings.rows, settings.trl_rows = ["380"], ["380"]
    table = []
    for count in map(int, settings.rows):
        folder = Path(tempfile.mkdtemp(prefix="data_prep-"))
        try:
            table += measure(settings, count, folder, with_trl=str(count) in settings.trl_rows)
            print(f"{count:,} rows done", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    lines = {(line["rows"], line["by"]): line for line in table}
    compared = {rows: (lines[rows, "TRL"], lines[rows, "data_prep.py"]) for rows, by in lines if by == "TRL"}
    write_result(
        settings.output, settings, table,
        times_faster_than_trl={str(rows): trl["s"] / ours["s"] for rows, (trl, ours) in compared.items()},
        times_less_cpu_than_trl={str(rows): trl["CPU s"] / ours["CPU s"] for rows, (trl, ours) in compared.items()},
    )  # fmt: skip


def measure(settings: PrepBenchmark, count: int, folder: Path, with_trl: bool) -> list[dict]:
    """The lines of the table for one size."""
    source = folder / "rows.jsonl"
    write_rows(Path(settings.input), source, count)
    command = [
        sys.executable, "data_prep.py", "--input", source, "--model_name_or_path", settings.model_name_or_path,
        "--output_dir", folder / "dataset", "--num_proc", settings.num_proc,
    ]  # fmt: skip
    measured = {"data_prep.py": run_watched(command), "data_prep.py again": run_watched(command)}
    manifest = json.loads((folder / "dataset" / "manifest.json").read_text(encoding="utf-8"))
    written = sum(manifest["rows_written"].values())
    if with_trl:
        measured["TRL"] = run_watched(
            [sys.executable, "-c", TRL_PREPARATION, source, settings.model_name_or_path, folder, settings.num_proc],
            env={"HF_HOME": str(folder / "cache")},
        )
        if f"rows {count}" not in measured["TRL"]["output"]:
            raise RuntimeError(f"TRL prepared other than {count} rows:\n{measured['TRL']['output'][-2000:]}")
    return [
        {
            "rows": count,
            "by": name,
            "s": one["seconds"],
            "CPU s": one["cpu_s"],
            "rows/s": count / one["seconds"],
            "peak GB, all processes": one["peak_rss_bytes"] / 1e9,
            "rows written": count if name == "TRL" else written,
        }
        for name, one in measured.items()
    ]


def write_rows(source: Path, target: Path, count: int) -> None:
    """`count` question–answer rows made from those of `source`."""
    pairs = [(row["question"], row["answer"]) for row in read_lines(source)]
    with target.open("w", encoding="utf-8") as file:
        for number, (question, answer) in enumerate(itertools.islice(itertools.cycle(pairs), count)):
            row = {"question": f"{question} (case {number})", "answer": answer}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    errors.run(main)
