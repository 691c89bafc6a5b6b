"""The settings that are used where the user names none, read from `defaults.toml`."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("apical.bench").joinpath("defaults.toml").read_text("utf-8"))


def settings_for(rule: str, model: str, data: str) -> dict[str, Any]:
    """Keywords for `fit`; nothing where no setting is recorded.

    >>> settings_for("dll", "mlp", "mnist")["batch_size"]
    128
    """
    found = dict(_table().get(data, {}).get(model, {}))
    rules = found.pop("rules", {})
    return {**found, **rules.get(rule, {})}
