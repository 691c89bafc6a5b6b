"""Pages read as their readers use them: the code in them runs, in order, as it is."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def blocks(*languages: str, page: Path = README) -> list[str]:
    assert page.exists(), f"there is no {page.name}"
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def commands(program: str, page: Path = README) -> list[list[str]]:
    found = blocks("sh", "bash", "shell", "console", page=page)
    lines = [line for block in found for line in block.splitlines()]
    split = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [words for words in split if words and words[0] == program]


def output_of(page: Path, folder: Path) -> str:
    """What the page's Python prints, in a process of its own, since a block may define a rule, and in that folder."""
    found = blocks("python", "py", page=page)
    assert found
    script = folder / "page.py"
    script.write_text("\n".join(found), "utf-8")
    paths = [entry for entry in sys.path if entry]
    start = f"import sys, runpy; sys.path[:0] = {paths!r}; runpy.run_path({str(script)!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", start],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(printed: str) -> list[float]:
    """The percentages in what a page printed."""
    return [float(percent) for percent in re.findall(r"(\d+\.\d+)%", printed)]
