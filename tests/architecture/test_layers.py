"""Rooms import only rooms below them, and no modules import each other in a cycle."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from support import ROOT

PACKAGE = ROOT / "slurmddp"

# From the bottom to the top: a room may import itself and any room before it.
# A folder may hold modules beside inner rooms; these modules belong to the outer room.
_ABOVE = """
    errors short_text near_matches plugins settings environments host slurm.units slurm slurm.limits
    sandbox
    runs runs.folder runs.index runs.sweeps runs.ssh_runs runs.failures runs.status pages runs.report bench
    batch
    checkpoint checkpoint.files checkpoint.memory
    launchers launchers.link launchers.watchdog launchers.coordinator launchers.agent launchers.local
    launchers.submit
    config.checks config.composition config control control.ssh run_handle start_from_python function_call
    mcp_server cli cli.commands
"""
_BELOW = """
    checkpoint.state collectives transports strategies
    training training.rng training.instantiate training.startup_timer training.heartbeat training.loggers
    training.device training.process_group training.stopping training.run_log training.data
    training.checkpointing training.rank_session training.distributon training.builtin training.trainer
    training.preflight training.rank_main remote
    bench.ranks
"""
TORCH_FREE, WITH_TORCH = _ABOVE.split(), _BELOW.split()
SHARED_WITH_TORCH = {"errors", "short_text", "near_matches", "plugins", "settings", "environments", "host"}
SHARED_WITH_TORCH |= {"runs", "runs.folder", "checkpoint", "checkpoint.files", "checkpoint.memory"}
SHARED_WITH_TORCH |= {"bench", "slurm.units"}
PURE_PACKAGES = {"conf", "templates", "__main__"}

# Imports upward. `launch()` in a script starts processes, and imports the code of the launcher only then.
# A controller and its workers prove the secret of their job in the same way as the agents.
ALLOWED = {
    ("slurmddp.training.rank_session", "slurmddp.launchers.local.launcher"),
    ("slurmddp.training.rank_session", "slurmddp.launchers.local.launch"),
    ("slurmddp.training.distributon", "slurmddp.launchers.local.launcher"),
    ("slurmddp.training.distributon", "slurmddp.launchers.local.function"),
    ("slurmddp.remote.channel", "slurmddp.launchers.link.connection"),
}

ONLY_IMPORTERS = {
    "torch": (
        "slurmddp.bench.ranks",
        "slurmddp.checkpoint.state",
        "slurmddp.collectives",
        "slurmddp.remote",
        "slurmddp.strategies",
        "slurmddp.training",
        "slurmddp.transports",
    ),
    "hydra": ("slurmddp.config",),
    "submitit": ("slurmddp.launchers.submit.submitit",),
    "mcp": ("slurmddp.mcp_server",),
    "xxhash": ("slurmddp.checkpoint.files.digest",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def imports(path: Path, *, types: bool = False) -> list[str]:
    """Return the modules that a file imports, also inside functions; with `types`, also for annotations."""
    found: list[str] = []
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if is_type_checking(node) and not types:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        pending += list(ast.iter_child_nodes(node))
    return found


def room(module: str) -> str:
    """Return the innermost room of a module: "runs.folder" for `slurmddp.runs.folder.layout`."""
    name = module.partition(".")[2]
    while "." in name and name not in TORCH_FREE + WITH_TORCH:
        name = name.rpartition(".")[0]
    return name


def allowed(importer: str) -> set[str]:
    """Return the rooms that a room may import."""
    assert importer in TORCH_FREE + WITH_TORCH, (
        f"{importer}: add it to this test and docs/internals/architecture.md"
    )
    if importer in WITH_TORCH:
        return SHARED_WITH_TORCH | set(WITH_TORCH[: WITH_TORCH.index(importer) + 1])
    return set(TORCH_FREE[: TORCH_FREE.index(importer) + 1])


def test_rooms_import_downward_only() -> None:
    edges = {
        (module, name)
        for module, path in MODULES.items()
        if room(module) and room(module) not in PURE_PACKAGES
        for name in imports(path)
        if name in MODULES and room(name) and room(name) not in allowed(room(module))
    }
    assert edges == ALLOWED


def test_heavy_libraries_have_few_importers() -> None:
    wrong = [
        (module, library)
        for module, path in MODULES.items()
        for library in ONLY_IMPORTERS.keys() & {name.split(".")[0] for name in imports(path)}
        if not module.startswith(ONLY_IMPORTERS[library])
    ]
    assert wrong == []


def test_no_import_cycles() -> None:
    """Imports inside functions and for annotations count: they tie two modules as tightly as others."""
    graph = {
        module: {name for name in imports(path, types=True) if name in MODULES} - {module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for other in sorted(graph[name]):
            # An `__init__` that re-exports the modules of its package is no cycle: they never import it.
            if not name.startswith(other + "."):
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_test_files_do_not_import_each_other() -> None:
    """A test file can be changed or removed without another test file."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [path.name for path in files if any(name.startswith("test_") for name in imports(path))] == []


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(
        "if TYPE_CHECKING:\n    import slurmddp.runs\n"
        "def f():\n    from slurmddp.cli import main\n    import slurmddp.config\n"
    )
    at_run_time = {"slurmddp.cli", "slurmddp.cli.main", "slurmddp.config"}
    assert set(imports(file)) == at_run_time
    assert set(imports(file, types=True)) == at_run_time | {"slurmddp.runs"}
