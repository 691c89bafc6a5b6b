"""apical: learning without backpropagation, in PyTorch."""

from apical import data
from apical.engine import Fit, fit, sweep
from apical.errors import ApicalError
from apical.learner import RULES, Credit, Learner, Update, make, rule_names
from apical.rules import (
    DLL,
    Backpropagation,
    DifferenceTargetPropagation,
    DirectFeedbackAlignment,
    EquilibriumPropagation,
    FeedbackAlignment,
    ForwardForward,
    IncrementalPredictiveCoding,
    LocalLosses,
    PredictiveCoding,
    Readout,
    RewardSTDP,
    SignSymmetry,
    TargetPropagation,
)
from apical.version import VERSION as __version__

__all__ = [
    "DLL",
    "RULES",
    "ApicalError",
    "Backpropagation",
    "Credit",
    "DifferenceTargetPropagation",
    "DirectFeedbackAlignment",
    "EquilibriumPropagation",
    "FeedbackAlignment",
    "Fit",
    "ForwardForward",
    "IncrementalPredictiveCoding",
    "Learner",
    "LocalLosses",
    "PredictiveCoding",
    "Readout",
    "RewardSTDP",
    "SignSymmetry",
    "TargetPropagation",
    "Update",
    "__version__",
    "data",
    "fit",
    "make",
    "rule_names",
    "sweep",
]
