"""Turn what a user passes to `fit` into settings, learners and data, each checked before anything runs."""

import inspect
import os
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from apical import data as datasets
from apical import models
from apical.core import registry, validation
from apical.core.learner import Learner
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.engine.settings import FitArguments, Model, Settings, expand_seeds, get_name, require_options
from apical.errors import ApicalError, CheckpointError, UnsupportedError
from apical.files import check_writable


def load_dataset(data: str | Dataset | Sequence[Tensor], options: dict[str, Any] | None = None) -> Dataset:
    """Load a data set by its name, with its options, or check the user's own four tensors."""
    require_options("data_options", options or {})
    if isinstance(data, str):
        # Check here: `load` also takes keywords that are not options of the data, such as the folder of its files.
        datasets.lookup(data).check_options(options or {})
        return datasets.load(data, **(options or {}))
    if options:
        raise ApicalError("data_options are for data that are given by name; these are tensors already.")
    if isinstance(data, Dataset):
        return data
    if not isinstance(data, Sequence) or len(data) != 4:
        raise ApicalError("data must be a registered name or four tensors x_train, y_train, x_test, y_test.")
    return datasets.from_tensors(*data)


VALIDATION_SHARE = 0.1
EXAMPLES = 8
"""Training examples on which a model that is not read as layers is run once, to see what it does with its parameters."""
SETTINGS = frozenset(each.name for each in fields(Settings)) - {"model", "data", "data_options"}
"""The keywords of `fit` that are settings."""


def make_settings(
    model: Model, data: Dataset, *, rule: str | None = None, seeds: int | Sequence[int] = 1, **settings: Any
) -> Settings:
    """Return the settings of a run from the keywords of `fit`; the others have their defaults."""
    for name in settings:
        if name not in SETTINGS:
            raise ApicalError(f"fit has no setting {name!r}; the settings are {', '.join(sorted(SETTINGS))}.")
    if isinstance(model, Learner):
        if rule is not None and registry.resolve(rule) != registry.resolve(model.name):
            raise ApicalError(f"the learner's rule is {model.name!r}, not {rule!r}; leave rule out.")
        if settings.get("loss") is not None or settings.get("label_smoothing") or settings.get("options"):
            raise ApicalError(
                "a learner has its loss, label_smoothing and options already; leave them out, or give them to make()."
            )
        rule = model.name
        settings |= {"loss": model.loss.name, "label_smoothing": model.loss.label_smoothing}
    rule = "dll" if rule is None else rule
    registry.resolve(rule)
    if settings.get("loss") is None:
        settings["loss"] = data.loss
    name = model if isinstance(model, str) else get_name(model)
    return Settings(rule, name, data.name, seeds=expand_seeds(seeds), data_options=dict(data.options), **settings)


def build_learners(model: Model, settings: Settings, data: Dataset) -> list[Learner]:
    """Build one learner per seed; its weights and feedback weights are drawn from the CPU's generator with that seed."""
    if isinstance(model, nn.Module) and len(settings.seeds) > 1:
        raise ApicalError("a model or learner that exists already has one seed; pass a function that builds it.")
    if isinstance(model, Learner):
        return [model]
    learners: list[Learner] = []
    for seed in settings.seeds:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            if learners:  # what is said of the first one holds for all
                warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(seed)
            network = models.build(model, data) if isinstance(model, str) else build_network(model)
            common: dict[str, Any] = {"input_shape": tuple(data.x_train.shape[1:]), "loss": settings.loss}
            common["label_smoothing"] = settings.label_smoothing
            rule, _ = registry.resolve(settings.rule)
            if "example" in inspect.signature(rule).parameters:
                common["example"] = data.x_train[:EXAMPLES]
            learners.append(registry.make(settings.rule, network, **common, **settings.options))
    seen: set[int] = set()
    for learner in learners:
        own = {id(p) for p in learner.parameters()}
        if own & seen:
            raise ApicalError("the function returned the same layers twice; it must build a new model each time.")
        seen |= own
    return learners


def build_network(model: Any) -> Any:
    """Return a network as it is, or what the user's function returns, which the learner refuses if it is no network."""
    if not callable(model) or isinstance(model, nn.Module):
        return model
    try:
        parameters = inspect.signature(model).parameters.values()
    except ValueError:  # some built-in functions have no signature
        parameters = {}.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise UnsupportedError(
            f"the function that builds the model takes {', '.join(needed)}, but is called without arguments, once for each "
            "seed; lambda: build(...) works."
        )
    return model()


def check_data(learner: Learner, data: Dataset) -> None:
    """Check the data's shapes and labels against the network, once, before any step."""
    learner.check_modules_unchanged()
    validation.check_weights(learner.network, learner.model)
    validation.check_one_dtype(learner.network, learner.params())
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        validation.check_targets(learner.network, learner.loss, x, y, values=True)
    # If only Θ, local heads or inverses are trainable, predictions never change, unless the rule predicts with them.
    if not any(name.startswith("model.") or not learner.MODEL_PREDICTS for name in learner.trainable):
        raise validation.make_nothing_to_train_error()


def hold_out(data: Dataset) -> Dataset:
    """Replace the test data by a tenth of the training data, the same for all seeds.

    Windows of a sequence may overlap, which the data knows. So of them it is the last tenth, and the windows before it that
    share values with it are not used at all.
    """
    count, gap = len(data.x_train), data.overlap or 0
    held = max(1, round(count * VALIDATION_SHARE))
    if count <= held + gap:
        apart = f" with {gap} between them, so that they share no value" if gap else ""
        raise ApicalError(f"protocol='validation' needs at least two training examples{apart}.")
    if data.overlap is not None:
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
    classes = data.classes if y_train.shape[1:] == output[:axis] + output[axis + 1 :] else None
    return replace(data, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=classes)


def load_saved(arguments: FitArguments, settings: Settings) -> Checkpoint | None:
    """Load the checkpoint to resume from, or return None if the run starts from the beginning."""
    path = arguments.path
    if path is None:
        if arguments.resume:
            raise ApicalError("resume=True needs the checkpoint to go on from: pass checkpoint=PATH.")
        return None
    if path.suffix != ".safetensors":
        raise ApicalError(f"the checkpoint {path} must be a file that ends in .safetensors.")
    if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises an error if the name is too long
        check_writable(path.absolute())
        return None
    if not arguments.resume:
        raise CheckpointError(
            f"{path} exists already; go on from it with resume=True, or choose another path: it is not overwritten."
        )
    saved, wanted = checkpoints.load(path), settings.to_dict()
    there, here = (str(each["data"]).partition(":") for each in (saved.settings, wanted))
    if (
        there[:2] == here[:2] and here[1] and "values" in saved.fingerprint
    ):  # text:PATH: the contents count, not the path
        wanted["data"] = saved.settings["data"]
    checkpoints.require_same(path, saved.settings, wanted)
    return saved
