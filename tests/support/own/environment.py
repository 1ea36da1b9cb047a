"""The environment of docs/guides/extending.md: `kubernetes`."""

from support.own import define

define("kubernetes", globals())


class Kubernetes:
    """The same as a class."""

    def __call__(self, environ):
        return globals()["kubernetes"](environ)
