"""A command line as a process: errors and exit codes, Ctrl-C, closed streams."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import jax

from reanchor_jax.errors import ReanchorError

BAD_INPUT, INTERRUPTED, READER_GONE = 2, 128 + signal.SIGINT, 128 + signal.SIGPIPE


def run(program: Callable[[], int], *, smaller: str = "", interrupted: str = "interrupted") -> int:
    """Runs a program; returns its exit code, or that of its error, of which stderr gets one line.

    Args:
      program: returns an exit code.
      smaller: flags that make what the program keeps on the device smaller.
      interrupted: what to say after Ctrl-C.
    """
    _open_streams()
    handler = signal.getsignal(signal.SIGINT)
    # Another handler is someone else's: of who started us with Ctrl-C ignored, or of who calls us.
    ours = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return program()
    except ReanchorError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except jax.errors.JaxRuntimeError as error:
        first = (str(error).strip().splitlines() or ["unknown"])[0]
        hint = f"; try a smaller {smaller}" if smaller else ""
        print(f"error: the device failed: {first}{hint}", file=sys.stderr)
        return BAD_INPUT
    except MemoryError as error:
        hint = f"; try a smaller {smaller}" if smaller else ""
        print(f"error: out of memory: {error or 'nothing is left'}{hint}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader is gone, which is its right. Python flushes stdout at exit: give it a place to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except OSError as error:
        print(f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)


def _open_streams() -> None:
    """A standard stream that was closed (`>&-`) swallows what is written to it, as /dev/null does."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt where it is not lost.

    Python ignores an exception in a callback of its garbage collector. JAX has one, which runs often
    while a program is compiled: an interrupt that meets it is sent again right behind it.
    """
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    if frame is not None and frame.f_code in callbacks:
        # To the main thread by name: only a signal of its own wakes it from a blocking call.
        threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, number)).start()
        return
    raise KeyboardInterrupt
