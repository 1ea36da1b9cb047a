"""Complete a command line for the shell: commands, flags, runs, settings and choices of config groups.

argcomplete implements the protocols of bash, zsh and fish. The shell passes the typed line in the
environment variable `COMP_LINE`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from slurmddp.bench.settings import BENCHES
from slurmddp.errors import SlurmddpError
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.ssh_runs import ssh_runs
from slurmddp.settings.keys import GROUPS, OPEN_NODES, every_key

SHELLS = ("bash", "zsh", "fish")
SEARCH = (
    "hydra/sweeper=optuna",
    *(f"hydra.sweeper.{key}=" for key in ("n_trials", "n_jobs", "metric", "direction", "sampler.seed")),
)
"""Settings that only a search has: `train -m hydra/sweeper=optuna`."""


def script(shell: str) -> str:
    """Return the shell code that makes a shell of `SHELLS` ask `slurmddp` for completions."""
    from argcomplete.shell_integration import shellcode

    return shellcode(["slurmddp"], shell=shell)


def answer(commands: Mapping[str, str], module_of: Callable[[str], Any], **options: Any) -> None:
    """Print the completions of the command line in the variable `COMP_LINE`, and exit.

    Args:
        commands: the description of each command, by name.
        module_of: returns the module of the command with the given name.
        options: further arguments of `argcomplete.autocomplete`.
    """
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    arguments = line.split()[1:]
    chosen = next((argument for argument in arguments if argument in commands), "")

    # The shell completes the last argument, unless a blank follows it.
    complete = arguments if line.endswith(" ") else arguments[:-1]
    if chosen in complete and _has_program(module_of(chosen), complete[complete.index(chosen) + 1 :]):
        # The arguments of a program are unknown here. Without candidates, the shell uses its own completion.
        raise SystemExit(0)

    argcomplete.autocomplete(parser(commands, module_of, chosen), always_complete_options=False, **options)


def _has_program(module: Any, arguments: Sequence[str]) -> bool:
    """Return whether the arguments already name a program, as `train.py` does after `slurmddp run`."""
    return hasattr(module, "split") and bool(module.split(arguments)[1])


def parser(
    commands: Mapping[str, str], module_of: Callable[[str], Any], chosen: str
) -> argparse.ArgumentParser:
    """Return a parser that knows all commands, but only the arguments of the command `chosen`.

    To know the arguments of a command, its module must be imported, which takes time.
    """
    whole = argparse.ArgumentParser(prog="slurmddp", allow_abbrev=False)
    for flag in ("--version", "--debug"):
        whole.add_argument(flag, action="store_true")

    actions = whole.add_subparsers()
    for name, purpose in commands.items():
        command = actions.add_parser(name, help=purpose)
        if name == chosen:
            module_of(name).add_arguments(command)
            _attach(command)

    return whole


def _attach(command: argparse.ArgumentParser) -> None:
    """Set the completion function of each argument of a command and of its sub-commands."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _attach(inner)
        elif action.dest in _COMPLETERS:
            name = command.prog.rpartition(" ")[2]
            completer = _OF_COMMAND.get((name, action.dest), _COMPLETERS[action.dest])
            action.completer = completer  # type: ignore[attr-defined]


def runs(prefix: str, **_context: Any) -> list[str]:
    """Return the names that begin with `prefix`: local runs, the newest first, then runs over ssh."""
    names = [*(run.name for run in index.all_runs()), *(run.name for run in reversed(ssh_runs()))]
    return [name for name in names if name.startswith(prefix)]


def sweep_names(prefix: str, **_context: Any) -> list[str]:
    """Return the names of sweeps that begin with `prefix`."""
    return [name for name in sweeps.names() if name.startswith(prefix)]


def runs_and_sweeps(prefix: str, **_context: Any) -> list[str]:
    """Return the names of runs and sweeps that begin with `prefix`."""
    return [*runs(prefix), *sweep_names(prefix)]


def active_runs(prefix: str, **_context: Any) -> list[str]:
    """Return the names of runs and sweeps that may have a job or a process, without asking SLURM.

    Local runs and sweeps are judged by the records in their folders. All runs over ssh are included.
    """
    local_names = [
        folder.name for folder in index.all_runs() if folder.name.startswith(prefix) and _may_live(folder)
    ]
    ssh_names = [run.name for run in reversed(ssh_runs()) if run.name.startswith(prefix)]
    sweeps_by_name = {name: sweeps.find(name) for name in sweep_names(prefix)}
    active_sweeps = [
        name
        for name, sweep in sweeps_by_name.items()
        if sweep is not None and any(map(_may_live, sweep.started))
    ]

    return [*local_names, *ssh_names, *active_sweeps]


def _may_live(folder: RunFolder) -> bool:
    from slurmddp.runs.folder.history import read_history

    try:
        return read_history(folder).may_live
    except (SlurmddpError, OSError):
        # A damaged record removes only its own run from the candidates.
        return False


def scripts(prefix: str) -> list[str]:
    """Return the Python files and the folders whose paths begin with `prefix`.

    Empty if `prefix` is empty or holds `=`, so that it is the beginning of a setting.
    """
    if not prefix or "=" in prefix:
        return []

    folder, slash, name = prefix.rpartition("/")
    start = folder + slash
    paths: list[str] = []
    with suppress(OSError):
        for path in sorted(Path(start or ".").iterdir()):
            if not path.name.startswith(name):
                continue
            if path.is_dir():
                paths.append(f"{start}{path.name}/")
            elif path.suffix == ".py":
                paths.append(f"{start}{path.name}")

    return paths


def settings_and_scripts(prefix: str, **_context: Any) -> list[str]:
    """Return the scripts and the settings that begin with `prefix`."""
    return [*scripts(prefix), *settings(prefix)]


def benchmarks(prefix: str, **_context: Any) -> list[str]:
    """Return the first arguments of `slurmddp bench` that begin with `prefix`: benchmarks, show, compare."""
    return [word for word in (*BENCHES, "show", "compare") if word.startswith(prefix)]


def clusters(prefix: str, **_context: Any) -> list[str]:
    """Return the names of cluster files that begin with `prefix`."""
    return [name for name in _choices("cluster") if name.startswith(prefix)]


def _choices(group: str) -> Iterable[str]:
    from slurmddp.config.composition.overrides import options
    from slurmddp.config.composition.sources import conf_roots

    return options(conf_roots(Path.cwd()), group)


def settings(prefix: str, **_context: Any) -> list[str]:
    """Return the settings that begin with `prefix`: `model=` for `mod`, `model=gpt_small` for `model=`."""
    return [text for text in _settings(prefix) if text.startswith(prefix)]


def _settings(prefix: str) -> Iterator[str]:
    """Yield settings that may complete a word: `key=` while it has no `=`, else `key=value`."""
    typed, equals_sign, _ = prefix.partition("=")
    name = typed.lstrip("+")
    if equals_sign:
        yield from _settings_with_value(typed, name)
        return

    signs = typed.removesuffix(name)
    for key in every_key():
        yield f"{signs}{key}="

    node = name.partition(".")[0]
    if node in OPEN_NODES and "." in name:
        yield from (f"{signs}{key}=" for key in _arguments(node))

    yield from SEARCH


def _settings_with_value(typed: str, name: str) -> Iterator[str]:
    """Yield a setting for each value that the key `name` can have."""
    if name in GROUPS:
        for choice in _choices(name):
            yield f"{typed}={choice}"
    elif name == "hydra/sweeper":
        yield SEARCH[0]
    elif name in every_key():
        for kind in every_key()[name].types:
            for value in _values(kind):
                yield f"{typed}={value}"


def _values(kind: Any) -> Sequence[str]:
    """Return the values of a bool or a Literal; empty for any other type."""
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is Literal:
        return get_args(kind)
    return ()


def _arguments(node: str) -> list[str]:
    """Return keys for the arguments of the class or function that the project chooses for a node.

    An example is `model.width` for the node `model`. Empty if the configuration can't be composed.
    """
    from slurmddp.config.checks.signatures import signature_of
    from slurmddp.config.composition.compose import COMPOSITION_ERRORS, compose_plan, make_plan

    try:
        value = compose_plan(make_plan([], Path.cwd()), []).get(node)
    except (SlurmddpError, *COMPOSITION_ERRORS):
        return []
    if not isinstance(value, Mapping):
        return []

    names = list(value)
    signature = signature_of(str(value.get("_target_", "")), Path.cwd())
    if signature is not None:
        names += signature.names

    return [f"{node}.{name}" for name in dict.fromkeys(names)]


_COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "run": runs, "first": runs, "second": runs, "names": clusters, "overrides": settings, "changes": settings,
    "words": settings, "action": benchmarks, "sweep": sweep_names,
}  # fmt: skip
"""The functions that complete arguments, by the name of the argument in the parser."""
_OF_COMMAND = {
    ("run", "overrides"): settings_and_scripts,
    ("controller", "overrides"): settings_and_scripts,
    **{(name, "run"): runs_and_sweeps for name in ("status", "report", "open", "resume")},
    ("stop", "run"): active_runs,
    ("cancel", "run"): active_runs,
}
"""Completion functions for an argument of one command; they take precedence over `_COMPLETERS`."""
