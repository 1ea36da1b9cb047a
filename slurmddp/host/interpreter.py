"""Start and end a Python program in a process that another process has forked.

A forked process has copies of the random states of imported modules, and ends by `os._exit`. These functions
give it the properties of a program that starts as `python script.py`: its own random numbers, and an end at
which threads finish, exit handlers run, and open files reach the disk.
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
"""Classes of the standard library, by module, whose `__del__` completes an archive file."""
_C_WRITERS = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


def draw_anew() -> None:
    """Give this forked process random states of its own, for NumPy, torch and multiprocessing."""
    # Two generators need no new seed: Python's `random` reseeds itself at a fork, and CUDA's generators draw
    # their first seed when CUDA starts, after the fork.
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()

    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "default_generator"):
        torch.default_generator.seed()

    # `authkey` is the secret by which processes of `multiprocessing` recognise each other.
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


def note_uncaught(error: BaseException) -> None:
    """Set `sys.last_value` and its companions to the error that ends the program: exit handlers read them."""
    sys.last_type = type(error)
    sys.last_value = error
    sys.last_traceback = error.__traceback__


def finish(code: int, limit_s: float | None = None) -> None:
    """Join threads, run exit handlers and close files, as Python does at the end; the process does not end.

    Args:
        code: the exit code of the process if it is ended after `limit_s`.
        limit_s: seconds after which the process is ended, even if it still waits; None for no limit.
    """
    if limit_s is not None:
        limit = threading.Timer(limit_s, os._exit, (code,))
        limit.daemon = True
        limit.start()

    # Threads are joined first, because they may still write files.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Unlike Python, this only closes files and destroys no objects: the destructor of a process group waits
    # for a thread of torch, which may in turn wait for the interpreter lock that the destructor holds.
    close_files()


def close_files() -> None:
    """Close every file object of this process that still exists, except for the standard streams."""
    standard = _standard_streams()
    modules = [(sys.modules[name], kind) for name, kind in _ARCHIVES.items() if name in sys.modules]
    kinds = (io.IOBase, *(getattr(module, kind) for module, kind in modules))
    files = [entry for entry in gc.get_objects() if issubclass(type(entry), kinds)]

    # Sorted, so that a file that writes into another file is closed before that file.
    for file in sorted(files, key=_depth):
        if id(file) not in standard:
            # Errors are ignored, as at Python's own end: the other files must still be closed.
            with suppress(Exception):
                file.close()

    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _standard_streams() -> set[int]:
    """Return the `id` of each standard stream, of its buffer and of its raw file."""
    layers: list[Any] = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]
    # The loop also visits the layers that it appends: text, then buffer, then raw file.
    for layer in layers:
        below = [getattr(layer, name, None) for name in ("buffer", "raw")]
        layers += [inner for inner in below if inner is not None]
    return {id(layer) for layer in layers}


def _depth(file: Any) -> int:
    """Return the sort key of a file, from -1 to 3: archive, text, compression, buffer, raw file.

    A file with a lower key may write into a file with a higher key.
    """
    if not isinstance(file, io.IOBase):
        return -1
    if isinstance(file, io.TextIOBase):
        return 0
    if isinstance(file, io.RawIOBase):
        return 3
    return 2 if isinstance(file, _C_WRITERS) else 1
