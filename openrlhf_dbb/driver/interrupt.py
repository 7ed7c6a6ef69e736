"""Ends the training command on Ctrl-C and on SIGTERM.

Before the training, a thread ends the process at once: an import or a destructor would swallow an exception, and code
in C can hold the main thread for a minute. During the training the main thread raises KeyboardInterrupt.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from openrlhf_dbb.terminal import print_error

END_S = 2.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Interrupts:  # of this process: signals have one handler only
    says: Callable[[], str] = staticmethod(lambda: "nothing was started")
    at_once = True
    is_ours = False  # the next one comes from a thread of this process


def install() -> None:
    """Watch for signals from now on. Call this once, in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    arm()
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def arm() -> None:
    """Set the handlers, once more after Ray's start, which replaces that of SIGTERM."""
    for number in _SIGNALS:
        signal.signal(number, _handle)


def say(line: Callable[[], str]) -> None:
    """Print this line if the process ends at once."""
    _Interrupts.says = line


def raise_from_now_on() -> None:
    """Let signals raise KeyboardInterrupt, with the exit code as its argument."""
    _Interrupts.at_once = False


def raise_in_main() -> None:
    """Raise KeyboardInterrupt in the main thread, for a thread that has seen why the training cannot go on.

    After a signal the process ends within ``END_S``. Here the main thread has time to ask which actor has died.
    """
    _Interrupts.at_once = False
    _Interrupts.is_ours = True
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # Unlike _thread.interrupt_main this also ends a wait in C.
    signal.pthread_kill(main_thread, signal.SIGINT)


def give_up(line: str) -> None:
    """End the process with this line, for a thread whose main thread is stuck."""
    print_error(line)
    kill_children()
    os._exit(1)


def _handle(number: int, frame: FrameType | None) -> None:
    if _Interrupts.at_once:
        return
    if _Interrupts.is_ours:
        _Interrupts.is_ours = False
    else:
        # What waits for a host that is gone, or for a full disk, is not waited for.
        ending = threading.Timer(END_S, _end, (number,))
        ending.daemon = True
        ending.start()
    raise KeyboardInterrupt(128 + number)


def _watch(reader: int) -> None:
    """Read the numbers of the signals, which Python writes into the pipe whatever the main thread does."""
    while True:
        for number in os.read(reader, 64):
            if number in _SIGNALS and _Interrupts.at_once:
                clear = "\r\x1b[K" if os.isatty(2) else ""
                with contextlib.suppress(OSError):  # a closed or full stderr must not keep it alive
                    os.write(2, f"{clear}interrupted: {_Interrupts.says()}\n".encode())
                _end(number)


def _end(number: int) -> None:
    kill_children()
    os._exit(128 + number)


def kill_children() -> None:
    """Kill all processes that this one has started, also those of a starting Ray."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
