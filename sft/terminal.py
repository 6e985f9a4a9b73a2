"""What reaches the terminal: text that can neither steer it nor fail on it. Standard library only."""

import os
import re
import sys

# Control characters (C0 but tab and line ends, DEL, C1), line separators and marks that turn the direction of text:
# with them a file name or a row could set the window's title, clear the screen or rewrite lines above.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
PROGRESS = re.compile("(\r(?!\n)|\x1b\\[A)")  # what tqdm needs to draw a bar where the last one is


def visible(text: str) -> str:
    r"""The text with steering characters written out, as \x1b; a carriage return stays before a line end only."""
    return STEERING.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text.replace("\r\n", "\n"))


def visible_beside_bars(text: str) -> str:
    """`visible`, progress bars left as they are."""
    return "".join(part if PROGRESS.fullmatch(part) else visible(part) for part in PROGRESS.split(text))


def protect_streams() -> None:
    """From here on whatever is printed is `visible`, shows what the terminal's encoding lacks as \\u4e2d, and cannot fail: a
    reader who leaves (`| head -1`) or a full disk under the log ends the output, not the work."""
    for name, shown in (("stdout", visible), ("stderr", visible_beside_bars)):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and "write" not in vars(stream):
            stream.reconfigure(errors="backslashreplace")
            # In the object itself, as loggers hold it already.
            stream.write, stream.flush = _unfailing(stream, stream.write, shown), _unfailing(stream, stream.flush)


def _unfailing(stream, method, shown=None):
    def call(*text):
        try:
            return method(*map(shown, text)) if shown else method()
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())  # what the stream still holds goes there as well
            if not isinstance(error, BrokenPipeError) and stream is sys.stdout:
                print(f"warning: the output cannot be written ({error.strerror}); going on without it", file=sys.stderr)
            return len(text[0]) if text else None

    return call
