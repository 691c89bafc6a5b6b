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
    Hebbian,
    NodePerturbation,
    Readout,
    SignSymmetry,
    SoftHebb,
    WeightPerturbation,
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
    "Hebbian",
    "Learner",
    "NodePerturbation",
    "Readout",
    "SignSymmetry",
    "SoftHebb",
    "Update",
    "WeightPerturbation",
    "__version__",
    "data",
    "fit",
    "make",
    "rule_names",
]
