"""Build objects from configuration: `_target_` names a class or function, the other keys are its arguments.

The keys are those of Hydra's `instantiate`: `_target_`, `_args_`, `_partial_`, `_recursive_`, `_convert_`.
Hydra's function is not used because it would break four promises (`test_what_hydras_own_would_break`):

- A value that holds `${`, such as a password from the environment, stays as it is. Hydra resolves it again.
- Mappings and lists arrive as dict and list under every `_convert_`. Hydra passes types of its own.
- An error contains the full name of the wrong key, and the nearest right name. Hydra shows the TypeError.
- A rank starts without the import of Hydra, which takes 0.35 s.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.plugins import locate
from slurmddp.settings.check_values import check_special_keys
from slurmddp.settings.spec import SPECIAL_KEYS


def instantiate(config: Any, *args: Any, _key_: str = "", **kwargs: Any) -> Any:
    """Call the `_target_` of `config` with the arguments in `config`, and return the result.

    Args:
        config: a mapping with `_target_`. A list, or another mapping, is returned with the nested mappings
            that have a `_target_` replaced by their objects.
        args: positional arguments, before those in the key `_args_`.
        _key_: the full name of `config` in the configuration, for errors.
        kwargs: keyword arguments, which replace keys of `config`.

    Returns:
        The result of the call, or a partial function if `_partial_` is true.

    Raises:
        ConfigError: the target can't be imported, or does not take the arguments.
    """
    if isinstance(config, list):
        return [instantiate(item, _key_=f"{_key_}[{index}]") for index, item in enumerate(config)]
    if not isinstance(config, Mapping):
        return config
    if "_target_" not in config:
        return {name: instantiate(value, _key_=_join(_key_, name)) for name, value in config.items()}

    call = _call(config, args, kwargs, _key_)
    return call.partial() if config.get("_partial_", False) else call.run()


def is_called_later(config: Mapping[str, Any], arguments: int, *, _key_: str) -> bool:
    """Decide whether `_target_` can be called only with `arguments` more positional arguments.

    It is then a function to call later, and not one that returns the object.
    """
    if "_partial_" in config or inspect.isclass(locate(config["_target_"], key=_join(_key_, "_target_"))):
        return False

    call = _call({**config, "_recursive_": False}, (), {}, _key_)
    return call.can_be_made(more=arguments) and not call.can_be_made()


def _call(config: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str) -> _Call:
    """Return the call that `config` describes, without making it.

    Nested objects among its arguments are built, unless `_recursive_` is false.
    """
    if not all(isinstance(name, str) for name in config):
        raise ConfigError(
            f"{key} has a key that is not an argument name: {list(config)}.",
            hint="Use names of arguments as keys.",
        )
    check_special_keys(key, config)
    target = locate(config["_target_"], key=_join(key, "_target_"))

    build = instantiate if config.get("_recursive_", True) else lambda value, _key_: value
    config_kwargs = {
        name: build(value, _key_=_join(key, name))
        for name, value in config.items()
        if name not in SPECIAL_KEYS
    }
    config_args = build(list(config.get("_args_") or ()), _key_=_join(key, "_args_"))
    return _Call(config["_target_"], target, (*args, *config_args), {**config_kwargs, **kwargs}, key)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


class _Call:
    """A call that the configuration describes: a target and its arguments."""

    def __init__(
        self, path: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: str
    ) -> None:
        self._path = path
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._where = key or path
        """The name of the call in errors: its key in the configuration, else the path of the target."""

    def partial(self) -> Any:
        self._check(whole=False)
        return functools.partial(self._target, *self._args, **self._kwargs)

    def can_be_made(self, more: int = 0) -> bool:
        """Decide whether the signature takes the arguments, and `more` positional arguments before them."""
        try:
            inspect.signature(self._target).bind(*self._args, *[None] * more, **self._kwargs)
        except TypeError:
            return False
        except ValueError:
            # The function has no signature, as some written in C: assume that it takes further arguments.
            return more > 0

        return True

    def run(self) -> Any:
        self._check(whole=True)
        try:
            return self._target(*self._args, **self._kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._where}: {self._path} refused its arguments: {error}",
                hint=f"It was given {self._shown_arguments()}.",
            ) from error

    def _shown_arguments(self) -> str:
        shown = ", ".join(f"{name}={value!r:.80}" for name, value in self._kwargs.items())
        return shown or "no named arguments"

    def _check(self, *, whole: bool) -> None:
        try:
            signature = inspect.signature(self._target)
        except (TypeError, ValueError):
            # Some callables written in C have no signature. Leave the check of the arguments to the call.
            return

        parameters = signature.parameters.values()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in self._kwargs:
            if name not in known and not takes_any:
                raise ConfigError(
                    f"{_join(self._where, name)} is given, but {self._path} takes no argument {name!r}.",
                    hint=near_matches(name, known),
                )

        bind = signature.bind if whole else signature.bind_partial
        try:
            bind(*self._args, **self._kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{self._where}: {self._path} can't be called with these arguments: {error}.",
                hint=f"Its arguments are {', '.join(known)}.",
            ) from error
