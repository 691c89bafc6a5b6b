"""Data by name and options in `fit`: what is trained on, kept in checkpoints and held out for validation."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import apical
import runs
from apical import data
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.inputs import hold_out
from apical.errors import CheckpointError

RULES = ["bp", "fa", "dll", "dll:released", "dll:frozen", "dll:kolen-pollack", "pc", "ipc"]
RUN = {"epochs": 2, "batch_size": 8, "lr": 0.01, "device": "cpu", "progress": False}


def small() -> apical.Elman:
    return apical.Elman(nn.RNN(4, 6, batch_first=True), nn.Linear(6, 4))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "own.txt").write_text("abcd" + "".join(random.Random(0).choices("abcd", k=300)))
    return f"text:{tmp_path / 'own.txt'}"


@pytest.fixture
def series(tmp_path: Path) -> str:
    values = torch.randn(120, 3, generator=torch.Generator().manual_seed(0)).cumsum(0)
    (tmp_path / "own.csv").write_text("\n".join(",".join(map(repr, row)) for row in values.tolist()))
    return f"series:{tmp_path / 'own.csv'}"


def test_a_name_with_options_is_the_loaded_data_set(text: str) -> None:
    named = apical.fit(small, text, rule="bp", data_options={"window": 5, "stride": 3}, **RUN)
    loaded = apical.fit(small, data.load(text, window=5, stride=3), rule="bp", **RUN)
    assert runs.without_time(named.history) == runs.without_time(loaded.history)
    assert named.settings == loaded.settings
    assert named.settings.data == text
    assert named.settings.data_options == {"window": 5, "stride": 3, "unknown": False}
    assert json.dumps(named.settings.to_dict()["data_options"])


def test_the_loss_is_the_datas_unless_another_is_named(text: str, series: str) -> None:
    build = lambda: apical.Elman(nn.RNN(3, 5, batch_first=True), nn.Linear(5, 3))  # noqa: E731
    assert apical.fit(small, text, rule="bp", data_options={"window": 5}, **RUN).settings.loss == "cross_entropy"
    assert apical.fit(small, text, rule="bp", data_options={"window": 5}, loss="mse", **RUN).settings.loss == "mse"
    fit = apical.fit(build, series, rule="dll", data_options={"window": 5}, **RUN)
    assert fit.settings.loss == "mse"
    assert {"test_mse", "test_mae"} <= set(fit.history[-1])
    (swept,) = apical.sweep(build, series, [{"lr": 0.01}], rule="dll", data_options={"window": 5}, progress=False,
                            epochs=1)  # fmt: skip
    assert (swept.settings.loss, swept.settings.data_options["window"]) == ("mse", 5)


def test_scores_are_those_of_the_last_epoch_or_the_best(series: str) -> None:
    build = lambda: apical.Elman(nn.RNN(3, 5, batch_first=True), nn.Linear(5, 3))  # noqa: E731
    settings = {**RUN, "epochs": 5, "lr": 0.3, "seeds": 3, "data_options": {"window": 5}}
    clean = apical.fit(build, series, rule="bp", **settings)
    paper = apical.fit(build, series, rule="bp", protocol="paper", **settings)
    for seed in range(3):
        curve = [row["test_mse"] for row in clean.of_seed(seed)]
        assert clean.scores("test_mse")[seed] == curve[-1]
        assert paper.scores("test_mse")[seed] == min(curve)
    assert paper.scores("test_mse") != clean.scores("test_mse")  # at this rate the last is not the best
    with pytest.raises(apical.ApicalError, match=r"^the history has no 'test_msi'; it has test_loss, .*test_mse"):
        clean.scores("test_msi")


def test_options_are_for_names(text: str) -> None:
    with pytest.raises(apical.ApicalError, match="data_options are for data that are given by name"):
        apical.fit(small, data.load(text, window=5), rule="bp", data_options={"window": 5}, **RUN)


def test_an_unknown_option_is_refused(text: str) -> None:
    with pytest.raises(apical.ApicalError, match="no option 'width'; their options: window, stride, unknown"):
        apical.fit(small, text, rule="bp", data_options={"width": 5}, **RUN)
    with pytest.raises(apical.ApicalError, match="no option 'root'"):
        apical.fit(small, text, rule="bp", data_options={"root": "/"}, **RUN)


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_of_every_rule_writes_text(text: str, tmp_path: Path, rule: str) -> None:
    """What it writes greedily is what the trained network predicts, letter by letter."""
    path = tmp_path / "run.safetensors"
    fit = apical.fit(small, text, rule=rule, seeds=[3, 5], data_options={"window": 5}, checkpoint=path, **RUN)
    assert checkpoints.load(path).vocabulary == "abcd"
    expected = "dab"
    for _ in range(10):
        expected += "abcd"[int(fit.learners[0](torch.tensor([["abcd".index(c) for c in expected]]))[0, -1].argmax())]
    assert apical.sample(path, "dab", length=10, temperature=0) == expected


def test_a_run_resumes_with_the_same_options_and_no_others(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    settings = {"rule": "dll", "checkpoint": path, **RUN}
    whole = apical.fit(small, text, **{**settings, "checkpoint": None}, data_options={"window": 5})
    runs.interrupt(lambda: apical.fit(small, text, **settings, data_options={"window": 5}), epoch=1)
    with pytest.raises(CheckpointError, match="belongs to another run: its data_options is"):
        apical.fit(small, text, **settings, data_options={"window": 6}, resume=True)
    resumed = apical.fit(small, text, **settings, data_options={"window": 5}, resume=True)
    assert runs.without_time(resumed.history) == runs.without_time(whole.history)
    assert checkpoints.load(path).vocabulary == "abcd"


def test_a_checkpoint_from_before_there_were_data_options_resumes(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    whole = runs.fit()
    runs.interrupt(lambda: runs.fit(checkpoint=path))
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["apical"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del about["settings"]["data_options"], about["vocabulary"]
    save_file(tensors, path, metadata={"apical": json.dumps(about)})
    resumed = runs.fit(checkpoint=path, resume=True)
    assert runs.without_time(resumed.history) == runs.without_time(whole.history)


# Validation.


def numbered(count: int, length: int, stride: int) -> Dataset:
    """Windows whose values are the places that they were cut from."""
    places = torch.arange(length) + stride * torch.arange(count)[:, None]
    x = places[..., None].float()
    return Dataset(x, x, x, x, "numbered", None, overlap=(length - 1) // stride)


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 1), (5, 2), (3, 7)])
def test_windows_that_are_held_out_come_last_and_share_no_value_with_the_others(length: int, stride: int) -> None:
    whole = numbered(40, length, stride)
    split = hold_out(whole)
    assert len(split.x_test) == 4
    assert split.x_train.max() < split.x_test.min()
    assert torch.equal(split.x_test, whole.x_train[-4:])
    assert len(split.x_train) == 36 - (length - 1) // stride  # no more is left out than shares a value
    assert torch.equal(split.x_train, whole.x_train[: len(split.x_train)])


def test_too_few_windows_for_a_gap_are_refused() -> None:
    assert len(hold_out(numbered(5, 4, 1)).x_train) == 1
    with pytest.raises(apical.ApicalError, match="two training examples with 3 between them"):
        hold_out(numbered(4, 4, 1))


@pytest.mark.parametrize("known", ["by the data set", "from the user"])
def test_overlapping_windows_do_not_leak_into_the_validation_of_a_plain_network(series: str, known: str) -> None:
    """With hardly any learning rate the losses show which windows are trained on and which are held out."""
    loaded = data.load(series, window=5, stride=1)
    tensors = [tensor.flatten(1) for tensor in loaded]
    own = replace(loaded, **dict(zip(("x_train", "y_train", "x_test", "y_test"), tensors, strict=True)))
    if known == "from the user":
        own = replace(data.from_tensors(*tensors, overlap=5), loss="mse")
    model = nn.Sequential(nn.Linear(15, 15))
    fit = apical.fit(model, own, rule="bp", protocol="validation", **{**RUN, "lr": 1e-12, "epochs": 1, "batch_size": 1})
    x, y = tensors[:2]
    held = round(len(x) / 10)
    errors = (model(x) - y).detach().square().mean(1)
    assert fit.history[0]["test_mse"] == pytest.approx(float(errors[-held:].mean()), rel=1e-4)
    trained = errors[: len(x) - held - 5]  # a window of 5 and the step after it share values with the next five
    assert fit.history[0]["loss"] == pytest.approx(float(trained.mean()) * 15 / 2, rel=1e-4)


def test_sequences_of_ones_own_are_held_out_in_order_and_other_examples_at_random() -> None:
    x = torch.arange(20.0)[:, None, None].expand(20, 3, 1)
    in_order = hold_out(data.from_tensors(x, x, x, x))
    assert in_order.x_test[:, 0, 0].tolist() == [18, 19]
    labels = torch.arange(20) % 2
    at_random = hold_out(data.from_tensors(x, labels, x, labels))
    assert at_random.x_test[:, 0, 0].tolist() != [18, 19]
    with pytest.raises(apical.ApicalError, match="overlap is -1, but must be a whole number of at least 0"):
        data.from_tensors(x, x, x, x, overlap=-1)


def test_moving_and_holding_out_keep_what_a_data_set_knows(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    loaded = replace(data.load(text, window=5), name="renamed")
    fit = apical.fit(small, loaded, rule="bp", protocol="validation", checkpoint=path, **RUN)
    assert checkpoints.load(path).vocabulary == "abcd"
    assert (fit.settings.data, fit.settings.data_options["window"]) == ("renamed", 5)
