"""Keep the name of a process group in Python: torch needs it to destroy a sub-group."""

from __future__ import annotations

from typing import Any

from torch import distributed


class NamedGroup(distributed.ProcessGroup):
    """The base of this package's groups. torch keeps a name in a C++ backend, and these groups have none."""

    _name = ""

    # torch calls the method by this name.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    # A str; newer versions of torch declare a type GroupName for it.
    @property
    def group_name(self) -> Any:
        return self._name
