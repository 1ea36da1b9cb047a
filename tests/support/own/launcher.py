"""The launcher of docs/extending.md: `Behind`."""

from support.own import define

define("Behind", globals())
