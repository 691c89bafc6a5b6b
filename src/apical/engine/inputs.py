"""Turn what a user passes to `fit` into settings, learners and data, each checked before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apical import data as datasets
from apical import models
from apical.core import registry, validation
from apical.core.learner import Learner
from apical.core.losses import LossFunction
from apical.core.recurrent import Elman
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.engine.settings import VALIDATION_SHARE, Settings, expand_seeds, get_name, require_options
from apical.errors import ApicalError, CheckpointError
from apical.files import check_writable

PlainModel = nn.Sequential | Elman
"""A network that is not wrapped in a learner yet."""
Model = str | Callable[[], PlainModel] | PlainModel | Learner


def load_dataset(data: str | Dataset | Sequence[Tensor], options: dict[str, Any] | None = None) -> Dataset:
    """Load a data set by its name, with its options, or check the user's own four tensors."""
    require_options("data_options", options or {})
    if isinstance(data, str):
        # Check here: `load` also takes keywords that are not options of the data, such as the folder of its files.
        datasets.lookup(data).check_options(options or {})
        return datasets.load(data, **(options or {}))
    if options:
        raise ApicalError("data_options are for data that are given by name; these are tensors already.")
    return data if isinstance(data, Dataset) else datasets.from_tensors(*unpack_tensors(data))


def unpack_tensors(data: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the user's four tensors, or raise an error if data is not a sequence of four."""
    if not isinstance(data, Sequence) or len(data) != 4:
        raise ApicalError("data must be a registered name or four tensors x_train, y_train, x_test, y_test.")
    x_train, y_train, x_test, y_test = data
    return x_train, y_train, x_test, y_test


def choose_rule(model: Model, rule: str | None) -> str:
    """Return the name of the rule: the one asked for, a learner's own, or 'dll'."""
    if isinstance(model, Learner):
        if rule is not None and registry.resolve(rule) != registry.resolve(model.name):
            raise ApicalError(f"the learner's rule is {model.name!r}, not {rule!r}; leave rule out.")
        return model.name
    chosen = "dll" if rule is None else rule
    registry.resolve(chosen)
    return chosen


def make_settings(
    model: Model, data: Dataset, *, rule: str | None = None, seeds: int | Sequence[int] = 1, **settings: Any
) -> Settings:
    """Return the settings of a run from the keywords of `fit`; the others have their defaults."""
    known = {field.name for field in fields(Settings)} - {"model", "data", "data_options"}
    for name in settings:
        if name not in known:
            raise ApicalError(f"fit has no setting {name!r}; the settings are {', '.join(sorted(known))}.")
    if settings.get("loss") is None:
        settings["loss"] = data.loss
    return Settings(
        rule=choose_rule(model, rule),
        model=model if isinstance(model, str) else get_name(model),
        data=data.name,
        data_options=dict(data.options),
        seeds=expand_seeds(seeds),
        **settings,
    )


def choose_loss(
    model: Model, loss: str | LossFunction | None, label_smoothing: float, options: dict[str, Any]
) -> tuple[str | LossFunction | None, float]:
    """Return loss and label smoothing: those asked for, or a learner's own, which cannot be changed here."""
    if not isinstance(model, Learner):
        return loss, label_smoothing
    if loss is not None or label_smoothing or options:
        raise ApicalError(
            "a learner has its loss, label_smoothing and options already; leave them out, or give them to make()."
        )
    return model.loss.name, model.loss.label_smoothing


def build_learners(model: Model, settings: Settings, data: Dataset) -> list[Learner]:
    """Build one learner per seed; its weights and feedback weights are drawn from the CPU's generator with that seed."""
    if isinstance(model, nn.Module) and len(settings.seeds) > 1:
        raise ApicalError("a model or learner that exists already has one seed; pass a function that builds it.")
    if isinstance(model, Learner):
        return [model]
    learners = []
    for seed in settings.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            learners.append(
                registry.make(
                    settings.rule,
                    build_network(model, data),
                    input_shape=tuple(data.x_train.shape[1:]),
                    loss=settings.loss,
                    label_smoothing=settings.label_smoothing,
                    **settings.options,
                )
            )
    seen: set[int] = set()
    for learner in learners:
        own = {id(p) for p in learner.parameters()}
        if own & seen:
            raise ApicalError("the function returned the same layers twice; it must build a new model each time.")
        seen |= own
    return learners


def build_network(model: str | Callable[[], PlainModel] | PlainModel, data: Dataset) -> PlainModel:
    """Build a network by its name or with the user's function, or return the user's network."""
    if isinstance(model, str):
        return models.build(model, data)
    # The user's function may return anything; the learner refuses what is neither an nn.Sequential nor an Elman.
    return model if isinstance(model, nn.Module) or not callable(model) else model()  # type: ignore[return-value]


def check_data(learner: Learner, data: Dataset) -> None:
    """Check the data's shapes and labels against the network, once, before any step."""
    learner.check_modules_unchanged()
    validation.check_one_dtype(learner.network, learner.params())
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        validation.check_targets(learner.network, learner.loss, x, y, values=True)
    # If only Θ, local heads or inverses are trainable, predictions never change, unless the rule predicts with them.
    if not any(name.startswith("model.") or not learner.MODEL_PREDICTS for name in learner.trainable):
        raise validation.make_nothing_to_train_error()


def hold_out(data: Dataset, learner: Learner) -> Dataset:
    """Replace the test data by a tenth of the training data, the same for all seeds.

    Sequences are windows of a longer one and may overlap. So for them it is the last tenth, and the windows before it that
    share values with it are not used at all.
    """
    count, gap = len(data.x_train), data.overlap or 0
    held = max(1, round(count * VALIDATION_SHARE))
    if count <= held + gap:
        apart = f" with {gap} between them, so that they share no value" if gap else ""
        raise ApicalError(f"protocol='validation' needs at least two training examples{apart}.")
    if learner.network.recurrent:
        order = torch.arange(count).roll(held)
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    order = order.to(data.x_train.device)
    keep, out = order[held : count - gap], order[:held]
    return replace(
        data, x_train=data.x_train[keep], y_train=data.y_train[keep], x_test=data.x_train[out], y_test=data.y_train[out]
    )


def move_to_device(data: Dataset, device: torch.device, learner: Learner) -> Dataset:
    """Move the data to the device, and floating-point data to the dtype of the network."""
    dtype = learner.forward_weights[0].dtype

    def move(t: Tensor) -> Tensor:
        return t.to(device, dtype) if t.is_floating_point() else t.to(device)

    x_train, y_train, x_test, y_test = (move(t) for t in data)
    # A user's own loss may take integers that are not class labels; then there is no accuracy.
    output, axis = learner.network.shapes(x_train.shape[1:]).output, learner.network.CLASSES - 1
    are_labels = y_train.shape[1:] == output[:axis] + output[axis + 1 :]
    return replace(
        data,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=data.classes if are_labels else None,
    )


def load_saved(path: Path | None, resume: bool, settings: Settings) -> Checkpoint | None:
    """Load the checkpoint to resume from, or return None if the run starts from the beginning."""
    if path is None:
        if resume:
            raise ApicalError("resume=True needs the checkpoint to go on from: pass checkpoint=PATH.")
        return None
    if path.suffix != ".safetensors":
        raise ApicalError(f"the checkpoint {path} must be a file that ends in .safetensors.")
    if not path.exists():
        check_writable(path.absolute().parent)
        return None
    if not resume:
        raise CheckpointError(
            f"{path} exists already; go on from it with resume=True, or choose another path: it is not overwritten."
        )
    saved = checkpoints.load(path)
    checkpoints.require_same(path, saved.settings, settings.to_dict())
    return saved
