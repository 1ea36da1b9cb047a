"""Run the `slurmddp` command: load the module of one command, and turn errors into exit codes.

Because `slurmddp --help` waits for the imports, this module imports only the standard library and errors.
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
    near_matches,
)

# A command's module has `add_arguments(parser)`, `run(args) -> int`, and a docstring that begins so.
# The module of a command that starts a user's program also has `split(arguments)`.
COMMANDS = {
    "init": "Write a project folder: configuration, an example model and, where SLURM is, cluster files.",
    "train": "Train here, or submit to a cluster with +cluster=NAME.",
    "run": "Run your own script, module or command as every rank, here or on a cluster.",
    "exec": "Run any program as ranks, now and in this terminal, as mpiexec does.",
    "controller": "Run one script that controls tensors on workers, here or on a cluster.",
    "list": "List the runs of this account, the newest activity first, or the runs of a sweep.",
    "status": "Show the state of a run, where it runs, and what to do if it does not.",
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
    "completion": "Print the lines with which bash, zsh or fish completes commands, flags, runs, settings "
    "and choices.",
    "sandbox": "Start a SLURM of your own on this machine, to try jobs without a cluster.",
}
_OF_RUNS = frozenset(COMMANDS) - {"init", "exec", "cluster", "completion", "sandbox"}
"""Commands that start a run or take a run, so that they may belong to a login node."""
_NOT_LINUX = (
    f"slurmddp: error: slurmddp runs on Linux, and this system is {sys.platform}. Use it in a container or "
    "WSL, or on a Linux machine such as a cluster's login node."
)
_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        if choice := _INVALID_CHOICE.search(message):
            near = near_matches(choice[1], re.findall(r"[\w-]+", choice[2]))
            raise UsageError(f"{self.prog} has no {choice[1]!r}. {near}")
        for action in self._actions:
            if action.nargs == "*":  # argparse calls it required if another argument is missing
                message = message.replace(f", {action.metavar}", "")
            if action.choices and message.endswith(f" {action.metavar or action.dest}"):
                message = f"{message} (one of {', '.join(action.choices)})"
        raise UsageError(f"{message[:1].upper()}{message[1:].rstrip('.')}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:  # A shell asks for completions.
        from slurmddp.cli.completion import answer

        answer(COMMANDS, _module)
    if not sys.platform.startswith("linux"):
        print(_NOT_LINUX, file=sys.stderr)
        return EXIT_CONFIG
    # sbatch hands the umask on to the job, so that no file of a run is writable for everybody.
    os.umask(os.umask(0o077) | 0o002)
    debug = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Some terminals can't show the output of a rank.
    try:
        own, program = _split(arguments)
        debug = debug or "--debug" in own
        code = _run([word for word in own if word != "--debug"], program, arguments)
        sys.stdout.flush()
        return code
    except SlurmddpError as error:
        return report(error, debug=debug)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has closed it. Without this, Python would print another error at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            return report_machine(error)
        return report_bug(error)


def _open_streams() -> None:
    """Open the streams that were closed for this process, as by `>&-`: Python has None in their place."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the words for slurmddp, and the words of a user's program; None if the command runs none."""
    name = next((word for word in arguments if word != "--debug"), "")
    if name not in COMMANDS or not hasattr(module := _module(name), "split"):
        return arguments, None
    at = arguments.index(name) + 1
    own, program = module.split(arguments[at:])
    return [*arguments[:at], *own], program


def _module(name: str) -> Any:
    return import_module(f"slurmddp.cli.commands.{name}")


def _run(arguments: list[str], program: list[str] | None, typed: Sequence[str]) -> int:
    """Run a command, here or on its login node.

    Args:
        arguments: the words for slurmddp.
        program: the words of a user's program; None if the command runs none.
        typed: the whole command line.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_FINISHED
    if arguments[0] == "--version":
        print(f"slurmddp {__version__}")
        return EXIT_FINISHED
    if arguments[0] == "--over-ssh":  # The laptop asks; see `slurmddp.control.ssh`.
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
    except SystemExit as left:  # argparse exits after --help.
        return int(left.code or 0)
    if program is not None:
        parsed.program = program
    _require_folder()
    if name in _OF_RUNS and (there := _on_login_node(name, typed, parsed, parser)) is not None:
        return there
    code: int = module.run(parsed)
    return code


def _require_folder() -> None:
    """Raise ConfigError if the folder of the shell was removed: every command looks for files there."""
    try:
        os.getcwd()  # noqa: PTH109 - the help loads no pathlib
    except FileNotFoundError as error:
        raise ConfigError("The folder of this shell was removed.", hint="Change to another: cd ~") from error


def _on_login_node(
    name: str, typed: Sequence[str], parsed: argparse.Namespace, parser: argparse.ArgumentParser
) -> int | None:
    """Run a command on its login node, and return the exit code; None if it belongs to this machine."""
    from slurmddp.cli import login_node

    if name not in login_node.SUBMITTING:
        from slurmddp.cli import over_ssh

        return over_ssh.forward(name, typed, parsed, partial(_parse, parser))
    if (keys := login_node.of_settings(parsed)) is None:
        return None
    from slurmddp.cli import over_ssh

    return over_ssh.start(keys, typed)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse flags and other arguments in any order; the error for an unknown flag names near ones."""
    try:
        parsed, rest = parser.parse_known_intermixed_args(arguments)
    except TypeError:  # A command with sub-commands can't be mixed.
        parsed, rest = parser.parse_known_args(arguments)
    if rest:
        kind = "flag" if rest[0].startswith("-") else "argument"
        hint = _hint_for_train(rest[0], arguments) if parser.prog.endswith(("train", "run")) else ""
        if not hint and kind == "flag":
            known = {name.removeprefix("--"): name for name in _flags(parser)}
            near = near_matches(rest[0].partition("=")[0].lstrip("-"), known, prefix="--", else_all=False)
            hint = near or f"Known: {', '.join(sorted(known.values()))}."
            if not near and parser.prog.endswith((" run", " exec")):
                hint = "The program's own flags stand behind the program."
        raise UsageError(f"{parser.prog} knows no {kind} {rest[0]!r}. {hint}".strip())
    return parsed


def _hint_for_train(flag: str, arguments: Sequence[str]) -> str:
    """Return how to write a setting, or the arguments of a script, that was typed as a flag; may be empty."""
    from slurmddp.cli import hydra_flags
    from slurmddp.settings.keys import every_key

    if flag.partition("=")[0] in hydra_flags.REFUSED:
        return hydra_flags.REFUSED[flag.partition("=")[0]]
    script = next((word for word in arguments if word.endswith(".py") and "=" not in word), "")
    if script:
        return f"A script runs as `slurmddp run [settings] {script} {flag} ...`, with its arguments after it."
    typed, _, value = flag.lstrip("-").partition("=")
    name = typed.replace("-", "_")
    meant = [key for key in every_key() if name in (key, key.rpartition(".")[2])]
    return f"Settings have no dashes: {meant[0]}={value or 'VALUE'}" if meant else ""


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
        hint = f"Settings follow a command: slurmddp train {name}"
    return UsageError(f"There is no {kind} {name!r}. {hint}")


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return f"""usage: slurmddp [--debug] COMMAND ...

Train PyTorch models on a SLURM cluster as easily as on a laptop.

  slurmddp train                            here, on two gloo ranks
  slurmddp train +cluster=a100x8 nodes=3    on the cluster; the prompt comes back at once

commands:
{commands}

`slurmddp COMMAND --help` describes a command.

flags:
  --help     show this
  --version  show the version
  --debug    show where an error came from (also: {DEBUG_VARIABLE}=1)

{EXIT_CODES_HELP}"""
