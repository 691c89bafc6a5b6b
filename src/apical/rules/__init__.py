"""The rules: one file per family. Importing this package fills `apical.RULES`, in the order of the tables."""

# isort: off
from apical.rules.bp import Backpropagation, Readout
from apical.rules.fa import FeedbackAlignment, SignSymmetry
from apical.rules.dfa import DirectFeedbackAlignment
from apical.rules.dll import DLL
from apical.rules.local import LocalLosses
from apical.rules.predictive_coding import IncrementalPredictiveCoding, PredictiveCoding
from apical.rules.perturbation import NodePerturbation, WeightPerturbation
from apical.rules.targets import DifferenceTargetPropagation, TargetPropagation
from apical.rules.hebbian import Hebbian, SoftHebb
from apical.rules.stdp import RewardSTDP
from apical.rules.forward_forward import ForwardForward
from apical.rules.equilibrium import EquilibriumPropagation
# isort: on

__all__ = [
    "DLL",
    "Backpropagation",
    "DifferenceTargetPropagation",
    "DirectFeedbackAlignment",
    "EquilibriumPropagation",
    "FeedbackAlignment",
    "ForwardForward",
    "Hebbian",
    "IncrementalPredictiveCoding",
    "LocalLosses",
    "NodePerturbation",
    "PredictiveCoding",
    "Readout",
    "RewardSTDP",
    "SignSymmetry",
    "SoftHebb",
    "TargetPropagation",
    "WeightPerturbation",
]
