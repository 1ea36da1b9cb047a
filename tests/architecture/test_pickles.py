"""No data that another process sent or wrote is unpickled or run: a pickle can run any code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmddp

PACKAGE = Path(slurmddp.__file__).parent
PICKLES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
ALLOWED = {
    # The result of a run of this account; its owner and its mode are checked before.
    ("run_handle.py", "pickle.loads"),
    # A function and its result, in a private folder of the process that started the ranks.
    ("launchers/local/function.py", "cloudpickle.loads"),
    # The safe loader of libyaml builds only plain values.
    ("runs/folder/layout.py", "yaml.load"),
}


OBJECTS = ("_object", "_object_list")
"""Ends of the names of torch's collectives that pickle what they exchange."""
RUNNING = frozenset({
    "eval", "exec", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load",
    "torch.package.PackageImporter", "pandas.read_pickle", "pd.read_pickle",
})  # fmt: skip
"""Calls that run the code in a text or a file, or build any object from it."""


def unpickling(text: str) -> Iterator[str]:
    """Yield the calls and imports in a source that unpickle, or that may unpickle for want of a keyword."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield from of_an_attribute(node)
        elif isinstance(node, ast.ImportFrom):
            yield from of_an_import(node)
        elif isinstance(node, ast.Call):
            yield from of_a_call(node)


def of_an_attribute(node: ast.Attribute) -> Iterator[str]:
    module = ast.unparse(node.value)
    is_of_torch = module.rpartition(".")[2] in ("dist", "distributed", "distributed_c10d")
    if is_of_torch and node.attr.endswith(OBJECTS):
        yield ast.unparse(node)
    if module in PICKLES and node.attr in ("load", "loads", "Unpickler", "open"):
        yield ast.unparse(node)


def of_an_import(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    for alias in node.names:
        is_collective = module.startswith("torch") and alias.name.endswith(OBJECTS)
        is_running = f"{module}.{alias.name}" in {*RUNNING, "torch.load"}
        is_connection = "multiprocessing" in module and alias.name in ("Client", "Listener", "Pipe")
        is_pickle = module in PICKLES and not alias.name.startswith("dump")
        if is_collective or is_running or is_connection or is_pickle:
            yield f"{module}.{alias.name}"


def of_a_call(node: ast.Call) -> Iterator[str]:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    called = ast.unparse(node.func)
    if called in RUNNING or called.endswith(
        ("multiprocessing.Pipe", "connection.Client", "connection.Listener")
    ):
        yield called
    if called == "torch.load" and keywords.get("weights_only") != "True":
        yield called
    if keywords.get("allow_pickle", "False") != "False":
        yield called


def test_the_package_unpickles_only_what_this_account_wrote() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in unpickling(path.read_text())
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "distributed.all_gather_object(names, 1)",
        "torch.distributed.broadcast_object_list(state)",
        "from torch.distributed import gather_object",
        "import pickle\npickle.Unpickler(stream)",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "from torch import load",
        "from multiprocessing.connection import Client",
        "multiprocessing.Pipe()",
        "eval(text)",
    ],
)
def test_each_way_to_unpickle_is_found(text: str) -> None:
    assert list(unpickling(text))
