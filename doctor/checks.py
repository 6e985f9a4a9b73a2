"""The doctor's checks: what was seen of a machine, judged, with the remedy. Standard library only."""

import importlib.util
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from doctor.explanations import explain, known, last_line, remedy_for
from doctor.machine import (
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
    satisfies,
    version_key,
    whole_number,
)
from sft.environment import npu_environment
from sft.simulation import is_simulated_home


@dataclass
class Check:
    """One line of the doctor's answer. `status` is "ok", "warn" or "FAIL"; `remedy` says what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Check:
    return Check(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    return Check(name, "FAIL", found, remedy)


# --- packages and versions --------------------------------------------------------------------------------------------


def check_python(machine: Machine) -> Iterator[Check]:
    version, npu = machine.versions["python"], machine.versions.get("torch_npu")
    minimum = knowledge("versions")["minimum"]["python"]
    table = knowledge("versions")["python_of_torch_npu"]
    row = next((row for row in table if npu and row["torch"] == family(npu)), None)
    if not satisfies(version, f">={minimum}"):
        yield fail("Python", version, f"accelerate 1.15 needs Python {minimum} or newer")
    elif row and not version_key(row["oldest"]) <= version_key(family(version)) <= version_key(row["newest"]):
        yield fail("Python", version, f"torch_npu {npu} has wheels for {row['oldest']} to {row['newest']}")
    else:
        yield ok("Python", version)


def check_packages(machine: Machine) -> Iterator[Check]:
    minimum = knowledge("versions")["minimum"]
    file = "requirements.txt"
    if machine.kind == "npu":
        file = requirements_file(machine.versions.get("cann"), machine.versions.get("driver"))
    for name in PACKAGES:
        version, failure = machine.versions.get(name), machine.imports.get(name, "")
        if not version and (name != "torch_npu" or machine.kind == "npu"):
            yield fail(name, "not installed", f"pip install -r {file}")
        elif not version:
            continue
        elif name in minimum and not satisfies(version, f">={minimum[name]}"):
            yield fail(name, version, f"{minimum[name]} or newer is needed: pip install -r {file}")
        elif failure and set(known(failure)) & set(known(machine.probe.get("error", ""))):
            yield ok(name, f"{version} (its import waits for torch, see there)")
        elif failure:
            yield fail(name, f"{version}, import fails: {last_line(failure)}", remedy_for(failure))
        else:
            yield ok(name, version)
    if late := machine.imports.get("late"):
        yield fail("imports", late, "a slow network disk, or a package that waits for the network: HF_HUB_OFFLINE=1")


def check_versions(machine: Machine) -> Iterator[Check]:
    """Whether torch, torch_npu, CANN, driver and the Hugging Face packages belong together."""
    have = machine.versions
    npu, torch, cann, driver = (have.get(name) for name in ("torch_npu", "torch", "cann", "driver"))
    file, checks = requirements_file(cann, driver), []
    if npu and torch:
        wanted, plain = ".".join(npu.split("+")[0].split(".")[:3]), torch.split("+")[0]
        if plain.split(".")[:3] != wanted.split("."):
            advice = f"their first three numbers must be equal: install torch {wanted}, or both from {file}"
            checks.append(fail("torch ↔ torch_npu", f"torch {torch}, torch_npu {npu}", advice))
        if machine.probe.get("cuda_build") or "+cu" in torch:
            advice = f"pip install torch=={plain}+cpu --index-url https://download.pytorch.org/whl/cpu (or from a wheelhouse)"
            found = f"torch {torch} is a CUDA build"
            if version_key(wanted) <= version_key("2.6.0"):  # torch_npu 2.1 and 2.6 were seen to load; 2.13 does not
                checks.append(warn("torch build", f"{found}, whose CUDA libraries are of no use here", advice))
            else:
                checks.append(fail("torch build", f"{found}, torch_npu refuses to load beside it", advice))
    if npu and cann:
        checks.append(_torch_npu_and_cann(npu, cann, file))
    if cann and driver and machine.kind == "npu":
        checks.append(_cann_and_driver(cann, driver))
    for rule in knowledge("versions")["needs"]:
        ((name, condition),) = rule["if"].items()
        for other, wanted in rule["then"].items():
            if (
                name in have
                and other in have
                and satisfies(have[name], condition)
                and not satisfies(have[other], wanted)
            ):
                advice = f"{name} {condition} needs {other} {wanted} ({rule['source']})"
                checks.append(fail(f"{name} ↔ {other}", f"{name} {have[name]}, {other} {have[other]}", advice))
    yield from checks or [ok("versions", "belong together")]


def _torch_npu_and_cann(npu: str, cann: str, file: str) -> Check:
    name, found, rows = "torch_npu ↔ CANN", f"torch_npu {npu}, CANN {cann}", knowledge("versions")["torch_npu"]
    row, last = next((row for row in rows if row["torch_npu"] == npu), None), rows[-1]
    if row is None and version_key(npu) > version_key(last["torch_npu"]):
        row, found = last, f"{found} (judged like {last['torch_npu']}, where the published table ends)"
    if row is None:
        return warn(name, found, f"this torch_npu is not in the published table; {file} has one that is")
    listed = knowledge("versions")["release_works_with_cann"].get(f"{family(row['release'])}.0", [])
    works = [other for other in listed if other not in row.get("not_with", [])]
    if family(cann) == row["cann"]:
        return ok(name, found)
    if family(cann) in works:
        return ok(name, f"{found} (made for {row['cann']}, listed as compatible)")
    return fail(name, found, f"torch_npu {npu} goes with CANN {', '.join(sorted({row['cann'], *works}))}: take {file}")


def _cann_and_driver(cann: str, driver: str) -> Check:
    name, found, rows = "CANN ↔ driver", f"CANN {cann}, driver {driver}", knowledge("versions")["cann_driver"]
    row = next((row for row in rows if row["cann"] == family(cann)), None)
    if row is None:
        return warn(name, found, "this CANN is not in the table; its release notes name the driver (Ascend HDK)")
    if family(driver) in row["paired"]:
        return ok(name, found)
    if family(driver) in row["works"]:
        return ok(name, f"{found} (made for {row['paired'][0]}.x, listed as compatible)")
    listed = sorted({*row["paired"], *row["works"]}, key=version_key)
    advice = f"CANN {row['cann']} wants driver {', '.join(listed)}; "
    if fitting := [other["cann"] for other in rows if family(driver) in other["paired"]]:
        file = requirements_file(fitting[0], driver)
        advice += f"driver {driver} is made for CANN {', '.join(fitting)}: take that CANN and {file}, or "
    advice += (
        "have the host's driver upgraded. A container does not help: its driver is the host's, and CANN then fails "
    )
    advice += "with drvRet=87 (so do vLLM-Ascend images)"
    return (fail if version_key(driver) < version_key(listed[0]) else warn)(name, found, advice)


# --- CANN, driver, cards ----------------------------------------------------------------------------------------------


def check_cann(machine: Machine) -> Iterator[Check]:
    if machine.kind != "npu":
        return
    home, scripts = find_cann(machine)
    folders = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    libraries = ("libhccl.so", "libascendcl.so")
    missing = [name for name in libraries if not any((folder / name).exists() for folder in folders)]
    if not home and scripts:
        found = f"set_env.sh was not sourced; it lies at {', '.join(map(str, scripts))}"
        yield fail("CANN", found, f"source {scripts[-1]}")
    elif not home:
        advice = "install the CANN toolkit and the operator package for this card, then source its set_env.sh; in a "
        yield fail("CANN", "not found", advice + "container take an image that has them")
    elif not home.is_dir():
        advice = "open a new shell and source the set_env.sh of the CANN that is installed"
        yield fail("CANN", f"ASCEND_HOME_PATH={home} does not exist", advice)
    elif missing:
        advice = f"source {home}/set_env.sh; if that does not help, the toolkit there is incomplete: install it again"
        yield fail("CANN", f"{', '.join(missing)} not on LD_LIBRARY_PATH", advice)
    elif is_simulated_home(home):
        yield ok("CANN", f"{machine.versions.get('cann')} at {home} (simulated Ascend, not hardware)")
    else:
        yield ok("CANN", f"{machine.versions.get('cann', 'of unknown version')} at {home}")
        lacking = [name for name in knowledge("versions")["cann_python_packages"] if not _importable(name)]
        if lacking:
            pip = " ".join(knowledge("versions")["pip_names"].get(name, name) for name in lacking)
            advice = f"pip install {pip} (else error EC0010 at the first operator that is compiled)"
            yield fail("CANN's Python packages", f"missing: {pip}", advice)
        else:
            yield ok("CANN's Python packages", "all there")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def check_driver(machine: Machine) -> Iterator[Check]:
    if machine.kind == "cpu":
        return
    tool = "npu-smi" if machine.kind == "npu" else "nvidia-smi"
    works = machine.probe.get("kind") == machine.kind and machine.probe.get("sum") == 4096
    version, firmware = machine.versions.get("driver"), machine.versions.get("firmware")
    if error := machine.smi.get("error"):
        yield fail("driver", f"{tool} fails: {last_line(error)}", remedy_for(error))
    elif not version and works:
        yield ok("driver", f"no {tool} here, but torch computes on the cards")
    elif not version and machine.kind == "npu":
        advice = "install driver and firmware on the host; mount /usr/local/Ascend/driver, /usr/local/dcmi and "
        yield fail("driver", f"no {tool} and no version file", advice + "/usr/local/bin/npu-smi into containers")
    elif not version:
        yield fail("driver", f"no {tool}", "install the NVIDIA driver; containers need --gpus all")
    else:
        yield ok("driver", version + (f", firmware {firmware}" if firmware else ""))
    sick = [
        f"{c['index']} ({c['health']})" for c in machine.smi.get("cards", []) if c["health"] not in ("OK", "Warning")
    ]
    if sick:
        advice = (
            "leave it out with ASCEND_RT_VISIBLE_DEVICES; `npu-smi info -t health -i N` tells more; reset or replace it"
        )
        yield fail("card health", f"card {', '.join(sick)}", advice)
    if machine.kind == "npu" and not works:
        nodes = list(machine.path("dev").glob("davinci[0-9]*"))
        absent = [f"/dev/{name}" for name in NODES if not machine.path("dev", name).exists()]
        if absent or not nodes:
            found = f"missing: {', '.join(absent + ([] if nodes else ['/dev/davinci0']))}"
            advice = (
                "on the host load the driver (lsmod | grep drv_); start containers with --device=/dev/davinciN for "
            )
            yield fail(
                "device nodes", found, advice + "each card and --device= for davinci_manager, devmm_svm, hisi_hdc"
            )
        else:
            yield ok("device nodes", f"{len(nodes)} cards")


def check_cards(machine: Machine) -> Iterator[Check]:
    """What torch itself can open and compute on."""
    probe = machine.probe
    variable = "ASCEND_RT_VISIBLE_DEVICES" if machine.kind == "npu" else "CUDA_VISIBLE_DEVICES"
    setting = os.environ.get(variable)
    where = "" if setting is None else f", {variable}={setting!r}"
    if late := probe.get("late"):
        yield fail(
            "torch", late, "a card or its driver hangs: leftover processes (npu-smi info, nvidia-smi)? else reboot"
        )
        return
    if error := probe.get("error"):
        yield fail("torch", f"{probe.get('step', 'start')} fails: {explain(error)['message']}", remedy_for(error))
        return
    if machine.kind == "cpu":
        yield ok("cards", "none: training runs on the CPU")
        return
    if probe["kind"] != machine.kind or not probe["count"]:
        if setting is not None:
            last = max(len(machine.smi.get("cards", [])), 1) - 1
            advice = f"{variable} hides them: unset it or name cards 0 to {last}"
        elif machine.kind == "npu":
            advice = "see the lines above: torch_npu, CANN, driver, device nodes"
        else:
            advice = "install the CUDA build of torch that goes with this driver"
        yield fail("cards", f"torch sees none{where}", advice)
        return
    cards = probe["cards"]
    names = ", ".join(sorted({card["name"] for card in cards}))
    yield ok("cards", f"{len(cards)} × {names}{where}")
    if probe.get("sum") != 4096:
        advice = "card 0 or its operators are broken: try another card, install CANN's operator package again"
        yield fail("computing", f"a 16×16 matrix product gave {probe.get('sum')}, not 4096", advice)
    busy = [f"card {i}: {c['free'] / GIB:.0f} of {c['total'] / GIB:.0f} GiB free" for i, c in enumerate(cards) if c["free"] < 0.9 * c["total"]]  # fmt: skip
    busy += [f"pid {p['pid']} ({p['name']}, {p['mb']} MB, card {p['card']})" for p in machine.smi.get("processes", [])]
    if busy:
        yield warn(
            "card memory", "; ".join(busy), f"others use these cards: end them, or choose others with {variable}"
        )
    else:
        yield ok("card memory", f"{min(card['free'] for card in cards) / GIB:.0f} GiB free on each")
    if probe.get("bf16"):
        yield ok("bfloat16", "supported")
    else:
        advice = "dtype: auto takes float32 there, twice the memory; bfloat16 begins with Ascend 910B and NVIDIA Ampere"
        yield warn("bfloat16", f"not on {names}", advice)


# --- launch config, environment, resources ----------------------------------------------------------------------------


def check_launch_config(machine: Machine) -> Iterator[Check]:
    """Traps of the Accelerate config, above all processes that would train alone without a word."""
    if not machine.accelerate_config:
        yield ok("launch config", "none given: accelerate_configs/ has one for each case")
        return
    if machine.unreadable:
        yield fail(
            "launch config",
            "; ".join(machine.unreadable),
            "write it anew with `accelerate config`, or take a file of accelerate_configs/",
        )
        return
    try:
        problems = list(_launch_problems(machine, machine.launch))
    except ValueError as error:
        yield fail(
            "launch config", f"{machine.accelerate_config}: {error}", "correct it; accelerate_configs/ shows the form"
        )
        return
    kind, processes = machine.launch.get("distributed_type", "NO"), machine.launch.get("num_processes", 1)
    yield from problems or [ok("launch config", f"{machine.accelerate_config}: {processes} × {kind}")]


def _launch_problems(machine: Machine, launch: dict) -> Iterator[Check]:
    name, path, kind = "launch config", machine.accelerate_config, str(launch.get("distributed_type", "NO"))
    processes, servers = (whole_number(launch, key, 1) for key in ("num_processes", "num_machines"))
    here, count = processes // max(servers, 1), machine.probe.get("count", 0)
    wanted = "npu" if kind == "MULTI_NPU" else machine.kind
    if kind == "MULTI_CPU" and processes > 1:
        advice = "use accelerate_configs/cpu_2.yaml (MULTI_GPU with use_cpu: true)"
        yield fail(name, f"{path}: MULTI_CPU starts one process, not {processes}", advice)
    elif kind in ("MULTI_NPU", "MULTI_GPU", "FSDP", "DEEPSPEED") and not launch.get("use_cpu"):
        if machine.probe.get("kind") != wanted or not count:
            advice = f"accelerate would start {here} processes that each train alone on the CPU; mend the cards first"
            yield fail(name, f"{path} promises {here} cards, torch sees none", advice)
        elif here > count:
            advice = f"two processes would share a card: num_processes: {count * servers}, or make more cards visible"
            yield fail(name, f"{path} wants {here} processes here, {count} cards are visible", advice)
    gpu_ids, visible = launch.get("gpu_ids", "all"), os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if kind.startswith("MULTI_") and re.fullmatch(r"\d+", str(gpu_ids)):
        advice = "accelerate wants two ids or more with it; for one card distributed_type: 'NO' and num_processes: 1, and the card by"
        yield fail(name, f"{path}: gpu_ids {gpu_ids} with {kind}", f"{advice} ASCEND_RT_VISIBLE_DEVICES={gpu_ids}")
    elif isinstance(gpu_ids, int):
        yield fail(name, f"{path}: gpu_ids: {gpu_ids}", f"quote it (gpu_ids: '{gpu_ids}'), else accelerate crashes")
    if gpu_ids not in ("all", "", None) and visible is not None:
        yield warn(name, f"gpu_ids {gpu_ids} overwrites ASCEND_RT_VISIBLE_DEVICES={visible}", "use one of the two")
    if launch.get("mixed_precision") is False:
        advice = "quote it ('no'): YAML reads it as false and accelerate crashes"
        yield fail(name, f"{path}: mixed_precision: no", advice)
    for key in ("max_restarts", "tee", "log_dir"):
        if key in launch:
            yield fail(
                name, f"{path}: {key}", "accelerate refuses this key in a file; give it as a flag of accelerate launch"
            )
    if servers > 1 and launch.get("rdzv_backend", "static") != "static":
        yield warn(name, f"{path}: rdzv_backend is ignored in a file", "give it as a flag of accelerate launch")
    port = whole_number(launch, "main_process_port", 0) or (29500 if servers > 1 else 0)
    if port and _port_is_taken(port):
        advice = "end the job that holds it (ss -ltnp), or set another main_process_port, the same on every server"
        yield fail("port", f"{port} is taken", advice)


def _port_is_taken(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("", port))
        except OSError:
            return True
    return False


def check_environment(machine: Machine) -> Iterator[Check]:
    """Variables that matter, with the values in effect: yours, else train.py's, else the vendor's."""
    rows = {row["name"]: row for row in knowledge("versions")["environment"][machine.kind]}
    train = npu_environment(machine.versions.get("torch_npu")) if machine.kind == "npu" else {}
    effective = {name: os.environ.get(name, train.get(name, row["unset"])) for name, row in rows.items()}
    origin = {name: "yours" if name in os.environ else "train.py" if name in train else "default" for name in rows}
    yield ok("environment", ", ".join(f"{name}={effective[name] or '(unset)'} ({origin[name]})" for name in rows))
    if machine.kind != "npu":
        return
    times = [effective["HCCL_CONNECT_TIMEOUT"], effective["HCCL_EXEC_TIMEOUT"]]
    times.append(str(machine.train.get("ddp_timeout") or knowledge("versions")["ddp_timeout"]))
    found = "HCCL_CONNECT_TIMEOUT {} s, HCCL_EXEC_TIMEOUT {} s, ddp_timeout {} s".format(*times)
    if not all(time.isdigit() for time in times):
        yield fail("time-outs", found, "time-outs are whole seconds")
    elif int(times[1]) == 0:
        advice = "unset it: with 0 a card waits for a lost rank for ever, and HCCL never says for whom; only ddp_timeout ends that"
        yield warn("time-outs", found, advice)
    elif int(times[2]) <= int(times[1]):
        advice = (
            f"ddp_timeout must be above HCCL_EXEC_TIMEOUT, else HCCL's reason is never shown: {int(times[1]) + 24}, "
        )
        yield fail("time-outs", found, advice + "or a smaller HCCL_EXEC_TIMEOUT")
    else:
        yield ok("time-outs", found)
    if effective["ASCEND_LAUNCH_BLOCKING"] == "1":
        yield warn(
            "environment", "ASCEND_LAUNCH_BLOCKING=1", "for debugging only, training is several times slower: unset it"
        )
    if str(machine.launch.get("num_machines") or 1) not in ("0", "1") and not effective["HCCL_SOCKET_IFNAME"]:
        advice = "name the interface between the servers (ip -br addr) on each of them"
        yield warn("environment", "several servers, HCCL_SOCKET_IFNAME not set", advice)


def check_resources(machine: Machine) -> Iterator[Check]:
    shared, files = machine.path("dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = shutil.disk_usage(Path.cwd()).free
    advice = "checkpoints and caches need room: another output_dir and HF_HOME"
    yield Check("disk", "ok" if free > 20 * GIB else "warn" if free > GIB else "FAIL", f"{free / GIB:.1f} GiB free", advice if free <= 20 * GIB else "")  # fmt: skip
    free = shutil.disk_usage(shared).free if shared.exists() else 0
    if free < machine.min_shm_bytes:
        advice = "processes of one server talk through it: start the container with --shm-size=16g or --ipc=host"
        yield fail("/dev/shm", f"{free / GIB:.2f} GiB free", advice)
    else:
        yield ok("/dev/shm", f"{free / GIB:.1f} GiB free")
    if files < 4096:
        yield warn("open files", str(files), "ulimit -n 65535 before starting (containers: --ulimit nofile=65535)")
    else:
        yield ok("open files", str(files))


# --- the answer -------------------------------------------------------------------------------------------------------

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
            found = f"could not be done: {type(error).__name__}: {error}"
            checks.append(warn(check.__name__, found, "please attach --report to an issue"))
    return checks


def verdict(machine: Machine, checks: list[Check]) -> str:
    """The last line: whether training can run here, and on what."""
    failed = [check.name for check in checks if check.status == "FAIL"]
    if failed:
        return f"cannot train: {', '.join(dict.fromkeys(failed))}"
    cards = machine.probe.get("cards", [])
    where = f"{len(cards)} × {cards[0]['name']}" if cards else "the CPU (float32)"
    if machine.kind == "npu" and is_simulated_home(find_cann(machine)[0]):
        where += " (simulated Ascend, not hardware)"
    warned = sum(check.status == "warn" for check in checks)
    return f"can train on {where}" + (f"; warnings: {warned}" if warned else "")
