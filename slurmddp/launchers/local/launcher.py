"""Define what starts the ranks of `Distributon.launch()`: the shipped launcher, or a class of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slurmddp import plugins
from slurmddp.host import process
from slurmddp.host.cpu_shares import refuse_crowd


class Launcher(Protocol):
    """Starts ranks from a process that no launcher has started. A launcher has one method."""

    def run(self, command: Sequence[str], ranks: Sequence[Mapping[str, str]], folder: str | None) -> int:
        """Start `command` once per rank, wait until all ranks have ended, and return their exit code.

        If a rank fails, the other ranks must be ended, because they may wait for it without end. SIGINT,
        SIGTERM and SIGUSR2 to this process must reach all ranks, so that they save and exit. No rank may
        outlive the call.

        Args:
            command: the program and its arguments.
            ranks: the whole environment of each rank, in the order of ranks.
            folder: the working folder of the ranks; None: this process's folder.

        Returns:
            0 if all ranks have ended with 0; 75 if they have stopped at a checkpoint; else the code of a
            failure.
        """


class LocalLauncher:
    """Starts ranks on this machine. Lines of all ranks except rank 0 are shown as `[rank 1] ...`."""

    def run(self, command: Sequence[str], ranks: Sequence[Mapping[str, str]], folder: str | None) -> int:
        refuse_crowd(len(ranks), process.usable_cpus(), "num_devices={}", "this machine")
        # Import here, because the ranks import this module but never call this method.
        from slurmddp.launchers.local.script_run import ScriptRun

        return ScriptRun(command, ranks, labelled=range(1, len(ranks)), folder=folder).run()


LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher}


def build(launcher: str | Launcher | type[Launcher]) -> Launcher:
    """Return a launcher by its name or import path, from its class, or unchanged.

    Raises:
        ConfigError: there is no such launcher.
    """
    built: Launcher = plugins.build(launcher, LAUNCHERS, Launcher, key="launcher")
    return built
