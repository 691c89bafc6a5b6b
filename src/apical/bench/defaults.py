"""The settings that are used where the user names none, read from `defaults.toml`."""

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from apical.errors import ApicalError

LIKE = {
    "fashion_mnist": "mnist",
    "svhn": "cifar10",
    "sherlock_holmes": "tinyshakespeare",
    "etth2": "etth1",
}
"""Data sets on which nothing was tuned: a rule that has settings of its own on the other has those here, too."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("apical.bench").joinpath("defaults.toml").read_text("utf-8"))


def settings_for(rule: str, model: str, data: str, table: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keywords for `fit`; nothing where no setting is recorded.

    >>> settings_for("dll", "mlp", "mnist")["batch_size"]
    128
    """
    recorded = _table() if table is None else table
    found, own = _entry(recorded, rule, model, data)
    if own is None and data in LIKE:
        common, own = _entry(recorded, rule, model, LIKE[data])
        if own is not None:
            own = {**common, **own, "epochs": own.get("epochs", found.get("epochs", 20))}
    return {**found, **(own or {})}


def _entry(
    table: dict[str, Any], rule: str, model: str, data: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What every rule has on a network and data set, and what this one has of its own."""
    found = dict(table.get(data, {}).get(model, {}))
    return found, found.pop("rules", {}).get(rule)


def with_file(path: Path) -> dict[str, Any]:
    """The recorded settings with a file of the user's over them; or that file alone, where it says `replace = true`."""
    try:
        own = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ApicalError(f"the settings in {path} cannot be read ({error}).") from error
    replace = own.pop("replace", False)
    for data, kinds in own.items():
        if not isinstance(kinds, dict) or not all(isinstance(entry, dict) for entry in kinds.values()):
            raise ApicalError(f"{path} must have tables [DATA.MODEL] as defaults.toml has; {data!r} is none.")
    return own if replace else over(_table(), own)


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Settings with others on top; tables, such as a rule's options, join name by name.

    >>> over({"lr": 0.1, "options": {"a": 1, "b": 2}}, {"options": {"b": 3}})
    {'lr': 0.1, 'options': {'a': 1, 'b': 3}}
    """
    joined = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        joined[name] = over(below[name], value) if both else value
    return joined
