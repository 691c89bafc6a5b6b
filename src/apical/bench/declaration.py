"""What to run: the request of a user, the declaration of one run, and values of a command line as text.

A declaration has the settings of a run without its seeds. Its hash and a seed identify a run in the store.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, get_args, get_type_hints

from apical import data as datasets
from apical.core.registry import RULES
from apical.data import Dataset
from apical.engine.identity import hash_contents
from apical.engine.settings import Settings
from apical.errors import ApicalError, DataError

KEYED = (
    *("rule", "model", "data", "epochs", "lr", "batch_size", "optimizer", "schedule", "protocol", "loss"),
    *("label_smoothing", "clip", "precision", "options", "optimizer_options", "alignment"),
)
"""The settings that are always part of a key. A setting that was added to `fit` later counts only if it differs from its
default, so that the keys of earlier runs do not change."""


@dataclass(frozen=True)
class Declaration:
    """The settings of a run without its seeds, as plain values.

    `examples` is how many training and test examples are used, if not all of them (`--quick`). `content` has a hash of each
    thing that is the user's own: a file of data, the source of a rule or a network.

    >>> one = Declaration.of(Settings("dll", "mlp", "mnist", lr=1.0, seeds=(0, 1)))
    >>> other = Declaration.of(Settings("dll", "mlp", "mnist", lr=1, seeds=(7,)))
    >>> one.key == other.key, one.epochs
    (True, 20)
    """

    text: str
    """The settings as JSON with sorted keys."""
    rule: str = field(init=False, compare=False, repr=False)
    model: str = field(init=False, compare=False, repr=False)
    data: str = field(init=False, compare=False, repr=False)
    epochs: int = field(init=False, compare=False, repr=False)
    examples: int | None = field(init=False, compare=False, repr=False)
    content: dict[str, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        values = self.to_dict()
        object.__setattr__(self, "content", values.get("content", {}))
        for name in ("rule", "model", "data", "epochs", "examples"):
            object.__setattr__(self, name, values.get(name))

    @classmethod
    def of(cls, settings: Settings, examples: int | None = None) -> "Declaration":
        """Make a declaration from settings."""
        values = settings.to_dict()
        del values["seeds"]
        if content := hash_contents(settings.rule, settings.model, settings.data):
            values["content"] = content
        if examples is not None:
            values["examples"] = examples
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Declaration":
        return cls(json.dumps(values, sort_keys=True))

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.text)
        return values

    @cached_property
    def key(self) -> str:
        """A hash of the settings, and of the contents of what is the user's own: of `text:PATH`, the path does not count."""
        defaults = {f.name: _get_default(f) for f in fields(Settings)}
        # Whole numbers become integers, so that 1.0 and 1 have the same hash.
        values = json.loads(self.text, parse_float=lambda text: int(x) if (x := float(text)).is_integer() else x)
        if "data" in self.content:
            values["data"] = self.data.partition(":")[0]
        kept = {
            name: value
            for name, value in values.items()
            if name in KEYED or name not in defaults or value != defaults[name]
        }
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def settings(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Return the settings with these seeds, in the order of `Settings`."""
        values = {**self.to_dict(), "seeds": list(seeds)}
        return {f.name: values.get(f.name, _get_default(f)) for f in fields(Settings)}

    def __str__(self) -> str:
        return f"{self.rule} {self.model} {self.data}"


def load_dataset(declaration: Declaration) -> Dataset:
    """Return the data of a declaration, only its first examples for a quick run."""
    content = declaration.content.get("data", "")
    if hash_contents(declaration.rule, declaration.model, declaration.data).get("data", "") != content:
        raise DataError(f"{declaration.data} has changed since {declaration} was declared; run the same command again.")
    whole = _load_cached(declaration.data, json.dumps(declaration.to_dict().get("data_options", {})), content)
    count = declaration.examples
    if count is None:
        return whole
    x_train, y_train, x_test, y_test = (tensor[:count] for tensor in whole)
    return replace(whole, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


@lru_cache(maxsize=1)
def _load_cached(name: str, options: str, content: str) -> Dataset:
    """Load a data set and keep it for the next run, which usually has the same. Loading takes seconds."""
    return datasets.load(name, **json.loads(options))


def explain_new_content(declaration: Declaration, others: Iterable[Declaration]) -> str:
    """Return why a run is not one of these others though it has the settings of one: the contents of its data, say.

    Returns "" if none of them has the same settings, or one has the same contents, too.
    """
    asked = {**declaration.to_dict(), "content": {}}
    changed: dict[str, None] = {}
    for other in others if declaration.content else ():
        if other.content == declaration.content and other.key == declaration.key:
            return ""
        if {**other.to_dict(), "content": {}} == asked:
            changed |= {name: None for name, known in declaration.content.items() if other.content.get(name) != known}
    what = " and ".join(f"its {name}" for name in changed)
    return f"{declaration}: the contents of {what} are not those of an earlier run, so it runs anew." if what else ""


def _get_default(field: Any) -> Any:
    """Return the default of a field of a dataclass, None if it has none."""
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    return None if made is MISSING else made


def build_train_command(settings: dict[str, Any]) -> str:
    """Return the command that repeats a run. Every setting is spelt out, so recorded settings do not matter."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            flag = name.replace("_", "-").removesuffix("s")
            pairs = [f"{option}={format_value(choice)}" for option, choice in value.items()]
            flags += [f"--{flag} {shlex.quote(pair)}" for pair in pairs]
        elif name == "alignment":
            flags += ["--alignment"] if value else []
        elif name == "seeds":
            flags.append(f"--seeds {format_seeds(value)}")
        elif value is not None:
            flags.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    known = RULES.get(settings["rule"].partition(":")[0])
    module = "apical" if known is None else known.__module__
    own = module.partition(".")[0] not in ("apical", "__main__")  # a rule of a script cannot be imported
    return " ".join(["apical", *([f"--import {shlex.quote(module)}"] if own else []), "train", *flags, "--untuned"])


# Values of a command line, and names of files.


def parse_seeds(text: str) -> int | list[int]:
    """Parse seeds: `4` means four seeds (0 to 3), `1,5,7` these three, and `7,` only seed 7."""
    try:
        return [int(part) for part in text.rstrip(",").split(",")] if "," in text else int(text)
    except ValueError:
        raise ApicalError(f"--seeds {text!r} is neither a number nor a list such as 0,1,2.") from None


def parse_names(given: Sequence[str] | None) -> list[str] | None:
    """Return names that are separated by commas, in one text or several; None if there is none.

    >>> parse_names(["bp,fa", "dll"]), parse_names([])
    (['bp', 'fa', 'dll'], None)
    """
    names = [name for text in given or () for name in text.split(",") if name]
    if given and not names:
        raise ApicalError("a list of names is empty; leave the option out for all of them.")
    return names or None


def parse_options(pairs: Sequence[str], flag: str = "--option") -> dict[str, Any]:
    """Parse pairs such as `theta_std=0.05` into keywords.

    >>> parse_options(["theta_std=0.05", "betas=[0.9, 0.99]", "scale=paper"])
    {'theta_std': 0.05, 'betas': [0.9, 0.99], 'scale': 'paper'}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ApicalError(f"{flag} {pair!r} is not NAME=VALUE.")
        if name in options:
            raise ApicalError(f"{flag} gives {name!r} twice; give it once.")
        options[name] = parse_value(text)
    return options


def parse_value(text: str) -> Any:
    """Parse a value: a number, true, false, none, a JSON list, object or string; anything else is text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    readers: list[Callable[[str], Any]] = [json.loads] if text.startswith(("[", "{", '"')) else [int, float]
    for read in readers:
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text


def format_seeds(seeds: Sequence[int]) -> str:
    """Return seeds as text that `parse_seeds` reads. A single seed needs a comma, since a plain number is a count.

    >>> format_seeds([3]), format_seeds([0, 1])
    ('3,', '0,1')
    """
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def format_value(value: Any) -> str:
    """Return the text that `parse_value` reads as this value.

    >>> format_value(0.05), format_value([0.9, 0.99]), format_value("paper"), format_value("3")
    ('0.05', '[0.9, 0.99]', 'paper', '"3"')
    """
    plain = isinstance(value, str) and parse_value(value) == value
    return str(value) if plain or isinstance(value, int | float | None) else json.dumps(value)


def make_safe_name(name: str) -> str:
    """Return the name of a model (maybe MODULE:FUNCTION) or of data (maybe text:PATH) as a part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def make_file_name(rule: str, model: str, data: str) -> str:
    """Return a file name, without its ending, that every file system accepts: the colon of a variant becomes a dot.

    >>> make_file_name("dll:released", "mlp", "mnist")
    'mnist-mlp-dll.released'
    """
    return f"{make_safe_name(data)}-{make_safe_name(model)}-{rule.replace(':', '.')}"


# What a user asks for: the fields of `Request` are the only declaration of the flags.

SUITES = resources.files("apical.bench").joinpath("suites")
"""The folder of the suites that come with apical."""


def list_names() -> list[str]:
    """Return the names of the suites that come with apical, `digits` first."""
    found = [p.name.removesuffix(".toml") for p in SUITES.iterdir() if p.name.endswith(".toml")]
    return sorted(found, key=lambda name: (name != "digits", name))


def _flag(default: Any, help: str, *aliases: str, parse: Callable[[Any], Any] | None = None) -> Any:
    """Return a field that is a flag. `parse` reads its text on a command line, if that is not of the field's type."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "parse": parse})


@dataclass(frozen=True)
class Request:
    """A part of a suite, and how to run it.

    Every field with a help text is an option of `apical bench`, of `python -m apical.bench` and of `apical.bench.run`.
    None means what the suite says.
    """

    suite: str = _flag("digits", f"{', '.join(list_names())}, or a TOML file of your own.")
    store: Path = _flag(  # noqa: RUF009
        Path("results.sqlite"), "The SQLite file of the results; what is in it is not run again."
    )
    rules: Sequence[str] | None = _flag(None, "Only these rules, separated by commas.", "--rule", parse=parse_names)
    models: Sequence[str] | None = _flag(None, "Only these models.", "--model", parse=parse_names)
    data: Sequence[str] | None = _flag(None, "Only these data sets.", parse=parse_names)
    seeds: int | Sequence[int] | None = _flag(None, "How many seeds, or which: 4, or 0,2,5.", parse=parse_seeds)
    epochs: int | None = _flag(None, "Passes over the training data.")
    quick: bool = _flag(
        False, "One epoch of one seed on a few examples: does everything work? Never taken for a result."
    )
    dry_run: bool = _flag(False, "List the runs and how long they take; run nothing.")
    defaults: Path | None = _flag(  # noqa: RUF009
        None, "A file like defaults.toml, over the recorded settings (or, with replace = true, in their place)."
    )
    redo: bool = _flag(False, "Run again what failed, or what other code computed.")
    limit: float | None = _flag(
        None, "Seconds after which no epoch begins; runs known to take longer are not begun.", "--limit-seconds"
    )
    workers: int = _flag(1, "Processes on this machine.")
    together: int = _flag(
        1,
        "Train up to so many networks as one run, where lines differ only in rule, loss, rates and options. Faster on a "
        "GPU; but the time of each run is then unknown, and an interrupted run starts again.",
    )
    ray: bool | str = _flag(
        False,
        "Run on the Ray cluster at this address; without an address, on one of its own.",
        parse=lambda address: address == "local" or address,
    )
    device: str = _flag("auto", "auto, cpu, cuda, …")
    modules: Sequence[str] = ()
    """Modules with your own rules, imported by every worker."""
    progress: bool = True
    """Show a progress bar."""
    started: float = 0.0
    """When the runs began, as `time.time()` says it. Deadline and redo count from there."""
    pool: str = ""
    """The name of the worker pool that this process belongs to."""

    @classmethod
    def from_command_line(cls, **texts: Any) -> Self:
        """Make a request from the values of flags, some of which are text that is still to be read."""
        parsers = {each.name: each.metadata.get("parse") for each in fields(cls)}
        given = {name: value for name, value in texts.items() if value is not None}
        return cls(**{name: parse(value) if (parse := parsers[name]) else value for name, value in given.items()})

    @property
    def deadline(self) -> float | None:
        """The time after which no epoch begins."""
        return None if self.limit is None else self.started + self.limit

    def check(self) -> None:
        """Raise ApicalError for options that cannot work, before any run begins."""
        for name in ("workers", "together"):
            if getattr(self, name) < 1:
                raise ApicalError(f"--{name} is {getattr(self, name)}, but must be at least 1.")
        if self.ray and self.together > 1:
            raise ApicalError("--together joins runs on one device; on a cluster (--ray) each has its own.")
        if self.limit is not None and not self.limit > 0:
            raise ApicalError(f"--limit is {self.limit:g}, but must be a positive number of seconds.")
        if self.store.suffix == ".html":
            raise ApicalError(f"the store {self.store} would be overwritten by its page; name it results.sqlite, say.")


class Flag(NamedTuple):
    """A field of a request as a command line sees it."""

    name: str
    options: list[str]
    kind: Any
    """The type of its value: bool, int, float, str, Path or list[str]."""
    default: Any
    help: str


def list_flags() -> list[Flag]:
    """Return the flags of the bench. The first, the suite, is an argument without a name."""
    hints, found = get_type_hints(Request), []
    for each in fields(Request):
        if "help" in each.metadata:
            hint, parse = hints[each.name], each.metadata["parse"]
            plain = get_args(hint)[0] if isinstance(hint, UnionType) else hint
            options = [f"--{each.name.replace('_', '-')}", *each.metadata["aliases"]]
            kind = plain if parse is None else list[str] if parse is parse_names else str
            # A flag whose text is still to be read has no default: what is not given is left to the request.
            found.append(Flag(each.name, options, kind, None if parse else each.default, each.metadata["help"]))
    return found
