"""A declaration: the settings of a run without its seeds. Its hash and a seed identify a run in the store."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from apical.engine.settings import Settings

KEYED = (
    *("rule", "model", "data", "epochs", "lr", "batch_size", "optimizer", "schedule", "protocol", "loss"),
    *("label_smoothing", "clip", "precision", "options", "optimizer_options", "alignment"),
)
"""The settings that are always part of a key. A setting that was added to `fit` later counts only if it differs from its
default, so that the keys of earlier runs do not change."""


@dataclass(frozen=True)
class Declaration:
    """The settings of a run without its seeds, as plain values.

    `examples` is how many training and test examples are used, if not all of them (`--quick`).

    >>> one = Declaration.of(Settings("dll", "mlp", "mnist", lr=1.0, seeds=(0, 1)))
    >>> other = Declaration.of(Settings("dll", "mlp", "mnist", lr=1, seeds=(7,)))
    >>> one.key == other.key, one.epochs
    (True, 20)
    """

    text: str
    """The settings as JSON with sorted keys."""

    @classmethod
    def of(cls, settings: Settings, examples: int | None = None) -> "Declaration":
        """Make a declaration from settings."""
        values = {name: value for name, value in settings.to_dict().items() if name != "seeds"}
        if examples is not None:
            values["examples"] = examples
        return cls.from_dict(values)

    @classmethod
    def of_result(cls, settings: dict[str, Any]) -> "Declaration":
        """Make a declaration from the settings of a result file."""
        return cls.of(Settings(**{**settings, "seeds": tuple(settings["seeds"])}))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Declaration":
        return cls(json.dumps(values, sort_keys=True))

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.text)
        return values

    @cached_property
    def _values(self) -> dict[str, Any]:
        return self.to_dict()

    @cached_property
    def key(self) -> str:
        """A hash of the settings."""
        defaults = {f.name: _get_default(f) for f in fields(Settings)}
        kept = {
            name: value
            for name, value in self._values.items()
            if name in KEYED or name not in defaults or value != defaults[name]
        }
        return hashlib.sha256(json.dumps(_normalize_numbers(kept), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def rule(self) -> str:
        return str(self._values["rule"])

    @property
    def model(self) -> str:
        return str(self._values["model"])

    @property
    def data(self) -> str:
        return str(self._values["data"])

    @property
    def epochs(self) -> int:
        return int(self._values["epochs"])

    @property
    def examples(self) -> int | None:
        examples: int | None = self._values.get("examples")
        return examples

    def settings(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Return the settings with these seeds, in the order of `Settings`."""
        values = self.to_dict()
        values.pop("examples", None)
        values["seeds"] = list(seeds)
        return {f.name: values.get(f.name, _get_default(f)) for f in fields(Settings)}

    def __str__(self) -> str:
        return f"{self.rule} {self.model} {self.data}"


def _get_default(field: Any) -> Any:
    """Return the default of a field of a dataclass, None if it has none."""
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    return None if made is MISSING else made


def _normalize_numbers(value: Any) -> Any:
    """Replace whole floats by integers, so that 1.0 and 1 have the same hash."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _normalize_numbers(item) for key, item in value.items()}
    return [_normalize_numbers(item) for item in value] if isinstance(value, list) else value
