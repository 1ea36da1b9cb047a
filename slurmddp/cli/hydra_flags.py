"""Handle Hydra's flags of `slurmddp train` and `slurmddp run`: choose config files, print the result."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmddp.errors import EXIT_FINISHED, ConfigError, UsageError
from slurmddp.near_matches import near_matches

if TYPE_CHECKING:
    from slurmddp.config.composition.sources import Sources
    from slurmddp.settings.spec import Job

_SHOWN = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
WITH_VALUE: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("-c", "--cfg"), _SHOWN),
    "--info": _INFO,
    **dict.fromkeys(("-p", "--package", "-cn", "--config-name", "-cp", "--config-path"), ()),
    **dict.fromkeys(("-cd", "--config-dir"), ()),
}
"""For each flag that takes the next word as its value, the values that it accepts; empty: any word.

A flag with listed values may also be given without a value.
"""
REFUSED = {
    "-sc": "`slurmddp completion bash` (or zsh, fish) prints the completion for a shell.",
    "--shell-completion": "`slurmddp completion bash` (or zsh, fish) prints the completion for a shell.",
    "--hydra-help": "`slurmddp train --help` describes flags and settings.",
    "-r": "Omit it: one command is one run.",
    "--run": "Omit it: one command is one run.",
    "--experimental-rerun": "`slurmddp resume RUN` starts a run again.",
}
"""Flags of Hydra that slurmddp refuses, each with the hint of the error message."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Hydra's flags to a parser: `--cfg`, `--info`, `--config-name` and others."""
    add = parser.add_argument
    add(
        "-c", "--cfg", nargs="?", const=_SHOWN[0], metavar="|".join(_SHOWN),
        help="print the resolved configuration; start nothing",
    )  # fmt: skip
    add("--resolve", action="store_true", help="no effect: --cfg always resolves interpolations")
    add("-p", "--package", metavar="KEY", help="with --cfg, print only this part, such as optimizer")
    add(
        "--info", nargs="?", const=_INFO[0], metavar="|".join(_INFO),
        help="print how Hydra composes the configuration; start nothing",
    )  # fmt: skip
    add("-cn", "--config-name", metavar="FILE", help="file in conf/ to use instead of slurmddp.yaml")
    add("-cp", "--config-path", metavar="FOLDER", help="folder to use instead of conf/")
    add(
        "-cd",
        "--config-dir",
        metavar="FOLDER",
        help="additional folder of config groups, searched after conf/",
    )


def add_multirun(parser: argparse.ArgumentParser, *short: str) -> None:
    """Add the flag `--multirun`, with its short forms."""
    parser.add_argument(
        *short,
        "--multirun",
        action="store_true",
        help="sweep: one run for each combination of values, as in seed=1,2 optimizer.lr=1e-3,1e-4; "
        "with hydra/sweeper=optuna, search: Optuna chooses values from the results so far",
    )


def sources(args: argparse.Namespace) -> Sources:
    """Return the config files and folders that the flags name.

    argparse takes a setting after a bare `--cfg` or `--info` as the value of the flag. Such a setting is
    moved back to `args.overrides`.

    Raises:
        ConfigError: `--cfg` or `--info` has an unknown value.
        UsageError: `--resolve` or `--package` is given without `--cfg`, or `--info` with `--multirun`.
    """
    from slurmddp.config.composition.sources import DEFAULT, Sources

    if not args.cfg and (args.resolve or args.package):
        flag = "--resolve" if args.resolve else "--package"
        raise UsageError(f"{flag} changes what --cfg prints, but --cfg is missing.", hint="Add --cfg.")
    if args.info and getattr(args, "multirun", False):
        raise UsageError(
            "--info shows how one configuration is composed, but --multirun (-m) composes several.",
            hint="Omit --multirun, and give each setting one value.",
        )

    for flag, choices in (("cfg", _SHOWN), ("info", _INFO)):
        value = getattr(args, flag)
        if value and value not in choices:
            if "=" not in value:
                near = near_matches(value, choices)
                raise ConfigError(f"--{flag} has no value {value!r}.", hint=near)
            args.overrides.insert(0, value)
            setattr(args, flag, choices[0])

    return Sources(
        path=args.config_path or DEFAULT.path,
        name=args.config_name or DEFAULT.name,
        folders=(args.config_dir,) if args.config_dir else (),
    )


def show_config(args: argparse.Namespace, job: Job, sources: Sources, *, many: bool = False) -> int:
    """Print the configuration of a job, Hydra's own configuration, or both, as YAML.

    Args:
        args: the parsed flags. `cfg` is `job`, `hydra` or `all`; `package` is the key to print, if any.
        job: the job.
        sources: the config files and folders.
        many: whether to print `---` and the name of the run first, because several documents are printed.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: the configuration does not have the key that `--package` names.
    """
    import yaml

    from slurmddp.settings.identity import relevant

    shown = relevant(job.program.config)
    if many:
        print(f"---\n# {job.run_name}")

    if args.cfg != "job":
        from slurmddp.config.composition.inspect import hydra_node

        hydra = {"hydra": hydra_node(job.overrides, Path.cwd(), sources)}
        shown = hydra if args.cfg == "hydra" else {**hydra, **shown}

    if args.package:
        print(f"# @package {args.package}")
        shown = _part(shown, args.package)

    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    # With --package, the part may be a plain value, after which PyYAML writes a line with three dots.
    print(text.removesuffix("...\n"), end="")

    return EXIT_FINISHED


def _part(config: Any, package: str) -> Any:
    for name in package.split("."):
        if not isinstance(config, Mapping) or name not in config:
            near = near_matches(name, map(str, config)) if isinstance(config, Mapping) else ""
            raise ConfigError(f"--package: the configuration has no {package!r}.", hint=near)
        config = config[name]

    return config


def show_info(args: argparse.Namespace, project_dir: Path, sources: Sources) -> int:
    """Print how Hydra composes the configuration, as chosen by `--info`; return exit code 0."""
    from slurmddp.config.composition import inspect

    inspect.show_info(args.info, args.overrides, project_dir, sources)
    return EXIT_FINISHED
