"""The engine: `fit`, the fast loop around any rule, and `sweep`, the same for several settings at once."""

from apical.engine.settings import split_for_sweep
from apical.engine.trainer import Fit, fit, seconds_per_epoch, sweep

__all__ = ["Fit", "fit", "seconds_per_epoch", "split_for_sweep", "sweep"]
