"""A CANN that computes nothing and counts what it is asked: launches of operators, waits of the host, copies (README.md)."""

from .build import build, environment

__all__ = ["build", "environment"]
