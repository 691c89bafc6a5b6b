"""The engine: `fit`, the fast loop around any rule."""

from apical.engine.fit import Fit, fit

__all__ = ["Fit", "fit"]
