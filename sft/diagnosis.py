"""The doctor's checks: what was seen of a machine, judged, with the remedy. Standard library only."""

import importlib.util
import os
import re
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from sft.failures import explain, known, last_line, remedy_for
from sft.machine import (
    GIB,
    NODES,
    PACKAGES,
    Machine,
    family,
    find_cann,
    knowledge,
    probe_all,
    read_machine,
    requirements_file,
    satisfies,  # fmt: skip
    unquoted,
    version_key,
)


@dataclass
class Check:
    """One line of the doctor's answer. `status` is "ok", "warn" or "FAIL"; `remedy` says what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


def check_python(machine: Machine) -> list[Check]:
    version, npu = machine.versions["python"], machine.versions.get("torch_npu")
    minimum = knowledge("versions")["minimum"]["python"]
    if not satisfies(version, f">={minimum}"):
        return [Check("Python", "FAIL", version, f"accelerate 1.15 needs Python {minimum} or newer")]
    row = next(
        (row for row in knowledge("versions")["python_of_torch_npu"] if npu and row["torch"] == family(npu)), None
    )
    if row and not version_key(row["oldest"]) <= version_key(family(version)) <= version_key(row["newest"]):
        return [Check("Python", "FAIL", version, f"torch_npu {npu} has wheels for {row['oldest']} to {row['newest']}")]
    return [Check("Python", "ok", version)]


def check_packages(machine: Machine) -> list[Check]:
    checks, minimum = [], knowledge("versions")["minimum"]
    file = (
        requirements_file(machine.versions.get("cann"), machine.versions.get("driver"))
        if machine.kind == "npu"
        else "requirements.txt"
    )
    for name in PACKAGES:
        version, failure = machine.versions.get(name), machine.imports.get(name, "")
        if not version and name == "torch_npu" and machine.kind != "npu":
            continue
        if not version:
            checks.append(Check(name, "FAIL", "not installed", f"pip install -r {file}"))
        elif name in minimum and not satisfies(version, f">={minimum[name]}"):
            checks.append(Check(name, "FAIL", version, f"{minimum[name]} or newer is needed: pip install -r {file}"))
        elif failure and set(known(failure)) & set(known(machine.probe.get("error", ""))):
            checks.append(Check(name, "ok", f"{version} (its import waits for torch, see there)"))
        elif failure:
            checks.append(Check(name, "FAIL", f"{version}, import fails: {last_line(failure)}", remedy_for(failure)))
        else:
            checks.append(Check(name, "ok", version))
    if late := machine.imports.get("late"):
        checks.append(
            Check(
                "imports",
                "FAIL",
                late,
                "a slow network disk or a package that waits for the network: set HF_HUB_OFFLINE=1",
            )
        )
    return checks


def check_versions(machine: Machine) -> list[Check]:
    """Whether torch, torch_npu, CANN, driver, Python and the Hugging Face packages belong together."""
    data, have, checks = knowledge("versions"), machine.versions, []
    npu, torch, cann, driver = (have.get(name) for name in ("torch_npu", "torch", "cann", "driver"))
    file = requirements_file(cann, driver)
    if npu and torch and npu.split("+")[0].split(".")[:3] != torch.split("+")[0].split(".")[:3]:
        base = ".".join(npu.split("+")[0].split(".")[:3])
        checks.append(
            Check(
                "torch ↔ torch_npu",
                "FAIL",
                f"torch {torch}, torch_npu {npu}",
                f"their first three numbers must be equal: install torch {base} or another torch_npu ({file} has a pair)",
            )
        )
    build = machine.probe.get("cuda_build") or ("+cu" in (torch or "") and torch)
    if npu and build:
        remedy = f"torch_npu refuses to load beside it: pip install torch=={torch.split('+')[0]}+cpu --index-url https://download.pytorch.org/whl/cpu (or from a wheelhouse)"
        checks.append(Check("torch build", "FAIL", f"torch {torch} is a CUDA build", remedy))
    if npu and cann:
        checks.append(_torch_npu_and_cann(npu, cann, file, data))
    if cann and driver and machine.kind == "npu":
        checks.append(_cann_and_driver(cann, driver, data))
    for rule in data["needs"]:
        ((name, condition),) = rule["if"].items()
        if name in have and satisfies(have[name], condition):
            for other, wanted in rule["then"].items():
                if other in have and not satisfies(have[other], wanted):
                    reason = f"{name} {condition} needs {other} {wanted} ({rule['source']})"
                    if name == "vllm-ascend":
                        reason += f"; driver {driver or '?'} allows the CANN versions listed beside it only, an image cannot bring its own driver: serve with another card's server or an older vLLM-Ascend"
                    checks.append(
                        Check(f"{name} ↔ {other}", "FAIL", f"{name} {have[name]}, {other} {have[other]}", reason)
                    )
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
    return Check(
        name, "FAIL", found, f"torch_npu {npu} goes with CANN {', '.join(sorted({row['cann'], *works}))}: take {file}"
    )


def _cann_and_driver(cann: str, driver: str, data: dict) -> Check:
    name, found = "CANN ↔ driver", f"CANN {cann}, driver {driver}"
    row = next((row for row in data["cann_driver"] if row["cann"] == family(cann)), None)
    if row is None:
        return Check(
            name, "warn", found, "this CANN is not in the table; see its release notes for the driver (Ascend HDK)"
        )
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
        remedy = (
            f"source {scripts[-1]}"
            if scripts
            else "install CANN toolkit and the operator package for this card, then source its set_env.sh; in a container take an image that has it"
        )
        return [Check("CANN", "FAIL", found + (f"; lies at {', '.join(scripts)}" if scripts else ""), remedy)]
    if not home.is_dir():
        return [
            Check(
                "CANN",
                "FAIL",
                f"ASCEND_HOME_PATH={home} does not exist",
                "open a new shell and source the set_env.sh of the CANN that is installed",
            )
        ]
    folders = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    missing = [
        name for name in ("libhccl.so", "libascendcl.so") if not any((folder / name).exists() for folder in folders)
    ]
    if missing:
        inside = [name for name in missing if (home / "lib64" / name).exists()]
        remedy = (
            f"source {home}/set_env.sh (LD_LIBRARY_PATH lacks {home}/lib64)"
            if inside
            else f"the CANN at {home} is incomplete: install the toolkit again, then source its set_env.sh"
        )
        return [Check("CANN", "FAIL", f"{', '.join(missing)} not on LD_LIBRARY_PATH", remedy)]
    simulated = " (simulated Ascend, not hardware)" if (home / "SIMULATED").exists() else ""
    checks = [Check("CANN", "ok", f"{machine.versions.get('cann', 'version unknown')} at {home}{simulated}")]
    if simulated:
        return checks
    lacking = [name for name in knowledge("versions")["cann_python_packages"] if not _importable(name)]
    pip = [knowledge("versions")["pip_names"].get(name, name) for name in lacking]
    if lacking:
        return [
            *checks,
            Check(
                "CANN's Python packages",
                "FAIL",
                f"missing: {', '.join(pip)}",
                f"pip install {' '.join(pip)} (else error EC0010 at the first compiled operator)",
            ),
        ]
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
        return [Check("driver", "FAIL", f"{tool} fails: {last_line(error)}", remedy_for(error))]
    version = machine.versions.get("driver") or machine.smi.get("version")
    if not version and works:
        return [Check("driver", "ok", f"no {tool} here, but torch computes on the cards")]
    if not version:
        remedy = (
            "install driver and firmware on the host; in a container mount /usr/local/Ascend/driver, /usr/local/dcmi and /usr/local/bin/npu-smi"
            if machine.kind == "npu"
            else "install the NVIDIA driver; containers need --gpus all"
        )
        return [Check("driver", "FAIL", f"no {tool} and no version file", remedy)]
    firmware = f", firmware {machine.versions['firmware']}" if "firmware" in machine.versions else ""
    checks = [Check("driver", "ok", f"{version}{firmware}")]
    sick = [card for card in machine.smi.get("cards", []) if card["health"] not in ("OK", "Warning")]
    if sick:
        names = ", ".join(f"{card['index']} ({card['health']})" for card in sick)
        checks.append(
            Check(
                "card health",
                "FAIL",
                f"card {names}",
                "leave it out with ASCEND_RT_VISIBLE_DEVICES; `npu-smi info -t health -i N` tells more; reset or replace it",
            )
        )
    if machine.kind == "npu" and not works:
        absent = [f"/dev/{name}" for name in NODES if not machine.path("dev", name).exists()]
        nodes = sorted(path.name for path in machine.path("dev").glob("davinci[0-9]*"))
        if absent or not nodes:
            lacking = absent + ([] if nodes else ["/dev/davinci0 …"])
            checks.append(
                Check(
                    "device nodes",
                    "FAIL",
                    f"missing: {', '.join(lacking)}",
                    "on the host load the driver (lsmod | grep drv_); start containers with --device=/dev/davinciN for each card and --device= for davinci_manager, devmm_svm and hisi_hdc",
                )
            )
        else:
            checks.append(Check("device nodes", "ok", f"{len(nodes)} cards"))
    return checks


def check_cards(machine: Machine) -> list[Check]:
    """What torch itself can open and compute on."""
    probe = machine.probe
    if late := probe.get("late"):
        return [
            Check(
                "torch",
                "FAIL",
                late,
                "a card or its driver hangs: `npu-smi info` (or nvidia-smi), leftover processes, then a reboot of the server",
            )
        ]
    if error := probe.get("error"):
        return [
            Check(
                "torch", "FAIL", f"{probe.get('step', 'start')} fails: {explain(error)['message']}", remedy_for(error)
            )
        ]
    if machine.kind == "cpu":
        return [Check("cards", "ok", "none: training runs on the CPU")]
    variable = "ASCEND_RT_VISIBLE_DEVICES" if machine.kind == "npu" else "CUDA_VISIBLE_DEVICES"
    setting, count = os.environ.get(variable), probe.get("count", 0)
    where = "" if setting is None else f", {variable}={setting!r}"
    if probe["kind"] != machine.kind or not count:
        remedy = (
            f"{variable} hides them: unset it or name cards 0 to {max(len(machine.smi.get('cards', [])), 1) - 1}"
            if setting is not None
            else "see the lines above: torch_npu, CANN, driver"
            if machine.kind == "npu"
            else "torch lacks CUDA: install the CUDA build of torch that goes with this driver"
        )
        return [Check("cards", "FAIL", f"torch sees none{where}", remedy)]
    names = ", ".join(sorted({card["name"] for card in probe["cards"]}))
    checks = [Check("cards", "ok", f"{count} × {names}{where}")]
    if probe.get("sum") != 4096:
        checks.append(
            Check(
                "computing",
                "FAIL",
                f"a 16×16 matrix product gave {probe.get('sum')}, not 4096",
                "card 0 or its operators are broken: try another card, install CANN's operator package again",
            )
        )
    busy = [
        f"card {i}: {c['free'] / GIB:.0f} of {c['total'] / GIB:.0f} GiB free"
        for i, c in enumerate(probe["cards"])
        if c["free"] < 0.9 * c["total"]
    ]
    users = ", ".join(
        f"pid {p['pid']} ({p['name']}, {p['mb']} MB, card {p['card']})" for p in machine.smi.get("processes", [])
    )
    if busy or users:
        checks.append(
            Check(
                "card memory",
                "warn",
                "; ".join([*busy, users][: len(busy) + bool(users)]),
                "other processes use these cards: end them, or take other cards with " + variable,
            )
        )
    else:
        checks.append(
            Check("card memory", "ok", f"{min(c['free'] for c in probe['cards']) / GIB:.0f} GiB free on each")
        )
    if probe.get("bf16"):
        checks.append(Check("bfloat16", "ok", "supported"))
    else:
        checks.append(
            Check(
                "bfloat16",
                "warn",
                f"not on {names}",
                "dtype: auto takes float32 there: twice the memory; bfloat16 begins with Ascend 910B1 and NVIDIA Ampere",
            )
        )
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
        checks.append(
            Check(
                name,
                "FAIL",
                f"{path}: MULTI_CPU starts one process, not {processes}",
                "use accelerate_configs/cpu_2.yaml (MULTI_GPU with use_cpu: true)",
            )
        )
    elif kind in ("MULTI_NPU", "MULTI_GPU", "FSDP", "DEEPSPEED") and not on_cpu:
        wanted = "npu" if kind == "MULTI_NPU" else machine.kind
        if machine.probe.get("kind") != wanted or not count:
            checks.append(
                Check(
                    name,
                    "FAIL",
                    f"{path} promises {here} cards, torch sees none",
                    f"accelerate would start {here} processes that each train alone on the CPU; mend the cards first (lines above)",
                )
            )
        elif here > count:
            checks.append(
                Check(
                    name,
                    "FAIL",
                    f"{path} wants {here} processes here, {count} cards are visible",
                    f"two processes would share a card: num_processes: {count * servers}, or make more cards visible",
                )
            )
    if re.fullmatch(r"\d+", launch.get("gpu_ids", "")):
        checks.append(
            Check(
                name,
                "FAIL",
                f"{path}: gpu_ids: {launch['gpu_ids']}",
                f"quote it (gpu_ids: '{launch['gpu_ids']}'), else accelerate crashes",
            )
        )
    if launch.get("gpu_ids", "all") not in ("all", "") and "ASCEND_RT_VISIBLE_DEVICES" in os.environ:
        checks.append(
            Check(
                name,
                "warn",
                f"gpu_ids {launch['gpu_ids']} overwrites ASCEND_RT_VISIBLE_DEVICES={os.environ['ASCEND_RT_VISIBLE_DEVICES']}",
                "use one of the two",
            )
        )
    if launch.get("mixed_precision") in ("no", "off", "false"):
        checks.append(
            Check(
                name,
                "FAIL",
                f"{path}: mixed_precision: {launch['mixed_precision']}",
                "quote it ('no'): YAML reads it as false and accelerate crashes",
            )
        )
    for key in ("max_restarts", "tee", "log_dir"):
        if key in launch:
            checks.append(
                Check(
                    name,
                    "FAIL",
                    f"{path}: {key}",
                    "accelerate refuses this key in a file; give it as a flag of accelerate launch",
                )
            )
    for key in ("rdzv_backend", "same_network"):
        if key in launch and servers > 1 and unquoted(launch[key]) not in ("static", "true"):
            checks.append(
                Check(name, "warn", f"{path}: {key} is ignored in a file", "give it as a flag of accelerate launch")
            )
    port = int(unquoted(launch.get("main_process_port") or "") or 29500)
    if port and _port_is_taken(port):
        remedy = "end the job that holds it (ss -ltnp) or set another main_process_port on every server"
        checks.append(
            Check(
                "port",
                "FAIL" if servers > 1 or launch.get("main_process_port") else "warn",
                f"{port} is taken",
                remedy if servers > 1 else f"{remedy}; 0 picks a free one on a single server",
            )
        )
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
    origin = {
        row["name"]: "set" if row["name"] in os.environ else "by train.py" if "train" in row else "default"
        for row in rows
    }
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
        checks.append(
            Check(
                "time-outs",
                "FAIL",
                found,
                f"ddp_timeout must be above HCCL_EXEC_TIMEOUT, else HCCL's reason is never shown: {limit + 24}, or a smaller HCCL_EXEC_TIMEOUT",
            )
        )
    else:
        checks.append(
            Check(
                "time-outs",
                "ok" if connect >= 120 else "warn",
                found,
                "" if connect >= 120 else "loading a model takes longer: HCCL_CONNECT_TIMEOUT=600",
            )
        )
    if effective["ASCEND_LAUNCH_BLOCKING"] == "1":
        checks.append(
            Check(
                "environment",
                "warn",
                "ASCEND_LAUNCH_BLOCKING=1",
                "for debugging only, training is several times slower: unset it",
            )
        )
    if int(unquoted(machine.launch.get("num_machines") or "1")) > 1 and not effective["HCCL_SOCKET_IFNAME"]:
        checks.append(
            Check(
                "environment",
                "warn",
                "several servers, HCCL_SOCKET_IFNAME not set",
                "name the interface between the servers (ip -br addr), the same on each",
            )
        )
    return checks


def check_resources(machine: Machine) -> list[Check]:
    checks = []
    for name, path, minimum, remedy in (
        ("disk", Path.cwd(), 20 * GIB, "weights, data set and checkpoints need room: another output_dir and HF_HOME"),
        (
            "/dev/shm",
            machine.path("dev/shm"),
            machine.min_shm_bytes,
            "processes of one server talk through it: start the container with --shm-size=16g or --ipc=host",
        ),
    ):
        if not path.exists():
            checks.append(Check(name, "FAIL", "not there", remedy))
            continue
        usage = shutil.disk_usage(path)
        status = "ok" if usage.free >= minimum else "FAIL" if name != "disk" or usage.free < GIB else "warn"
        found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
        checks.append(Check(name, status, found, "" if status == "ok" else remedy))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    checks.append(
        Check(
            "open files",
            "ok" if files >= 4096 else "warn",
            str(files),
            "" if files >= 4096 else "ulimit -n 65535 before starting (containers: --ulimit nofile=65535)",
        )
    )
    return checks


CHECKS = (check_python, check_packages, check_versions, check_cann, check_driver, check_cards, check_launch_config,
          check_environment, check_resources)  # fmt: skip


def examine(machine: Machine) -> list[Check]:
    """All checks. One that breaks becomes a warning of its own: the doctor must not need a doctor."""
    probe_all(machine)
    read_machine(machine)
    checks = []
    for check in CHECKS:
        try:
            checks += check(machine)
        except Exception as error:  # an unforeseen file or tool output; the other checks still help
            checks.append(
                Check(
                    check.__name__,
                    "warn",
                    f"could not be done: {type(error).__name__}: {error}",
                    "please report this with --report",
                )
            )
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
