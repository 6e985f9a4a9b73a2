"""Builds the simulated Ascend with g++ and gives the environment that makes a subprocess see its cards.

Everything lands in `.cache/sim_ascend/` of the repository: the torch_npu wheel in a folder of its own (installed into the
environment it would break `import torch` wherever CANN is absent), and one folder per build, named by a hash of the sources
and the versions of torch and torch_npu.
"""

import fcntl
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "sim_ascend"


@dataclass(frozen=True)
class Stack:
    """What goes with a release of torch."""

    torch_npu: str
    cann: str
    cxx11_abi: int  # of std::string: 0 is that of PyPI's torch until 2.6, and of the torch_npu made for it


STACKS = {  # by torch release
    "2.1": Stack("2.1.0.post10", cann="8.0.1", cxx11_abi=0),
    "2.6": Stack("2.6.0.post3", cann="8.2.RC1", cxx11_abi=0),
    "2.13": Stack("2.13.0", cann="8.5.0", cxx11_abi=1),
}

# CANN's headers are those in this wheel, for all: older wheels lack some, and a new CANN serves an old torch_npu.
HEADERS = "2.13.0"

COMPILER = ["g++", "-std=c++20", "-fPIC"]

# libsimcann answers under each name that torch_npu links or opens; to the loader they are one file.
CANN_LIBRARIES = ["ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi"]
CANN_SYMBOL = re.compile(r"(acl|Hccl|Msprof|rt[A-Z])\w*")
GRAPH_SYMBOL = re.compile(r"_ZNK?2ge\w+")  # torch_npu 2.1 describes graph operators with these while it is loaded

# How a program can tell that it is not on hardware: ASCEND_HOME_PATH holds a file of this name. A real toolkit has the other.
MARKER = "SIMULATED"
INSTALL_INFO = """package_name=Ascend-cann-toolkit (simulated)
version={version}
innerversion=simulated
arch={arch}
os=linux
path={path}
"""


class Unavailable(RuntimeError):
    """The simulator cannot be had on this machine; the message says why."""


def has_real_cards() -> bool:
    """Whether the driver of real Ascend cards is loaded."""
    return bool(glob.glob("/dev/davinci[0-9]*"))


def environment(cards: int = 8, memory_bytes: int = 64 << 30, soc: str = "Ascend910B3") -> dict[str, str]:
    """Returns the variables that a subprocess needs, beside the current ones, to see `cards` simulated NPUs.

    Builds the simulator first if need be (half a minute). `memory_bytes` is per card.
    Raises: Unavailable without g++, nm, the torch_npu wheel, or a torch that it goes with.
    """
    return variables(build(), cards, memory_bytes, soc)


def variables(root: Path, cards: int, memory_bytes: int, soc: str) -> dict[str, str]:
    """What a subprocess needs in its environment to use the CANN that was built in the folder `root`."""
    return {
        "LD_LIBRARY_PATH": _prepend(root / "lib", "LD_LIBRARY_PATH"),
        "PYTHONPATH": _prepend(install_wheel(stack().torch_npu), "PYTHONPATH"),
        "ASCEND_HOME_PATH": str(root / "cann"),
        "ASCEND_OPP_PATH": str(root / "cann" / "opp"),
        "SIM_ASCEND_CARDS": str(cards),
        "SIM_ASCEND_MEMORY_BYTES": str(memory_bytes),
        "SIM_ASCEND_SOC": soc,
    }


def build() -> Path:
    """Returns the folder of the build for these sources and versions; it holds `lib/` and `cann/`. Makes it if absent."""

    def compile_all(library: Path, torch_npu: Path) -> None:
        compile_cann(library, torch_npu, {SOURCES / f"{name}.cpp": [] for name in ("acl", "hccl", "opapi")})
        _compile_operators(library, torch_npu)

    return built_once("build", [*SOURCES.iterdir(), Path(__file__)], compile_all)


def built_once(name: str, sources: list[Path], compile_all: Callable[[Path, Path], None]) -> Path:
    """Returns the folder `NAME-<hash of sources and versions>` of the cache, with `lib/` and `cann/`; makes it if absent.

    `compile_all(library, torch_npu)` writes the libraries for the torch_npu package of that folder.
    """
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (Debian: apt-get install g++)")
    wheel = install_wheel(stack().torch_npu)
    install_wheel(HEADERS)
    target = CACHE / f"{name}-{_fingerprint(sources)}"
    if target.is_dir():
        return target
    with _lock():
        if not target.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix="tmp-", dir=CACHE))
            try:
                library = scratch / "lib"
                library.mkdir()
                compile_all(library, wheel / "torch_npu")
                _lay_out_cann(scratch / "cann", target / "cann")
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def install_wheel(version: str) -> Path:
    """Returns the folder that holds that torch_npu for this Python; fetches the wheel with pip if absent."""
    folder = CACHE / f"torch_npu-{version}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with _lock():
        if not folder.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix="tmp-", dir=CACHE))
            try:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
                run([*pip, "--target", str(scratch), f"torch_npu=={version}"], "pip cannot install the wheel")
                scratch.chmod(0o755)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def compile_cann(library: Path, torch_npu: Path, sources: dict[Path, list[str]]) -> None:
    """Makes libsimcann.so and its other names in the folder `library`, from sources with flags of their own."""
    headers = install_wheel(HEADERS) / "torch_npu" / "include"
    vendor = [headers, headers / "third_party" / "acl" / "inc", headers / "third_party" / "hccl" / "inc"]
    includes = [f"-I{folder}" for folder in (SOURCES, *vendor, _torch_folder() / "include")]
    compiler = [*_compiler(), "-O2", "-Wall", "-Wextra", "-Wno-deprecated-declarations"]
    compiler.append(f'-DCANN_VERSION="{stack().cann}"')
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for source, flags in sources.items():
            objects.append(Path(scratch) / f"{source.stem}.o")
            run([*compiler, *flags, *includes, "-c", source, "-o", objects[-1]], f"{source.name} does not compile")
        rest = Path(scratch) / "unsupported.cpp"
        rest.write_text(_unsupported_functions(torch_npu, objects))
        simcann = library / "libsimcann.so"
        run([*compiler, *includes, "-shared", *objects, rest, "-ldl", "-o", simcann], "libsimcann does not link")
    for name in CANN_LIBRARIES:
        (library / f"lib{name}.so").symlink_to(simcann.name)


def _compile_operators(library: Path, torch_npu: Path) -> None:
    """Makes libsimoperators.so. Without warnings: most would be about torch's headers."""
    torch = _torch_folder()
    folders = [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-L{torch_npu / 'lib'}"]
    flags = [*_compiler(), "-O1", "-w", "-shared", *folders]
    output = ["-ltorch_npu", "-ltorch_cpu", "-lc10", "-o", library / "libsimoperators.so"]
    run([*flags, SOURCES / "operators.cpp", SOURCES / "fused.cpp", *output], "the operators do not compile")


def _unsupported_functions(torch_npu: Path, parts: list[Path]) -> str:
    """C++ text that defines each CANN function torch_npu links against and `parts` do not define."""
    wanted = _symbols("--dynamic", "--undefined-only", *torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so"))
    missing = sorted(filter(CANN_SYMBOL.fullmatch, wanted - _symbols("--defined-only", *parts)))
    functions = [f'long {name}() {{ return sim::unsupported("{name}"); }}' for name in missing]
    functions += [f"void {name}() {{}}" for name in sorted(filter(GRAPH_SYMBOL.fullmatch, wanted))]
    return "\n".join(['#include "cann.h"', 'extern "C" {', *functions, "}", ""])


def _symbols(*arguments) -> set[str]:
    lines = run(["nm", *arguments], "nm fails").splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def _lay_out_cann(folder: Path, final: Path) -> None:
    """Writes what torch_npu looks for below ASCEND_HOME_PATH."""
    for part in ("runtime", "compiler", "opp"):
        (folder / part).mkdir(parents=True)
    arch = f"{platform.machine()}-linux"
    (folder / arch).mkdir()
    text = INSTALL_INFO.format(version=stack().cann, arch=platform.machine(), path=final / arch)
    (folder / arch / "ascend_toolkit_install.info").write_text(text)
    (folder / MARKER).write_text("Made by tests/sim_ascend. Nothing seen here is a result on Ascend hardware.\n")


def stack() -> Stack:
    """What goes with the torch that is installed. Raises: Unavailable when that is unknown."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable("torch is not installed") from None
    release = ".".join(torch.split(".")[:2])
    if release not in STACKS:
        raise Unavailable(f"it imitates CANN for torch {', '.join(STACKS)}; installed is torch {torch}")
    return STACKS[release]


def _compiler() -> list[str]:
    return [*COMPILER, f"-D_GLIBCXX_USE_CXX11_ABI={stack().cxx11_abi}"]


def _torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent  # found, not imported


def _fingerprint(sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.read_bytes())
    digest.update(f"{importlib.metadata.version('torch')} {_torch_folder()}".encode())
    return digest.hexdigest()[:16]


def _prepend(folder: Path, variable: str) -> str:
    rest = [entry for entry in os.environ.get(variable, "").split(os.pathsep) if entry not in ("", str(folder))]
    return os.pathsep.join([str(folder), *rest])


@contextmanager
def _lock():
    """Lets one process at a time build: several test workers start at once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: list, what: str) -> str:
    """What a command printed. Raises: Unavailable, beginning with `what`, when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{what}: {done.stderr.strip()[-2000:]}")
    return done.stdout
