"""Prepare the agent before it forks: its ranks inherit the folder, the search path and the imports."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import pkgutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.launchers.agent.startup.sitecustomize import import_from_copy, in_copy
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    # DistributedDataParallel imports it with the first model: 800 modules, as slow as torch itself.
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "numpy",
    "safetensors.torch",
    "encodings.idna",  # a socket's, for the first host that it is given
    "slurmddp.training.*",
)
_EXTENSIONS = ("numpy", "array", "cmath", "decimal", "random", "shutil", "unicodedata")
"""Modules below sympy that hold libraries of their own, which wait while torch's are loaded."""
_PURE = "sympy"
"""The largest part of torch._dynamo that is Python alone."""


def enter_project(folder: RunFolder, project_dir: str | None) -> None:
    """Enter the person's project folder, and import its modules as they were at submission."""
    project = Path(project_dir or Path.cwd())
    try:
        os.chdir(project)
    except OSError as error:
        raise ConfigError(
            f"The project folder {project} can't be entered on {socket.gethostname()}: {error.strerror}.",
            hint="It must be on a filesystem that the compute nodes share.",
        ) from error
    # `python -m` has put its working folder first.
    has_copy = is_there(folder.code_dir)
    sys.path[0] = str(folder.code_dir if has_copy else project)
    if has_copy:
        names = str(project.resolve()), str(folder.code_dir)
        import_from_copy(*names)
        if "PYTHONPATH" in os.environ:  # for programs that a rank starts
            entries = os.environ["PYTHONPATH"].split(os.pathsep)
            os.environ["PYTHONPATH"] = os.pathsep.join(in_copy(entry, *names) for entry in entries)


def import_for_all(names: Sequence[str]) -> str | None:
    """Import modules by name for every rank to share; return why ranks can't be forked then, or None."""
    gc.disable()  # Imports leave little garbage, and looking for it takes a fifth of the time.
    try:
        if "torch" in names:
            with _libraries_loading("torch", "libtorch_global_deps.so", "libtorch_python.so"):
                _import_quietly(_PURE)
        why = import_all(names)
    finally:
        gc.enable()
    gc.freeze()  # No collection in a rank touches, and so copies, the objects that are shared now.
    found = why_no_fork()
    return None if found is None else why or f"the agent {found}"


@contextmanager
def _libraries_loading(package: str, *libraries: str) -> Iterator[None]:
    """Let the kernel and the linker load a package's libraries while this thread imports Python modules.

    Loading torch's libraries takes a fifth of a second of an idle processor.
    """
    for name in _EXTENSIONS:
        _import_quietly(name)
    loader = threading.Thread(target=_load_libraries, args=(package, libraries))
    loader.start()
    try:
        yield
    finally:
        loader.join()


def _load_libraries(package: str, libraries: Sequence[str]) -> None:
    """Load libraries of a package that is not imported yet. If that fails, the import reports it."""
    found = importlib.util.find_spec(package)
    folders = (found.submodule_search_locations if found else None) or []
    # Called through ctypes, dlopen releases the interpreter; ctypes.CDLL itself and imports don't.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, scope in zip(libraries, (os.RTLD_GLOBAL, 0), strict=True):
        for folder in folders:
            dlopen(os.fsencode(Path(folder, "lib", name)), os.RTLD_NOW | scope)


def _import_quietly(name: str) -> None:
    """Import a module ahead of the modules that need it; a missing module is their error."""
    with suppress(ImportError):
        importlib.import_module(name)


def import_all(names: Sequence[str]) -> str | None:
    """Import modules by name; `package.*` stands for every module of the package and of its subpackages.

    Returns which import has made a fork impossible, and how; None if a fork is still possible.
    """
    why = None
    for name in names:
        package, star, _ = name.partition(".*")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            _tolerate_missing(error, package)
            continue
        if why is None and (found := why_no_fork()):
            why = f"importing {package} {found}"
        if star:
            below = pkgutil.walk_packages(module.__path__, f"{package}.")
            parts = import_all([entry.name for entry in below])
            why = why or parts
    return why


def _tolerate_missing(error: ModuleNotFoundError, name: str) -> None:
    """Raise unless the missing module is a part of a package that only some versions have."""
    if error.name == name and name.count(".") > 0 and not name.startswith("slurmddp"):
        return
    raise ConfigError(
        f"The module {error.name} can't be imported by {sys.executable} on {socket.gethostname()}.",
        hint="Install it there, or name another interpreter with cluster.python.",
    ) from error


def why_no_fork() -> str | None:
    """Return why this process can't be forked, as a verb phrase like "has initialised CUDA"; None if it can.

    A forked process can't use CUDA if its parent has. It inherits locks of Python threads that it does not
    have. Other threads, such as those of numpy's BLAS, survive a fork.
    """
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or _cuda_is_initialised():
        return "has initialised CUDA"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"has started a thread ({others[0]})" if others else None


def _cuda_is_initialised() -> bool:
    """Return whether CUDA is initialised in this process; before that its driver counts no devices.

    torch knows only its own part, without the effect of `cuda.is_available()`.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # The driver is not loaded.
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0
