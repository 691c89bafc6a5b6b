"""`apical.load`: the learners of a checkpoint, with the weights that they were saved with."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apical import models
from apical.core.learner import Learner
from apical.core.losses import LossFunction
from apical.core.recurrent import Elman
from apical.core.registry import RULES, make
from apical.data import DATASETS
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.engine.inputs import build_network
from apical.engine.settings import Model
from apical.errors import ApicalError, CheckpointError, describe_error


def load(path: str | Path, model: Model | None = None, *, loss: LossFunction | None = None) -> list[Learner]:
    """Return the learners of a checkpoint that `fit(checkpoint=…)` or `apical train --out` wrote, one per seed.

    model: what was passed to `fit`, if that was no name of apical's: a function that builds the network or, for one seed,
        the network itself.
    loss: the function, if the run had one of your own.

    They are in evaluation mode, on the CPU. Nothing in the file is executed: it is safetensors, not a pickle.

    >>> import tempfile
    >>> from apical import fit
    >>> path = tempfile.mkdtemp() + "/run.safetensors"
    >>> run = fit("mlp", "digits", epochs=1, seeds=2, checkpoint=path, progress=False)
    >>> [torch.equal(a.model[1].weight, b.model[1].weight) for a, b in zip(load(path), run.learners)]
    [True, True]
    """
    path = Path(path)
    saved = checkpoints.load(path)
    settings, seeds = saved.settings, saved.settings["seeds"]
    if settings["rule"].partition(":")[0] not in RULES:
        raise CheckpointError(
            f"{path} was trained by {settings['rule']!r}; import the module that defines this rule first."
        )
    if settings["loss"] not in ("cross_entropy", "mse") and loss is None:
        raise CheckpointError(f"{path} was trained with the loss {settings['loss']!r}; pass that function as loss=.")
    if isinstance(model, nn.Module) and len(seeds) > 1:
        raise CheckpointError(f"{path} has {len(seeds)} seeds; pass a function that builds the model as model=.")
    return [_rebuild(path, saved, seed, model, loss) for seed in seeds]


def _rebuild(path: Path, saved: Checkpoint, seed: int, model: Model | None, loss: LossFunction | None) -> Learner:
    """Return the learner of one seed."""
    settings, tensors = saved.settings, saved.tensors[seed]
    weights = {key.partition("/")[2]: t for key, t in tensors.items() if not key.startswith("optim/")}
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and replaced
        name = settings["model"] if model is None else model
        network: Any = _build_named(name, path, saved, weights) if isinstance(name, str) else build_network(name)
        if isinstance(network, Learner):
            learner = network
        else:
            learner = make(
                settings["rule"],
                network,
                input_shape=_find_input_shape(saved),
                loss=settings["loss"] if loss is None else loss,
                label_smoothing=settings["label_smoothing"],
                **json.loads(saved.fingerprint.get("given", json.dumps(settings["options"]))),
            )
    learner.to(next(t.dtype for t in weights.values() if t.is_floating_point()))
    try:
        learner.load_state_dict(weights)
    except RuntimeError as error:
        checkpoints.require_same_shapes(learner.state_dict(), [weights])
        raise CheckpointError(f"{path} does not fit its network: {describe_error(error)}") from error
    return learner.eval()


def _build_named(name: str, path: Path, saved: Checkpoint, weights: dict[str, Tensor]) -> nn.Module:
    """Build a network of apical's. Those that take their sizes from the data take them from the weights here."""
    try:
        if name == "rnn":
            (hidden, inputs), last = weights["model.rnn.weight_ih_l0"].shape, weights["model.readout.weight"]
            return Elman(nn.RNN(inputs, hidden, bias=False, batch_first=True), nn.Linear(hidden, len(last), bias=False))
        if name in models.TEXTCNNS:
            values, last = weights["model.0.0.0.weight"].shape[1], weights["model.3.weight"]
            return models.textcnn(values, len(last), models.TEXTCNNS[name])
        network: nn.Module = models.build(name, saved.settings["data"])
        return network
    except (KeyError, ApicalError) as error:
        raise CheckpointError(
            f"{path} was trained with a network of your own, {name!r}; pass the function that builds it as model=."
        ) from error


def _find_input_shape(saved: Checkpoint) -> tuple[int, ...] | None:
    """Return the shape of one example. Files of version 0.1 do not have it; registered data do."""
    if "input_shape" in saved.fingerprint:
        return tuple(json.loads(saved.fingerprint["input_shape"]))
    source = DATASETS.get(saved.settings["data"])
    return None if source is None else tuple(source.arrays["x_train"].shape[1:])
