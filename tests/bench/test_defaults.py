"""The recorded settings are settings that `fit` takes, for rules, models and data that exist."""

import inspect
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import apical
from apical import models
from apical.bench.defaults import LIKE, find_settings, load_defaults_file
from apical.core.registry import options_of, resolve
from apical.data import DATASETS, Characters, Series
from apical.engine.settings import Settings

TABLE: dict[str, Any] = tomllib.loads(resources.files("apical.bench").joinpath("defaults.toml").read_text("utf-8"))
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
    settings = find_settings(rule, model, data)
    assert set(settings) <= SETTINGS
    assert Settings(rule, model, data, **settings).lr > 0  # its own checks pass
    assert set(settings.get("options", {})) <= set(options_of(resolve(rule)[0]))


@pytest.mark.parametrize(("data", "model"), NETWORKS)
def test_every_rule_that_is_named_exists_and_overrides_the_common_settings(data: str, model: str) -> None:
    entry = TABLE[data][model]
    common = {key: value for key, value in entry.items() if key != "rules"}
    for rule in apical.rule_names():
        own = entry.get("rules", {}).get(rule)
        if own is not None or data not in LIKE:
            shared = find_settings("", model, data) if data in LIKE else common
            assert find_settings(rule, model, data) == {**shared, **(own or {})}
    assert set(entry.get("rules", {})) <= set(apical.rule_names())


def test_every_named_network_has_settings() -> None:
    named = [*((data, "mlp") for data in models.MLPS), *((data, "cnn") for data in models.CNNS)]
    assert all({"epochs", "lr", "batch_size"} <= set(find_settings("", model, data)) for data, model in named)


@pytest.mark.parametrize(
    ("data", "other", "model"), [(data, other, model) for data, other in LIKE.items() for model in TABLE[other]]
)
def test_where_nothing_was_tuned_a_rule_has_what_it_has_on_the_data_set_that_is_alike(
    data: str, other: str, model: str
) -> None:
    own = dict(TABLE.get(data, {}).get(model, {}))
    tuned = own.pop("rules", {})
    for rule in apical.rule_names():
        same = find_settings(rule, model, data) == {**find_settings(rule, model, other), **own}
        assert same != (rule in tuned)  # what was tuned has its reason: the other's failed
    assert find_settings("bp", "rnn", "sherlock_holmes")["epochs"] == 10


def test_what_a_file_says_of_a_data_set_comes_before_what_serves_it(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[fashion_mnist.mlp]\nlr = 0.5\n")
    settings = find_settings("local", "mlp", "fashion_mnist", load_defaults_file(own))
    assert settings == {**find_settings("local", "mlp", "mnist"), "lr": 0.5}


def test_a_rules_own_table_takes_the_place_of_the_one_that_served_it(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[svhn.cnn.rules."bp"]\nlr = 0.5\n')
    assert "optimizer_options" in find_settings("bp", "cnn", "svhn")  # CIFAR-10's decay
    assert find_settings("bp", "cnn", "svhn", load_defaults_file(own)) == {
        **find_settings("", "cnn", "cifar10"),
        "lr": 0.5,
    }


def test_a_file_of_ones_own_goes_over_the_recorded_settings_or_takes_their_place(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[mnist.mlp]\nlr = 0.5\n[mnist.mlp.rules.dll]\nbatch_size = 7\n")
    table = load_defaults_file(own)
    recorded = find_settings("dll", "mlp", "mnist")
    assert find_settings("dll", "mlp", "mnist", table) == {**recorded, "lr": 0.5, "batch_size": 7}
    assert find_settings("local", "mlp", "mnist", table)["lr"] == 0.002  # its own is more particular
    assert find_settings("bp", "cnn", "mnist", table) == find_settings("bp", "cnn", "mnist")
    own.write_text("replace = true\n[mnist.mlp]\nlr = 0.5\n")
    table = load_defaults_file(own)
    assert find_settings("local", "mlp", "mnist", table) == {"lr": 0.5}
    assert find_settings("bp", "cnn", "mnist", table) == {}


@pytest.mark.parametrize("text", ["lr = 1", "[mnist]\nlr = 1", "[mnist", None])
def test_settings_that_cannot_be_read_are_one_sentence(text: str | None, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    if text is not None:
        own.write_text(text)
    with pytest.raises(apical.ApicalError, match=r"own\.toml") as caught:
        load_defaults_file(own)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[digitz.mlp]", r"no data set called 'digitz' \(did you mean digits\?\)"),
        ("[digits.mpl]", r"\[digits\] of .*: 'mpl' is unknown; did you mean 'mlp'"),
        ('[digits.mlp.rules."bpp"]', "unknown rule 'bpp'; did you mean 'bp'"),
        ('replace = "yes"', "replace in .* is 'yes', but must be true or false"),
        ("[digits.mlp]\nrules = 3", r"rules in \[digits.mlp\] of .* is 3, but must be a table"),
        ("[digits.mlp.rules]\nbp = 3", r"bp in \[digits.mlp.rules\] of .* is 3, but must be a table"),
        ("[digits.mlp]\nlrr = 3", r"\[digits.mlp\] of .*: 'lrr' is unknown; did you mean 'lr'"),
        ("[digits.mlp]\nlr = -1", r"\[digits.mlp\] of .*: lr is -1"),
        ("[digits.mlp.rules.bp]\noptions = 3", r'options in \[digits.mlp.rules."bp"\] of .* is 3, but must'),
        ('[digits.mlp.rules.bp]\nepochs = "one"', r'rules."bp"\] of .*: epochs is \'one\''),
    ],
)
def test_a_typo_in_settings_of_ones_own_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(apical.ApicalError, match=words) as caught:
        load_defaults_file(own)
    assert "own.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_of_ones_own_may_be_of_any_network_data_set_and_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(apical.RULES, "mine", apical.RULES["bp"])
    own = tmp_path / "own.toml"
    own.write_text(
        """replace = true
        ["text:my.txt".rnn.rules."dll:frozen"]
        optimizer_options = { momentum = 0.5 }
        ["series:my.csv".rnn.rules."mine"]
        lr = 1
        [mnist."mlp-8-8"]
        data_options = {}"""
    )
    assert find_settings("dll:frozen", "rnn", "text:my.txt", load_defaults_file(own)) == {
        "optimizer_options": {"momentum": 0.5}
    }


def test_nothing_is_recorded_for_what_is_not_named() -> None:
    assert find_settings("dll", "mine:net", "digits") == {}
    assert find_settings("dll", "mlp", "custom") == {}


def test_the_papers_own_settings_are_what_the_rules_of_an_mlp_share() -> None:
    """Appendix D: learning rate and batch size of the MLPs that we tuned (the results say where ours differ)."""
    paper = {"mnist": (1e-3, 128), "cifar10": (8e-5, 64)}
    for data, (lr, batch) in paper.items():
        settings = find_settings("", "mlp", data)
        assert (settings["lr"], settings["batch_size"]) == (lr, batch)


def test_a_caller_cannot_change_the_table() -> None:
    find_settings("dll", "mlp", "mnist")["lr"] = 99
    assert find_settings("dll", "mlp", "mnist")["lr"] != 99
