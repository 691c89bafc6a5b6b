"""Cross-validation: every fold of a data set is the test set once, and the accuracy that counts is the mean over folds."""

from typing import Any

from apical.bench.defaults import settings_for
from apical.data.sentences import FOLDS
from apical.engine import fit
from apical.errors import ApicalError


def cross_validate(
    rule: str, model: str, data: str, *, data_options: dict[str, Any] | None = None, **settings: Any
) -> dict[int, float]:
    """The test accuracy of each fold, in its own run: with several seeds, their mean.

    `settings` are those of `fit`; what is not given has its recorded default. Under the protocol 'validation' each
    fold's test sentences stay out of sight, and the accuracies are those on a tenth of its training sentences.
    """
    chosen = {**settings_for(rule, model, data), **settings}
    options = {**chosen.pop("data_options", {}), **(data_options or {})}
    if "fold" in options or "checkpoint" in chosen:
        raise ApicalError("cross-validation runs every fold, each without a checkpoint: leave both out.")
    return {
        fold: fit(model, data, rule=rule, data_options={**options, "fold": fold}, **chosen).accuracy
        for fold in range(FOLDS)
    }
