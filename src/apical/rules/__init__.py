"""The rules: one file per family. Importing this package fills `apical.RULES`, in the order of the tables."""

# isort: off
from apical.rules.bp import Backpropagation, Readout
from apical.rules.fa import FeedbackAlignment, SignSymmetry
from apical.rules.dfa import DirectFeedbackAlignment
from apical.rules.dll import DLL
from apical.rules.perturbation import NodePerturbation, WeightPerturbation
from apical.rules.hebbian import Hebbian, SoftHebb
# isort: on

__all__ = [
    "DLL",
    "Backpropagation",
    "DirectFeedbackAlignment",
    "FeedbackAlignment",
    "Hebbian",
    "NodePerturbation",
    "Readout",
    "SignSymmetry",
    "SoftHebb",
    "WeightPerturbation",
]
