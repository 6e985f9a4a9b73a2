"""Whether the Ascend software of this machine is the test suite's simulation. Standard library only."""

from pathlib import Path


def is_simulated_home(home: str | Path | None) -> bool:
    """Whether this CANN directory says in its installation file that it is simulated, and so never hardware."""
    return bool(home) and any(
        "simulated" in path.read_text(errors="replace") for path in Path(home).glob("*/ascend_*_install.info")
    )
