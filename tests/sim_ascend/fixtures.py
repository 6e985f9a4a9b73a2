"""The fixtures through which tests get NPUs, real or simulated. tests/conftest.py imports them."""

import os

import pytest

from .build import Unavailable, environment, has_real_cards


@pytest.fixture(scope="session")
def npu_environment() -> dict[str, str]:
    """Variables to add to os.environ for a subprocess that should see eight NPUs; none where real cards are.

    Skips with the reason where there are no NPUs of either kind, and fails instead when REQUIRE_NPU_TESTS=1.
    """
    if has_real_cards():
        return {}
    return _simulated()


@pytest.fixture(scope="session")
def simulated_environment() -> dict[str, str]:
    """As npu_environment, for the tests about the simulator itself: skips on real cards."""
    if has_real_cards():
        pytest.skip("this machine has real Ascend cards")
    return _simulated()


@pytest.fixture(scope="session")
def trace_environment() -> dict[str, str]:
    """Variables for a subprocess that should see the trace-only CANN of tests/trace_cann; skips on real cards."""
    if has_real_cards():
        pytest.skip("this machine has real Ascend cards")
    from tests.trace_cann import environment as trace_only

    return _simulated(trace_only)


def _simulated(variables=environment) -> dict[str, str]:
    try:
        return variables()
    except Unavailable as reason:
        message = f"no simulated Ascend: {reason}"
    if os.environ.get("REQUIRE_NPU_TESTS") == "1":
        pytest.fail(message)
    pytest.skip(message)
