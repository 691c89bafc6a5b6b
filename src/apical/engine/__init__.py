"""The engine: `fit`, the fast loop around any rule, and `sweep`, the same for several settings at once."""

from apical.engine.fit import Fit, fit, seconds_per_epoch, split_for_sweep, sweep

__all__ = ["Fit", "fit", "seconds_per_epoch", "split_for_sweep", "sweep"]
