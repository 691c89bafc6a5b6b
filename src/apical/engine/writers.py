"""Ready writers for `fit(on_epoch=…)`: the curves of a run in TensorBoard or in Weights & Biases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apical.extras import import_extra


def list_scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each number of a history row; those of the alignment by layer.

    >>> list(list_scalars({"seed": 1, "epoch": 2, "loss": 0.5, "alignment": {"update": [None, 0.9]}}))
    [('loss/seed1', 0.5), ('alignment/update/layer1/seed1', 0.9)]
    """
    for name, value in row.items():
        if name == "alignment":
            for kind, cosines in value.items():
                for layer, cosine in enumerate(cosines):
                    if cosine is not None:
                        yield f"alignment/{kind}/layer{layer}/seed{row['seed']}", cosine
        elif name not in ("seed", "epoch"):
            yield f"{name}/seed{row['seed']}", value


class TensorBoardWriter:
    """Write every epoch to a folder for `tensorboard --logdir FOLDER`: `fit(..., on_epoch=TensorBoardWriter(folder))`.

    The tags are the names of the history with the seed, such as test_accuracy/seed0. Accuracies are between 0 and 1.
    """

    def __init__(self, folder: str | Path) -> None:
        import_extra("tensorboard", "TensorBoardWriter", "tensorboard")
        self.writer = import_extra("torch.utils.tensorboard", "TensorBoardWriter", "tensorboard").SummaryWriter(folder)

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for tag, value in list_scalars(row):
                self.writer.add_scalar(tag, value, row["epoch"])
        self.writer.flush()


class WandbWriter:
    """Log every epoch to Weights & Biases: `fit(..., on_epoch=WandbWriter(project="apical"))`.

    Args:
        run: a run that exists already; without one, `wandb.init(**options)` begins one.

    The names are those of `TensorBoardWriter`; the step is the epoch.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self.run = import_extra("wandb", "WandbWriter", "wandb").init(**options) if run is None else run

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        if rows:  # there are none if every seed diverged
            values = {tag: value for row in rows for tag, value in list_scalars(row)}
            self.run.log(values, step=rows[0]["epoch"], commit=True)
