"""Recognise files that may hold passwords or keys, which are neither copied into runs nor sent over ssh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

_NAMES = (
    ".env*", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.kdbx", "*.keytab", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pypirc", ".pgpass", ".npmrc", ".git-credentials",
    ".htpasswd", ".*_history", "kaggle.json", "credentials.json", "client_secret*.json", ".token", "token",
    "*.token", "token.txt", "*_token", "*_token.txt", "secret.*ml", "secrets.*ml", "secrets.json",
    "service_account*.json", "service-account*.json", "application_default_credentials.json", ".s3cfg",
    ".boto", ".my.cnf", "*.jks", "*.env", "*.pem.*", "token.json", "auth.json", "*api_key", "*api_key.txt",
    "*apikey", "*apikey.txt", "*password.txt", "*passwords.txt", ".vault_pass*", ".databrickscfg",
    ".dockercfg", ".renviron", "pip.conf", "*-token", "*.keystore", "*.tfstate*", "*.tfvars", "oauth*.json",
    "*_key.txt",
)  # fmt: skip
"""Patterns for the names of files that may hold passwords or keys, in lower case."""
_FOLDERS = frozenset({
    ".aws", ".azure", ".config", ".docker", ".gnupg", ".kaggle", ".kube", ".mlflow", ".oci",
    ".password-store", ".ssh", ".terraform.d",
})  # fmt: skip
"""Names of folders in which programs keep passwords and keys."""
_PRIVATE_KEY = re.compile(
    rb"""(?:^|"\s*:\s*")-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----|^PuTTY-User-Key-File-""", re.MULTILINE
)
"""A key at the beginning of a line, or as a value in JSON, as in the file of a service account."""
_HEAD_BYTES = 4096
"""Length of the beginning of a file that is searched for a key."""


def is_secret(path: Path, project_dir: Path) -> bool:
    """Return whether a file may hold a password or key, judged by its name, folders and first bytes."""
    if any(fnmatchcase(path.name.lower(), pattern) for pattern in _NAMES):
        return True
    if any(is_secret_folder(name) for name in path.relative_to(project_dir).parts):
        return True

    if path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            return bool(_PRIVATE_KEY.search(stream.read(_HEAD_BYTES)))
    except OSError:
        # A file that can't be read counts as no secret: the later copy fails with an error that names it.
        return False


def is_secret_folder(name: str) -> bool:
    """Return whether programs keep passwords and keys in a folder of this name."""
    return name in _FOLDERS


def topmost(secrets: Sequence[Path], project_dir: Path) -> list[str]:
    """Return the relative paths of secret files; of all files in a folder of secrets, only the folder."""
    names: dict[str, None] = {}
    for path in secrets:
        parts = path.relative_to(project_dir).parts
        folders = [at for at, part in enumerate(parts) if part in _FOLDERS]
        if folders:
            parts = parts[: folders[0] + 1]
        names["/".join(parts)] = None
    return list(names)
