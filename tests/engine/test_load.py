"""`apical.load`: the learners of a checkpoint are those that the run ended with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from apical import ApicalError
from cases import EVERY

X, Y = torch.randn(40, 1, 8, 8), torch.randint(0, 10, (40,))
DATA = (X, Y, X[:10], Y[:10])
SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 20, "progress": False}


def cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 10))


def assert_same_learners(loaded: list[apical.Learner], trained: list[apical.Learner], x: Tensor = X) -> None:
    assert [learner.name for learner in loaded] == [learner.name for learner in trained]
    for ours, theirs in zip(loaded, trained, strict=True):
        state = theirs.state_dict()
        assert ours.state_dict().keys() == state.keys()
        for name, value in ours.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert not ours.training
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("rule", EVERY)
def test_every_rule_is_loaded_with_its_own_tensors_and_options(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    run = apical.fit(cnn, DATA, rule=rule, lr=1e-4, checkpoint=path, **SHORT)
    (loaded,) = apical.load(path, cnn)
    assert_same_learners([loaded], run.learners)
    assert loaded.given_options == run.learners[0].given_options


@pytest.mark.parametrize("model", ["mlp", "cnn", "mlp-12-bias"])
def test_a_network_of_apicals_needs_nothing_but_the_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    options = {"theta_std": 0.3, "theta_rate": 0.5}
    before = torch.get_rng_state()
    run = apical.fit(
        model, "digits", rule="dll", seeds=[3, 1], checkpoint=path, options=options, epochs=1, progress=False
    )
    loaded = apical.load(str(path))
    assert_same_learners(loaded, run.learners)
    assert [learner.theta_rate for learner in loaded] == [0.5, 0.5]
    assert torch.equal(before, torch.get_rng_state())


def test_a_recurrent_network_and_a_textcnn_take_their_sizes_from_the_file(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("abcabd" * 40)
    run = apical.fit(
        "rnn", f"text:{text}", rule="bp", checkpoint=tmp_path / "a.safetensors", data_options={"window": 5}, **SHORT
    )
    assert_same_learners(apical.load(tmp_path / "a.safetensors"), run.learners, torch.tensor([[0, 1, 2]]))
    x, y = torch.randn(30, 7, 9), torch.randint(0, 2, (30,))
    run = apical.fit("textcnn", (x, y, x, y), rule="fa", checkpoint=tmp_path / "b.safetensors", **SHORT)
    assert_same_learners(apical.load(tmp_path / "b.safetensors"), run.learners, x)


def test_a_learner_that_was_trained_is_loaded_with_the_options_it_was_made_with(tmp_path: Path) -> None:
    learner = apical.make("dll", cnn().double(), theta_std=0.3, loss="mse", label_smoothing=0.1)
    run = apical.fit(learner, DATA, checkpoint=tmp_path / "run.safetensors", **SHORT)
    (loaded,) = apical.load(tmp_path / "run.safetensors", lambda: cnn())
    assert (loaded.theta_std, loaded.loss.name, loaded.loss.label_smoothing) == (0.3, "mse", 0.1)
    assert_same_learners([loaded], run.learners, X.double())
    network = cnn()
    assert apical.load(tmp_path / "run.safetensors", network)[0].model is network


def loss_of_ones_own(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


def test_what_cannot_be_rebuilt_says_what_to_pass(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    apical.fit(cnn, DATA, rule="bp", seeds=2, loss=loss_of_ones_own, checkpoint=path, **SHORT)
    with pytest.raises(ApicalError, match="with the loss 'loss_of_ones_own'; pass that function as loss="):
        apical.load(path, cnn)
    own = {"loss": loss_of_ones_own}
    with pytest.raises(ApicalError, match=r"a network of your own, 'cnn'; pass the function that builds it as model="):
        apical.load(path, **own)  # a function of this name, which is not apical's
    with pytest.raises(ApicalError, match="has 2 seeds; pass a function"):
        apical.load(path, cnn(), **own)
    with pytest.raises(ApicalError, match=r"belongs to another network: model.1.weight has shape None there"):
        apical.load(path, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **own)
    with pytest.raises(ApicalError, match="not a checkpoint that can be read"):
        apical.load(tmp_path / "nowhere.safetensors")
    assert len(apical.load(path, cnn, **own)) == 2


def test_a_rule_of_ones_own_must_be_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.safetensors"
    monkeypatch.setitem(apical.RULES, "mine", nn.Module)  # removed at the end; the class puts itself there
    mine = type("Mine", (apical.Backpropagation,), {"NAME": "mine", "__module__": "mine"})
    apical.fit(cnn, DATA, rule="mine", checkpoint=path, **SHORT)
    assert type(apical.load(path, cnn)[0]) is mine
    monkeypatch.delitem(apical.RULES, "mine")
    with pytest.raises(ApicalError, match="was trained by 'mine'; import the module that defines this rule first"):
        apical.load(path, cnn)


def test_a_run_is_shown_in_a_few_lines(tmp_path: Path) -> None:
    run = apical.fit(cnn, DATA, rule="bp", seeds=2, lr=0.01, **SHORT)
    lines = repr(run).splitlines()
    assert lines[:2] == ["Fit: bp, cnn, custom", "  1 of 1 epochs, 2 seeds, lr 0.01, on cpu"]
    assert lines[3] == f"  test_accuracy {run.accuracy:.4f}"
    assert len(lines) == 4
    run.failed[1] = "diverged"
    assert repr(run).splitlines()[-1] == "  seed 1 failed"
