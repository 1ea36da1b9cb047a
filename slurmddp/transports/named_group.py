"""Keep the name of a process group in Python: torch needs it to destroy a sub-group."""

from __future__ import annotations

from typing import Any

from torch import distributed


class NamedGroup(distributed.ProcessGroup):
    """Base class of process groups that stores the group's name.

    torch stores the name in a C++ backend, which the groups of this package lack.
    """

    _name = ""

    # torch calls the method by this name.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    # The name is a str, but newer versions of torch declare the type GroupName. So the annotation is Any.
    @property
    def group_name(self) -> Any:
        return self._name
