"""Pass on the messages of ssh and of the host on stderr, and keep the last line for an error."""

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
"""Number of last bytes that are kept."""
_SHOWN_CHARS = 300
"""Length of the longest line in an error."""
_END_S = 1.0
"""Seconds to wait for the last messages after ssh has ended: a background process may keep the pipe open."""


class HostMessages:
    """A pipe for the stderr of ssh, which a thread reads.

    A notebook does not show the stderr of processes, so an error has to contain the last line itself.
    """

    def __init__(self, *, quiet: bool) -> None:
        """Create the pipe; if `quiet`, messages are not passed on."""
        self._source, self.descriptor = os.pipe()
        self._quiet = quiet
        self._last = b""
        self._thread = threading.Thread(target=self._read, name="slurmddp-ssh-messages", daemon=True)

    def begin(self) -> None:
        """Start to read, once ssh has its copy of the writing end or could not be started."""
        os.close(self.descriptor)
        self._thread.start()

    def end(self) -> None:
        """Wait for the last messages."""
        self._thread.join(_END_S)

    def last_line(self) -> str:
        """Return the last line without its final period; empty if there was no message."""
        self.end()
        lines = self._last.decode(errors="replace").strip().splitlines()
        if not lines:
            return ""
        return shorten(without_control(lines[-1]), _SHOWN_CHARS).removesuffix(".")

    def _read(self) -> None:
        """Pass on messages until ssh and the host have closed the pipe."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(self._source, _PIECE_BYTES):
            self._last = (self._last + content)[-_KEPT_BYTES:]
            if not self._quiet:
                # A stderr that can't be written is no error.
                with suppress(Exception):
                    sys.stderr.write(decoder.decode(content))
                    sys.stderr.flush()

        os.close(self._source)
