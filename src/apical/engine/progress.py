"""The progress bar, shown if rich is installed and the output is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, str], None]
"""Takes the number of steps just done and the text beside the bar; an empty text leaves the old one."""


@contextmanager
def show_progress(title: str, total: int, done: int, show: bool) -> Iterator[Advance]:
    """Show a progress bar over `total` steps, of which `done` are done, and yield the function that advances it."""
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
