"""Why do odd networks do worse on SVHN's test set than on held-out images of its training set? An experiment on the CPU.

    python tools/svhn_contrast.py

trains a small MLP with and without biases by backpropagation, one seed, and writes results/svhn-contrast.json: the accuracy
on digits lighter and on digits darker than what surrounds them. It is measured on the test set and on two held-out parts
of the training set: random images, most of whose photographs have other digits in the training part, and the last images of
the file, whose photographs are new to the network. Each network is trained twice, on images as they are and on images that
have mean 0 and spread 1 each, so that their brightness is no clue. The file also has the mean brightness of each part. It
takes about five minutes on one core.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import apical
from apical import models
from apical.files import replace_atomically

PATH = Path(__file__).resolve().parents[1] / "results" / "svhn-contrast.json"
MODEL, EPOCHS, LR, BATCH, DECAY = "mlp-256-128", 5, 3e-4, 128, 1e-3
CENTRE = (slice(6, 26), slice(10, 22))
"""The rows and columns of an image that the digit fills."""
BORDER = 4
"""The rows above and below that show what surrounds the digit."""


def measure_contrast(images: Tensor) -> Tensor:
    """Return how much lighter the middle of each image is than the rows above and below it."""
    grey = images.mean(1)
    surround = torch.cat([grey[:, :BORDER], grey[:, -BORDER:]], 1)
    return grey[:, *CENTRE].mean((1, 2)) - surround.mean((1, 2))


def standardise(images: Tensor) -> Tensor:
    """Give each image mean 0 and spread 1."""
    flat = images.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-6)).view_as(images)


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train a network by backpropagation with a rate that falls linearly to zero."""
    learner = apical.make("bp", model, label_smoothing=0.1)
    optim = torch.optim.Adam(learner.param_groups(lr=LR), weight_decay=DECAY)
    steps = EPOCHS * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 - step / steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x))[: len(x) // BATCH * BATCH].split(BATCH):
            learner.step(x[batch], y[batch], optim)
            schedule.step()


def run_experiment(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """Return the accuracy in percent by network, part of the data and contrast; and the brightness of the parts."""
    tenth = len(x) // 10
    shuffled = torch.randperm(len(x) - tenth, generator=torch.Generator().manual_seed(0))
    parts = {
        "random": (x[shuffled[:tenth]], y[shuffled[:tenth]]),
        "last": (x[-tenth:], y[-tenth:]),
        "test": (x_test, y_test),
    }
    kept = shuffled[tenth:]
    found = {
        "brightness": {name: average_by_contrast(images.mean((1, 2, 3)), images) for name, (images, _) in parts.items()}
    }
    for network in ("odd", "biased"):
        for kind, prepare in (("plain", lambda images: images), ("standardised", standardise)):
            torch.manual_seed(0)
            model = models.build(MODEL if network == "odd" else f"{MODEL}-bias", "svhn")
            train(model, prepare(x[kept]), y[kept])
            found[f"{network}_{kind}"] = {
                name: average_by_contrast(100 * is_right(model, prepare(images), labels), images)
                for name, (images, labels) in parts.items()
            }
    return found


@torch.no_grad()
def is_right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return 1 for each image that a network recognises, 0 for the others."""
    output: Tensor = model(x)
    return (output.argmax(1) == y).double()


def average_by_contrast(values: Tensor, images: Tensor) -> dict[str, float]:
    """Return the mean of a value over all images, over those with light and over those with dark digits."""
    light = measure_contrast(images) > 0
    chosen = {"all": values, "light": values[light], "dark": values[~light]}
    return {name: round(some.mean().item(), 2) for name, some in chosen.items()}


def main() -> None:
    found = run_experiment(*apical.data.load("svhn"))
    with replace_atomically(PATH) as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
