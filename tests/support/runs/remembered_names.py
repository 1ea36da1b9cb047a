"""A file system whose client remembers names that did not exist, as one of NFS does for up to a minute."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LOOK_UPS = ((os, "scandir"), (os, "stat"), (os, "lstat"), (os, "open"), (io, "open"), (builtins, "open"))


class RememberedNames:
    """The look-ups of this process below a folder: a name that was once absent stays absent.

    Listings ask the server, and a file that this process creates is known to it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._absent: set[str] = set()
        self._is_other_host = False

    def remember(self, look_up: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the system that trusts what is remembered."""

        def ask(path: Any, *args: Any, **options: Any) -> Any:
            name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
            if self._is_other_host or not str(name).startswith(f"{self._root}/"):
                return look_up(path, *args, **options)
            if name in self._absent and not _creates(args):
                raise FileNotFoundError(2, "No such file or directory", name)
            try:
                answer = look_up(path, *args, **options)
            except FileNotFoundError:
                self._absent.add(str(name))
                raise
            self._absent.discard(str(name))
            return answer

        return ask

    @contextmanager
    def other_host(self) -> Iterator[None]:
        """Let another host do what is done within this block."""
        self._is_other_host = True
        yield
        self._is_other_host = False

    def finds(self, path: Path) -> bool:
        """Return whether a program on this host that asks by name, such as SLURM, finds a file."""
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
