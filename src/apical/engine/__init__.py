"""The engine: `fit`, the fast loop around any rule, and `sweep`, the same for several settings at once."""

from apical.engine.loading import load
from apical.engine.settings import split_for_sweep
from apical.engine.trainer import Fit, fit, seconds_per_epoch, sweep
from apical.engine.writers import TensorBoardWriter, WandbWriter

__all__ = ["Fit", "TensorBoardWriter", "WandbWriter", "fit", "load", "seconds_per_epoch", "split_for_sweep", "sweep"]
