"""The app that all commands belong to, and what they share: the console and modules of the user's own."""

import importlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment
from torch import nn
from typer import Option
from typer.core import TyperCommand

import apical
from apical.errors import ApicalError
from apical.models import NAMES, is_model
from apical.printing import make_printable, print_error

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train networks without backpropagation, compare the rules, and reproduce the paper.",
)


class SafeConsole(Console):
    """A console that prints names as they are: nothing in them is obeyed, neither by rich nor by the terminal."""

    def render(self, *args: Any, **keywords: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **keywords):
            yield segment if segment.control else Segment(make_printable(segment.text), segment.style)


_running: list["OptionNamingCommand"] = []
"""The command that runs."""


def print_warning(text: object) -> None:
    """Print a warning, or what went wrong, as one line that names the options of the command."""
    print_error(_running[0].name_options(str(text)) if _running else text)


class OptionNamingCommand(TyperCommand):
    """A command whose errors and warnings name its options: --resume, where the library says resume=True."""

    def invoke(self, ctx: Any) -> Any:
        _running[:] = [self]
        try:
            return super().invoke(ctx)
        except ApicalError as error:
            raise type(error)(self.name_options(str(error))) from error

    def name_options(self, text: str) -> str:
        """Replace arguments of the library in a message by options: lr=0.1 by --lr 0.1, and `lr is` at its beginning."""
        for option in self.params:
            flag = max(option.opts, key=len)
            if flag.startswith("--"):
                value, becomes = r"(['\"]?)([\w.:-]*\w)\1", rf"{flag} \2"
                if getattr(option, "is_flag", False):
                    value, becomes = r"True\b", flag
                text = re.sub(rf"(?<![\w=/.-]){option.name}={value}", becomes, text)
                text = re.sub(rf"^{option.name} is (?=[-\d'\"])", f"{flag} is ", text)
        return text


console = SafeConsole(soft_wrap=True, markup=False)
imported_modules: list[str] = []
"""The modules of --import, which worker processes must import, too."""


def _version(show: bool) -> None:
    if show:
        typer.echo(f"apical {apical.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    modules: Annotated[
        list[str], Option("--import", help="A module with rules of your own, imported first; repeat for several.")
    ] = [],  # noqa: B006
) -> None:
    warnings.showwarning = lambda message, *_, **__: print_warning(message)
    for name in modules:
        import_module(name, f"--import {name}")
    imported_modules[:] = modules


def echo(text: str, end: str = "\n") -> None:
    """Print text without wrapping its lines."""
    typer.echo(make_printable(text) + end, nl=False)


def import_module(name: str, why: str) -> ModuleType:
    """Import a module of the user's own, from the current folder or installed. `why` names the option that asks for it.

    The current folder comes last: a file in it with the name of an installed package does not replace the package.
    """
    folder = Path.cwd()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ApicalError(f"cannot import {name!r} for {why}: {error}.") from error
    except Exception as error:  # of the user's own file: no trace through ours is of use
        said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise ApicalError(
            f"cannot import {name!r} for {why}: {_locate(error)}{type(error).__name__}: {said}."
        ) from error
    top = name.partition(".")[0]
    for own in (folder / f"{top}.py", folder / top / "__init__.py"):
        if own.exists() and not own.samefile(getattr(sys.modules[top], "__file__", None) or folder):
            raise ApicalError(f"{own} for {why} has the name of another module, which comes first: rename it.")
    return module


def _locate(error: Exception) -> str:
    """Return the file and line of the user's at which an import failed; empty if no line of theirs ran."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{own[0].filename}, line {own[0].lineno}: " if own else ""


def find_builder(name: str) -> str | Callable[[], nn.Sequential]:
    """Return the name of a built-in model, or the function that MODULE:FUNCTION names."""
    module, colon, function = name.partition(":")
    if not colon:
        if not is_model(name):
            raise ApicalError(f"unknown model {name!r}; {', '.join(NAMES)} or MODULE:FUNCTION work.")
        return name
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ApicalError(f"--model {name} is not MODULE:FUNCTION, such as mynetworks:small.")
    found = getattr(import_module(module, f"--model {name}"), function, None)
    if isinstance(found, nn.Module):
        raise ApicalError(
            f"{function!r} in {module!r} is a {type(found).__name__}, not a function; --model {name} takes a function that "
            "returns a new one each time."
        )
    if not callable(found):
        raise ApicalError(f"{module!r} has no function {function!r} for --model {name}.")

    def build() -> nn.Sequential:
        try:
            network: nn.Sequential = found()
        except Exception as error:  # of the user's own function: no trace through ours is of use
            raise ApicalError(f"--model {name} failed ({type(error).__name__}: {error}).") from error
        return network

    build.__name__ = name  # so that results, checkpoints and commands name it as --model does
    return build
