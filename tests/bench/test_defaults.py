"""The recorded settings are settings that `fit` takes, for rules, models and data that exist."""

import inspect
import tomllib
from importlib import resources
from typing import Any

import pytest

import apical
from apical import models
from apical.bench.defaults import settings_for
from apical.data import DATASETS, Characters, Series
from apical.engine.settings import Settings
from apical.learner import options_of, resolve

TABLE: dict[str, Any] = tomllib.loads(
    resources.files("apical.bench").joinpath("defaults.toml").read_text("utf-8")
)
NETWORKS = [(data, model) for data, kinds in TABLE.items() for model in kinds]
SETTINGS = set(inspect.signature(apical.fit).parameters) - {"model", "data", "rule", "seeds", "device"}


@pytest.mark.parametrize(("data", "model"), NETWORKS)
def test_every_entry_is_of_a_network_that_exists(data: str, model: str) -> None:
    assert data in DATASETS
    if model == "rnn":  # its sizes are the data's
        assert isinstance(DATASETS[data], Characters | Series)
        DATASETS[data].check_options(TABLE[data][model].get("data_options", {}))
    else:
        assert models.build(model, data)


@pytest.mark.parametrize(("data", "model"), NETWORKS)
@pytest.mark.parametrize("rule", apical.rule_names())
def test_every_entry_is_a_valid_setting_of_fit(data: str, model: str, rule: str) -> None:
    settings = settings_for(rule, model, data)
    assert set(settings) <= SETTINGS
    assert Settings(rule, model, data, **settings).lr > 0  # its own checks pass
    assert set(settings.get("options", {})) <= set(options_of(resolve(rule)[0]))


@pytest.mark.parametrize(("data", "model"), NETWORKS)
def test_every_rule_that_is_named_exists_and_overrides_the_common_settings(data: str, model: str) -> None:
    entry = TABLE[data][model]
    common = {key: value for key, value in entry.items() if key != "rules"}
    for rule in apical.rule_names():
        own = entry.get("rules", {}).get(rule, {})
        assert settings_for(rule, model, data) == {**common, **own}
    assert set(entry.get("rules", {})) <= set(apical.rule_names())


def test_every_named_network_has_settings() -> None:
    assert {(data, "mlp") for data in models.MLPS} <= set(NETWORKS)
    assert {(data, "cnn") for data in models.CNNS} <= set(NETWORKS)


def test_nothing_is_recorded_for_what_is_not_named() -> None:
    assert settings_for("dll", "mine:net", "digits") == {}
    assert settings_for("dll", "mlp", "custom") == {}


def test_the_papers_own_settings_of_the_mlps_are_kept() -> None:
    """Appendix D: learning rate and batch size of each data set's MLP (the results say where ours differ)."""
    paper = {"mnist": (1e-3, 128), "fashion_mnist": (5e-4, 64), "svhn": (5e-5, 64), "cifar10": (8e-5, 64)}
    for data, (lr, batch) in paper.items():
        settings = settings_for("dll", "mlp", data)
        assert (settings["lr"], settings["batch_size"]) == (lr, batch)


def test_a_caller_cannot_change_the_table() -> None:
    settings_for("dll", "mlp", "mnist")["lr"] = 99
    assert settings_for("dll", "mlp", "mnist")["lr"] != 99
