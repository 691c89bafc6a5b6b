"""Checkpoints: one safetensors file for all seeds of a run, written atomically."""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from apical.core.learner import Learner
from apical.core.registry import options_of
from apical.data import DATASETS, Dataset
from apical.engine.identity import hash_code
from apical.errors import CheckpointError, describe_error
from apical.files import parse_json, replace_atomically

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
    described = {"format": FORMAT, **checkpoint._asdict()}
    del described["tensors"]
    text = json.dumps(described)
    with replace_atomically(path) as temporary:
        try:
            save_file(flat, temporary, metadata={"apical": text, "checksum": _compute_checksum(text, flat)})
        except SafetensorError as error:  # safetensors raises this if the disk is full
            raise CheckpointError(f"{path} could not be written ({error}).") from error


def _compute_checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of a checkpoint's description and of every tensor's name, shape, dtype and values."""
    checksum = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), checksum)
        checksum = zlib.crc32(_view_bytes(tensor), checksum)
    return f"{checksum:08x}"


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as bytes, in the order of its axes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, or raise CheckpointError if the file is not a valid one. Files of version 0.1 have no checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)
        text = header.get("apical", "null")
        described = parse_json(text)
        checksum = _compute_checksum(text, flat)
    except Exception as error:  # a damaged header can make safetensors and torch raise anything
        raise CheckpointError(f"{path} is not a checkpoint that can be read: {describe_error(error)}.") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by apical, or by a version with another format than {FORMAT}.")
    if header.keys() - {"apical", "checksum"} or header.get("checksum", checksum) != checksum:
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of its contents; take a copy, or start anew."
        )
    try:
        return _parse(described, flat)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be read: it was altered.") from error


def read_seeds(path: Path) -> list[int]:
    """Return the seeds of a checkpoint without reading its tensors; none if it is no checkpoint that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            seeds = parse_json((file.metadata() or {})["apical"])["settings"]["seeds"]
    except Exception:  # a damaged header can make safetensors raise anything
        return []
    return seeds if isinstance(seeds, list) and all(isinstance(seed, int) for seed in seeds) else []


def _parse(described: dict[str, Any], flat: dict[str, Tensor]) -> Checkpoint:
    """Return the checkpoint of a description and its tensors; a value of a wrong type raises an error."""
    settings, epoch, history = described["settings"], described["epoch"], described["history"]
    vocabulary, fingerprint = described.get("vocabulary"), dict(described.get("fingerprint", {}))
    tensors: dict[int, dict[str, Tensor]] = {seed: {} for seed in settings["seeds"]}
    for key, tensor in flat.items():
        seed, _, name = key.partition("/")
        tensors[int(seed)][name] = tensor
    numbers = [epoch, *tensors, *(row[name] for row in history for name in ("seed", "epoch"))]
    texts = [*described["failed"].values(), *fingerprint.values(), vocabulary or ""]
    texts += [settings[name] for name in ("rule", "model", "data")]
    plain = all(type(number) is int for number in numbers) and all(isinstance(text, str) for text in texts)
    if not (
        plain and isinstance(parse_json(fingerprint.get("options", "{}")), dict) and 0 <= epoch <= settings["epochs"]
    ):
        raise TypeError("a value has a wrong type or size")
    failed = {int(seed): why for seed, why in described["failed"].items()}
    settings = {"data_options": {}, **settings}  # older files have no data_options
    return Checkpoint(settings, epoch, history, failed, tensors, vocabulary, fingerprint)


def require_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that a saved run has the wanted settings; the error names the first one that differs."""
    for key in [*wanted, *saved]:
        if saved.get(key) != wanted.get(key):
            raise CheckpointError(
                f"{path} belongs to another run: its {key} is {saved.get(key)!r}, this one's is "
                f"{wanted.get(key)!r}; use the same settings, or another path."
            )


def require_same_shapes(wanted: dict[str, Tensor], saved: list[dict[str, Tensor]]) -> None:
    """Check that every replica's saved parameters and buffers have the names and shapes of the network's."""

    def list_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("optim/")}

    here = list_shapes(wanted)
    for there in map(list_shapes, saved):
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"the checkpoint belongs to another network: {name} has shape {there.get(name)} there and "
                    f"{here.get(name)} here."
                )


def fingerprint(learner: Learner, data: Dataset) -> dict[str, str]:
    """Return hashes of the network, of the source of what is the user's own, and of the data; and the learner's options.

    They tell apart networks and data of the same name. They do not depend on the device or the memory format. `data` covers
    a part of the data, as in version 0.1; `values` covers all, unless they are registered. `given` and `input_shape` are
    what `load` builds a learner with.
    """
    described = re.sub(" at 0x[0-9a-fA-F]+", "", repr(learner.model))
    plain = (str, int, float, list, tuple, dict)
    options = {
        name: next((v for v in values if isinstance(v, plain)), None)
        for name, default in options_of(type(learner)).items()
        for values in [(getattr(learner, name, None), learner.given_options.get(name), default)]
    }
    kinds: set[Any] = {type(module) for module in learner.modules()}
    sources = {hash_code(kind) for kind in kinds} - {None}
    contents, values = hashlib.sha256(), 0
    for tensor in data:
        if data.name not in DATASETS:  # registered data were verified when they were loaded
            values = zlib.crc32(_view_bytes(tensor), values)
        some = tensor[:: max(1, -(-tensor.nbytes // SAMPLE))]
        contents.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        contents.update(_view_bytes(some))
    return {
        "model": hashlib.sha256(described.encode()).hexdigest(),
        "data": contents.hexdigest(),
        "values": f"{values:08x}",
        "sources": " ".join(sorted(map(str, sources))),
        "options": json.dumps(options, sort_keys=True, default=repr),
        "given": json.dumps(learner.given_options, default=repr),
        "input_shape": json.dumps(data.x_train.shape[1:]),
    }


def require_same_origin(saved: Checkpoint, wanted: dict[str, str]) -> None:
    """Check that a saved run has the wanted network, data and options; older files do not know all of them."""
    for key in ("model", "sources", "data", "values", "options"):
        known = saved.fingerprint.get(key, wanted[key])
        if known != wanted[key] and not (key == "options" and _agree(known, wanted[key])):
            data = f"other data of the same name {saved.settings['data']!r}"
            other = {
                "model": f"another network of the same name {saved.settings['model']!r}",
                "sources": f"other source code of {saved.settings['rule']} or {saved.settings['model']}",
                "data": data,
                "values": data,
                "options": f"a learner with other options, {known} and not {wanted[key]}",
            }[key]
            raise CheckpointError(
                f"the checkpoint belongs to {other}; go on with what it was begun with, or use another path."
            )


def _agree(saved: str, wanted: str) -> bool:
    """Return whether options agree where both are known: version 0.1 left out some of them."""
    there, here = json.loads(saved), json.loads(wanted)
    return all(there[name] == here[name] for name in there.keys() & here.keys())
