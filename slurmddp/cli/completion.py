"""Complete a command line for the shell: commands, flags, runs, settings and choices of config groups.

argcomplete speaks with bash, zsh and fish. The line that a shell completes arrives in `COMP_LINE`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from slurmddp.config.keys import GROUPS, every_key
from slurmddp.runs import index
from slurmddp.runs.ssh_runs import ssh_runs

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

    chosen = next((word for word in os.environ.get("COMP_LINE", "").split()[1:] if word in commands), "")
    argcomplete.autocomplete(parser(commands, module_of, chosen), always_complete_options=False, **options)


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
            action.completer = _COMPLETERS[action.dest]  # type: ignore[attr-defined]


def runs(prefix: str, **_facts: Any) -> list[str]:
    """Return the names of runs, the newest first, then of runs over ssh."""
    names = [*(run.name for run in index.all_runs()), *(run.name for run in reversed(ssh_runs()))]
    return [name for name in names if name.startswith(prefix)]


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


_COMPLETERS = {
    "run": runs, "first": runs, "second": runs, "names": clusters, "overrides": settings, "changes": settings,
    "words": settings,
}  # fmt: skip
"""The functions that complete an argument, by its name in the parser."""
