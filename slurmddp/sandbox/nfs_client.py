"""Mount a folder as a client of NFS sees it: `python -m slurmddp.sandbox.nfs_client FROM TO OPTIONS`.

FROM is the folder on the server; this process reads and writes it directly. The kernel remembers no names and
attributes by itself. It asks this process by FUSE, which follows `nfs_rules`. It drops the data of a file
when the attributes show another time or size. Further rules:

- Written data go to the server at close, fsync, unlock, and a look at the attributes, also after `writeback`
  seconds, or when a megabyte has gathered (nfs(5), "Close-to-open cache consistency"; nfs_getattr of Linux).
- A file opened for appending asks for the size before it writes. Two clients that append at the same time
  can overwrite each other (open(2), O_APPEND).
- An open file that another client has removed is lost: ESTALE (RFC 1813, 2.6). A file that this client
  removes while it is open keeps a hidden name until it is closed; libfuse does that.
- flock holds between clients. A client that gets a lock asks for the attributes again (nfs(5), "Using file
  locks with NFS"). Locks of fcntl hold within a host, as with the option `local_lock=posix`.
- rename takes no flags, as nfs_rename of Linux.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
import threading
import time
from typing import Any

from slurmddp.sandbox.nfs_rules import AttributeCache, MountOptions, parse_options

LONGEST_PENDING = 2**20
"""The largest number of bytes of a file that wait for the server."""
OPEN_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
ATTRIBUTES = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_rdev")
SPACE = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_namemax")
NOW_NS = 2**30 - 1
OMIT_NS = 2**30 - 2
"""UTIME_NOW and UTIME_OMIT of utimensat(2), which stand in place of nanoseconds."""
NO_KERNEL_CACHE = {"entry_timeout": 0, "negative_timeout": 0, "attr_timeout": 0}


class OpenFile:
    """A file that a process of this host has opened, with the data that the server does not have yet."""

    def __init__(self, descriptor: int, path: str, *, appends: bool) -> None:
        self.descriptor = descriptor
        self.path = path
        self.inode = os.fstat(descriptor).st_ino
        self._appends = appends
        self._offset = 0
        self._pending = bytearray()
        self._pending_since = 0.0
        self._failure: OSError | None = None
        self._lock = threading.RLock()

    def attributes(self) -> os.stat_result:
        """Query the file's attributes on the server; raise OSError if another client has removed the file."""
        attributes = os.fstat(self.descriptor)
        if attributes.st_nlink == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.path)
        return attributes

    def read(self, size: int, offset: int) -> bytes:
        """Return bytes of the file from the server."""
        self.attributes()
        return os.pread(self.descriptor, size, offset)

    def write(self, data: bytes, offset: int) -> None:
        """Store data that the server gets later; raise OSError if earlier data could not be written."""
        with self._lock:
            self.raise_failure()
            end = self._offset + len(self._pending)
            if self._appends:
                offset = end if self._pending else self.attributes().st_size

            if self._pending and (offset != end or len(self._pending) >= LONGEST_PENDING):
                self.write_back()
            if not self._pending:
                self._offset = offset
                self._pending_since = time.monotonic()
            self._pending += data

    def waits_since(self, deadline: float) -> bool:
        """Return whether unsent data have waited for the server since before the time `deadline`."""
        return bool(self._pending) and self._pending_since <= deadline

    def write_back(self) -> bool:
        """Write the pending data to the server, and return whether there were any.

        An error of the write is stored, and `raise_failure` raises it later.
        """
        with self._lock:
            data = memoryview(bytes(self._pending))
            self._pending.clear()
            if not data:
                return False

            try:
                self.attributes()
                while data:
                    written = os.pwrite(self.descriptor, data, self._offset)
                    self._offset += written
                    data = data[written:]
            except OSError as error:
                self._failure = error

            return True

    def raise_failure(self) -> None:
        """Raise the error of an earlier `write_back` once, as write, fsync and close do."""
        with self._lock:
            failure = self._failure
            self._failure = None
            if failure is not None:
                raise failure


class NfsClient:
    """The operations on a mounted folder; libfuse calls them by their names.

    Args:
        folder: the folder on the server.
        options: the times for which the client remembers names and attributes.
        cache: attributes and names; None: a new cache on the clock of this machine.
    """

    use_ns = True
    """Whether libfuse passes times as whole nanoseconds."""

    def __init__(self, folder: str, options: MountOptions, cache: AttributeCache | None = None) -> None:
        self._folder = folder
        self._options = options
        self._cache = cache or AttributeCache(options, self._ask_server)
        self._files: dict[int, OpenFile] = {}

    def _ask_server(self, path: str) -> os.stat_result:
        return os.lstat(self._on_server(path))

    def _on_server(self, path: str) -> str:
        return self._folder + path

    def init(self, path: str) -> None:
        """Start the thread that writes old data back."""
        threading.Thread(target=self._write_back_forever, daemon=True).start()

    def _write_back_forever(self) -> None:
        while True:
            time.sleep(min(1.0, max(0.05, self._options.writeback / 10)))
            self.write_back_old()

    def write_back_old(self) -> None:
        """Write the data to the server that have waited for `writeback` seconds."""
        deadline = time.monotonic() - self._options.writeback
        for file in list(self._files.values()):
            if file.waits_since(deadline):
                file.write_back()
                self._cache.forget(file.path)

    def _write_back(self, inode: int) -> bool:
        """Write the pending data of all writers of a file to the server; return whether there were any."""
        # A list, so that `any` does not leave out the writers after the first.
        same_file = [file for file in list(self._files.values()) if file.inode == inode]
        return any([file.write_back() for file in same_file])

    def getattr(self, path: str, info: Any = None) -> dict[str, int]:
        """Return the attributes of a path, or of an open file."""
        attributes = self._attributes(path, info)
        # The size and time on the server must be those after the last write.
        if self._write_back(attributes.st_ino):
            self._cache.forget(path)
            attributes = self._attributes(path, info)

        values = {name: getattr(attributes, name) for name in ATTRIBUTES}
        for name in ("st_atime", "st_mtime", "st_ctime"):
            values[name] = getattr(attributes, f"{name}_ns")
        return values

    def _attributes(self, path: str, info: Any) -> os.stat_result:
        if info is None:
            return self._cache.attributes(path)
        file = self._files[info.fh]
        return self._cache.attributes_of_open(path, file.inode, file.attributes)

    def opendir(self, path: str) -> int:
        """Query the server about a folder, and forget the folder's names if the folder has changed."""
        self._cache.ask(path)
        return 0

    def readdir(self, path: str, handle: int) -> list[tuple[str, dict[str, int], int]]:
        """Return the entries of a folder, each as (name, inode and type, 0); libfuse wants 0 as offset."""
        kinds = {".": stat.S_IFDIR, "..": stat.S_IFDIR}
        listing = [(name, {"st_ino": 1, "st_mode": kind}, 0) for name, kind in kinds.items()]
        with os.scandir(self._on_server(path)) as entries:
            for entry in entries:
                # An entry may have gone since the server listed the folder.
                with contextlib.suppress(FileNotFoundError):
                    kind = entry.stat(follow_symlinks=False).st_mode
                    listing.append((entry.name, {"st_ino": entry.inode(), "st_mode": kind}, 0))

        return listing

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""
        return os.readlink(self._on_server(path))

    def statfs(self, path: str) -> dict[str, int]:
        """Return the free and the total space of the server's file system."""
        space = os.statvfs(self._on_server(path))
        return {name: getattr(space, name) for name in SPACE}

    def open(self, path: str, info: Any) -> int:
        """Open a file on the server, and let the kernel drop its cached data if the file has changed."""
        try:
            # Without O_APPEND, because Linux would then ignore the offset of a write.
            descriptor = os.open(self._on_server(path), info.flags & OPEN_FLAGS)
        except FileNotFoundError:
            # The name is remembered as missing from now on.
            self._cache.ask(path)
            raise

        has_changed = self._register(path, descriptor, info)
        info.keep_cache = not has_changed
        return 0

    def create(self, path: str, mode: int, info: Any) -> int:
        """Create a file on the server, or open it if it exists."""
        flags = info.flags & (OPEN_FLAGS | os.O_EXCL) | os.O_CREAT
        with self._cache.changing(path, exists=True):
            descriptor = os.open(self._on_server(path), flags, mode)
        self._register(path, descriptor, info)
        return 0

    def _register(self, path: str, descriptor: int, info: Any) -> bool:
        """Store an open file; return whether the server's file has changed since this client's last query."""
        appends = bool(info.flags & os.O_APPEND)
        self._files[descriptor] = OpenFile(descriptor, path, appends=appends)
        info.fh = descriptor
        # The kernel would put appended data into its copy of the file at an offset that it only guesses.
        info.direct_io = appends
        return self._cache.learn(path, os.fstat(descriptor))

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        """Read from an open file, with the data that this host has written."""
        file = self._files[info.fh]
        self._write_back(file.inode)
        return file.read(size, offset)

    def write(self, path: str, data: bytes, offset: int, info: Any) -> int:
        """Write to an open file; the server gets the data later."""
        file = self._files[info.fh]
        # Data of other writers of this host are sent first: processes of one host see each other's writes at
        # once.
        for other in list(self._files.values()):
            if other.inode == file.inode and other is not file:
                other.write_back()

        file.write(data, offset)
        return len(data)

    def truncate(self, path: str, length: int, info: Any = None) -> int:
        """Set the size of a file."""
        if info is None:
            self._write_back(self._ask_server(path).st_ino)
            os.truncate(self._on_server(path), length)
        else:
            file = self._files[info.fh]
            self._write_back(file.inode)
            os.ftruncate(file.descriptor, length)

        self._cache.forget(path)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, length: int, info: Any) -> int:
        """Reserve space for a file on the server."""
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.posix_fallocate(self._files[info.fh].descriptor, offset, length)
        self._cache.forget(path)
        return 0

    def flush(self, path: str, info: Any) -> int:
        """Write the data of a file to the server, because a process closes it."""
        file = self._files[info.fh]
        if self._write_back(file.inode):
            self._cache.forget(path)
        file.raise_failure()
        return 0

    def fsync(self, path: str, datasync: int, info: Any) -> int:
        """Write the data of a file to the disk of the server."""
        self.flush(path, info)
        os.fsync(self._files[info.fh].descriptor)
        return 0

    def release(self, path: str, info: Any) -> int:
        """Close a file on the server, which also ends its lock."""
        file = self._files.pop(info.fh)
        # Mapped memory may have been written after the last close.
        file.write_back()
        os.close(file.descriptor)
        return 0

    def fsyncdir(self, path: str, datasync: int, handle: int) -> int:
        """Write a folder to the disk of the server."""
        descriptor = os.open(self._on_server(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return 0

    def flock(self, path: str, info: Any, operation: int) -> int:
        """Lock a file against all clients, or unlock it."""
        file = self._files[info.fh]
        self._write_back(file.inode)
        fcntl.flock(file.descriptor, operation)
        # What other clients wrote under their lock must be seen under this lock.
        self._cache.forget(path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        """Create a folder."""
        with self._cache.changing(path, exists=True):
            os.mkdir(self._on_server(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        """Remove an empty folder."""
        with self._cache.changing(path, exists=False):
            os.rmdir(self._on_server(path))
        return 0

    def unlink(self, path: str) -> int:
        """Remove a file."""
        with self._cache.changing(path, exists=False):
            os.unlink(self._on_server(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        """Rename a file or a folder, and replace a file or an empty folder that has the new name."""
        with self._cache.changing(old, exists=False), self._cache.changing(new, exists=True):
            os.rename(self._on_server(old), self._on_server(new))
        # libfuse uses the new name for the open file from now on.
        for file in list(self._files.values()):
            if file.path == old:
                file.path = new
        return 0

    def link(self, path: str, existing: str) -> int:
        """Give a file a further name."""
        with self._cache.changing(path, exists=True):
            os.link(self._on_server(existing), self._on_server(path))
        self._cache.forget(existing)
        return 0

    def symlink(self, path: str, target: str) -> int:
        """Create a symbolic link."""
        with self._cache.changing(path, exists=True):
            os.symlink(target, self._on_server(path))
        return 0

    def mknod(self, path: str, mode: int, device: int) -> int:
        """Create a pipe, a socket or another special file."""
        with self._cache.changing(path, exists=True):
            os.mknod(self._on_server(path), mode, device)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """Set the permissions of a path."""
        os.chmod(self._on_server(path), mode)
        self._cache.forget(path)
        return 0

    def chown(self, path: str, user: int, group: int) -> int:
        """Set the owner of a path."""
        os.lchown(self._on_server(path), user, group)
        self._cache.forget(path)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Set the times of a path, in nanoseconds; None: now."""
        before = self._ask_server(path)
        self._write_back(before.st_ino)
        access_ns = _moment_ns(times[0] if times else NOW_NS, before.st_atime_ns)
        change_ns = _moment_ns(times[1] if times else NOW_NS, before.st_mtime_ns)
        os.utime(self._on_server(path), ns=(access_ns, change_ns), follow_symlinks=False)
        self._cache.forget(path)
        return 0


def _moment_ns(value: int, before: int) -> int:
    """Return the time for `value` in nanoseconds: UTIME_NOW means now, UTIME_OMIT the time `before`."""
    if value == NOW_NS:
        return time.time_ns()
    if value == OMIT_NS:
        return before
    return value


def mount(folder: str, target: str, options: MountOptions) -> None:
    """Mount `folder` on `target`, and serve it until it is unmounted."""
    # The package needs libfuse, and only this process needs the package.
    import mfusepy

    class Mount(mfusepy.FUSE):  # type: ignore[misc]
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            if flags:
                return -errno.EINVAL
            return int(self.rename_fuse_2(old, new))

    # The kernel has applied the umask of the process that creates a file, so this process must apply none.
    os.umask(0)
    client = NfsClient(folder, options)
    Mount(
        client,
        target,
        raw_fi=True,
        foreground=True,
        use_ino=True,
        allow_other=True,
        default_permissions=True,
        # A comma in the path of the folder would end this option.
        fsname="server",
        subtype="slurmddp-nfs",
        **NO_KERNEL_CACHE,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    mount(sys.argv[1], sys.argv[2], parse_options(sys.argv[3]))
