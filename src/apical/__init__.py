"""apical: learning without backpropagation, in PyTorch."""

from apical import data
from apical.core.learner import Credit, Learner, Update
from apical.core.recurrent import Elman
from apical.core.registry import RULES, make, rule_names
from apical.core.sequential import Parallel
from apical.engine import Fit, TensorBoardWriter, WandbWriter, fit, load, sweep
from apical.errors import ApicalError
from apical.plausibility import Audit, audit
from apical.rules.bp import Backpropagation, Readout
from apical.rules.decay import DecayScheduler
from apical.rules.dfa import DirectFeedbackAlignment
from apical.rules.dll import DLL
from apical.rules.drtp import DirectRandomTargetProjection
from apical.rules.equilibrium import EquilibriumPropagation
from apical.rules.fa import FeedbackAlignment, SignSymmetry
from apical.rules.forward_forward import ForwardForward
from apical.rules.hebbian import Hebbian, SoftHebb
from apical.rules.local import LocalLosses
from apical.rules.perturbation import NodePerturbation, WeightPerturbation
from apical.rules.predictive_coding import IncrementalPredictiveCoding, PredictiveCoding
from apical.rules.stdp import RewardSTDP
from apical.rules.streaming import Streaming
from apical.rules.targets import DifferenceTargetPropagation, TargetPropagation
from apical.sampling import sample
from apical.version import VERSION as __version__

__all__ = [
    "DLL",
    "RULES",
    "ApicalError",
    "Audit",
    "Backpropagation",
    "Credit",
    "DecayScheduler",
    "DifferenceTargetPropagation",
    "DirectFeedbackAlignment",
    "DirectRandomTargetProjection",
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
    "Streaming",
    "TargetPropagation",
    "TensorBoardWriter",
    "Update",
    "WandbWriter",
    "WeightPerturbation",
    "__version__",
    "audit",
    "data",
    "fit",
    "load",
    "make",
    "rule_names",
    "sample",
    "sweep",
]
