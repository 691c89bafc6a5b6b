"""The rules: one file per family. Importing this package fills `apical.RULES`, in the order of the tables."""

# isort: off
from apical.rules import bp, fa, dfa, dll, streaming, local, drtp, predictive_coding  # noqa: F401
from apical.rules import perturbation, targets, hebbian, stdp, forward_forward, equilibrium  # noqa: F401
