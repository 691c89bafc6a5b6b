"""What a run is, without its seeds: the half of a result's key that says what was asked for."""

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
"""The settings that are always part of a key. One that was added to `fit` later counts only where it is not at its
default, so that the keys of earlier runs stay as they are."""


@dataclass(frozen=True)
class Declaration:
    """The settings of a run without its seeds, plain values alone.

    `examples` is how many training and test examples are used where that is not all of them (`--quick`).

    >>> one = Declaration.of(Settings("dll", "mlp", "mnist", lr=1.0, seeds=(0, 1)))
    >>> other = Declaration.of(Settings("dll", "mlp", "mnist", lr=1, seeds=(7,)))
    >>> one.key == other.key, one.epochs
    (True, 20)
    """

    text: str
    """The settings as JSON with sorted keys."""

    @classmethod
    def of(cls, settings: Settings, examples: int | None = None) -> "Declaration":
        values = {name: value for name, value in settings.to_dict().items() if name != "seeds"}
        if examples is not None:
            values["examples"] = examples
        return cls.from_dict(values)

    @classmethod
    def of_result(cls, settings: dict[str, Any]) -> "Declaration":
        """What a result in a file was asked for."""
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
        """A hash of what was asked for."""
        defaults = {f.name: _default(f) for f in fields(Settings)}
        kept = {
            name: value
            for name, value in self._values.items()
            if name in KEYED or name not in defaults or value != defaults[name]
        }
        return hashlib.sha256(json.dumps(_plain(kept), sort_keys=True).encode()).hexdigest()[:16]

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
        """What `Settings` holds for these seeds, in its order, as a result or a command has it."""
        values = self.to_dict()
        values.pop("examples", None)
        values["seeds"] = list(seeds)
        return {f.name: values.get(f.name, _default(f)) for f in fields(Settings)}

    def __str__(self) -> str:
        return f"{self.rule} {self.model} {self.data}"


def _default(field: Any) -> Any:
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    return None if made is MISSING else made


def _plain(value: Any) -> Any:
    """1.0 and 1 are the same number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
