"""Prints a line for a training whose own code cannot run any more.

When the raylet is gone, Ray's C++ code ends the driver at once and prints nothing. So does the kernel when memory runs
out. A small process waits for the driver's end and prints the line, unless the driver has taken it back.
"""

import atexit
import contextlib
import subprocess
import sys

from openrlhf_dbb.terminal import safe

# Prints the last line that it was given; an empty one takes it back.
_PROGRAM = """
import sys
last = b""
for line in sys.stdin.buffer:
    last = line.strip()
if last:
    clear = b"\\r\\x1b[K" if sys.stderr.isatty() else b""
    sys.stderr.buffer.write(clear + last + b"\\n")
"""


def leave(line: str) -> None:
    """Let this line be printed on stderr if this process ends without an orderly exit.

    ``interrupt.kill_children`` takes it back; it comes before every exit by ``os._exit``.
    """
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is for the driver
    )
    assert process.stdin is not None
    words = process.stdin
    words.write(f"{safe(line)}\n".encode(errors="backslashreplace"))
    words.flush()

    def take_back() -> None:
        with contextlib.suppress(OSError):  # somebody has killed the process
            words.write(b"\n")
            words.flush()

    atexit.register(take_back)
