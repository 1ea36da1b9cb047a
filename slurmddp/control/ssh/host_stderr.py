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
"""Number of bytes that are kept, counted from the end of the messages."""
_SHOWN_CHARS = 300
"""Number of characters of the last line that an error quotes at most."""
_END_S = 1.0
"""Seconds to wait for the last messages after ssh has ended: a background process may keep the pipe open."""


class HostMessages:
    """A pipe for the stderr of ssh; a thread copies it to this process's stderr and stores its last bytes.

    An error quotes the last line, because a notebook does not show the stderr of processes.
    """

    def __init__(self, *, quiet: bool) -> None:
        """Create the pipe.

        Args:
            quiet: whether to keep the last messages only, and copy nothing to stderr.
        """
        self._source, self.descriptor = os.pipe()
        self._quiet = quiet
        self._last = b""
        self._thread = threading.Thread(target=self._read, name="slurmddp-ssh-messages", daemon=True)

    def begin(self) -> None:
        """Close this process's copy of the writing end, and start the thread that reads the pipe.

        Call this once ssh has inherited the writing end, or could not be started.
        """
        os.close(self.descriptor)
        self._thread.start()

    def end(self) -> None:
        """Wait until the pipe is read to its end, for at most `_END_S` seconds."""
        self._thread.join(_END_S)

    def last_line(self) -> str:
        """Return the last line of the messages without its final period; empty if there was no message."""
        self.end()
        lines = self._last.decode(errors="replace").strip().splitlines()
        if not lines:
            return ""
        return shorten(without_control(lines[-1]), _SHOWN_CHARS).removesuffix(".")

    def _read(self) -> None:
        """Read the pipe until all processes have closed it; keep its last bytes, and copy all to stderr."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while content := os.read(self._source, _PIECE_BYTES):
            self._last = (self._last + content)[-_KEPT_BYTES:]
            if not self._quiet:
                # If stderr is closed, the messages can't be shown. But the thread continues to read: it keeps
                # the last line, and ssh would block on a full pipe.
                with suppress(Exception):
                    sys.stderr.write(decoder.decode(content))
                    sys.stderr.flush()

        os.close(self._source)
