"""apical: learning without backpropagation, in PyTorch."""

from apical import data
from apical.core.learner import Credit, Learner, Update
from apical.core.parsing import Parallel
from apical.core.recurrent import Elman
from apical.core.registry import RULES, make, rule_names
from apical.engine import Fit, fit, sweep
from apical.errors import ApicalError
from apical.plausibility import Audit, audit
from apical.rules import (
    DLL,
    Backpropagation,
    DifferenceTargetPropagation,
    DirectFeedbackAlignment,
    EquilibriumPropagation,
    FeedbackAlignment,
    ForwardForward,
    Hebbian,
    IncrementalPredictiveCoding,
    LocalLosses,
    NodePerturbation,
    PredictiveCoding,
    Readout,
    RewardSTDP,
    SignSymmetry,
    SoftHebb,
    TargetPropagation,
    WeightPerturbation,
)
from apical.sampling import sample
from apical.version import VERSION as __version__

__all__ = [
    "DLL",
    "RULES",
    "ApicalError",
    "Audit",
    "Backpropagation",
    "Credit",
    "DifferenceTargetPropagation",
    "DirectFeedbackAlignment",
    "Elman",
    "EquilibriumPropagation",
    "FeedbackAlignment",
    "Fit",
    "ForwardForward",
    "Hebbian",
    "IncrementalPredictiveCoding",
    "Learner",
    "LocalLosses",
    "NodePerturbation",
    "Parallel",
    "PredictiveCoding",
    "Readout",
    "RewardSTDP",
    "SignSymmetry",
    "SoftHebb",
    "TargetPropagation",
    "Update",
    "WeightPerturbation",
    "__version__",
    "audit",
    "data",
    "fit",
    "make",
    "rule_names",
    "sample",
    "sweep",
]
