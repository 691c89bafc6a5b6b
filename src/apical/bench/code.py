"""Which code a result comes from: the version, the commit, and a digest of the files that compute."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

import apical
from apical.version import VERSION

PACKAGE = Path(apical.__file__).parent
ASIDE = {
    "bench",
    "report",
    "plausibility",
    "cli.py",
    "commands.py",
    "version.py",
    "extras.py",
    "errors.py",
    "files.py",
}
"""What does not decide a result."""


@cache
def version() -> str:
    """The package's version, and the commit where this is a checkout."""
    root = PACKAGE.parents[1]
    if not (root / ".git").exists():
        return VERSION
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return VERSION
    return f"{VERSION}+{asked.stdout.strip()}"


@cache
def source() -> str:
    """A digest of the code that computes results: a row whose digest differs was made by another version of it.

    Unlike the commit it stays the same when a page or a test changes, and is known without git, too.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in ASIDE:
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
