"""The engine: `fit`, the fast loop around any rule, and `sweep`, the same for several settings at once."""

from apical.engine.fit import Fit, fit, for_sweep, seconds_per_epoch, sweep

__all__ = ["Fit", "fit", "for_sweep", "seconds_per_epoch", "sweep"]
