"""The beginning and the end of a Python program, for a process that another process has forked.

Such a process copies what imported modules have drawn, and leaves by `os._exit`. These functions give it what
a program gets that starts as `python script.py`: random numbers of its own, and an end at which threads
finish, exit handlers run, and open files reach the disk.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
from contextlib import suppress
from typing import Any

_ARCHIVES = {"zipfile": "ZipFile", "shelve": "Shelf"}
"""Classes of Python, by module, whose `__del__` writes what completes their file."""
_C_WRITERS = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


def draw_anew() -> None:
    """Give this forked process random states of its own; Python's `random` reseeds itself at a fork.

    CUDA's generators draw their first seed when CUDA starts, which is after the fork.
    """
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


def note_uncaught(error: BaseException) -> None:
    """Let exit handlers see that the program ends by `error`, where Python leaves it for them."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def finish(code: int, limit_s: float | None = None) -> None:
    """Do what Python does at the end of a program, up to the end of the process itself.

    No object is destroyed: the destructor of a process group, for one, waits for a thread of torch, which may
    wait for the interpreter's lock, which its caller holds.

    Args:
        code: the exit code of the process.
        limit_s: seconds after which the process ends in any case, whatever it waits for; None: no limit.
    """
    if limit_s is not None:
        limit = threading.Timer(limit_s, os._exit, (code,))
        limit.daemon = True
        limit.start()
    threading._shutdown()  # type: ignore[attr-defined]  # Threads may still write files.
    atexit._run_exitfuncs()
    close_files()


def close_files() -> None:
    """Close every file that this process has open and has not forgotten, except for the standard streams."""
    standard = _standard_streams()
    modules = [(sys.modules[name], kind) for name, kind in _ARCHIVES.items() if name in sys.modules]
    kinds = (io.IOBase, *(getattr(module, kind) for module, kind in modules))
    files = [entry for entry in gc.get_objects() if issubclass(type(entry), kinds)]
    # A file that writes into another one comes before it.
    for file in sorted(files, key=_depth):
        if id(file) not in standard:
            with suppress(Exception):  # As at the end of Python, the next file is closed all the same.
                file.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _standard_streams() -> set[int]:
    """Return the identities of the standard streams and of the layers below them."""
    layers: list[Any] = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]
    for layer in layers:
        layers += [below for name in ("buffer", "raw") if (below := getattr(layer, name, None)) is not None]
    return {id(layer) for layer in layers}


def _depth(file: Any) -> int:
    """Return how close a file is to the kernel: archive, text, compression, buffer, descriptor."""
    if not isinstance(file, io.IOBase):
        return -1
    if isinstance(file, io.TextIOBase):
        return 0
    if isinstance(file, io.RawIOBase):
        return 3
    return 2 if isinstance(file, _C_WRITERS) else 1
