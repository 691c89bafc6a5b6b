"""The engine: `fit`, the fast loop around any rule, and `sweep`, the same for several settings at once."""

from apical.engine.fit import VARIES, Fit, fit, seconds_per_epoch, sweep

__all__ = ["VARIES", "Fit", "fit", "seconds_per_epoch", "sweep"]
