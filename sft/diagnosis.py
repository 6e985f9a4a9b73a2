"""What the doctor knows: checks of an installation, known failures in a log. Standard library only.

It has to work where torch cannot be imported (a torch_npu without CANN breaks `import torch`), so whatever imports
torch or opens a card runs in a process of its own with a deadline: `python -m sft.diagnosis cards`.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
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
    """The data file `sft/doctor_data/NAME.json`; its values carry their sources."""
    return json.loads((Path(__file__).parent / "doctor_data" / f"{name}.json").read_text(encoding="utf-8"))


@dataclass
class Check:
    """One line of the doctor's answer. `status` is "ok", "warn" or "FAIL"; `remedy` says what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


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
    versions: dict = field(default_factory=dict)  # of Python, packages, CANN and driver
    kind: str = "cpu"

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*(part.lstrip("/") for part in parts))


# --- versions ---------------------------------------------------------------------------------------------------------


def version_key(text: str) -> tuple:
    """Sorts versions as their makers mean it: 8.0.RC3 < 8.0.0 < 8.0.1, 24.1.rc3 < 24.1.0.3, 2.1.0 < 2.1.0.post17."""
    key = []
    for part in re.split(r"[.\-_]", text.lower().split("+")[0].lstrip("v")):
        if match := re.fullmatch(r"(rc|alpha|beta|a|b|post|t|b)?(\d+)", part):
            rank = {"rc": -1, "beta": -2, "b": -2, "alpha": -3, "a": -3}.get(match[1], 0)
            key.append((rank, int(match[2])))
    return tuple(key)


def family(version: str) -> str:
    """Its first two numbers: "8.0.RC3" → "8.0"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def satisfies(version: str, condition: str) -> bool:
    """Whether a version meets ">=2.6", "<2" or "==2.1.0"; a shorter bound compares as many numbers as it has."""
    sign, bound = re.fullmatch(r"(>=|<|==)(.+)", condition).groups()
    mine, other = version_key(version), version_key(bound)
    return {">=": mine >= other, "<": mine < other, "==": mine[: len(other)] == other}[sign]


def installed(package: str) -> str | None:
    """Version of a package by its metadata, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_file(cann: str | None, driver: str | None) -> str:
    """Which requirements file goes with this CANN and driver."""
    for row in knowledge("versions")["requirements"]:
        if (not cann or family(cann) in row["cann"]) and (not driver or family(driver) in row["drivers"]):
            return row["file"]
    return "requirements-npu.txt" if not cann or satisfies(cann, ">=8.5") else "requirements-cann8.txt"


# --- looking ----------------------------------------------------------------------------------------------------------


def read_flat(path: str | Path) -> dict:
    """Keys and values of a YAML file, nested ones too, as text. PyYAML may be missing here, so it is not used."""
    pairs = re.findall(r"^\s*([A-Za-z_]\w*):[ \t]*([^\n]*)", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    return {key: re.sub(r"\s+#.*$", "", value).strip() for key, value in pairs}


def unquoted(value: str) -> str:
    return value.strip("'\"")


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
    """What `python -m sft.diagnosis WHAT` said before it ended, failed ("error") or ran out of time ("late")."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "sft.diagnosis", what]
    # A file, not a pipe: a grandchild that CANN leaves behind may keep a pipe open for ever.
    with open(os.path.join(_scratch(), f"{what}.out"), "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY, start_new_session=True
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


@lru_cache
def _scratch() -> str:
    import atexit
    import tempfile

    folder = tempfile.mkdtemp(prefix="doctor-")
    atexit.register(shutil.rmtree, folder, True)
    return folder


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
        return {} if status is None else {"error": text.strip()[:300]}
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 4]
    cards = [{"index": int(r[1]), "name": r[2], "health": "OK", "used_mb": int(r[3]), "total_mb": int(r[4])} for r in rows]
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
    if (home / "version.cfg").is_file():
        if match := re.search(r":([\d.]+(?:\.?RC\d+)?)\]", (home / "version.cfg").read_text(errors="replace")):
            return match[1]
    return None


def version_file(path: Path) -> str | None:
    """`Version=` of a driver's or firmware's version.info."""
    match = re.search(r"^Version=(\S+)", path.read_text(errors="replace"), re.MULTILINE) if path.is_file() else None
    return match[1] if match else None


def look(machine: Machine) -> None:
    """Fills in what the probes find. The slow ones run side by side, each with its deadline."""
    path = machine.accelerate_config = machine.accelerate_config or default_accelerate_config()
    machine.launch = read_flat(path) if path else {}
    machine.train = read_flat(machine.train_config) if machine.train_config else {}
    with ThreadPoolExecutor(4) as pool:
        cards = pool.submit(run_probe, "cards", machine.timeout_s)
        imports = pool.submit(run_probe, "imports", machine.timeout_s)
        npu = pool.submit(run_tool, "npu-smi", "info", timeout_s=min(machine.timeout_s, 30))
        nvidia = pool.submit(read_nvidia_smi, min(machine.timeout_s, 30))
        machine.probe, machine.imports = cards.result(), imports.result()
        status, text = npu.result()
        if status is not None:
            machine.smi = read_npu_smi(text) if status == 0 else {"error": text.strip()[:300]}
            machine.kind = "npu"
        elif nvidia.result():
            machine.smi, machine.kind = nvidia.result(), "cuda"
    home, scripts = find_cann(machine)
    wants_npu = machine.launch.get("distributed_type") == "MULTI_NPU"
    if installed("torch_npu") or home or scripts or wants_npu or machine.path("dev/davinci_manager").exists():
        machine.kind = "npu"
    elif machine.probe.get("kind") == "cuda":
        machine.kind = "cuda"
    versions = {name: installed(name) for name in (*PACKAGES, "numpy", "vllm", "vllm-ascend")}
    versions["python"] = "{}.{}.{}".format(*sys.version_info[:3])
    versions["cann"] = (cann_version(home) if home and home.is_dir() else None) or machine.probe.get("cann")
    driver = version_file(machine.path("usr/local/Ascend/driver/version.info"))
    versions["driver"] = driver or machine.smi.get("version")
    versions["firmware"] = version_file(machine.path("usr/local/Ascend/firmware/version.info"))
    machine.versions = {name: version for name, version in versions.items() if version}


# --- judging ----------------------------------------------------------------------------------------------------------


def check_python(machine: Machine) -> list[Check]:
    version, minimum = machine.versions["python"], knowledge("versions")["minimum"]["python"]
    if not satisfies(version, f">={minimum}"):
        return [Check("Python", "FAIL", version, f"accelerate 1.15 needs Python {minimum} or newer")]
    for row in knowledge("versions")["python_of_torch_npu"]:
        npu = machine.versions.get("torch_npu")
        if npu and family(npu) == row["torch"] and not row["oldest"] <= family(version) <= row["newest"]:
            oldest, newest = version_key(row["oldest"]), version_key(row["newest"])
            if not oldest <= version_key(family(version)) <= newest:
                remedy = f"torch_npu {npu} has wheels for Python {row['oldest']} to {row['newest']}"
                return [Check("Python", "FAIL", version, remedy)]
    return [Check("Python", "ok", version)]


def check_packages(machine: Machine) -> list[Check]:
    checks, minimum = [], knowledge("versions")["minimum"]
    file = requirements_file(machine.versions.get("cann"), machine.versions.get("driver")) if machine.kind == "npu" else "requirements.txt"
    for name in PACKAGES:
        version, failure = machine.versions.get(name), machine.imports.get(name, "")
        if not version and name == "torch_npu" and machine.kind != "npu":
            continue
        if not version:
            checks.append(Check(name, "FAIL", "not installed", f"pip install -r {file}"))
        elif name in minimum and not satisfies(version, f">={minimum[name]}"):
            checks.append(Check(name, "FAIL", version, f"{minimum[name]} or newer is needed: pip install -r {file}"))
        elif failure:
            checks.append(Check(name, "FAIL", f"{version}, import fails: {_last_line(failure)}", _remedy(failure)))
        else:
            checks.append(Check(name, "ok", version))
    if late := machine.imports.get("late"):
        checks.append(Check("imports", "FAIL", late, "a slow network disk or a package that waits for the network: set HF_HUB_OFFLINE=1"))
    return checks


def check_versions(machine: Machine) -> list[Check]:
    """Whether torch, torch_npu, CANN, driver, Python and the Hugging Face packages belong together."""
    data, have, checks = knowledge("versions"), machine.versions, []
    npu, torch, cann, driver = (have.get(name) for name in ("torch_npu", "torch", "cann", "driver"))
    file = requirements_file(cann, driver)
    if npu and torch and npu.split("+")[0].split(".")[:3] != torch.split("+")[0].split(".")[:3]:
        base = ".".join(npu.split("+")[0].split(".")[:3])
        checks.append(Check("torch ↔ torch_npu", "FAIL", f"torch {torch}, torch_npu {npu}", f"their first three numbers must be equal: install torch {base} or another torch_npu ({file} has a pair)"))
    build = machine.probe.get("cuda_build") or ("+cu" in (torch or "") and torch)
    if npu and build:
        remedy = f"torch_npu refuses to load beside it: pip install torch=={torch.split('+')[0]}+cpu --index-url https://download.pytorch.org/whl/cpu (or from a wheelhouse)"
        checks.append(Check("torch build", "FAIL", f"torch {torch} is a CUDA build", remedy))
    if npu and cann:
        checks.append(_torch_npu_and_cann(npu, cann, file, data))
    if cann and driver and machine.kind == "npu":
        checks.append(_cann_and_driver(cann, driver, data))
    for rule in data["needs"]:
        (name, condition), = rule["if"].items()
        if name in have and satisfies(have[name], condition):
            for other, wanted in rule["then"].items():
                if other in have and not satisfies(have[other], wanted):
                    reason = f"{name} {condition} needs {other} {wanted} ({rule['source']})"
                    if name == "vllm-ascend":
                        reason += f"; driver {driver or '?'} allows the CANN versions listed beside it only, an image cannot bring its own driver: serve with another card's server or an older vLLM-Ascend"
                    checks.append(Check(f"{name} ↔ {other}", "FAIL", f"{name} {have[name]}, {other} {have[other]}", reason))
    return checks or [Check("versions", "ok", "belong together")]


def _torch_npu_and_cann(npu: str, cann: str, file: str, data: dict) -> Check:
    name, found = "torch_npu ↔ CANN", f"torch_npu {npu}, CANN {cann}"
    row = next((row for row in data["torch_npu"] if row["torch_npu"] == npu), None)
    if row is None:
        return Check(name, "warn", found, f"this torch_npu is not in the table; for CANN {family(cann)} take {file}")
    works = data["release_works_with_cann"].get(".".join([*row["release"].split(".")[:2], "0"]), [])
    if family(cann) == row["cann"]:
        return Check(name, "ok", found)
    if family(cann) in works:
        return Check(name, "ok", f"{found} (paired with {row['cann']}, listed as compatible)")
    return Check(name, "FAIL", found, f"torch_npu {npu} goes with CANN {', '.join(sorted({row['cann'], *works}))}: take {file}")


def _cann_and_driver(cann: str, driver: str, data: dict) -> Check:
    name, found = "CANN ↔ driver", f"CANN {cann}, driver {driver}"
    row = next((row for row in data["cann_driver"] if row["cann"] == family(cann)), None)
    if row is None:
        return Check(name, "warn", found, "this CANN is not in the table; see its release notes for the driver (Ascend HDK)")
    if family(driver) in row["paired"]:
        return Check(name, "ok", found)
    if family(driver) in row["works"]:
        return Check(name, "ok", f"{found} (paired with {row['paired'][0]}.x, listed as compatible)")
    fitting = [other["cann"] for other in data["cann_driver"] if family(driver) in other["paired"]]
    listed = sorted({*row["paired"], *row["works"]}, key=version_key)
    remedy = f"CANN {row['cann']} wants driver {', '.join(listed)}; "
    if fitting:
        remedy += f"driver {driver} is made for CANN {', '.join(fitting)}: take that CANN and {requirements_file(fitting[0], driver)}, "
    remedy += "or have the host's driver upgraded. A container does not help: its driver is the host's, and CANN then fails with drvRet=87 (so do vLLM-Ascend images)"
    return Check(name, "FAIL" if version_key(driver) < version_key(listed[0]) else "warn", found, remedy)


def check_cann(machine: Machine) -> list[Check]:
    if machine.kind != "npu":
        return []
    home, scripts = find_cann(machine)
    scripts = [str(script) for script in scripts]
    if not home:
        found = "set_env.sh was not sourced" if scripts else "not found"
        remedy = f"source {scripts[-1]}" if scripts else "install CANN toolkit and the operator package for this card, then source its set_env.sh; in a container take an image that has it"
        return [Check("CANN", "FAIL", found + (f"; lies at {', '.join(scripts)}" if scripts else ""), remedy)]
    if not home.is_dir():
        return [Check("CANN", "FAIL", f"ASCEND_HOME_PATH={home} does not exist", "open a new shell and source the set_env.sh of the CANN that is installed")]
    folders = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    missing = [name for name in ("libhccl.so", "libascendcl.so") if not any((folder / name).exists() for folder in folders)]
    if missing:
        inside = [name for name in missing if (home / "lib64" / name).exists()]
        remedy = f"source {home}/set_env.sh (LD_LIBRARY_PATH lacks {home}/lib64)" if inside else f"the CANN at {home} is incomplete: install the toolkit again, then source its set_env.sh"
        return [Check("CANN", "FAIL", f"{', '.join(missing)} not on LD_LIBRARY_PATH", remedy)]
    simulated = " (simulated Ascend, not hardware)" if (home / "SIMULATED").exists() else ""
    checks = [Check("CANN", "ok", f"{machine.versions.get('cann', 'version unknown')} at {home}{simulated}")]
    if simulated:
        return checks
    lacking = [name for name in knowledge("versions")["cann_python_packages"] if not _importable(name)]
    pip = [knowledge("versions")["pip_names"].get(name, name) for name in lacking]
    if lacking:
        return [*checks, Check("CANN's Python packages", "FAIL", f"missing: {', '.join(pip)}", f"pip install {' '.join(pip)} (else error EC0010 at the first compiled operator)")]
    return [*checks, Check("CANN's Python packages", "ok", "all there")]


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def check_driver(machine: Machine) -> list[Check]:
    if machine.kind == "cpu":
        return []
    tool = "npu-smi" if machine.kind == "npu" else "nvidia-smi"
    works = machine.probe.get("kind") == machine.kind and machine.probe.get("sum") == 4096
    if error := machine.smi.get("error"):
        return [Check("driver", "FAIL", f"{tool} fails: {_last_line(error)}", _remedy(error))]
    version = machine.versions.get("driver") or machine.smi.get("version")
    if not version and works:
        return [Check("driver", "ok", f"no {tool} here, but torch computes on the cards")]
    if not version:
        remedy = "install driver and firmware on the host; in a container mount /usr/local/Ascend/driver, /usr/local/dcmi and /usr/local/bin/npu-smi" if machine.kind == "npu" else "install the NVIDIA driver; containers need --gpus all"
        return [Check("driver", "FAIL", f"no {tool} and no version file", remedy)]
    firmware = f", firmware {machine.versions['firmware']}" if "firmware" in machine.versions else ""
    checks = [Check("driver", "ok", f"{version}{firmware}")]
    sick = [card for card in machine.smi.get("cards", []) if card["health"] not in ("OK", "Warning")]
    if sick:
        names = ", ".join(f"{card['index']} ({card['health']})" for card in sick)
        checks.append(Check("card health", "FAIL", f"card {names}", "leave it out with ASCEND_RT_VISIBLE_DEVICES; `npu-smi info -t health -i N` tells more; reset or replace it"))
    if machine.kind == "npu" and not works:
        absent = [f"/dev/{name}" for name in NODES if not machine.path("dev", name).exists()]
        nodes = sorted(path.name for path in machine.path("dev").glob("davinci[0-9]*"))
        if absent or not nodes:
            lacking = absent + ([] if nodes else ["/dev/davinci0 …"])
            checks.append(Check("device nodes", "FAIL", f"missing: {', '.join(lacking)}", "on the host load the driver (lsmod | grep drv_); start containers with --device=/dev/davinciN for each card and --device= for davinci_manager, devmm_svm and hisi_hdc"))
        else:
            checks.append(Check("device nodes", "ok", f"{len(nodes)} cards"))
    return checks


def check_cards(machine: Machine) -> list[Check]:
    """What torch itself can open and compute on."""
    probe = machine.probe
    if late := probe.get("late"):
        return [Check("torch", "FAIL", late, "a card or its driver hangs: `npu-smi info` (or nvidia-smi), leftover processes, then a reboot of the server")]
    if error := probe.get("error"):
        return [Check("torch", "FAIL", f"{probe.get('step', 'start')} fails: {explain(error)['message']}", _remedy(error))]
    if machine.kind == "cpu":
        return [Check("cards", "ok", "none: training runs on the CPU")]
    variable = "ASCEND_RT_VISIBLE_DEVICES" if machine.kind == "npu" else "CUDA_VISIBLE_DEVICES"
    setting, count = os.environ.get(variable), probe.get("count", 0)
    where = "" if setting is None else f", {variable}={setting!r}"
    if probe["kind"] != machine.kind or not count:
        remedy = f"{variable} hides them: unset it or name cards 0 to {max(len(machine.smi.get('cards', [])), 1) - 1}" if setting is not None else "see the lines above: torch_npu, CANN, driver" if machine.kind == "npu" else "torch lacks CUDA: install the CUDA build of torch that goes with this driver"
        return [Check("cards", "FAIL", f"torch sees none{where}", remedy)]
    names = ", ".join(sorted({card["name"] for card in probe["cards"]}))
    checks = [Check("cards", "ok", f"{count} × {names}{where}")]
    if probe.get("sum") != 4096:
        checks.append(Check("computing", "FAIL", f"a 16×16 matrix product gave {probe.get('sum')}, not 4096", "card 0 or its operators are broken: try another card, install CANN's operator package again"))
    busy = [f"card {i}: {c['free'] / GIB:.0f} of {c['total'] / GIB:.0f} GiB free" for i, c in enumerate(probe["cards"]) if c["free"] < 0.9 * c["total"]]
    users = ", ".join(f"pid {p['pid']} ({p['name']}, {p['mb']} MB, card {p['card']})" for p in machine.smi.get("processes", []))
    if busy or users:
        checks.append(Check("card memory", "warn", "; ".join([*busy, users][: len(busy) + bool(users)]), "other processes use these cards: end them, or take other cards with " + variable))
    else:
        checks.append(Check("card memory", "ok", f"{min(c['free'] for c in probe['cards']) / GIB:.0f} GiB free on each"))
    if probe.get("bf16"):
        checks.append(Check("bfloat16", "ok", "supported"))
    else:
        checks.append(Check("bfloat16", "warn", f"not on {names}", "dtype: auto takes float32 there: twice the memory; bfloat16 begins with Ascend 910B1 and NVIDIA Ampere"))
    return checks


def check_launch_config(machine: Machine) -> list[Check]:
    """Traps of the Accelerate config, above all processes that would train alone without a word."""
    name, launch, checks = "launch config", machine.launch, []
    if not machine.accelerate_config:
        return [Check(name, "ok", "none given: accelerate_configs/ has one for each case")]
    path, kind = machine.accelerate_config, launch.get("distributed_type", "NO")
    processes, servers = (int(unquoted(launch.get(key) or "1")) for key in ("num_processes", "num_machines"))
    count, on_cpu = machine.probe.get("count", 0), unquoted(launch.get("use_cpu", "false")) == "true"
    here = processes // max(servers, 1)
    if kind == "MULTI_CPU" and processes > 1:
        checks.append(Check(name, "FAIL", f"{path}: MULTI_CPU starts one process, not {processes}", "use accelerate_configs/cpu_2.yaml (MULTI_GPU with use_cpu: true)"))
    elif kind in ("MULTI_NPU", "MULTI_GPU", "FSDP", "DEEPSPEED") and not on_cpu:
        wanted = "npu" if kind == "MULTI_NPU" else machine.kind
        if machine.probe.get("kind") != wanted or not count:
            checks.append(Check(name, "FAIL", f"{path} promises {here} cards, torch sees none", f"accelerate would start {here} processes that each train alone on the CPU; mend the cards first (lines above)"))
        elif here > count:
            checks.append(Check(name, "FAIL", f"{path} wants {here} processes here, {count} cards are visible", f"two processes would share a card: num_processes: {count * servers}, or make more cards visible"))
    if re.fullmatch(r"\d+", launch.get("gpu_ids", "")):
        checks.append(Check(name, "FAIL", f"{path}: gpu_ids: {launch['gpu_ids']}", f"quote it (gpu_ids: '{launch['gpu_ids']}'), else accelerate crashes"))
    if launch.get("gpu_ids", "all") not in ("all", "") and "ASCEND_RT_VISIBLE_DEVICES" in os.environ:
        checks.append(Check(name, "warn", f"gpu_ids {launch['gpu_ids']} overwrites ASCEND_RT_VISIBLE_DEVICES={os.environ['ASCEND_RT_VISIBLE_DEVICES']}", "use one of the two"))
    if launch.get("mixed_precision") in ("no", "off", "false"):
        checks.append(Check(name, "FAIL", f"{path}: mixed_precision: {launch['mixed_precision']}", "quote it ('no'): YAML reads it as false and accelerate crashes"))
    for key in ("max_restarts", "tee", "log_dir"):
        if key in launch:
            checks.append(Check(name, "FAIL", f"{path}: {key}", "accelerate refuses this key in a file; give it as a flag of accelerate launch"))
    for key in ("rdzv_backend", "same_network"):
        if key in launch and servers > 1 and unquoted(launch[key]) not in ("static", "true"):
            checks.append(Check(name, "warn", f"{path}: {key} is ignored in a file", "give it as a flag of accelerate launch"))
    port = int(unquoted(launch.get("main_process_port") or "") or 29500)
    if port and _port_is_taken(port):
        remedy = "end the job that holds it (ss -ltnp) or set another main_process_port on every server"
        checks.append(Check("port", "FAIL" if servers > 1 or launch.get("main_process_port") else "warn", f"{port} is taken", remedy if servers > 1 else f"{remedy}; 0 picks a free one on a single server"))
    return checks or [Check(name, "ok", f"{path}: {processes} × {kind}")]


def _port_is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def check_environment(machine: Machine) -> list[Check]:
    """Variables that matter, with the values in effect: yours, else train.py's, else the vendor's."""
    rows, effective = knowledge("versions")["environment"][machine.kind], {}
    for row in rows:
        effective[row["name"]] = os.environ.get(row["name"], row.get("train", row["unset"]))
    origin = {row["name"]: "set" if row["name"] in os.environ else "by train.py" if "train" in row else "default" for row in rows}
    shown = ", ".join(f"{name}={value or '(unset)'} ({origin[name]})" for name, value in effective.items())
    checks = [Check("environment", "ok", shown)]
    if machine.kind != "npu":
        return checks
    try:
        limit, connect = int(effective["HCCL_EXEC_TIMEOUT"]), int(effective["HCCL_CONNECT_TIMEOUT"])
    except ValueError:
        return [*checks, Check("time-outs", "FAIL", shown, "HCCL time-outs are whole seconds")]
    ddp = int(machine.train.get("ddp_timeout") or knowledge("versions")["ddp_timeout"])
    found = f"connect {connect} s, HCCL_EXEC_TIMEOUT {limit} s, ddp_timeout {ddp} s"
    if ddp <= limit:
        checks.append(Check("time-outs", "FAIL", found, f"ddp_timeout must be above HCCL_EXEC_TIMEOUT, else HCCL's reason is never shown: {limit + 24}, or a smaller HCCL_EXEC_TIMEOUT"))
    else:
        checks.append(Check("time-outs", "ok" if connect >= 120 else "warn", found, "" if connect >= 120 else "loading a model takes longer: HCCL_CONNECT_TIMEOUT=600"))
    if effective["ASCEND_LAUNCH_BLOCKING"] == "1":
        checks.append(Check("environment", "warn", "ASCEND_LAUNCH_BLOCKING=1", "for debugging only, training is several times slower: unset it"))
    if int(unquoted(machine.launch.get("num_machines") or "1")) > 1 and not effective["HCCL_SOCKET_IFNAME"]:
        checks.append(Check("environment", "warn", "several servers, HCCL_SOCKET_IFNAME not set", "name the interface between the servers (ip -br addr), the same on each"))
    return checks


def check_resources(machine: Machine) -> list[Check]:
    checks = []
    for name, path, minimum, remedy in (
        ("disk", Path.cwd(), 20 * GIB, "weights, data set and checkpoints need room: another output_dir and HF_HOME"),
        ("/dev/shm", machine.path("dev/shm"), machine.min_shm_bytes, "processes of one server talk through it: start the container with --shm-size=16g or --ipc=host"),
    ):
        if not path.exists():
            checks.append(Check(name, "FAIL", "not there", remedy))
            continue
        usage = shutil.disk_usage(path)
        status = "ok" if usage.free >= minimum else "FAIL" if name != "disk" or usage.free < GIB else "warn"
        found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
        checks.append(Check(name, status, found, "" if status == "ok" else remedy))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    checks.append(Check("open files", "ok" if files >= 4096 else "warn", str(files), "" if files >= 4096 else "ulimit -n 65535 before starting (containers: --ulimit nofile=65535)"))
    return checks


CHECKS = (check_python, check_packages, check_versions, check_cann, check_driver, check_cards, check_launch_config,
          check_environment, check_resources)  # fmt: skip


def examine(machine: Machine) -> list[Check]:
    """All checks. One that breaks becomes a warning of its own: the doctor must not need a doctor."""
    look(machine)
    checks = []
    for check in CHECKS:
        try:
            checks += check(machine)
        except Exception as error:  # an unforeseen file or tool output; the other checks still help
            checks.append(Check(check.__name__, "warn", f"could not be done: {type(error).__name__}: {error}", "please report this with --report"))
    return checks


def verdict(machine: Machine, checks: list[Check]) -> str:
    """The last line: whether training can run here, and on what."""
    failed = [check.name for check in checks if check.status == "FAIL"]
    if failed:
        return f"cannot train: {', '.join(dict.fromkeys(failed))}"
    cards = machine.probe.get("cards", [])
    where = f"{len(cards)} × {cards[0]['name']}" if cards else "the CPU (float32)"
    warned = sum(check.status == "warn" for check in checks)
    return f"can train on {where}" + (f", {warned} warnings" if warned else "")


# --- explaining -------------------------------------------------------------------------------------------------------

PREFIX = re.compile(r"^\s*\[(?:rank|default)(\d+)\]:\s?")
RANK_INSIDE = re.compile(r"RankID:(\d+)|\[Rank (\d+)\]|^error on rank (\d+)")
STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[-_ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{3}))?")
EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*|^error(?: on rank \d+)?: .*")
LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError")


def explain(log: str) -> dict:
    """Which known failures a log shows, and whose came first.

    Returns {"rank": int or None, "line": 1-based, "message": the first failing rank's first error, "failures":
    signatures found, causes before consequences}. The first failing rank is the one with the earliest error that is
    not itself the consequence of another rank's failure (a time-out, a closed connection); time stamps decide where
    both lines have one, the order in the log elsewhere; torchrun's own "first observed failure" where nothing else is.
    """
    patterns = [(re.compile(row["pattern"]), row) for row in knowledge("signatures")["signatures"]]
    rank, errors, found, root, in_summary = None, [], {}, None, False
    for number, raw in enumerate(log.splitlines(), 1):
        prefix = PREFIX.match(raw)
        text = raw[prefix.end() :] if prefix else raw
        inside = RANK_INSIDE.search(text)
        if prefix:
            rank = int(prefix[1])
        elif inside:
            rank = int(next(group for group in inside.groups() if group))
        elif text.startswith("Traceback (most recent call last)"):
            rank = None
        in_summary = in_summary or "Root Cause (first observed failure)" in text
        if in_summary and root is None and (match := re.match(r"\s*rank\s*:\s*(\d+)", text)):
            root = rank = int(match[1])
        hits = [row for pattern, row in patterns if pattern.search(text)]
        if LAUNCHER.search(text) or not (hits or EXCEPTION.match(text)):
            continue
        stamp = STAMP.search(text)
        consequence = bool(hits) and all(row.get("consequence") for row in hits)
        errors.append({"rank": rank, "line": number, "message": text.strip(), "consequence": consequence,
                       "stamp": stamp.group(0) if stamp else None, "ids": [row["id"] for row in hits]})  # fmt: skip
        for row in hits:
            found.setdefault(row["id"], {**row, "line": number, "rank": rank, "count": 0})["count"] += 1
    causes = [error for error in errors if not error["consequence"]] or errors
    if not causes:
        return {"rank": root, "line": None, "message": "no error found in the log", "failures": []}
    stamped = [error for error in causes if error["stamp"]]
    first = min(causes, key=lambda error: error["line"])
    if first["stamp"] and len(stamped) > 1:
        first = min(stamped, key=lambda error: (re.sub(r"\D", "", error["stamp"])[:17].ljust(17, "0"), error["line"]))
    if first["consequence"] and root is not None:
        first = next((error for error in errors if error["rank"] == root), first)
    order = sorted(found.values(), key=lambda row: (row["id"] not in first["ids"], row.get("consequence", False), row["line"]))
    return {"rank": first["rank"] if first["rank"] is not None else root, "line": first["line"], "message": first["message"], "failures": order}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _remedy(text: str) -> str:
    failures = explain(text)["failures"]
    return failures[0]["check"] if failures else "not a known failure; install the versions of the requirements file in a fresh environment"


# --- hiding -----------------------------------------------------------------------------------------------------------


def mask(text: str, keep: tuple[str, ...] = ()) -> str:
    """The text without tokens, passwords, user names, home directories, host names and network addresses.

    keep: versions that look like addresses (a driver's 24.1.0.3)."""
    text = re.sub(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{8,}", r"<token>", text)
    text = re.sub(r"(?i)((?:token|secret|passw(?:or)?d|api_?key|authorization|bearer)[\"']?\s*[=:\s]\s*[\"']?)(?!<)[^\s\"',;]{4,}", r"\1<secret>", text)
    text = re.sub(r"://[^/\s@]+@", "://<user>@", text)
    text = re.sub(r"[\w.+-]+@[\w-]+\.[\w.]+", "<mail>", text)
    text = re.sub(r"/(?:home|Users)/[^/\s\"':,;)]+", "/home/<user>", text)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    for name in {socket.gethostname(), socket.gethostname().split(".")[0], os.environ.get("HOSTNAME", "")}:
        if len(name) > 2:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "<host>", text)
    for name in {os.environ.get(key, "") for key in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")} - {"root", ""}:
        text = re.sub(rf"\b{re.escape(name)}\b", "<user>", text) if len(name) > 2 else text

    def address(match: re.Match) -> str:
        local = match[0].startswith("127.") or match[0] in ("0.0.0.0", "::1")
        return match[0] if local or match[0] in keep else "<address>"

    text = re.sub(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)", address, text)
    return re.sub(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])|\bfe80::[\w:%]+", "<address>", text)


if __name__ == "__main__":
    {"cards": probe_cards, "imports": probe_imports}[sys.argv[1]]()
