"""Identify the code that computes a result: its version, its commit, and a hash of the source files."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

import apical
from apical.version import VERSION

PACKAGE = Path(apical.__file__).parent
EXCLUDED = {"bench", "report", "plausibility", "cli", "version.py", "extras.py", "errors.py", "files.py"}
"""Files and folders that cannot change a result; they are not hashed."""


@cache
def describe_version() -> str:
    """Return the version of the package, with the commit if this is a git checkout."""
    root = PACKAGE.parents[1]
    if not (root / ".git").exists():
        return VERSION
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return VERSION
    return f"{VERSION}+{asked.stdout.strip()}"


@cache
def hash_source() -> str:
    """Return a hash of the source files that can change a result. A row with another hash comes from other code.

    Unlike the commit, it does not change with a page or a test, and it does not need git.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in EXCLUDED:
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
