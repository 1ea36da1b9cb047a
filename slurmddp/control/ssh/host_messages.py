"""The messages of ssh and of the host on stderr: passed on at once, and the last line kept for an error."""

from __future__ import annotations

import codecs
import os
import sys
import threading
from contextlib import suppress

from slurmddp.runs.text_format import without_control
from slurmddp.short_text import shorten

_PIECE_BYTES = 1 << 16
_KEPT_BYTES = 4096
_SHOWN_CHARS = 300
_END_S = 1.0
"""Seconds for the rest of the messages after ssh has ended; a process in the background may keep the pipe."""


class HostMessages:
    """A pipe for the stderr of ssh, read by a thread.

    A person in a notebook sees no stderr of a process, so an error has to hold the last line itself.
    """

    def __init__(self, *, quiet: bool) -> None:
        """With `quiet`, pass no message on."""
        self._source, self.descriptor = os.pipe()
        self._quiet = quiet
        self._last = b""
        self._thread = threading.Thread(target=self._read, name="slurmddp-ssh-messages", daemon=True)

    def begin(self) -> None:
        """Read from now on; ssh holds the other end of the pipe, or was not started."""
        os.close(self.descriptor)
        self._thread.start()

    def end(self) -> None:
        """Wait for the rest of the messages."""
        self._thread.join(_END_S)

    def last_line(self) -> str:
        """Return the last line without a final full stop; empty if there was none."""
        self.end()
        lines = self._last.decode(errors="replace").strip().splitlines()
        return shorten(without_control(lines[-1]), _SHOWN_CHARS).removesuffix(".") if lines else ""

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(self._source, _PIECE_BYTES):
            self._last = (self._last + content)[-_KEPT_BYTES:]
            if not self._quiet:
                with suppress(Exception):  # An output that nobody reads is no error.
                    sys.stderr.write(decoder.decode(content))
                    sys.stderr.flush()
        os.close(self._source)
