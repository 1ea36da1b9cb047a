"""A process group in Python that knows its name, which torch needs to destroy a sub-group."""

from __future__ import annotations

from typing import Any

from torch import distributed


class NamedGroup(distributed.ProcessGroup):
    """The base of the groups of this package. torch keeps the name in a backend in C++, which they lack."""

    _name = ""

    def _set_group_name(self, name: str) -> None:  # torch calls it by this name
        self._name = name

    @property
    def group_name(self) -> Any:  # A str, which newer versions of torch call GroupName.
        return self._name
