"""Write durable files: hash their bytes during the write, and flush them to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slurmddp.checkpoint.files import space
from slurmddp.checkpoint.files.digest import Digest, FileRecord, chunks
from slurmddp.host.atomic_file import replacing
from slurmddp.host.mounts import file_system_type

_BLOCK_BYTES = 4096
"""Alignment of direct writes, in the file and in memory: no disk needs more, and no page is smaller."""
_DIRECT = frozenset({"ext4", "xfs"})
"""File systems that get direct writes (O_DIRECT). Some network file systems are slow at them."""
_SLEEP_PER_TIME = 1.0
_SLEEP_PER_CPU_TIME = 2.5
"""After each piece a background write sleeps for the smaller of two times: _SLEEP_PER_TIME times the seconds
of the piece, and _SLEEP_PER_CPU_TIME times its processor seconds. The sleep spreads the cost to the training.
The second bound keeps writes to slow disks as fast as `torch.save`: the processors idle there anyway."""
_RAMP_BYTES = 64 << 20
_MAX_RAMP = 2.0
"""The sleeps get longer during a write: they are multiplied by 1 + (bytes written) / _RAMP_BYTES, at most by
_MAX_RAMP. So a small state is durable almost as soon as with `torch.save` and a flush."""


def write_hashed(
    path: Path, parts: Iterable[memoryview], *, expected: int = 0, in_memory: bool = False
) -> FileRecord:
    """Write a new file, flush it to the disk, and return its size and digest.

    Args:
        path: the file, which must not exist.
        parts: the content of the file: its bytes, in consecutive pieces.
        expected: number of bytes to reserve on the disk before the write; 0 reserves nothing.
        in_memory: whether all parts stay in memory during the call. If so, they are hashed during the flush.
            Otherwise each part is hashed right after its write.

    Raises:
        NoRoomError: the disk or the quota has fewer than `expected` bytes left; nothing was written.
        OSError: the write or the flush failed.
    """
    digest = Digest()
    size = 0
    unhashed = []
    with path.open("xb", buffering=1 << 20) as stream:
        space.reserve(stream.fileno(), expected, path.parent)
        for chunk in chunks(parts):
            stream.write(chunk)
            space.write_back(stream.fileno(), size, len(chunk))
            size += len(chunk)
            if in_memory:
                unhashed.append(chunk)
            else:
                digest.update(chunk)

        stream.flush()
        if not in_memory:
            os.fsync(stream.fileno())
            return FileRecord(size, digest.hexdigest())

        # The flush waits for the disk and the digest needs the processor, so they run at the same time.
        with ThreadPoolExecutor(1) as thread:
            flush = thread.submit(os.fsync, stream.fileno())
            for chunk in unhashed:
                digest.update(chunk)
            flush.result()

    return FileRecord(size, digest.hexdigest())


def copy_hashed(
    path: Path, source: int, start: int, part: memoryview, *, is_urgent: Callable[[], bool] = lambda: True
) -> FileRecord:
    """Copy a part of a memory file to a new file, flush it to the disk, and return its size and digest.

    On ext4 and xfs, direct writes (O_DIRECT) let the disk read the bytes from the memory. On other file
    systems the kernel copies them by sendfile. Each piece is hashed during its write.

    Args:
        path: the new file, which must not exist.
        source: descriptor of the memory file.
        start: where the part begins in the memory file, in bytes.
        part: the bytes to copy: a view of the mapped memory file.
        is_urgent: called after each piece. If it returns False, the writer sleeps before the next piece, so
            that the processors have more time for the training.

    Raises:
        NoRoomError: the disk or the quota is too small; nothing was written.
        OSError: the write or the flush failed.
    """
    with path.open("xb", buffering=0) as stream, ThreadPoolExecutor(1) as thread:
        space.reserve(stream.fileno(), len(part), path.parent)
        target = _CopyTarget(path, stream.fileno(), source, start)
        digest = Digest()
        throttle = _Throttle(is_urgent)

        for chunk in chunks([part]):
            write = thread.submit(target.write, chunk)
            digest.update(chunk)
            write.result()
            throttle.sleep_after(len(chunk))

        os.fsync(stream.fileno())

    return FileRecord(len(part), digest.hexdigest())


class _Throttle:
    """Slows down a background write: sleeps between its pieces, to leave the processors to the training.

    It measures the processor time of the whole process, so a process may have only one such write at a time.
    """

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent = is_urgent
        self._done = 0
        """The number of bytes written."""
        self._began = time.monotonic()
        """Start of the current piece, in seconds of the monotonic clock."""
        self._cpu_began = time.process_time()
        """Processor seconds that this process had used at the start of the current piece."""

    def sleep_after(self, count: int) -> None:
        """Sleep in proportion to the time that the last `count` bytes took, unless the write is urgent."""
        self._done += count
        if not self._is_urgent():
            took_s = time.monotonic() - self._began
            cpu_s = time.process_time() - self._cpu_began
            ramp = min(1.0 + self._done / _RAMP_BYTES, _MAX_RAMP)
            time.sleep(ramp * min(_SLEEP_PER_TIME * took_s, _SLEEP_PER_CPU_TIME * cpu_s))

        self._began = time.monotonic()
        self._cpu_began = time.process_time()


class _CopyTarget:
    """A new file that receives, piece by piece, the bytes of the file `source` from `start` on."""

    def __init__(self, path: Path, descriptor: int, source: int, start: int) -> None:
        self._descriptor = descriptor
        self._source = source
        self._start = start
        self._done = 0
        """The number of bytes written."""
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        # A direct write needs bytes that are aligned in memory. The map starts at a page, so `start` decides.
        self._direct = start % _BLOCK_BYTES == 0 and _takes_direct(path)
        if self._direct:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, self._flags | os.O_DIRECT)

    def write(self, chunk: memoryview) -> None:
        """Append `chunk`, the next bytes of the source, and let the disk start to store them."""
        written = self._write_direct(chunk) if self._direct else 0
        while written < len(chunk):
            sent = _send(self._descriptor, self._source, self._start + self._done + written, chunk[written:])
            space.write_back(self._descriptor, self._done + written, sent)
            written += sent

        self._done += written

    def _write_direct(self, chunk: memoryview) -> int:
        """Write the whole blocks of `chunk` past the page cache; return the number of bytes written.

        If bytes of `chunk` remain, direct writes are turned off for the rest of the file.
        """
        written = 0
        whole = len(chunk) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            while written < whole and written % _BLOCK_BYTES == 0:
                written += os.write(self._descriptor, chunk[written:whole])
        except OSError as error:
            # This file system refuses direct writes.
            if error.errno != errno.EINVAL:
                raise

        # The remaining bytes are less than a block, or were refused. These bytes and all later pieces go
        # through the page cache.
        if written < len(chunk):
            self._direct = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags)

        return written


def _takes_direct(path: Path) -> bool:
    """Return whether `path` is on a file system with fast direct writes: ext4 or xfs."""
    return file_system_type(path) in _DIRECT


def _send(target: int, source: int, start: int, chunk: memoryview) -> int:
    """Copy bytes of `chunk` to the file `target`; return their number, at least 1.

    They are copied by sendfile from byte `start` of `source`, or by a plain write of `chunk` if the file
    system has no sendfile.
    """
    try:
        sent = os.sendfile(target, source, start, len(chunk))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        sent = os.write(target, chunk)

    # sendfile copies 0 bytes, without an error, at the end of the source. The caller would then loop forever.
    if sent == 0:
        raise OSError(errno.EIO, "The memory file of the state has become shorter")
    return sent


def write_small(path: Path, text: str) -> None:
    """Replace a file durably; after a power cut it contains either the old text or `text`, both whole."""
    with replacing(path) as stream:
        stream.write(text.encode())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder to the disk, so that new files and renames in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; their renames are durable without it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
