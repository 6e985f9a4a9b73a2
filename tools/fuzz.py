"""Bad inputs for the five programs, drawn from a seed: what they end with, what they say, and what they leave behind.

    python -m tools.fuzz --minutes 5 --seed 0

Each case copies a small model, data set and run, spoils one file or one flag, and starts one program on it. It has to end
with status 0 or 2, and with 2 in one sentence; nothing but its output directory may have changed, and nothing may lie
beside it afterwards. What ends otherwise is a finding, printed with the case's number, which makes it again.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools import tiny
from tools.warm import WarmServer

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 90.0  # of one case; a program that takes longer hangs
VALUES = (None, True, False, -1, 0, 1, 2**63, 10**30, 1.5, 1e308, float("nan"), float("inf"), "", "x", "x" * 5000, "0", "../x",
          "/etc/passwd", "\x1b]0;t\x07\x1b[2J", "\x00", "中文 🙂", [], {}, [[]], [None], {"a": 1}, ["x", 1])  # fmt: skip
WORDS = ("", " ", "0", "-1", "1", "3", "1e9", "1e15", "1e400", "nan", "inf", "x", "None", "true", "[1,2]", "../x", "~", "/",
         "a" * 300, "\x1b]0;t\x07", "中文", "\udcff", "--seed", "9" * 5000)  # fmt: skip
FLAGS = {  # with a value that a program takes; VALUES of these are tried besides
    "data_prep.py": ("max_length", "eval_fraction", "seed", "encoding", "format", "on_too_long", "system_prompt", "strict",
                     "question_column", "answer_column", "num_proc", "output_dir", "model_name_or_path", "input"),
    "train.py": ("learning_rate", "lora_r", "lora_alpha", "lora_dropout", "warmup_ratio", "max_steps", "num_train_epochs", "seed",
                 "target_modules", "dtype", "attn_implementation", "loss_chunk_tokens", "save_steps", "eval_steps", "ddp_timeout",
                 "resume_from_checkpoint", "adapter_name_or_path", "global_batch_size", "report_to", "weight_decay",
                 "max_grad_norm", "per_device_train_batch_size", "output_dir", "dataset_dir", "model_name_or_path", "config"),
    "eval.py": ("batch_size", "max_new_tokens", "limit", "output_dir", "language", "seed", "dataset_dir", "model_name_or_path",
                "run_dir"),
    "export.py": ("dtype", "max_shard_size_bytes", "output_dir", "model_name_or_path", "run_dir", "push_to_hub"),
    "doctor.py": ("max_length", "config", "accelerate_config", "model_name_or_path", "explain", "root", "timeout_s"),
}  # fmt: skip
FILES = {  # what a program reads, below a case's folder
    "data_prep.py": ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "model/tokenizer.json", "model/tokenizer_config.json"),
    "train.py": ("train.yaml", "dataset/manifest.json", "dataset/train/*.arrow", "dataset/eval/*.arrow", "model/config.json",
                 "model/model.safetensors", "model/tokenizer.json", "run/*.json", "run/metrics.jsonl",
                 "run/checkpoint-*/*.json", "run/checkpoint-*/*.safetensors"),
    "eval.py": ("run/*.json", "run/metrics.jsonl", "run/adapter_model.safetensors", "dataset/manifest.json",
                "dataset/eval/*.arrow", "model/config.json"),
    "export.py": ("run/adapter_config.json", "run/provenance.json", "run/summary.json", "run/adapter_model.safetensors",
                  "model/*.json", "model/model.safetensors"),
    "doctor.py": ("train.yaml", "launch.yaml", "model/config.json", "dataset/manifest.json", "run.log"),
}  # fmt: skip


def make_originals(folder: Path, server: WarmServer) -> None:
    """A model, rows in four formats, a data set, a finished run of four steps and config files, all good."""
    import pyarrow
    from pyarrow import csv, parquet

    rows = tiny.make_rows(40)
    (folder / "model").mkdir(parents=True)
    tiny.save_model(folder / "model", tiny.save_tokenizer(folder / "model", [t for row in rows for t in row.values()]))
    tiny.write_jsonl(folder / "rows.jsonl", rows)
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    csv.write_csv(pyarrow.Table.from_pylist(rows), folder / "rows.csv")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    settings = {"model_name_or_path": "model", "dataset_dir": "dataset", "output_dir": "run", "max_steps": 4, "save_steps": 2,
                "report_to": "none", "learning_rate": 0.001}  # fmt: skip
    (folder / "train.yaml").write_text("".join(f"{k}: {v}\n" for k, v in settings.items()), encoding="utf-8")
    (folder / "launch.yaml").write_text(
        "distributed_type: MULTI_NPU\nnum_processes: 2\nmixed_precision: bf16\n", "utf-8"
    )
    (folder / "run.log").write_text("step 1 loss 2.3\n[rank1]: RuntimeError: NPU out of memory. Tried\n", "utf-8")
    for script, argv in (
        ("data_prep.py", command("data_prep.py", folder, "rows.jsonl")),
        ("train.py", command("train.py", folder)),
    ):
        status, output = start(server, script, argv, folder)
        if status:
            raise RuntimeError(f"{script} failed on good inputs:\n{output}")


def command(script: str, folder: Path, rows: str = "rows.jsonl") -> dict[str, str]:
    """The flags of a good start of a program in a case's folder, by name."""
    output = str(folder / "output")
    return {
        "data_prep.py": {"input": str(folder / rows), "model_name_or_path": str(folder / "model"),
                         "output_dir": output if (folder / "dataset").exists() else str(folder / "dataset")},
        "train.py": {"config": str(folder / "train.yaml"), "output_dir": str(folder / "run"), "dataset_dir": str(folder / "dataset"),
                     "model_name_or_path": str(folder / "model")},
        "eval.py": {"run_dir": str(folder / "run"), "output_dir": output, "dataset_dir": str(folder / "dataset"), "limit": "2",
                    "model_name_or_path": str(folder / "model"), "max_new_tokens": "4"},
        "export.py": {"run_dir": str(folder / "run"), "output_dir": output, "model_name_or_path": str(folder / "model")},
        "doctor.py": {"estimate": "", "config": str(folder / "train.yaml"), "accelerate_config": str(folder / "launch.yaml"),
                      "model_name_or_path": str(folder / "model")},
    }[script]  # fmt: skip


def start(server: WarmServer, script: str, flags: dict[str, str], folder: Path) -> tuple[int, str]:
    """(exit status, output) of one program in a fork. Raises: TimeoutError."""
    argv = []
    for name, value in flags.items():
        argv += [f"--{name}"] if name == "estimate" else [f"--{name}={value}"]
    home = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    return server.run(*argv, processes=1, script=script, env=home, timeout_s=LIMIT_S)


def spoil(path: Path, draw: random.Random) -> str:
    """Spoils one file; what was done to it."""
    content = path.read_bytes()
    kinds = ["cut", "bits", "empty", "noise", "gone", "directory", "dangling link", "nested", "byte"]
    is_json = path.suffix in (".json", ".jsonl", ".yaml")
    kind = draw.choice(["value"] * 12 + ["key"] * 3 + kinds if is_json else kinds)
    if kind in ("value", "key") and path.suffix == ".yaml":
        lines = content.decode().splitlines()
        place = draw.randrange(len(lines))
        lines[place] = (
            f"{lines[place].split(':')[0]}: {json.dumps(draw.choice(VALUES))}"
            if kind == "value"
            else draw.choice(("x: y", "- a", "a: [", "\t"))
        )
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    elif kind in ("value", "key"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        place = draw.randrange(len(lines))
        value, what = change(json.loads(lines[place]), kind, draw)
        lines[place] = json.dumps(value)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"{kind} {what}"
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(max(len(content), 1))])
    elif kind == "bits":
        spoilt = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(spoilt))
    elif kind == "byte":
        place = draw.randrange(max(len(content), 1))
        path.write_bytes(content[:place] + draw.choice((b"\xff", b"\x00", b'"', b"{", b"\n")) + content[place:])
    elif kind in ("empty", "noise", "nested"):
        path.write_bytes({"empty": b"", "noise": draw.randbytes(300), "nested": b"[" * 100_000}[kind])
    else:
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "dangling link":
            path.symlink_to("nothing-there")
    return kind


def change(value, kind: str, draw: random.Random):
    """A JSON value with one value replaced or one key removed, and which."""
    places = []

    def walk(inside, path: tuple) -> None:
        for key, inner in inside.items() if isinstance(inside, dict) else enumerate(inside):
            places.append((inside, key, (*path, key)))
            if isinstance(inner, (dict, list)) and len(places) < 3000:
                walk(inner, (*path, key))

    if isinstance(value, (dict, list)):
        walk(value, ())
    if not places or draw.random() < 0.05:
        return draw.choice(VALUES), "of the whole file"
    inside, key, path = draw.choice(places)
    if kind == "key":
        del inside[key]
        return value, f"{'.'.join(map(str, path))} removed"
    inside[key] = draw.choice(VALUES)
    return value, f"{'.'.join(map(str, path))} = {inside[key]!r}"[:120]


def snapshot(folder: Path, without: list[Path]) -> dict[str, str]:
    """Each file, directory and link below a folder with a hash of its content, the output directories left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if (
            any(path == one or one in path.parents for one in without)
            or folder / "home" in (path, *path.parents)
            or folder / "tmp" == path
        ):
            continue
        is_file = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if is_file else str(path.is_symlink())
        )
    return found


def one_case(number: int, seed: int, originals: Path, folder: Path, server: WarmServer) -> tuple[str, str | None]:
    """(what was done, what is wrong with how it ended or None). Equal numbers and seeds make equal cases."""
    draw = random.Random(f"{seed}/{number}")
    shutil.copytree(originals, folder, symlinks=True)
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    script = draw.choice(list(FILES))
    flags = command(script, folder)
    if script == "data_prep.py":
        flags["input"] = str(folder / draw.choice(("rows.jsonl", "rows.json", "rows.csv", "rows.parquet")))
    if script == "train.py" and draw.random() < 0.5:
        flags["output_dir"] = str(folder / "output")
    elif script == "train.py" and draw.random() < 0.7:  # a run to be continued
        for name in ("summary.json", "checkpoint-4"):
            path = folder / "run" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if draw.random() < 0.65:
        patterns = [p for p in FILES[script] if not p.startswith("rows.") or folder / p == Path(flags.get("input", ""))]
        path = draw.choice(sorted(folder.glob(draw.choice(patterns))) or [folder / "model/config.json"])
        done = f"{script}: {path.relative_to(folder)}: {spoil(path, draw)}"
    else:
        name = draw.choice(FLAGS[script])
        flags[name] = draw.choice(WORDS).replace("\0", "")
        done = f"{script}: --{name} {flags[name][:60]!a}"
    outputs = [Path(flags[name]) for name in ("output_dir",) if flags.get(name, "").startswith(str(folder))]
    if script == "eval.py":
        outputs.append(folder / "run/eval")
    before = snapshot(folder, outputs)
    there = {str(path) for path in outputs if path.exists()}
    try:
        status, output = start(server, script, flags, folder)
    except TimeoutError as error:
        return done, f"did not end in {LIMIT_S:.0f} s: {str(error)[-500:]}"
    after = snapshot(folder, outputs)
    sentences = [line for line in output.splitlines() if line.startswith(("error", "usage: ", "doctor.py: error"))]
    if "Traceback (most recent call last)" in output:
        return done, f"a traceback: {output[-1500:]}"
    if status not in (0, 2) and not (status == 3 and script == "doctor.py"):
        return done, f"status {status}: {output[-800:]}"
    if status == 2 and not sentences:
        return done, f"no sentence: {output[-500:]}"
    if any(ord(character) < 32 and character not in "\n\t\r" for character in output):
        return done, f"control characters: {output[-300:]!r}"
    if before != after:
        changed = sorted({name for name in before.keys() | after.keys() if before.get(name) != after.get(name)})
        return done, f"changed {', '.join(changed[:5])}"
    if status == 2 and (
        left := [path for path in outputs if path.exists() and str(path) not in there and any(path.iterdir())]
    ):
        return done, f"left {left[0].name} with {sorted(path.name for path in left[0].iterdir())[:5]}"
    return done, None


def fuzz(
    seed: int, cases: int | None, seconds: float | None, only: int | None = None, report=lambda line: None
) -> dict:
    """Runs cases 0, 1, 2 … of a seed until their number or the time is used up; counts by program, and the findings."""
    begun, counts, findings, number = time.monotonic(), dict.fromkeys(FILES, 0), [], only or 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary, WarmServer() as server:
        make_originals(Path(temporary) / "originals", server)
        while (cases is None or number < cases) and (seconds is None or time.monotonic() - begun < seconds):
            folder = Path(temporary) / f"case-{number}"
            done, wrong = one_case(number, seed, Path(temporary) / "originals", folder, server)
            counts[done.split(":")[0]] += 1
            if wrong:
                findings.append(f"case {number}: {done}: {wrong}")
                report(findings[-1])
            shutil.rmtree(folder, ignore_errors=True)
            number += 1
            if only is not None:
                break
    return {"seed": seed, "cases": sum(counts.values()), "by": counts, "findings": findings,
            "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone")
    arguments = parser.parse_args()
    result = fuzz(arguments.seed, None, 60 * arguments.minutes, arguments.only, lambda line: print(line, flush=True))
    print(f"{result['cases']} cases in {result['seconds']} s ({result['by']}): {len(result['findings'])} findings")
    sys.exit(bool(result["findings"]))


if __name__ == "__main__":
    main()
