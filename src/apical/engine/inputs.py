"""From what a user passes to `fit` to learners, data and a device, each checked before anything runs."""

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
from apical.engine.settings import VALIDATION_SHARE, Settings, name_of, require_options, seed_list
from apical.errors import ApicalError, CheckpointError
from apical.files import writable

Plain = nn.Sequential | Elman
Model = str | Callable[[], Plain] | Plain | Learner


def load_dataset(data: str | Dataset | Sequence[Tensor], options: dict[str, Any] | None = None) -> Dataset:
    """A data set by its name, loaded with its options, or the user's own four tensors, checked."""
    require_options("data_options", options or {})
    if isinstance(data, str):
        # `load` has more keywords than options: where to look for a file is none of the data's.
        datasets.lookup(data).check_options(options or {})
        return datasets.load(data, **(options or {}))
    if options:
        raise ApicalError("data_options are for data that are given by name; these are tensors already.")
    return data if isinstance(data, Dataset) else datasets.from_tensors(*unpack_tensors(data))


def unpack_tensors(data: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not isinstance(data, Sequence) or len(data) != 4:
        raise ApicalError("data must be a registered name or four tensors x_train, y_train, x_test, y_test.")
    x_train, y_train, x_test, y_test = data
    return x_train, y_train, x_test, y_test


def choose_rule(model: Model, rule: str | None) -> str:
    if isinstance(model, Learner):
        if rule is not None and registry.resolve(rule) != registry.resolve(model.name):
            raise ApicalError(f"the learner's rule is {model.name!r}, not {rule!r}; leave rule out.")
        return model.name
    chosen = "dll" if rule is None else rule
    registry.resolve(chosen)
    return chosen


def make_settings(
    model: Model,
    data: Dataset,
    *,
    rule: str | None = None,
    seeds: int | Sequence[int] = 1,
    **settings: Any,
) -> Settings:
    """What `fit` was asked for, by name; what it was not asked for has its default."""
    known = {field.name for field in fields(Settings)} - {"model", "data", "data_options"}
    for name in settings:
        if name not in known:
            raise ApicalError(f"fit has no setting {name!r}; the settings are {', '.join(sorted(known))}.")
    if settings.get("loss") is None:
        settings["loss"] = data.loss
    return Settings(
        rule=choose_rule(model, rule),
        model=model if isinstance(model, str) else name_of(model),
        data=data.name,
        data_options=dict(data.options),
        seeds=seed_list(seeds),
        **settings,
    )


def choose_loss(
    model: Model, loss: str | LossFunction | None, label_smoothing: float, options: dict[str, Any]
) -> tuple[str | LossFunction | None, float]:
    """The loss that was asked for, if any: a learner has its own already, and its rule's options, too."""
    if not isinstance(model, Learner):
        return loss, label_smoothing
    if loss is not None or label_smoothing or options:
        raise ApicalError(
            "a learner has its loss, label_smoothing and options already; leave them out, or give them to make()."
        )
    return model.loss.name, model.loss.label_smoothing


def build_learners(model: Model, settings: Settings, data: Dataset) -> list[Learner]:
    """One learner per seed; weights and feedback weights are drawn from the CPU's generator at that seed."""
    if isinstance(model, nn.Module) and len(settings.seeds) > 1:
        raise ApicalError(
            "a model or learner that exists already has one seed; pass a function that builds it."
        )
    if isinstance(model, Learner):
        return [model]
    team = []
    for seed in settings.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            team.append(
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
    for learner in team:
        own = {id(p) for p in learner.parameters()}
        if own & seen:
            raise ApicalError(
                "the function returned the same layers twice; it must build a new model each time."
            )
        seen |= own
    return team


def build_network(model: str | Callable[[], Plain] | Plain, data: Dataset) -> Plain:
    if isinstance(model, str):
        return models.build(model, data)
    # What is neither an nn.Sequential nor an Elman in the end is refused by Network, in a sentence.
    return model if isinstance(model, nn.Module) or not callable(model) else model()  # type: ignore[return-value]


def check_data(learner: Learner, data: Dataset) -> None:
    """The data's shapes and labels against the network, once, before any step."""
    learner.require_unchanged()
    validation.one_type(learner.network, learner.params())
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        validation.targets(learner.network, learner.loss, x, y, values=True)
    # Θ, heads or inverses alone change no prediction, unless the rule predicts by what is its own.
    if not any(name.startswith("model.") or not learner.MODEL_PREDICTS for name in learner.trainable):
        raise validation.nothing_to_train()


def hold_out(data: Dataset, learner: Learner) -> Dataset:
    """A tenth of the training data in the place of the test data, chosen once for all seeds.

    Sequences are windows of something longer and may overlap: of these it is the last tenth, and the windows before it
    that share values with it are left out.
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
        data,
        x_train=data.x_train[keep],
        y_train=data.y_train[keep],
        x_test=data.x_train[out],
        y_test=data.y_train[out],
    )


def move_to_device(data: Dataset, device: torch.device, learner: Learner) -> Dataset:
    dtype = learner.forward_weights[0].dtype

    def values(t: Tensor) -> Tensor:
        return t.to(device, dtype) if t.is_floating_point() else t.to(device)

    x_train, y_train, x_test, y_test = (values(t) for t in data)
    # A loss of the user's own may take integers that are no class labels; then there is no accuracy.
    output, axis = learner.network.shapes(x_train.shape[1:]).output, learner.network.CLASSES - 1
    labels = y_train.shape[1:] == output[:axis] + output[axis + 1 :]
    return replace(
        data,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=data.classes if labels else None,
    )


def load_saved(path: Path | None, resume: bool, settings: Settings) -> Checkpoint | None:
    if path is None:
        if resume:
            raise ApicalError("resume=True needs the checkpoint to go on from: pass checkpoint=PATH.")
        return None
    if path.suffix != ".safetensors":
        raise ApicalError(f"the checkpoint {path} must be a file that ends in .safetensors.")
    if not path.exists():
        writable(path.absolute().parent)
        return None
    if not resume:
        raise CheckpointError(
            f"{path} exists already; go on from it with resume=True, or choose another path: it is not overwritten."
        )
    saved = checkpoints.load(path)
    checkpoints.require_same(path, saved.settings, settings.to_dict())
    return saved
