"""The progress bar, where rich is installed and somebody is watching."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, str], None]
"""Takes the steps just done and the text beside the bar; an empty text leaves the one that stands there."""


@contextmanager
def bar(title: str, total: int, done: int, show: bool) -> Iterator[Advance]:
    """A bar over `total` steps, `done` of which lie behind us."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        show = False
    if not show or not sys.stderr.isatty():
        yield lambda steps, text: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, completed=done, text="")

        def advance(steps: int, text: str) -> None:
            progress.advance(task, steps)
            if text:
                progress.update(task, text=text)

        yield advance
