"""Complete a command line for the shell: commands, flags, runs, settings and choices of config groups.

argcomplete speaks with bash, zsh and fish. The line that a shell completes arrives in `COMP_LINE`.
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
"""The settings of a search with `train -m`."""


def script(shell: str) -> str:
    """Return the code with which a shell of `SHELLS` asks `slurmddp` for completions."""
    from argcomplete.shell_integration import shellcode

    return shellcode(["slurmddp"], shell=shell)


def answer(commands: Mapping[str, str], module_of: Callable[[str], Any], **options: Any) -> None:
    """Print the completions that a shell asks for, and exit.

    Args:
        commands: the descriptions of all commands by name.
        module_of: returns the module of a command.
        options: further arguments of `argcomplete.autocomplete`.
    """
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    arguments = line.split()[1:]
    chosen = next((argument for argument in arguments if argument in commands), "")
    # The shell completes the last argument, unless a blank follows it.
    complete = arguments if line.endswith(" ") else arguments[:-1]
    if chosen in complete and _has_program(module_of(chosen), complete[complete.index(chosen) + 1 :]):
        raise SystemExit(0)  # The shell completes its own way: the program takes any words.
    argcomplete.autocomplete(parser(commands, module_of, chosen), always_complete_options=False, **options)


def _has_program(module: Any, arguments: Sequence[str]) -> bool:
    """Return whether the arguments of a command name a program that the command starts."""
    return hasattr(module, "split") and bool(module.split(arguments)[1])


def parser(
    commands: Mapping[str, str], module_of: Callable[[str], Any], chosen: str
) -> argparse.ArgumentParser:
    """Return a parser of all commands; only the chosen one has its arguments, because imports take time."""
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
    """Give the arguments of a command, and of its actions, the functions that complete them."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _attach(inner)
        elif action.dest in _COMPLETERS:
            name = command.prog.rpartition(" ")[2]
            completer = _OF_COMMAND.get((name, action.dest), _COMPLETERS[action.dest])
            action.completer = completer  # type: ignore[attr-defined]


def runs(prefix: str, **_facts: Any) -> list[str]:
    """Return the names of runs, the newest first, then of runs over ssh."""
    names = [*(run.name for run in index.all_runs()), *(run.name for run in reversed(ssh_runs()))]
    return [name for name in names if name.startswith(prefix)]


def sweep_names(prefix: str, **_facts: Any) -> list[str]:
    """Return the names of sweeps."""
    return [name for name in sweeps.names() if name.startswith(prefix)]


def runs_and_sweeps(prefix: str, **_facts: Any) -> list[str]:
    """Return the names of runs and of sweeps."""
    return [*runs(prefix), *sweep_names(prefix)]


def active_runs(prefix: str, **_facts: Any) -> list[str]:
    """Return the names of runs, and of sweeps, that may have a job or process, by their records alone."""
    named = [
        folder.name for folder in index.all_runs() if folder.name.startswith(prefix) and _may_live(folder)
    ]
    far = [run.name for run in reversed(ssh_runs()) if run.name.startswith(prefix)]
    sweeps_by_name = {name: sweeps.find(name) for name in sweep_names(prefix)}
    groups = [
        name
        for name, sweep in sweeps_by_name.items()
        if sweep is not None and any(map(_may_live, sweep.started))
    ]
    return [*named, *far, *groups]


def _may_live(folder: RunFolder) -> bool:
    from slurmddp.runs.folder.history import read_history

    try:
        return read_history(folder).may_live
    except (SlurmddpError, OSError):  # A damaged record hides only its run.
        return False


def scripts(prefix: str) -> list[str]:
    """Return the Python files, and the folders, whose paths begin so; nothing for an empty word."""
    if not prefix or "=" in prefix:
        return []
    folder, _, name = prefix.rpartition("/")
    start = f"{folder}/" if "/" in prefix else ""
    with suppress(OSError):
        entries = sorted(Path(start or ".").iterdir())
        return [
            f"{start}{path.name}{'/' if path.is_dir() else ''}"
            for path in entries
            if path.name.startswith(name) and (path.suffix == ".py" or path.is_dir())
        ]
    return []


def settings_and_scripts(prefix: str, **_facts: Any) -> list[str]:
    """Return the settings and the scripts that begin so."""
    return [*scripts(prefix), *settings(prefix)]


def benchmarks(prefix: str, **_facts: Any) -> list[str]:
    """Return the benchmarks, and the words that show them."""
    return [word for word in (*BENCHES, "show", "compare") if word.startswith(prefix)]


def clusters(prefix: str, **_facts: Any) -> list[str]:
    """Return the names of cluster files."""
    return [name for name in _choices("cluster") if name.startswith(prefix)]


def _choices(group: str) -> Iterable[str]:
    from slurmddp.config.composition.overrides import options
    from slurmddp.config.composition.sources import conf_roots

    return options(conf_roots(Path.cwd()), group)


def settings(prefix: str, **_facts: Any) -> list[str]:
    """Return the settings that begin so: `train.st` gives `train.steps=`, `model=` gives all models."""
    return [text for text in _settings(prefix) if text.startswith(prefix)]


def _settings(prefix: str) -> Iterator[str]:
    typed, given, _ = prefix.partition("=")
    name = typed.lstrip("+")
    if not given:
        signs = typed.removesuffix(name)
        for key in every_key():
            yield f"{signs}{key}="
        if name.partition(".")[0] in OPEN_NODES and "." in name:
            yield from (f"{signs}{key}=" for key in _arguments(name.partition(".")[0]))
        yield from SEARCH
        return
    if name in GROUPS:
        for choice in _choices(name):
            yield f"{typed}={choice}"
    elif name == "hydra/sweeper":
        yield SEARCH[0]
    elif name in every_key():
        for kind in every_key()[name].types:
            values = ("true", "false") if kind is bool else get_args(kind)
            for value in values if kind is bool or get_origin(kind) is Literal else ():
                yield f"{typed}={value}"


def _arguments(node: str) -> list[str]:
    """Return the keys of the class or function that the project chooses for a node."""
    from slurmddp.config.checks.signatures import signature_of
    from slurmddp.config.composition.compose import COMPOSITION_ERRORS, compose_plan, make_plan

    try:
        value = compose_plan(make_plan([], Path.cwd()), []).get(node)
    except (SlurmddpError, *COMPOSITION_ERRORS):
        return []
    if not isinstance(value, Mapping):
        return []
    signature = signature_of(str(value.get("_target_", "")), Path.cwd())
    names = [*value, *(signature.names if signature else ())]
    return [f"{node}.{name}" for name in dict.fromkeys(names)]


_COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "run": runs, "first": runs, "second": runs, "names": clusters, "overrides": settings, "changes": settings,
    "words": settings, "action": benchmarks, "sweep": sweep_names,
}  # fmt: skip
"""The functions that complete an argument, by its name in the parser."""
_OF_COMMAND = {
    ("run", "overrides"): settings_and_scripts,
    ("controller", "overrides"): settings_and_scripts,
    **{(name, "run"): runs_and_sweeps for name in ("status", "report", "open", "resume")},
    ("stop", "run"): active_runs,
    ("cancel", "run"): active_runs,
}
"""Other functions for the arguments of a command."""
