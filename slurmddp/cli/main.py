"""Run the `slurmddp` command: load the module of one command, and turn errors into exit codes.

This module imports little, because `slurmddp --help` waits for every import.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from slurmddp import __version__
from slurmddp.cli.messages import (
    EXIT_BROKEN_PIPE,
    EXIT_CODES_HELP,
    OF_THE_MACHINE,
    print_event,
    report,
    report_bug,
    report_machine,
)
from slurmddp.environments.names import DEBUG_VARIABLE
from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    ConfigError,
    SlurmddpError,
    UsageError,
)
from slurmddp.near_matches import near_matches

# The module of a command has `add_arguments(parser)`, `run(args) -> int`, and a docstring whose first line is
# the description below. If the command starts a user's program, its module also has `split(arguments)`.
COMMANDS = {
    "init": "Write a project folder: configuration, an example model and, if SLURM answers, cluster files.",
    "train": "Train on this machine, or submit to a cluster with +cluster=NAME.",
    "run": "Run your own script, module or command as every rank, here or on a cluster.",
    "exec": "Run any program as ranks, now and in this terminal, as mpiexec does.",
    "controller": "Run one script that controls tensors on workers, here or on a cluster.",
    "list": "List your runs, the most recently active first, or the runs of one sweep.",
    "status": "Show the state and progress of a run, where it runs, and what to do next.",
    "explain": "Explain why a run waits: SLURM's reason, its place in the queue, limits, expected start.",
    "logs": "Print the logs of a run, merged and labelled; -f follows them across restarts.",
    "stop": "Let a run save and stop; it stays stopped until `slurmddp resume`.",
    "cancel": "End a run: its jobs leave the queue, and it is not requeued.",
    "resume": "Resume an ended run in the same folder, or train a finished run further.",
    "rerun": "Start a run's command once more, as a new run beside it.",
    "diff": "Compare two runs: the settings in which they differ, and their results.",
    "rm": "Remove the folder of a run, or a sweep and its runs, for good; needs --yes.",
    "checkpoints": "List the checkpoints of a run, damaged ones too; --verify reads every byte.",
    "export": "Write the weights of a run to a plain safetensors file.",
    "cluster": "Draft cluster files from this site's SLURM, or compare cluster files with it.",
    "bench": "Measure a cluster, its collectives, strategies and scaling; compare results.",
    "report": "Write the report of a run, or of a sweep and its runs, and print its path.",
    "open": "Open the report of a run or sweep and print its path; --folder only prints the folder of a run.",
    "completion": "Print the code with which bash, zsh or fish completes commands, flags, runs, settings "
    "and choices.",
    "mcp": "Serve tools by which a coding agent plans, starts, watches and stops runs (MCP).",
    "sandbox": "Start a SLURM of your own on this machine, to try jobs without a cluster.",
}
_OF_RUNS = frozenset(COMMANDS) - {"init", "exec", "cluster", "completion", "mcp", "sandbox"}
"""Commands that start a run or take an existing run; the run may be on a login node."""
_SUBMITTING = frozenset({"train", "run", "controller", "bench"})
"""Commands whose settings may name a login node. The other commands of `_OF_RUNS` take existing runs."""
_NOT_LINUX = (
    f"slurmddp: error: slurmddp runs only on Linux, not on {sys.platform}. Use it in a container, in WSL, or "
    "on a Linux machine such as a cluster's login node."
)
_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, so that all errors are printed alike."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message as a sentence, and suggest names near a misspelled one."""
        if choice := _INVALID_CHOICE.search(message):
            near = near_matches(choice[1], re.findall(r"[\w-]+", choice[2]))
            raise UsageError(f"{self.prog} has no {choice[1]!r}. {near}")

        for action in self._actions:
            # If a required argument is missing, argparse also lists the optional ones, with nargs="*".
            if action.nargs == "*":
                message = message.replace(f", {action.metavar}", "")
            if action.choices and message.endswith(f" {action.metavar or action.dest}"):
                message = f"{message} (one of {', '.join(action.choices)})"

        raise UsageError(f"{message[:1].upper()}{message[1:].rstrip('.')}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The shell sets this variable when it calls slurmddp to complete a command line.
    if "_ARGCOMPLETE" in os.environ:
        from slurmddp.cli.completion import answer

        answer(COMMANDS, _module)

    if not sys.platform.startswith("linux"):
        print(_NOT_LINUX, file=sys.stderr)
        return EXIT_CONFIG

    # Files of a run must not be writable by others (o+w). The umask is set before any job is submitted,
    # because sbatch passes it on to the job.
    os.umask(os.umask(0o077) | 0o002)
    debug = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A rank may print characters that this terminal's encoding lacks. Such characters are escaped, and
        # raise no error.
        sys.stdout.reconfigure(errors="backslashreplace")

    try:
        typed, program = _split(arguments)
        debug = debug or "--debug" in typed
        code = _run([word for word in typed if word != "--debug"], program, arguments)
        sys.stdout.flush()
        return code
    except SlurmddpError as error:
        return report(error, debug=debug)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The pipe of stdout is closed, as by `| head`. Python flushes stdout at its exit, and would print
        # another error if stdout were not redirected to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            return report_machine(error)
        return report_bug(error)


def _open_streams() -> None:
    """Open /dev/null for standard streams that the caller has closed (`>&-`): Python sets them to None."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line into slurmddp's own arguments, and the program that the command starts.

    Returns:
        The arguments of slurmddp, and the program with its arguments. The latter is None for a command such
        as `list`, which starts no program.
    """
    name = next((word for word in arguments if word != "--debug"), "")
    if name not in COMMANDS or not hasattr(module := _module(name), "split"):
        return arguments, None

    start = arguments.index(name) + 1
    typed, program = module.split(arguments[start:])
    return [*arguments[:start], *typed], program


def _module(name: str) -> Any:
    return import_module(f"slurmddp.cli.commands.{name}")


def _run(arguments: list[str], program: list[str] | None, typed: Sequence[str]) -> int:
    """Run a command on this machine, or on the login node of its settings or of its run.

    Args:
        arguments: slurmddp's own arguments, without `--debug`; the first is the name of the command.
        program: the program and its arguments; None for a command that starts no program.
        typed: the whole command line, without `slurmddp`.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_FINISHED
    if arguments[0] == "--version":
        print(f"slurmddp {__version__}")
        return EXIT_FINISHED
    # Over ssh, slurmddp on another machine calls slurmddp on this login node; see `slurmddp.control.ssh`.
    if arguments[0] == "--over-ssh":
        from slurmddp.control.ssh import serve

        return serve.serve("".join(arguments[1:]), main, print_event)

    name = arguments[0]
    if name not in COMMANDS:
        raise _unknown(name)

    module = _module(name)
    parser = Parser(
        prog=f"slurmddp {name}",
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)

    try:
        parsed = _parse(parser, arguments[1:])
    except SystemExit as argparse_exit:
        # argparse exits after it has printed the text of --help.
        return int(argparse_exit.code or 0)

    if program is not None:
        parsed.program = program

    _require_folder()
    if name in _OF_RUNS:
        login_node_code = _run_on_login_node(name, typed, parsed, parser)
        if login_node_code is not None:
            return login_node_code

    code: int = module.run(parsed)
    return code


def _require_folder() -> None:
    """Raise ConfigError if the current folder was removed, because every command looks for files there."""
    try:
        os.getcwd()  # noqa: PTH109 - the import of pathlib would delay the help
    except FileNotFoundError as error:
        raise ConfigError("The current folder was removed.", hint="Change to another one: cd ~") from error


def _run_on_login_node(
    name: str, typed: Sequence[str], parsed: argparse.Namespace, parser: argparse.ArgumentParser
) -> int | None:
    """Run a command on the login node of its settings or of its run.

    Args:
        name: the name of the command.
        typed: the whole command line, without `slurmddp`.
        parsed: the parsed arguments of the command.
        parser: the parser of the command.

    Returns:
        The exit code; None if no login node is named, so that the command must run on this machine.
    """
    if name in _SUBMITTING:
        from slurmddp.cli.login_node import of_settings

        keys = of_settings(parsed)
        if keys is None:
            return None

        from slurmddp.cli import over_ssh

        return over_ssh.start(keys, typed)

    # If no run over ssh is recorded, the slow import of the modules that connect to hosts is avoided.
    from slurmddp.runs import ssh_runs

    if not ssh_runs.are_recorded():
        return None

    from slurmddp.cli import over_ssh

    return over_ssh.forward(name, typed, parsed, partial(_parse, parser))


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse a command's flags and arguments, which a person may type in any order.

    Raises:
        UsageError: a flag or argument is unknown; the message suggests similar flags.
    """
    try:
        parsed, rest = parser.parse_known_intermixed_args(arguments)
    except TypeError:
        # argparse refuses to parse flags between arguments if the parser has sub-commands.
        parsed, rest = parser.parse_known_args(arguments)

    if rest:
        kind = "flag" if rest[0].startswith("-") else "argument"
        hint = _hint_for_train(rest[0], arguments) if parser.prog.endswith(("train", "run")) else ""
        if not hint and kind == "flag":
            known = {name.removeprefix("--"): name for name in _flags(parser)}
            near = near_matches(rest[0].partition("=")[0].lstrip("-"), known, prefix="--", else_all=False)
            hint = near or f"Known: {', '.join(sorted(known.values()))}."
            if not near and parser.prog.endswith((" run", " exec")):
                hint = "Flags of the program follow the name of the program."

        raise UsageError(f"{parser.prog} has no {kind} {rest[0]!r}. {hint}".strip())

    return parsed


def _hint_for_train(flag: str, arguments: Sequence[str]) -> str:
    """Return a hint for an unknown flag of `slurmddp train` or `slurmddp run`.

    The flag may belong to Hydra or to a script, or be a setting (`--seed 1` for `seed=1`). Empty for any
    other flag.

    Args:
        flag: the unknown flag.
        arguments: the arguments of the command.
    """
    from slurmddp.cli import hydra_flags
    from slurmddp.settings.keys import every_key

    if flag.partition("=")[0] in hydra_flags.REFUSED:
        return hydra_flags.REFUSED[flag.partition("=")[0]]

    script = next((word for word in arguments if word.endswith(".py") and "=" not in word), "")
    if script:
        return f"Run a script with its arguments after it: `slurmddp run [settings] {script} {flag} ...`."

    typed, _, value = flag.lstrip("-").partition("=")
    name = typed.replace("-", "_")
    meant = [key for key in every_key() if name in (key, key.rpartition(".")[2])]

    return f"Type settings without dashes: {meant[0]}={value or 'VALUE'}" if meant else ""


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """Return the long flags of a command and of its sub-commands."""
    flags: set[str] = set()
    for action in parser._actions:
        flags.update(flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            flags.update(*(_flags(inner) for inner in action.choices.values()))

    return flags


def _unknown(name: str) -> UsageError:
    kind = "flag" if name.startswith("-") else "command"
    known = ["--help", "--version", "--debug"] if kind == "flag" else COMMANDS
    hint = near_matches(name, known)
    if "=" in name or name.startswith("+"):
        hint = f"Type settings after a command: slurmddp train {name}"

    return UsageError(f"There is no {kind} {name!r}. {hint}")


def _help() -> str:
    """Return the text of `slurmddp --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return f"""usage: slurmddp [--debug] COMMAND ...

Train PyTorch models on a SLURM cluster as easily as on a laptop.

  slurmddp train                            on this machine, on two gloo ranks
  slurmddp train +cluster=a100x8 nodes=3    on the cluster; the prompt comes back at once

commands:
{commands}

`slurmddp COMMAND --help` describes one command.

flags:
  --help     print this help
  --version  print the version
  --debug    print the traceback of an error (also: {DEBUG_VARIABLE}=1)

{EXIT_CODES_HELP}"""
