"""A simulated Ascend: runs the unmodified torch_npu wheel on a machine without NPUs. See README.md beside this file."""

from .build import Unavailable, build, environment, has_real_cards

__all__ = ["Unavailable", "build", "environment", "has_real_cards"]
