"""The recorded settings of `defaults.toml`, which are used unless the user gives others."""

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from apical import data as datasets
from apical.bench.refusals import add_context, check_model, check_settings, check_types
from apical.core.registry import resolve
from apical.engine.settings import merge_settings
from apical.errors import ApicalError

LIKE = {
    "fashion_mnist": "mnist",
    "svhn": "cifar10",
    "sherlock_holmes": "tinyshakespeare",
    "etth2": "etth1",
    "tiny_imagenet": "cifar100",
}
"""Data sets that use the settings of another one. Their own tables come first."""


@cache
def _load_table() -> dict[str, Any]:
    """Return the contents of defaults.toml."""
    return tomllib.loads(resources.files("apical.bench").joinpath("defaults.toml").read_text("utf-8"))


def find_settings(rule: str, model: str, data: str, table: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the recorded settings as keywords for `fit`; an empty dictionary if there are none.

    >>> find_settings("dll", "mlp", "mnist")["batch_size"]
    128
    """
    recorded = _load_table() if table is None else table
    common: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name in (LIKE[data], data) if data in LIKE else (data,):
        shared = dict(recorded.get(name, {}).get(model, {}))
        own = shared.pop("rules", {}).get(rule)
        common |= shared
        # A rule's own table was chosen as a whole, so it replaces the table of that rule for the other data set.
        found = found | shared if own is None else common | own
    return found


def load_defaults_file(path: Path) -> dict[str, Any]:
    """Return the recorded settings overridden by a user's file, or only that file if it has `replace = true`."""
    try:
        own = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ApicalError(f"the settings in {path} cannot be read ({error}).") from error
    check_types(own, {"replace": bool}, str(path))
    replace = own.pop("replace", False)
    for data, kinds in own.items():
        if not isinstance(kinds, dict) or not all(isinstance(entry, dict) for entry in kinds.values()):
            raise ApicalError(f"{path} must have tables [DATA.MODEL] as defaults.toml has; {data!r} is none.")
        with add_context(str(path)):
            datasets.lookup(data)
        for model, entry in kinds.items():
            check_model(model, f"[{data}] of {path}")
            _check_entry(entry, f"{data}.{model}", path)
    return own if replace else merge_settings(_load_table(), own)


def _check_entry(entry: dict[str, Any], table: str, path: Path) -> None:
    """Check the table of one network: settings of all rules, and tables of single rules."""
    where = f"[{table}] of {path}"
    check_types(entry, {"rules": dict}, where)
    rules = entry.get("rules", {})
    check_types(rules, dict.fromkeys(rules, dict), f"[{table}.rules] of {path}")
    check_settings({name: value for name, value in entry.items() if name != "rules"}, where)
    for rule, own in rules.items():
        with add_context(where):
            resolve(rule)
        check_settings(own, f'[{table}.rules."{rule}"] of {path}')
