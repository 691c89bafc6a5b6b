"""``digits``: 1,797 handwritten digits of 8×8 pixels. They come with scikit-learn, so nothing is downloaded."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from apical.data.images import Images
from apical.data.source import Arrays, PathLike, Report
from apical.extras import import_extra


@dataclass(frozen=True, kw_only=True)
class Digits(Images):
    """The digits, permuted with CPU seed 0: the first ``train`` examples are for training, the others for testing.

    Values are 0 to 16; with mean and std ½ a network sees −1 to 1. The registry has the SHA-256 of the split
    arrays, so another version of the data or another permutation raises an error.
    """

    @property
    def remedy(self) -> str:
        return "reinstalling scikit-learn brings the right ones back"

    def place(self, root: PathLike | None = None) -> Path:
        """Return the folder of the package that contains the data; ``root`` is not used."""
        return Path(import_extra("sklearn.datasets", "the digits data set").__file__).parent

    def state(self, root: PathLike | None = None) -> str:
        return "absent" if importlib.util.find_spec("sklearn") is None else "present"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        bunch = import_extra("sklearn.datasets", "the digits data set").load_digits()
        generator = torch.Generator("cpu").manual_seed(0)
        order = torch.randperm(self.train + self.test, generator=generator, device="cpu").numpy()
        x, y = bunch.images[order].astype("uint8"), bunch.target[order].astype("uint8")
        n = self.train
        arrays = {"x_train": x[:n], "y_train": y[:n], "x_test": x[n:], "y_test": y[n:]}
        return arrays, self.certify(arrays, None, self.place(root))
