"""What the doctor sees of a machine: versions, files, tools, and what torch finds. Standard library only.

It has to work where torch cannot be imported (a torch_npu without CANN breaks `import torch`), so whatever imports
torch or opens a card runs in a process of its own with a deadline: `python -m doctor.machine cards`.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
GIB = 1 << 30
PACKAGES = ("torch", "torch_npu", "accelerate", "transformers", "peft", "datasets", "evaluate")
NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")  # character devices that every NPU process opens


@lru_cache
def knowledge(name: str) -> dict:
    """The data file `doctor/data/NAME.json`; its values carry their sources."""
    return json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text(encoding="utf-8"))


@dataclass
class Machine:
    """Where to look, and what was found there by the probes."""

    root: Path = Path("/")  # of the file system; another one for a container image or a chroot
    accelerate_config: str | None = None
    train_config: str | None = None
    timeout_s: float = 120
    min_shm_bytes: int = GIB
    launch: dict = field(default_factory=dict)  # keys of the Accelerate config
    train: dict = field(default_factory=dict)  # keys of the training config
    probe: dict = field(default_factory=dict)  # what torch says about the cards
    imports: dict = field(default_factory=dict)  # package → "" or the error of its import
    smi: dict = field(default_factory=dict)  # what the vendor's tool says about the cards
    unreadable: list = field(default_factory=list)  # config files that are none, with the reason
    versions: dict = field(default_factory=dict)  # of Python, packages, CANN and driver
    kind: str = "cpu"

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*(part.lstrip("/") for part in parts))


def version_key(text: str) -> tuple:
    """Sorts versions as their makers mean it: 8.0.RC3 < 8.0.0 < 8.0.1, 24.1.rc3 < 24.1.0.3, 2.1.0 < 2.1.0.post17."""
    ranks = {"rc": -1, "beta": -2, "b": -2, "alpha": -3, "a": -3}
    parts = re.findall(r"(rc|beta|alpha|post|a|b)?[.\-_]?(\d+)", text.lower().split("+")[0])
    key = [(ranks.get(word, 0), int(number)) for word, number in parts]
    return (*key, (-0.5, 0))  # the end: after a pre-release, before a further number


def family(version: str) -> str:
    """Its first two numbers: "8.0.RC3" → "8.0"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def satisfies(version: str, condition: str) -> bool:
    """Whether a version meets ">=2.6", "<2" or "==2.1.0"; a shorter bound compares as many numbers as it has."""
    sign, bound = re.fullmatch(r"(>=|<|==)(.+)", condition).groups()
    mine, other = version_key(version), version_key(bound)
    return {">=": mine >= other, "<": mine < other, "==": mine[: len(other) - 1] == other[:-1]}[sign]


def installed(package: str) -> str | None:
    """Version of a package by its metadata, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_file(cann: str | None, driver: str | None) -> str:
    """Which requirements file goes with this CANN and driver, CANN counting more; the newest where neither is known."""
    rows = knowledge("versions")["requirements"]  # newest first

    def fit(row: dict) -> int:
        return 2 * bool(cann and family(cann) in row["cann"]) + bool(driver and family(driver) in row["drivers"])

    return max(rows, key=fit)["file"]


def read_flat(path: str | Path) -> dict:
    """Keys and values of a YAML file, those of nested mappings beside the others. Raises: ValueError when it is none.

    Where PyYAML is missing, which is what the doctor may be asked to find out, lines of the form `key: value` are read.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        import yaml
    except ImportError:
        pairs = re.findall(r"^\s*([A-Za-z_]\w*):[ \t]*([^\n]*)", text, re.MULTILINE)
        return {key: _scalar(re.sub(r"\s+#.*$", "", value).strip()) for key, value in pairs}
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no valid YAML: {' '.join(str(error).split())[:200]}") from None
    return _flattened(settings) if isinstance(settings, dict) else {}


def _flattened(settings: dict) -> dict:
    flat = {}
    for key, value in settings.items():
        flat.update(_flattened(value) if isinstance(value, dict) else {str(key): value})
    return flat


def _scalar(text: str):
    """A YAML value without PyYAML: quoted text stays text, numbers and truth values become what YAML 1.1 makes of them."""
    if text[:1] in ("'", '"'):
        return text.strip(text[0])
    words = {
        "": None,
        "null": None,
        "~": None,
        "true": True,
        "yes": True,
        "on": True,
        "false": False,
        "no": False,
        "off": False,
    }
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def whole_number(settings: dict, key: str, default: int) -> int:
    """A whole number from 0 on of a launch config. Raises: ValueError naming the key."""
    value = settings.get(key)
    if value is None:
        return default
    if not re.fullmatch(r"\d{1,9}", str(value)):
        raise ValueError(f"{key} is {value}; expected a whole number")
    return int(value)


def default_accelerate_config() -> str | None:
    """The file that `accelerate config` writes, if it is there."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    path = Path(home) / "accelerate" / "default_config.yaml"
    return str(path) if path.is_file() else None


def run_tool(*command: str, timeout_s: float) -> tuple[int | None, str]:
    """Exit status and output of a command; None when it is not there, -1 when it did not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return -1, f"{command[0]} did not answer within {timeout_s:.0f} s"
    except OSError as error:
        return None, str(error)
    return done.returncode, done.stdout + done.stderr


def run_probe(what: str, timeout_s: float) -> dict:
    """What `python -m doctor.machine WHAT` said before it ended, failed ("error") or ran out of time ("late")."""
    command = [sys.executable, "-m", "doctor.machine", what]
    # A file, not a pipe: a grandchild that CANN leaves behind may keep a pipe open for ever.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, start_new_session=True
        )
        try:
            status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = None
        output.seek(0)
        text = output.read()
    facts: dict = {}
    for line in text.splitlines():
        if line.startswith("DOCTOR "):
            facts.update(json.loads(line[len("DOCTOR ") :]))
    if status is None:
        facts["late"] = f"{facts.get('step', 'start')}: no answer within {timeout_s:.0f} s"
    elif status:
        facts["error"] = text if facts else text or f"ended with status {status}"
    return facts


def probe_cards() -> None:
    """Says what torch finds, step by step, so that a hang or a crash shows how far it came. Runs in its own process."""

    def say(**facts) -> None:
        print("DOCTOR " + json.dumps(facts), flush=True)

    say(step="import torch")
    import torch

    say(step="import torch_npu", torch=torch.__version__, cuda_build=torch.version.cuda)
    if importlib.util.find_spec("torch_npu"):
        import torch_npu  # noqa: F401  torch before 2.5 does not load it by itself

        try:
            from torch_npu.npu.utils import get_cann_version

            say(cann=get_cann_version("CANN"))
        except (ImportError, AttributeError, RuntimeError, ValueError):
            pass  # not every torch_npu has it; the version is read from CANN's files then
    say(step="count the cards")
    npu = hasattr(torch, "npu") and torch.npu.is_available()
    kind = "npu" if npu else "cuda" if torch.cuda.is_available() else "cpu"
    say(kind=kind, count=0)
    if kind == "cpu":
        return
    backend, cards = getattr(torch, kind), []
    say(count=backend.device_count())
    for index in range(backend.device_count()):
        say(step=f"open card {index}")
        backend.set_device(index)  # an NPU answers nothing before
        free, total = backend.mem_get_info(index)
        cards.append({"name": backend.get_device_name(index), "free": free, "total": total})
        say(cards=cards)
    say(step="compute on card 0")
    backend.set_device(0)
    ones = torch.ones(16, 16, device=f"{kind}:0")
    say(sum=float((ones @ ones).sum()), bf16=bool(backend.is_bf16_supported()), step="done")


def probe_imports() -> None:
    """Imports each package that training needs; one that fails does not keep the others from being tried."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu has its own probe
    for name in ("accelerate", "transformers", "datasets", "evaluate", "peft"):
        message = ""
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package raises anything, and that is the answer
            message = f"{type(error).__name__}: {error}"
        print("DOCTOR " + json.dumps({name: message, "step": f"import {name}"}), flush=True)


def read_npu_smi(text: str) -> dict:
    """`npu-smi info` as data: version, cards [{index, name, health, used_mb, total_mb}], processes [{card, pid, name, mb}]."""
    version = re.search(r"npu-smi\s+\S+\s+Version:\s*(\S+)", text)
    cards, processes, table = [], [], "cards"
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            table = "processes"
        elif table == "cards" and (first := re.fullmatch(r"(\d+)\s+(\S+)", cells[0])) and not first[2].isdigit():
            cards.append({"index": int(first[1]), "name": f"Ascend{first[2]}", "health": cells[1]})
        elif table == "cards" and cards and (memory := re.search(r"(\d+)\s*/\s*(\d+)\s*$", cells[-1])):
            cards[-1].update(used_mb=int(memory[1]), total_mb=int(memory[2]))
        elif table == "processes" and len(cells) == 4 and cells[1].isdigit():
            card = int(cells[0].split()[0])
            processes.append({"card": card, "pid": int(cells[1]), "name": cells[2], "mb": int(cells[3] or 0)})
    return {"version": version[1] if version else None, "cards": cards, "processes": processes}


def read_nvidia_smi(timeout_s: float) -> dict:
    """The same as `read_npu_smi` from nvidia-smi's CSV output."""
    fields = "driver_version,index,name,memory.used,memory.total"
    status, text = run_tool("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", timeout_s=timeout_s)
    if status != 0:
        return {} if status is None else {"error": text}
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 4]
    cards = [
        {"index": int(r[1]), "name": r[2], "health": "OK", "used_mb": int(r[3]), "total_mb": int(r[4])} for r in rows
    ]
    apps = run_tool("nvidia-smi", "--query-compute-apps=gpu_bus_id,pid,name,used_memory",
                    "--format=csv,noheader,nounits", timeout_s=timeout_s)[1]  # fmt: skip
    pids = re.findall(r"^[^,\n]+, *(\d+), *([^,\n]+), *(\d+)", apps, re.MULTILINE)
    processes = [{"card": "?", "pid": int(pid), "name": name, "mb": int(mb)} for pid, name, mb in pids]
    return {"version": rows[0][0] if rows else None, "cards": cards, "processes": processes}


def find_cann(machine: Machine) -> tuple[Path | None, list[Path]]:
    """CANN's home directory in this environment, and the set_env.sh files lying on this machine."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    places = [machine.path("usr/local/Ascend"), Path(os.path.expanduser("~/Ascend")), machine.path("opt/Ascend")]
    scripts = [script for place in places for script in sorted(place.glob("*/set_env.sh"))]
    return (Path(home) if home else None), [script for script in scripts if script.parent.name != "nnal"]


def cann_version(home: Path) -> str | None:
    """CANN's version from its installation files (`version=` in ascend_*_install.info, else in version.cfg)."""
    for info in sorted([*home.glob("ascend_*_install.info"), *home.glob("*/ascend_*_install.info")]):
        if match := re.search(r"^version=(\S+)", info.read_text(errors="replace"), re.MULTILINE):
            return match[1]
    config = home / "version.cfg"
    match = re.search(r":([\d.]+(?:\.?RC\d+)?)\]", config.read_text(errors="replace")) if config.is_file() else None
    return match[1] if match else None


def version_file(path: Path) -> str | None:
    """`Version=` of a driver's or firmware's version.info."""
    match = re.search(r"^Version=(\S+)", path.read_text(errors="replace"), re.MULTILINE) if path.is_file() else None
    return match[1] if match else None


def probe_all(machine: Machine) -> None:
    """Fills in what torch and the packages say. The two slow probes run side by side, each with its deadline."""
    with ThreadPoolExecutor(2) as pool:
        cards = pool.submit(run_probe, "cards", machine.timeout_s)
        imports = pool.submit(run_probe, "imports", machine.timeout_s)
        machine.probe, machine.imports = cards.result(), imports.result()


def read_machine(machine: Machine) -> None:
    """Fills in what files and tools say: launch config, npu-smi or nvidia-smi, versions, the kind of machine."""
    path = machine.accelerate_config = machine.accelerate_config or default_accelerate_config()
    for name, file in (("launch", path), ("train", machine.train_config)):
        try:
            setattr(machine, name, read_flat(file) if file else {})
        except (ValueError, OSError) as error:
            machine.unreadable.append(f"{file}: {error}")
    status, text = run_tool("npu-smi", "info", timeout_s=min(machine.timeout_s, 30))
    if status is not None:
        machine.smi = read_npu_smi(text) if status == 0 else {"error": text}
    else:
        machine.smi = read_nvidia_smi(min(machine.timeout_s, 30))
    home, scripts = find_cann(machine)
    signs = (status is not None, home, scripts, installed("torch_npu"), machine.path("dev/davinci_manager").exists(),
             machine.launch.get("distributed_type") == "MULTI_NPU")  # fmt: skip
    if any(signs):
        machine.kind = "npu"
    elif machine.smi or machine.probe.get("kind") == "cuda":
        machine.kind = "cuda"
    versions = {name: installed(name) for name in (*PACKAGES, "numpy", "vllm", "vllm-ascend")}
    versions["python"] = "{}.{}.{}".format(*sys.version_info[:3])
    versions["cann"] = (cann_version(home) if home and home.is_dir() else None) or machine.probe.get("cann")
    driver = version_file(machine.path("usr/local/Ascend/driver/version.info"))
    versions["driver"] = driver or machine.smi.get("version")
    versions["firmware"] = version_file(machine.path("usr/local/Ascend/firmware/version.info"))
    machine.versions = {name: version for name, version in versions.items() if version}


if __name__ == "__main__":
    {"cards": probe_cards, "imports": probe_imports}[sys.argv[1]]()
