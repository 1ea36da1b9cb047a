"""Measure a cluster, its collectives, strategies and scaling; compare results.

    slurmddp bench cluster +cluster=mine nodes=4      first on a new site: nodes, links, all-reduce
    slurmddp bench collectives -n 4                   every all-reduce algorithm, on this machine
    slurmddp bench show RUN                           print a result and write its page
    slurmddp bench compare FIRST SECOND               compare two results with equal settings

A benchmark is a run, with the settings, submission and logs of `slurmddp run`. Rank 0 writes bench.json into
the run folder. RUN, FIRST and SECOND are names of runs, run folders, or paths of bench.json files.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from slurmddp.bench.settings import BENCHES, SIZES, Settings, parse_sizes
from slurmddp.cli.commands import run as run_command
from slurmddp.cli.commands import train
from slurmddp.cli.commands.exec import add_count
from slurmddp.cli.messages import EXIT_CODES_HELP
from slurmddp.errors import EXIT_FINISHED, UsageError
from slurmddp.near_matches import near_matches

_READERS = {
    "show": "print the result of a run and write its page",
    "compare": "compare two results; results with different settings are refused",
}
"""Actions that read the results of benchmarks."""
MODULE = "slurmddp.bench.ranks"
_TIME_LIMIT = "00:30:00"
"""The default time limit is half an hour, because a cluster starts short jobs sooner."""
_NUMBERS = {
    "repetitions": "measured repetitions or steps (20)",
    "warmup": "repetitions before the measured ones (5)",
    "seed": "seed of weights and data (0)",
    "width": "width of the trained model (512)",
    "layers": "layers of the trained model (4)",
    "batch": "samples of a step, summed over all ranks (64)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `slurmddp bench`."""
    parser.usage = (
        "slurmddp bench BENCH [key=value ...] [flags]\n       slurmddp bench show RUN | compare FIRST SECOND"
    )
    lines = "\n".join(f"  {name:<12} {line}" for name, line in {**BENCHES, **_READERS}.items())
    parser.add_argument("action", nargs="?", metavar="BENCH", help="; ".join([*BENCHES, *_READERS]))
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings, as for `slurmddp train`")
    add_count(parser, "-n", "--ranks", purpose="ranks on each node (ranks_per_node)")
    parser.add_argument("--sizes", default=SIZES, help=f"sizes of reduced tensors ({SIZES})")
    for name, purpose in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=purpose)

    train.add_flags(parser)
    parser.set_defaults(json=False)
    parser.epilog = f"{lines}\n\n{EXIT_CODES_HELP}"


def run(args: argparse.Namespace) -> int:
    """Start a benchmark, print a result, or compare two; return the exit code."""
    if args.action == "show":
        return _show(_only(args.words, 1, "show RUN")[0])
    if args.action == "compare":
        return _compare(*_only(args.words, 2, "compare FIRST SECOND"))
    if args.action is None:
        raise UsageError(f"slurmddp bench needs an action: {', '.join([*BENCHES, *_READERS])}.")
    if args.action not in BENCHES:
        near = near_matches(args.action, [*BENCHES, *_READERS])
        raise UsageError(f"slurmddp bench has no {args.action!r}. {near}")

    return _measure(args)


def _only(arguments: list[str], count: int, usage: str) -> list[str]:
    """Return the arguments of an action of `slurmddp bench` if their number is `count`.

    Raises:
        UsageError: there are more or fewer arguments; the message shows `usage`, the right way to type the
            action.
    """
    if len(arguments) != count:
        raise UsageError(
            f"`slurmddp bench {usage}` takes {count} run(s) or file(s), but {len(arguments)} were given."
        )
    return arguments


def _measure(args: argparse.Namespace) -> int:
    """Run the benchmark as `slurmddp run` does, and return the exit code.

    Print the result if the run has ended, else the command that prints it later.
    """
    from slurmddp.bench.results import FILE_NAME
    from slurmddp.runs import index

    given = {name: value for name in _NUMBERS if (value := getattr(args, name)) is not None}
    settings = Settings(bench=args.action, sizes=parse_sizes(args.sizes), **given)
    named = [word.partition("=")[2] for word in args.words if word.startswith("name=")]
    # The default name has the time in it, so that the same command starts a new run and measures again.
    name = named[-1] if named else time.strftime(f"bench-{args.action}-%Y%m%d-%H%M%S", time.gmtime())
    # Not requeued: a benchmark saves no checkpoint from which a second attempt could resume.
    args.overrides = [f"name={name}", f"time_limit={_TIME_LIMIT}", "policy.requeue=false", *args.words]
    args.launcher = None
    args.program = ["-m", MODULE, settings.to_json()]
    code = run_command.run(args, lambda job: settings.check_ranks(job.resources.world_size))
    if code != EXIT_FINISHED or args.dry_run or args.cfg:
        return code

    folder = next(run for run in index.all_runs() if run.name.startswith(name))
    if (folder.path / FILE_NAME).is_file():
        return _show(str(folder.path))

    print(f"result  slurmddp bench show {folder.name}  (once the run has finished)")
    return EXIT_FINISHED


def _path(word: str) -> Path:
    """Return the path of a result: `word` if it is an existing path, else the folder of the run `word`."""
    from slurmddp.runs import index

    return Path(word) if Path(word).exists() else index.find(word).path


def _show(word: str) -> int:
    """Print a result, and write bench.html beside it; return the exit code."""
    from slurmddp.bench.page import show, write_bench_page
    from slurmddp.bench.results import read

    path = _path(word)
    result = read(path)
    page = (path if path.is_dir() else path.parent) / "bench.html"
    print()
    show(result, sys.stdout)
    write_bench_page(result, page)
    print(f"\npage  {page}")

    return EXIT_FINISHED


def _compare(first: str, second: str) -> int:
    """Print the comparison of two results; return the exit code."""
    from slurmddp.bench.page import headline, show_rows
    from slurmddp.bench.results import compare, read

    first_result = read(_path(first))
    second_result = read(_path(second))
    tables = compare(first_result, second_result)

    print(f"first   {headline(first_result)}\nsecond  {headline(second_result)}")
    for rows in tables.values():
        print()
        show_rows(rows, sys.stdout)

    return EXIT_FINISHED
