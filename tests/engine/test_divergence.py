"""A seed whose numbers are no longer finite ends alone, in one sentence, and keeps its last good weights."""

import functools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from apical.engine import checkpoint as checkpoints
from apical.errors import DivergenceError
from reference import assert_all_same
from runs import data, doomed, fit, mlp, seed_now, sqrt_loss, weights, without_time

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

DOOMED: dict[str, Any] = {"loss": sqrt_loss, "schedule": "constant", "optimizer": "adam"}
stacks = pytest.mark.parametrize("stack", [True, False])


def run(build: Any, **settings: Any) -> apical.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(build, **{**DOOMED, **settings})


def assert_finite(learner: nn.Module) -> None:
    assert all(bool(p.isfinite().all()) for p in learner.parameters())


@stacks
@pytest.mark.parametrize(("after", "epoch"), [(1.5, 1), (19, 2), (40, 3)])
def test_a_seed_that_diverges_ends_and_the_others_are_as_they_would_be_alone(
    after: float, epoch: int, stack: bool
) -> None:
    build = doomed(1, after=after)
    with pytest.warns(UserWarning, match=f"seed 1 was not finite in epoch {epoch}") as warned:
        together = fit(build, seeds=3, stack=stack, **DOOMED)
    assert len(warned) == 1
    assert list(together.failed) == [1]
    assert "\n" not in together.failed[1]
    for k in (0, 2):
        alone = run(build, seeds=[k])
        assert_all_same(weights(together.learners[k]), weights(alone.learners[0]), 1e-5)
        for row, expected in zip(together.of_seed(k), without_time(alone.history), strict=True):
            assert without_time([row])[0] == pytest.approx(expected, rel=1e-4)
    assert len(together.accuracies) == 2
    assert [row["epoch"] for row in together.of_seed(1)] == list(range(1, epoch))
    assert all(math.isfinite(row["test_loss"]) for row in together.history)


@stacks
def test_a_seed_that_diverged_holds_the_weights_of_its_last_good_epoch(stack: bool) -> None:
    build = doomed(1, after=19)
    broken = run(build, seeds=3, stack=stack).learners[1]
    assert_finite(broken)
    good = run(build, seeds=3, stack=stack, epochs=1)  # a constant rate: its first epoch is the same
    assert not good.failed
    assert_all_same(weights(broken), weights(good.learners[1]), 1e-6)


@stacks
def test_when_no_seed_is_left_it_is_an_error_that_names_each(stack: bool) -> None:
    with pytest.raises(DivergenceError, match=r"seed 0 .*seed 1 ") as caught:
        run(doomed(0, 1, after=1.5), seeds=2, stack=stack)
    assert "\n" not in str(caught.value)


def test_a_model_of_the_users_own_gets_its_last_good_weights_back() -> None:
    torch.manual_seed(0)
    model = doomed(0, after=19)()
    before = weights(model)
    with pytest.raises(DivergenceError, match="seed 0"):
        run(model)
    assert_finite(model)
    assert not torch.equal(model[3].weight, before["3.weight"])  # the first epoch's work is kept
    assert all(p.grad is None for p in model.parameters())


@stacks
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("after", [1.5, 19])
def test_a_run_with_a_failed_seed_resumes_exactly(after: float, first: bool, stack: bool, tmp_path: Path) -> None:
    """The seed that fails, in the first epoch or in a later one, may be the first or the last of the stack."""
    build = doomed(4, after=after)
    settings: dict[str, Any] = {"seeds": [4, 0, 2] if first else [0, 2, 4], "stack": stack}
    expected = run(build, **settings)
    for epoch in (1, 2, 3, 4):
        path = tmp_path / f"{epoch}.safetensors"
        save = checkpoints.save

        def and_stop(where: Path, done: checkpoints.Checkpoint, *, _save: Any = save, _last: int = epoch) -> None:
            _save(where, done)
            if done.epoch == _last:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints, "save", and_stop)
            with pytest.raises(KeyboardInterrupt):
                run(build, **settings, checkpoint=path)
        resumed = run(build, **settings, checkpoint=path, resume=True)
        assert resumed.failed == expected.failed
        assert without_time(resumed.history) == without_time(expected.history)
        for a, b in zip(resumed.learners, expected.learners, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("epochs", [1, 3])
def test_resuming_a_run_that_failed_altogether_says_so_again(epochs: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": tmp_path / "run.safetensors", "epochs": epochs}
    attempt = functools.partial(run, doomed(0, after=1.5), **settings)
    with pytest.raises(DivergenceError, match="seed 0 was not finite in epoch 1"):
        attempt()
    with pytest.raises(DivergenceError, match="seed 0 was not finite in epoch 1"):
        attempt(resume=True)


def linear() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
    return model


def steep(output: Tensor, y: Tensor) -> Tensor:
    """A finite loss of a finite gradient: it is lr times the gradient that float32 cannot hold."""
    return 1e30 * output.sum(1)


@stacks
@pytest.mark.parametrize("epochs", [1, 2])
def test_weights_that_overflow_on_an_epochs_last_step_are_not_good_ones(epochs: int, stack: bool) -> None:
    """The loss of that step was still finite; only the weights that it left, and their scores, are not."""
    x, y, x_test, y_test = data()
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 1e15, "schedule": "constant", "batch_size": 29}
    with pytest.raises(DivergenceError, match="not finite in epoch 1"):
        fit(linear, (x, y, x_test, y_test), loss=steep, epochs=epochs, seeds=2, stack=stack, **settings)
    model = linear()
    before = weights(model)
    with pytest.raises(DivergenceError):
        fit(model, (x, y, x_test, y_test), loss=steep, epochs=epochs, **settings)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_theta_that_overflows_while_the_loss_does_not_is_not_good_either() -> None:
    settings: dict[str, Any] = {"rule": "dll", "options": {"theta_rate": 1e38}, "optimizer": "sgd"}
    learner_settings: dict[str, Any] = {"batch_size": 29, "epochs": 1, "lr": 1e3, "schedule": "constant"}

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3))

    with pytest.raises(DivergenceError, match="not finite in epoch 1"):
        fit(build, **settings, **learner_settings)


@pytest.fixture
def squaring() -> Iterator[str]:
    """A rule whose gradients are `bp`'s, and which keeps a number that it squares in every step: seed 1 has 2, others 1."""
    known = dict(apical.RULES)

    class Squaring(apical.Backpropagation):
        NAME = "squaring"

        def __init__(self, *args: Any, **common: Any) -> None:
            super().__init__(*args, **common)
            self.register_buffer("number", torch.tensor(2.0 if seed_now() == 1 else 1.0))

        def update(self, params: Any, state: dict[str, Tensor], *rest: Any) -> apical.Update:
            update = super().update(params, state, *rest)
            return update._replace(state={"number": state["number"].square()})

    yield Squaring.NAME
    apical.RULES.clear()
    apical.RULES.update(known)


@stacks
def test_a_state_that_overflows_while_loss_and_weights_do_not_ends_the_seed(stack: bool, squaring: str) -> None:
    """2 is 2¹⁶ after the four steps of an epoch, and after three more 2¹²⁸, which float32 cannot hold."""
    with pytest.warns(UserWarning, match="seed 1 was not finite in epoch 2"):
        done = fit(mlp, rule=squaring, seeds=3, stack=stack)
    assert list(done.failed) == [1]
    assert [float(learner.get_buffer("number")) for learner in done.learners] == [1.0, 2.0**16, 1.0]


@stacks
def test_a_rate_that_is_far_too_high_is_named_as_such(stack: bool) -> None:
    with pytest.raises(DivergenceError, match=r"a smaller learning rate than .*, clip=1.0 or"):
        fit(seeds=2, loss="mse", optimizer="sgd", lr=1e30, epochs=3, schedule="constant", stack=stack)


@stacks
def test_one_infinite_loss_anywhere_in_an_epoch_ends_the_seed_though_the_weights_stay_finite(stack: bool) -> None:
    """Each seed meets the marked example in another batch; its gradient is zero, so nothing else shows it."""

    def marked(output: Tensor, y: Tensor) -> Tensor:
        return torch.where(y[:, 0] > 1000, math.inf, (output[:, :1] - y).square().sum(1))

    x, _, x_test, _ = data()
    y = torch.zeros(29, 1)
    y[13] = 1001.0
    with pytest.raises(DivergenceError) as caught:
        fit(on=(x, y, x_test, torch.zeros(11, 1)), loss=marked, seeds=6, stack=stack)
    for seed in range(6):
        assert f"the loss of seed {seed} was not finite in epoch 1" in str(caught.value)


@stacks
def test_finite_weights_whose_test_loss_overflows_are_not_good_either(stack: bool) -> None:
    """½ Σ (y − 1e30)² is more than float32 holds; JSON could not hold it, either."""
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 1e30, "schedule": "constant", "batch_size": 29}
    with pytest.raises(DivergenceError, match="not finite in epoch 1"):
        fit(linear, loss="mse", epochs=1, seeds=2, stack=stack, **settings)
