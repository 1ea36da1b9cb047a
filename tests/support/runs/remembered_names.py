"""A file system whose client caches names: that a name does not exist (as NFS does), and its file.

A program that opens a file by a cached name gets the error ESTALE if another host has replaced the file, as
on GlusterFS with long cache times.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

LOOK_UPS = (
    (os, "scandir"),
    (os, "listdir"),
    (os, "stat"),
    (os, "lstat"),
    (os, "open"),
    (io, "open"),
    (builtins, "open"),
)


class RememberedNames:
    """The cache of this process for a folder: a name that was once absent stays absent.

    A listing of a folder asks the server, and so corrects the cached names of its files. A file that this
    process creates enters the cache.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._absent: set[str] = set()
        self._inodes: dict[str, int] = {}
        """The inode of each file that this process has opened."""
        self._is_other_host = False

    def remember(self, look_up: Callable[..., Any]) -> Callable[..., Any]:
        """Return the system function `look_up` with a cache of names in front of it."""

        def ask(path: Any, *args: Any, **options: Any) -> Any:
            name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
            if self._is_other_host or not f"{name}/".startswith(f"{self._root}/"):
                return look_up(path, *args, **options)
            if name in self._absent and not _creates(args):
                raise FileNotFoundError(2, "No such file or directory", name)

            if look_up.__name__ == "open":
                self._refuse_replaced(str(name))
            try:
                answer = look_up(path, *args, **options)
            except FileNotFoundError:
                self._absent.add(str(name))
                raise

            self._absent.discard(str(name))
            if look_up.__name__ in ("scandir", "listdir"):
                self._forget_files_in(Path(name))
            return answer

        return ask

    def _refuse_replaced(self, name: str) -> None:
        with suppress(FileNotFoundError):
            inode = os.stat(name).st_ino  # noqa: PTH116 - the look-up by name
            if self._inodes.setdefault(name, inode) != inode:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)

    def _forget_files_in(self, folder: Path) -> None:
        for name in [name for name in self._inodes if Path(name).parent == folder]:
            del self._inodes[name]

    @contextmanager
    def other_host(self) -> Iterator[None]:
        """Act as another host within this block."""
        self._is_other_host = True
        yield
        self._is_other_host = False

    def finds(self, path: Path) -> bool:
        """Return whether a program on this host that opens files by name, such as SLURM, finds a file."""
        try:
            os.stat(path)  # noqa: PTH116 - this is the look-up by name
        except FileNotFoundError:
            return False

        return True


def _creates(args: tuple[Any, ...]) -> bool:
    flags = args[0] if args else 0
    return bool(flags & os.O_CREAT) if isinstance(flags, int) else not set("wax").isdisjoint(flags)


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RememberedNames:
    """The folder of the test, on such a file system."""
    names = RememberedNames(tmp_path)
    for module, name in LOOK_UPS:
        monkeypatch.setattr(module, name, names.remember(getattr(module, name)))
    return names
