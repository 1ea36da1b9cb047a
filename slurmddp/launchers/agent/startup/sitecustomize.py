"""Prepare the interpreter of a person's script, module or `python ...`, before the program's first line.

An agent puts this folder first in PYTHONPATH. Python imports `sitecustomize` once the search path is complete
and before it runs the program. This module does four things:

- Imports of a script or module find the snapshot of the code.
- The agent can ask for the stacks of a rank that hangs.
- The program waits for gloo's threads at its end.
- The module removes every other trace of itself. The program finds the search path, the PYTHONPATH and the
  `sitecustomize` of its site as it would without slurmddp.

The module imports nothing that Python has not imported itself, because a program may depend on being the
first to import a module.
"""

from __future__ import annotations

import faulthandler
import os
import sys

# The same as `typing.TYPE_CHECKING`, without importing `typing`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# `environments/names.py`, `runs/folder/layout.py` and `host/heartbeat_page.py` define these values. They
# are not imported from there, because the program would find slurmddp and its imports in `sys.modules`.
RUN_DIR_VARIABLE = "SLURMDDP_RUN_DIR"
HEARTBEAT_VARIABLE = "SLURMDDP_HEARTBEAT_FD"
SNAPSHOT_VARIABLE = "SLURMDDP_SNAPSHOT"
CODE_FOLDER = "code"
PAGE_NAME = "slurmddp-heartbeat"
STACKS_SIGNAL_OFFSET = 7
"""Offset from SIGRTMIN of the signal at which a process writes its stacks."""


def import_from_copy(project: str, code: str) -> None:
    """Replace the project by its snapshot in the search path and in the mappings of editable installs.

    Args:
        project: the project folder, without symbolic links.
        code: the snapshot of its code.
    """
    sys.path[:] = [in_copy(entry, project, code) for entry in sys.path]

    # Some editable installs keep the folders of packages in a mapping of a module, not in a .pth file.
    finders = [vars(module) for name, module in sys.modules.items() if name.startswith("__editable___")]
    for finder in finders:
        mapping = finder.get("MAPPING")
        if isinstance(mapping, dict):
            _map_packages(mapping, project, code)


def _map_packages(mapping: dict[str, str], project: str, code: str) -> None:
    """Replace the folders of packages in the mapping of an editable install by their copies in the snapshot.

    Args:
        mapping: the folder of each package by its name; changed in place.
        project: the project folder, without symbolic links.
        code: the snapshot of its code.
    """
    for package, folder in mapping.items():
        copy = in_copy(folder, project, code)
        mapping[package] = copy
        # A process that multiprocessing spawns gets this search path and the unchanged mapping. It finds the
        # copy by the path.
        if copy != folder and os.path.splitext(os.path.basename(folder))[0] == package:
            sys.path.append(os.path.dirname(copy))


def in_copy(entry: str, project: str, code: str) -> str:
    """Return the snapshot's copy of a folder or module of the project, or `entry` if there is no copy."""
    path = os.path.realpath(entry)
    if path != project and not path.startswith(project + os.sep):
        return entry

    copy = os.path.normpath(os.path.join(code, os.path.relpath(path, project)))
    exists = os.path.exists(copy) or os.path.exists(copy + ".py")
    # A link in the snapshot may lead out of it, to code that was not copied.
    root = os.path.realpath(code)
    is_copied = (os.path.realpath(copy) + os.sep).startswith(root + os.sep)
    return copy if exists and is_copied else entry


class _ModuleFolder:
    """Import finder that replaces the working folder in the search path of `python -m` by the snapshot.

    Python inserts the working folder after it has run `sitecustomize`, right before it looks for the module.
    `find_spec` is called for that look-up: it replaces the folder, and removes this finder.
    """

    def __init__(self, project: str, code: str) -> None:
        self._project = project
        self._code = code

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if sys.path and os.path.realpath(sys.path[0]) == self._project:
            sys.path[0] = self._code
            sys.meta_path.remove(self)


def _prepare() -> None:
    """Make imports find the code snapshot, arm faulthandler, and register the wait for gloo's threads.

    Also remove the folder of this module from the search path.
    """
    _leave_search_path(os.path.dirname(__file__))
    run_dir = os.environ.get(RUN_DIR_VARIABLE, "")
    code = os.path.join(run_dir, CODE_FOLDER)

    # SLURMDDP_SNAPSHOT is 1 for a script or module. A command, such as `python app.pyz`, runs on the files
    # of the project.
    is_on_snapshot = os.environ.pop(SNAPSHOT_VARIABLE, "") == "1"
    if is_on_snapshot and run_dir and os.path.isdir(code):
        project = os.path.realpath(os.getcwd())
        import_from_copy(project, code)
        if "-m" in sys.orig_argv[:3]:
            sys.meta_path.insert(0, _ModuleFolder(project, code))

    _arm_faulthandler(os.environ.get(HEARTBEAT_VARIABLE, ""))
    _end_after_gloo()


def _leave_search_path(folder: str) -> None:
    """Remove this folder from the search path of this process and of the processes that it starts."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)

    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = os.pathsep.join(entry for entry in entries if entry != folder)
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)


def _arm_faulthandler(descriptor: str) -> None:
    """Let faulthandler print the stacks at a crash, and write them to the heartbeat file at a signal.

    The agent sends this signal to a rank that hangs.

    Args:
        descriptor: the descriptor of the heartbeat file; empty without one.
    """
    faulthandler.enable()
    try:
        is_page = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{PAGE_NAME}")
    except OSError:
        is_page = False

    if is_page:
        # `signal` would import `enum`, which the program may want to be the first to import.
        from _signal import SIGRTMIN  # type: ignore[import-not-found]

        number = SIGRTMIN + STACKS_SIGNAL_OFFSET
        faulthandler.register(number, file=int(descriptor), all_threads=True, chain=False)


def _end_after_gloo() -> None:
    """Register an exit handler that waits for gloo's threads: Python may abort if it shuts down before them.

    This handler runs after the program's exit handlers, because it is registered before them.
    """
    import atexit

    atexit.register(_wait_for_gloo)
    del sys.modules["atexit"]


def _wait_for_gloo() -> None:
    if "torch.distributed" in sys.modules:
        from slurmddp.host import gloo_threads

        gloo_threads.wait_until_idle()


if __name__ == "sitecustomize":
    _prepare()
    del sys.modules["sitecustomize"]
    # Import the site's own module. Without one, Python expects and ignores this ImportError.
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
