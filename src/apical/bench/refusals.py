"""Checks of suites and settings files. Each error says what is wrong and where."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from apical import models
from apical.engine.settings import Settings
from apical.errors import ApicalError

SETTING_TYPES = {"options": dict, "data_options": dict, "optimizer_options": dict, "alignment": bool}
"""Settings whose type is checked here, because all other checks rely on it."""
TYPE_DESCRIPTIONS = {
    bool: "true or false",
    dict: "a table such as { NAME = VALUE }",
    list: 'a list such as ["NAME"]',
    str: "a text",
}


def check_settings(found: dict[str, Any], where: str) -> None:
    """Check settings, even if no run with them was requested."""
    fields = [name for name in Settings.__dataclass_fields__ if name not in ("rule", "model", "data", "seeds")]
    check_names(found, fields, where)
    check_types(found, SETTING_TYPES, where)
    with add_context(where):  # the optimizer's options are checked when the optimizer is known
        Settings("", "", "", **{**found, "optimizer_options": {}})


def check_model(name: str, where: str) -> None:
    """Check that this is the name of a model."""
    if not models.is_model(name):
        check_names([name], models.NAMES, where)


def check_names(found: Iterable[Any], names: Sequence[str], where: str) -> None:
    """Check that all names are among the known ones. The error suggests a similar name."""
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}? It" if near else "it"
            raise ApicalError(f"{where}: {name!r} is unknown; {hint} takes {', '.join(names) or 'none'}.")


def check_types(found: dict[str, Any], kinds: Mapping[str, type], where: str) -> None:
    """Check the types of some values."""
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            raise ApicalError(f"{name} in {where} is {found[name]!r}, but must be {TYPE_DESCRIPTIONS[kind]}.")


@contextmanager
def add_context(where: str) -> Iterator[None]:
    """Prepend the place of the fault to the message of an ApicalError."""
    try:
        yield
    except ApicalError as error:
        raise ApicalError(f"{where}: {error}") from error
