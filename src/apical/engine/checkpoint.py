"""Checkpoints: one safetensors file for all seeds of a run, written atomically."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from apical.core.learner import Learner
from apical.core.registry import options_of
from apical.data import Dataset
from apical.errors import CheckpointError
from apical.files import replace_atomically

FORMAT = 1
SAMPLE = 1 << 20
"""Approximate number of bytes of a tensor that its fingerprint covers: whole examples at equal distances."""


class Checkpoint(NamedTuple):
    """What a run needs to continue: its settings, the epochs done, and each seed's tensors by name.

    `vocabulary` is there if the data are characters; with it, `apical sample` needs no other file. `fingerprint` is that
    of the network, the learner's options and the data; older files have an empty one.
    """

    settings: dict[str, Any]
    epoch: int
    history: list[dict[str, Any]]
    failed: dict[int, str]
    tensors: dict[int, dict[str, Tensor]]
    vocabulary: str | None = None
    fingerprint: dict[str, str] = {}  # noqa: RUF012 (never written to)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; an interruption leaves the old file as it was."""
    flat = {
        f"{seed}/{name}": tensor.detach().cpu().contiguous()
        for seed, tensors in checkpoint.tensors.items()
        for name, tensor in tensors.items()
    }
    metadata = {
        "format": FORMAT,
        "settings": checkpoint.settings,
        "epoch": checkpoint.epoch,
        "history": checkpoint.history,
        "failed": checkpoint.failed,
        "vocabulary": checkpoint.vocabulary,
        "fingerprint": checkpoint.fingerprint,
    }
    with replace_atomically(path) as temporary:
        try:
            save_file(flat, temporary, metadata={"apical": json.dumps(metadata)})
        except SafetensorError as error:  # safetensors raises this if the disk is full
            raise CheckpointError(f"{path} could not be written ({error}).") from error


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, or raise CheckpointError if the file is not a valid one."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("apical", "null"))
            flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be read: {error}.") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by apical, or by a version with another format than {FORMAT}.")
    try:
        tensors: dict[int, dict[str, Tensor]] = {seed: {} for seed in metadata["settings"]["seeds"]}
        for key, tensor in flat.items():
            seed, _, name = key.partition("/")
            tensors[int(seed)][name] = tensor
        failed = {int(seed): why for seed, why in metadata["failed"].items()}
        settings = {"data_options": {}, **metadata["settings"]}  # older files have no data_options
        fingerprint = dict(metadata.get("fingerprint", {}))
        return Checkpoint(
            settings, metadata["epoch"], metadata["history"], failed, tensors, metadata.get("vocabulary"), fingerprint
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be read: it was altered.") from error


def require_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that a saved run has the wanted settings; the error names the first one that differs."""
    for key in [*wanted, *saved]:
        if saved.get(key) != wanted.get(key):
            raise CheckpointError(
                f"{path} belongs to another run: its {key} is {saved.get(key)!r}, this one's is "
                f"{wanted.get(key)!r}; use the same settings, or another path."
            )


def fingerprint(learner: Learner, data: Dataset) -> dict[str, str]:
    """Return hashes of the network and the data, and the learner's options.

    They tell apart networks and data of the same name. They do not depend on the device or the memory format.
    """
    described = re.sub(" at 0x[0-9a-fA-F]+", "", repr(learner.model))
    values = {name: getattr(learner, name, None) for name in options_of(type(learner))}
    options = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    contents = hashlib.sha256()
    for tensor in data:
        some = tensor[:: max(1, -(-tensor.nbytes // SAMPLE))].detach().cpu().contiguous()
        contents.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        contents.update(some.view(torch.uint8).numpy().tobytes())
    return {
        "model": hashlib.sha256(described.encode()).hexdigest(),
        "data": contents.hexdigest(),
        "options": json.dumps(options, sort_keys=True),
    }


def require_same_origin(saved: Checkpoint, wanted: dict[str, str]) -> None:
    """Check that a saved run has the wanted network, data and options; older files have no fingerprint to check."""
    for key in ("model", "data", "options"):
        known = saved.fingerprint.get(key, wanted[key])
        if known != wanted[key]:
            other = {
                "model": f"another network of the same name {saved.settings['model']!r}",
                "data": f"other data of the same name {saved.settings['data']!r}",
                "options": f"a learner with other options, {known} and not {wanted[key]}",
            }[key]
            raise CheckpointError(
                f"the checkpoint belongs to {other}; go on with what it was begun with, or use another path."
            )
