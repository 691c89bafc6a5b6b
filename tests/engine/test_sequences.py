"""`fit` on sequences, against a plain loop of autograd through nn.RNN, and scores written out by hand."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical import data as datasets
from apical.engine import metrics
from apical.engine.loop import shuffle_indices
from apical.engine.settings import Settings
from apical.errors import ApicalError, DataError, DivergenceError
from reference import assert_all_same
from runs import RUN, Four, interrupt, weights, without_time
from sequences import RECURRENT

SYMBOLS, TIME, TRAIN, TEST = 4, 6, 29, 11


def build(outputs: int = SYMBOLS) -> apical.Elman:
    return apical.Elman(nn.RNN(SYMBOLS, 5, batch_first=True), nn.Linear(5, outputs)).double()


def two_outputs() -> apical.Elman:
    return build(2)


def characters() -> Four:
    """What comes next follows from the present symbol, mostly."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, SYMBOLS, (TRAIN + TEST, TIME), generator=generator)
    noise = torch.rand(x.shape, generator=generator) < 0.2
    y = torch.where(noise, torch.randint(0, SYMBOLS, x.shape, generator=generator), (x + 1) % SYMBOLS)
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def series() -> Four:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(TRAIN + TEST, TIME, SYMBOLS, generator=generator)
    y = torch.stack([x[..., 0].cumsum(1), x[..., 1] * x[..., 2]], dim=2)
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def fit(model: Any = build, on: Any = None, **settings: Any) -> apical.Fit:
    return apical.fit(model, characters() if on is None else on, **{"rule": "bp", **RUN, **settings})


def test_trials_of_other_losses_have_other_scores_and_progress_shows_what_all_have() -> None:
    text = io.StringIO()
    trials = [{"loss": "cross_entropy"}, {"loss": "mse"}]
    one, other = apical.sweep(build, characters(), trials, **{**RUN, "rule": "bp", "epochs": 1, "progress": text})
    assert "test_bits" in one.history[0]
    assert "test_bits" not in other.history[0]
    shown = 50 * (one.history[0]["test_accuracy"] + other.history[0]["test_accuracy"])
    assert f"test {shown:.2f}%" in text.getvalue()


def test_progress_calls_held_out_training_data_by_their_name() -> None:
    for protocol, words in (("clean", "  test mse 0.2500"), ("paper", "  test mse"), ("validation", "  held-out mse")):
        settings = Settings("bp", "rnn", "own", epochs=3, protocol=protocol)
        shown = metrics.summarize([{"seed": 0, "epoch": 2, "loss": 1.0, "test_mse": 0.25}], settings)
        assert shown.startswith("epoch 2/3  loss 1.0000")
        assert words in shown
    assert metrics.summarize([], settings) == "no seed left"


def loop(seed: int, clip: float = math.inf) -> tuple[nn.Module, list[dict[str, float]]]:
    """Adam on the mean cross-entropy of all time steps, at a rate that falls linearly to zero."""
    x_train, y_train, x_test, y_test = characters()
    eye = torch.eye(SYMBOLS, dtype=torch.float64)
    torch.manual_seed(seed)
    model = build()
    optim = torch.optim.Adam(model.parameters())
    steps = RUN["epochs"] * -(-TRAIN // RUN["batch_size"])
    rows, step = [], 0

    def scores(x: Tensor) -> Tensor:
        return model.readout(model.rnn(eye[x])[0])

    for epoch in range(RUN["epochs"]):
        loss = hits = 0.0
        for index in shuffle_indices(TRAIN, seed, epoch).split(RUN["batch_size"]):
            optim.param_groups[0]["lr"] = RUN["lr"] * (1 - step / steps)
            optim.zero_grad()
            output, y = scores(x_train[index]), y_train[index]
            mean = F.cross_entropy(output.flatten(0, 1), y.flatten())
            mean.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optim.step()
            loss += float(mean.detach()) * len(index) / TRAIN
            hits += float((output.argmax(2) == y).sum()) / (TRAIN * TIME)
            step += 1
        output = scores(x_test).detach()
        test = float(F.cross_entropy(output.flatten(0, 1), y_test.flatten()))
        right = float((output.argmax(2) == y_test).double().mean())
        rows.append(
            {"loss": loss, "accuracy": hits, "test_loss": test, "test_accuracy": right, "test_bits": test / math.log(2)}
        )
    return model, rows


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fit_equals_a_plain_loop_of_autograd_for_every_seed(stack: bool, clip: float | None) -> None:
    done = fit(seeds=[1, 4], stack=stack, clip=clip)
    for learner, seed in zip(done.learners, (1, 4), strict=True):
        model, rows = loop(seed, math.inf if clip is None else clip)
        assert_all_same(weights(learner.model), weights(model), tolerance=1e-6)
        for got, expected in zip(done.of_seed(seed), rows, strict=True):
            assert {"seed", "epoch", "seconds", *expected} == set(got)
            for name, value in expected.items():
                assert got[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("rule", RECURRENT)
def test_a_resumed_run_equals_one_that_was_never_interrupted(rule: str, tmp_path: Path) -> None:
    whole, path = fit(rule=rule, seeds=2), tmp_path / "run.safetensors"
    interrupt(lambda: fit(rule=rule, seeds=2, checkpoint=path))
    resumed = fit(rule=rule, seeds=2, checkpoint=path, resume=True)
    assert without_time(resumed.history) == without_time(whole.history)
    for one, other in zip(resumed.learners, whole.learners, strict=True):
        assert_all_same(weights(one), weights(other), tolerance=0.0)
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]


@pytest.mark.parametrize("rule", ["dll", "ipc"])
def test_values_are_scored_by_their_mean_squared_and_absolute_error(rule: str) -> None:
    done = fit(two_outputs, series(), rule=rule, loss="mse", seeds=2)
    x, y = (t.double() for t in series()[2:])
    for seed, learner in enumerate(done.learners):
        with torch.no_grad():
            off = learner(x) - y
        row = done.of_seed(seed)[-1]
        assert row["test_mse"] == pytest.approx(float(off.square().mean()), rel=1e-5)
        assert row["test_mae"] == pytest.approx(float(off.abs().mean()), rel=1e-5)
        assert row["test_loss"] == pytest.approx(float(off.square().sum(2).mean()) / 2, rel=1e-5)
        assert not {"accuracy", "test_accuracy", "test_bits"} & set(row)


def test_values_without_a_time_are_scored_so_too() -> None:
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    row = apical.fit(net, (x, y, x, y), rule="bp", loss="mse", **RUN).history[-1]
    with torch.no_grad():
        off = net(x) - y
    assert row["test_mse"] == pytest.approx(float(off.square().mean()), rel=1e-5)
    assert row["test_mae"] == pytest.approx(float(off.abs().mean()), rel=1e-5)


def test_bits_are_those_of_the_labels_whatever_the_loss_smooths() -> None:
    done = fit(label_smoothing=0.3)
    _, _, x, y = characters()
    with torch.no_grad():
        plain = F.cross_entropy(done.learners[0](x).flatten(0, 1), y.flatten())
    row = done.history[-1]
    assert row["test_bits"] == pytest.approx(float(plain) / math.log(2), rel=1e-5)
    assert row["test_loss"] > float(plain)
    assert "test_bits" not in fit(loss="mse").history[-1]


def test_scores_do_not_depend_on_how_many_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit()
    widest = max(shape.numel() for shape in whole.learners[0].network.shapes((TIME,)).drives)
    monkeypatch.setattr(metrics, "EVALUATION_VALUES", 4 * widest)
    parts = fit()
    monkeypatch.setattr(metrics, "EVALUATION_VALUES", 1)
    single = fit()
    for name in ("test_loss", "test_accuracy", "test_bits"):
        value = whole.history[-1][name]
        assert parts.history[-1][name] == pytest.approx(value, rel=1e-5)
        assert single.history[-1][name] == pytest.approx(value, rel=1e-5)


def test_a_validation_split_of_windows_is_the_last_tenth() -> None:
    x, y, _, _ = characters()
    nothing = torch.zeros(1, TIME, dtype=torch.long)
    done = fit(on=(x, y, nothing, nothing), protocol="validation")
    held = round(TRAIN / 10)
    with torch.no_grad():
        expected = F.cross_entropy(done.learners[0](x[-held:]).flatten(0, 1), y[-held:].flatten())
    assert done.history[-1]["test_loss"] == pytest.approx(float(expected), rel=1e-5)
    kept = fit(on=(x[:-held], y[:-held], x[-held:], y[-held:]))
    assert without_time(done.history) == without_time(kept.history)


def test_alignment_is_measured_at_every_layer() -> None:
    row = fit(rule="dll", alignment=True).history[-1]["alignment"]
    assert row["feedback"][0] is None
    assert row["update"][2] == pytest.approx(1.0)
    assert [len(row[key]) for key in ("feedback", "update")] == [3, 3]
    assert fit(rule="pc:fixed", alignment=True).history[-1]["alignment"]["update"] == pytest.approx([1.0] * 3)


def test_an_elman_and_a_learner_of_ones_own_are_trained_in_place() -> None:
    model = build()
    before = weights(model)
    assert fit(model).learners[0].model is model
    assert any(not torch.equal(p, before[n]) for n, p in weights(model).items())
    learner = apical.make("dll:kolen-pollack", build())
    assert fit(learner, rule=None).learners == [learner]
    with pytest.raises(ApicalError, match="has one seed"):
        fit(model, seeds=2)


def test_a_seed_that_diverges_is_ended_with_a_sentence() -> None:
    with pytest.raises(DivergenceError, match="the loss of seed 0 was not finite"):
        fit(two_outputs, series(), loss="mse", optimizer="sgd", lr=1e30, schedule="constant")


def test_several_settings_of_a_recurrent_network_are_swept_at_once() -> None:
    trials = [{"lr": RUN["lr"]}, {"lr": RUN["lr"] / 2, "clip": 0.1}]
    settings = {key: value for key, value in RUN.items() if key not in ("lr",)}
    fits = apical.sweep(build, characters(), trials, rule="dll", **settings)
    for trial, done in zip(trials, fits, strict=True):
        alone = fit(rule="dll", **trial)
        assert_all_same(weights(done.learners[0]), weights(alone.learners[0]), tolerance=1e-6)


X, Y = characters()[:2]


@pytest.mark.parametrize(
    ("four", "sentence"),
    [
        ((X, Y[:, 0], X, Y[:, 0]), r"x_train is int64.*floating numbers.*need a target for each"),
        ((X[..., None], Y, X[..., None], Y), "x_train is int64"),
        ((X[:, 0], Y[:, 0], X[:, 0], Y[:, 0]), "x_train is int64"),
        ((X - 1, Y, X, Y), "x_train holds -1 at position .*, but indices count from 0"),
        ((X > 1, Y, X > 1, Y), r"x_train is bool.*x_train\.long\(\) for indices"),
        ((X, Y[:, :4], X, Y[:, :4]), "x_train is int64"),
    ],
)
def test_whole_numbers_are_inputs_only_as_sequences_of_indices(four: Four, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        datasets.from_tensors(*four)


def test_indices_and_labels_beyond_the_network_are_refused_before_a_step() -> None:
    with pytest.raises(ApicalError, match="has indices from 1 to 4, but this network takes"):
        fit(on=(X, Y, X + 1, Y))
    with pytest.raises(ApicalError, match="labels range from 1 to 4, but the network has 4 outputs"):
        fit(on=(X, Y, X, Y + 1))
    with pytest.raises(ApicalError, match=r"float32 of shape \(29, 6\), but this network takes"):
        fit(on=(X.float(), Y, X.float(), Y))
    with pytest.raises(ApicalError, match=r"int64, which an apical\.Elman alone takes"):
        fit(nn.Sequential(nn.Linear(TIME, TIME)), (X, Y.float(), X, Y.float()), loss="mse")
    assert datasets.from_tensors(X.to(torch.uint8), Y, X.to(torch.uint8), Y).x_train.dtype == torch.int64
