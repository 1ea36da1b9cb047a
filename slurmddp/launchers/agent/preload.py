"""Prepare the agent before it forks: ranks inherit its working folder, search path and imports."""

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
    # DistributedDataParallel imports torch._dynamo for its first model: 800 modules, as slow as torch itself.
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "numpy",
    "safetensors.torch",
    "encodings.idna",  # imported by socket at the first host name lookup
    "slurmddp.training.*",
)
_EXTENSIONS = ("numpy", "array", "cmath", "decimal", "random", "shutil", "unicodedata")
"""Modules that sympy imports and that load shared libraries.

They are imported before another thread loads torch's libraries; during that load they would have to wait.
"""
_PURE = "sympy"
"""The largest package of pure Python that torch._dynamo imports."""


def enter_project(folder: RunFolder, project_dir: str | None) -> None:
    """Change to the project folder, and let imports find the snapshot of its code, if there is one."""
    project = Path(project_dir or Path.cwd())
    try:
        os.chdir(project)
    except OSError as error:
        raise ConfigError(
            f"The project folder {project} can't be entered on {socket.gethostname()}: {error.strerror}.",
            hint="It must be on a filesystem that the compute nodes share.",
        ) from error

    # Replace the first entry of the search path: `python -m` has put the agent's working folder there.
    has_copy = is_there(folder.code_dir)
    sys.path[0] = str(folder.code_dir if has_copy else project)
    if not has_copy:
        return

    root = str(project.resolve())
    code = str(folder.code_dir)
    import_from_copy(root, code)
    # Python programs that a rank starts get the search path from this variable.
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(in_copy(entry, root, code) for entry in entries)


def import_for_all(names: Sequence[str]) -> str | None:
    """Import the modules that forked ranks share.

    Returns:
        Why this process can't be forked afterwards; None if it can.
    """
    # Imports leave little garbage, and garbage collection would add a fifth to their time.
    gc.disable()
    try:
        if "torch" in names:
            with _libraries_loading("torch", "libtorch_global_deps.so", "libtorch_python.so"):
                _import_quietly(_PURE)
        culprit = import_all(names)
    finally:
        gc.enable()
    # Exclude the imported objects from garbage collection: in a forked rank it would write to each object,
    # and so copy the memory that the rank shares with the agent.
    gc.freeze()

    # Check again after all imports: a thread that an import has started may have ended by now.
    obstacle = why_no_fork()
    if obstacle is None:
        return None
    return culprit or f"the agent {obstacle}"


@contextmanager
def _libraries_loading(package: str, *libraries: str) -> Iterator[None]:
    """Load shared libraries of a package in another thread while the `with` block imports modules.

    Loading torch's libraries takes a fifth of a second, in which the processor is idle.
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
    """Load shared libraries of a package ahead of its import.

    Errors are ignored, because the import of the package raises them again.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []

    # Call the function dlopen through ctypes, which releases the GIL, so that the other thread can import.
    # ctypes.CDLL(path) and an import keep the GIL while the linker loads the library.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    for name, scope in zip(libraries, (os.RTLD_GLOBAL, 0), strict=True):
        for folder in folders:
            dlopen(os.fsencode(Path(folder, "lib", name)), os.RTLD_NOW | scope)


def _import_quietly(name: str) -> None:
    """Import a module early; ignore an ImportError, because the modules that need it will raise it again."""
    with suppress(ImportError):
        importlib.import_module(name)


def import_all(names: Sequence[str]) -> str | None:
    """Import modules by name; `package.*` stands for every module of the package and of its subpackages.

    Returns:
        Which import has made a fork impossible, and how; None if a fork is still possible.

    Raises:
        ConfigError: a module can't be found.
    """
    culprit = None
    for name in names:
        package, star, _ = name.partition(".*")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            _tolerate_missing(error, package)
            continue

        # Name only the first import that makes a fork impossible.
        obstacle = why_no_fork() if culprit is None else None
        if obstacle:
            culprit = f"importing {package} {obstacle}"

        if star:
            below = pkgutil.walk_packages(module.__path__, f"{package}.")
            culprit_below = import_all([entry.name for entry in below])
            culprit = culprit or culprit_below
    return culprit


def _tolerate_missing(error: ModuleNotFoundError, name: str) -> None:
    """Raise ConfigError for a missing module, except a submodule that only some versions of a package have.

    Args:
        error: the error of the import.
        name: the name of the imported module.
    """
    if error.name == name and name.count(".") > 0 and not name.startswith("slurmddp"):
        return

    raise ConfigError(
        f"The module {error.name} can't be imported by {sys.executable} on {socket.gethostname()}.",
        hint="Install it there, or name another interpreter with cluster.python.",
    ) from error


def why_no_fork() -> str | None:
    """Return why this process can't be forked, as a verb phrase like "has initialised CUDA"; None if it can.

    A forked process can't use CUDA if its parent has initialised CUDA. A fork copies the locks that Python's
    threads hold, but not the threads, so a lock may stay locked. Threads of libraries, such as numpy's BLAS,
    do no harm.
    """
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or _cuda_is_initialised():
        return "has initialised CUDA"

    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"has started a thread ({others[0]})" if others else None


def _cuda_is_initialised() -> bool:
    """Return whether CUDA is initialised in this process.

    `torch.cuda.is_initialized()` misses an initialisation of the driver alone, as by `cuda.is_available()`.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        # CUDA's driver library is not loaded, so CUDA can't be initialised.
        return False

    # cuDeviceGetCount succeeds (0) only after the driver was initialised.
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0
