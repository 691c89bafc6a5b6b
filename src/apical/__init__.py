"""apical: learning without backpropagation, in PyTorch."""

from apical import data
from apical.engine import Fit, fit
from apical.errors import ApicalError
from apical.learner import RULES, Credit, Learner, Update, make, rule_names
from apical.rules import (
    DLL,
    Backpropagation,
    DirectFeedbackAlignment,
    FeedbackAlignment,
    ForwardForward,
    LocalLosses,
    Readout,
    SignSymmetry,
)
from apical.version import VERSION as __version__

__all__ = [
    "DLL",
    "RULES",
    "ApicalError",
    "Backpropagation",
    "Credit",
    "DirectFeedbackAlignment",
    "FeedbackAlignment",
    "Fit",
    "ForwardForward",
    "Learner",
    "LocalLosses",
    "Readout",
    "SignSymmetry",
    "Update",
    "__version__",
    "data",
    "fit",
    "make",
    "rule_names",
]
