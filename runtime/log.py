"""What partc logs, by the standard library: phases, decisions and launches as INFO, segments as DEBUG.

The environment variable PARTC_LOG_LEVEL asks for it: DEBUG, INFO, WARNING (unless it is set) or ERROR. What
ranks log goes to run.log in the plan's folder. A program that configures logging itself gets the records
of logger `partc` anyway.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from partc.runtime.errors import BadUsage

LEVEL = "PARTC_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

# Control characters, those of Unicode's second block too, but for tab and newline; and what stands for bytes
# that are no UTF-8.
_CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))
    if code not in (9, 10)
}

log = logging.getLogger("partc")


def printable(text: str) -> str:
    """Return text that moves no cursor, sets no colour and is UTF-8: names are others' to choose."""
    return text.translate(_CONTROL)


@contextmanager
def silent_log() -> Iterator[None]:
    """Log nothing meanwhile: of many things that are tried, what is said of each helps nobody."""
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def configure_log() -> None:
    """Let records go where and as far as the environment says. Raises BadUsage."""
    level = os.environ.get(LEVEL, "").upper()
    if not level:
        return
    if level not in _LEVELS:
        raise BadUsage(f"no log level {level!r}", at=LEVEL, fix=f"set it to one of {', '.join(_LEVELS)}")
    log.setLevel(level)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
