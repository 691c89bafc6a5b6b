"""Cross-validation: which fits are made, with which settings."""

from types import SimpleNamespace
from typing import Any

import pytest

from apical.bench import folds
from apical.errors import ApicalError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `fit` was asked for; the accuracy of fold k is k²."""
    made: list[dict[str, Any]] = []

    def fit(model: str, data: str, **settings: Any) -> SimpleNamespace:
        made.append({"model": model, "data": data, **settings})
        return SimpleNamespace(accuracy=settings["data_options"]["fold"] ** 2)

    monkeypatch.setattr(folds, "fit", fit)
    return made


def test_every_fold_is_run_once_with_the_same_settings(calls: list[dict[str, Any]]) -> None:
    found = folds.cross_validate("fa", "mine", "custom", lr=0.5, data_options={"length": 7})
    assert found == {k: k**2 for k in range(10)}
    assert [call.pop("data_options") for call in calls] == [{"length": 7, "fold": k} for k in range(10)]
    assert all(call == {"model": "mine", "data": "custom", "rule": "fa", "lr": 0.5} for call in calls)


def test_settings_that_are_not_given_are_the_recorded_ones(calls: list[dict[str, Any]]) -> None:
    folds.cross_validate("bp", "mlp", "mnist", epochs=1)
    assert {call["batch_size"] for call in calls} == {128}
    assert {call["epochs"] for call in calls} == {1}


@pytest.mark.parametrize("wrong", [{"data_options": {"fold": 3}}, {"checkpoint": "run.safetensors"}])
def test_a_fold_or_a_checkpoint_of_ones_own_is_refused(
    wrong: dict[str, Any], calls: list[dict[str, Any]]
) -> None:
    with pytest.raises(ApicalError, match="every fold"):
        folds.cross_validate("bp", "textcnn", "mr", **wrong)
    assert calls == []


def test_recorded_data_options_hold_beside_the_fold(calls: list[dict[str, Any]]) -> None:
    folds.cross_validate("bp", "rnn", "tinyshakespeare", data_options={"stride": 8})
    assert calls[4]["data_options"] == {"window": 32, "stride": 8, "fold": 4}
