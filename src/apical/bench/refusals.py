"""What a suite or a file of settings may not say, each refused in one sentence that names the place."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from apical import models
from apical.engine.settings import Settings
from apical.errors import ApicalError

KINDS = {"options": dict, "data_options": dict, "optimizer_options": dict, "alignment": bool}
"""Settings whose type is looked at here, since everything else relies on it."""
WORDS = {
    bool: "true or false",
    dict: "a table such as { NAME = VALUE }",
    list: 'a list such as ["NAME"]',
    str: "a text",
}


def check_settings(found: dict[str, Any], where: str) -> None:
    """Refuse settings that no run could have, whether one is asked for or not."""
    fields = [
        name for name in Settings.__dataclass_fields__ if name not in ("rule", "model", "data", "seeds")
    ]
    known(found, fields, where)
    typed(found, KINDS, where)
    with naming(where):  # an optimizer's options are looked at when it is known which
        Settings("", "", "", **{**found, "optimizer_options": {}})


def check_model(name: str, where: str) -> None:
    """Refuse what is no name of a model."""
    if not models.is_model(name):
        known([name], models.NAMES, where)


def known(found: Iterable[Any], names: Sequence[str], where: str) -> None:
    """Refuse a name that is none of these."""
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}? It" if near else "it"
            raise ApicalError(f"{where}: {name!r} is unknown; {hint} takes {', '.join(names) or 'none'}.")


def typed(found: dict[str, Any], kinds: Mapping[str, type], where: str) -> None:
    """Refuse a value that is not of its kind."""
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            raise ApicalError(f"{name} in {where} is {found[name]!r}, but must be {WORDS[kind]}.")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say in an error where the fault is."""
    try:
        yield
    except ApicalError as error:
        raise ApicalError(f"{where}: {error}") from error
