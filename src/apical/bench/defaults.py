"""The settings that are used where the user names none, read from `defaults.toml`."""

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from apical import data as datasets
from apical.bench.refusals import check_model, check_settings, naming, typed
from apical.core.registry import resolve
from apical.engine.settings import over
from apical.errors import ApicalError

LIKE = {
    "fashion_mnist": "mnist",
    "svhn": "cifar10",
    "sherlock_holmes": "tinyshakespeare",
    "etth2": "etth1",
    "tiny_imagenet": "cifar100",
}
"""Data sets that are served by the settings of others; what a table of their own says comes first."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("apical.bench").joinpath("defaults.toml").read_text("utf-8"))


def settings_for(rule: str, model: str, data: str, table: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keywords for `fit`; nothing where no setting is recorded.

    >>> settings_for("dll", "mlp", "mnist")["batch_size"]
    128
    """
    recorded = _table() if table is None else table
    common: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name in (LIKE[data], data) if data in LIKE else (data,):
        shared = dict(recorded.get(name, {}).get(model, {}))
        own = shared.pop("rules", {}).get(rule)
        common |= shared
        # A rule's own table was chosen as a whole: nothing of what the other data set has for that rule is left.
        found = found | shared if own is None else common | own
    return found


def with_file(path: Path) -> dict[str, Any]:
    """The recorded settings with a file of the user's over them; or that file alone, where it says `replace = true`."""
    try:
        own = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ApicalError(f"the settings in {path} cannot be read ({error}).") from error
    typed(own, {"replace": bool}, str(path))
    replace = own.pop("replace", False)
    for data, kinds in own.items():
        if not isinstance(kinds, dict) or not all(isinstance(entry, dict) for entry in kinds.values()):
            raise ApicalError(f"{path} must have tables [DATA.MODEL] as defaults.toml has; {data!r} is none.")
        with naming(str(path)):
            datasets.lookup(data)
        for model, entry in kinds.items():
            check_model(model, f"[{data}] of {path}")
            _check_entry(entry, f"{data}.{model}", path)
    return own if replace else over(_table(), own)


def _check_entry(entry: dict[str, Any], table: str, path: Path) -> None:
    """What one network has in a file: settings of all rules, and tables with those of single ones."""
    where = f"[{table}] of {path}"
    typed(entry, {"rules": dict}, where)
    rules = entry.get("rules", {})
    typed(rules, dict.fromkeys(rules, dict), f"[{table}.rules] of {path}")
    check_settings({name: value for name, value in entry.items() if name != "rules"}, where)
    for rule, own in rules.items():
        with naming(where):
            resolve(rule)
        check_settings(own, f'[{table}.rules."{rule}"] of {path}')
