"""The environment of docs/guides/extending.md: `kubernetes`."""

from support.own import define

define("kubernetes", globals())


class Kubernetes:
    """The environment `kubernetes` as a class with a method `__call__`."""

    def __call__(self, environ):
        return globals()["kubernetes"](environ)
