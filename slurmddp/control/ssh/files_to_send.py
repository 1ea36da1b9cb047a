"""Choose the files of a project that are sent to a login node: its code, without secrets and results."""

from __future__ import annotations

import os
from pathlib import Path

from slurmddp.runs.folder import sent_code
from slurmddp.runs.folder.git import trouble_of
from slurmddp.runs.folder.project_files import (
    ProjectFiles,
    is_cache,
    is_run,
    list_files,
    refuse_large,
    unreadable,
)
from slurmddp.runs.folder.secret_files import is_secret, is_secret_folder

_CODE_DOTFILES = frozenset({".gitignore", ".gitattributes", ".python-version"})
"""Names with a leading dot that belong to the code of a project outside a git repository."""


def files_to_send(project_dir: Path) -> ProjectFiles:
    """Return the files to send to a login node, in `code`, and the secret files that are not sent.

    In a git repository, the code is all files that git tracks, and new files that git does not ignore.
    Elsewhere it is every file without a leading dot in its path.

    Raises:
        ConfigError: the code is larger than `project_files.MOST_MB`, or its git repository can't be read.
    """
    trouble = trouble_of(project_dir)
    if trouble is None:
        files = list_files(project_dir, ())
    elif trouble.kind == "unreadable":
        # The files that .gitignore names are unknown and would be sent, so nothing is sent.
        raise unreadable(project_dir, trouble.reason)
    else:
        files = _walk(project_dir)

    # Sockets and pipes are no code, and reading a pipe would never end.
    code = [path for path in files.code if path.is_symlink() or path.is_file()]
    # If the project itself came over ssh, the folder with the list of sent files is not part of its code.
    code = [path for path in code if not path.is_relative_to(project_dir / sent_code.FOLDER)]
    refuse_large(project_dir, code)
    return ProjectFiles(code=code, secrets=files.secrets, ignored=[])


def _walk(project_dir: Path) -> ProjectFiles:
    """Return the entries of a project outside a git repository, without run folders, caches and dotfiles."""
    code: list[Path] = []
    secrets: list[Path] = []
    for folder, folders, files in os.walk(project_dir):
        inside = Path(folder)
        # os.walk lists links to folders among the folders, but does not enter them, so they count as files
        # here.
        links = [name for name in folders if (inside / name).is_symlink()]
        for path in sorted(inside / name for name in (*files, *links)):
            if is_secret(path, project_dir):
                secrets.append(path)
            elif _is_visible(path) and not is_cache(path, project_dir):
                code.append(path)

        secrets += [inside / name for name in folders if is_secret_folder(name)]
        folders[:] = [name for name in folders if _may_hold_code(inside / name, project_dir)]
    return ProjectFiles(code=sorted(code), secrets=sorted(secrets), ignored=[])


def _may_hold_code(folder: Path, project_dir: Path) -> bool:
    return _is_visible(folder) and not is_cache(folder, project_dir) and not is_run(folder)


def _is_visible(path: Path) -> bool:
    return not path.name.startswith(".") or path.name in _CODE_DOTFILES
