"""On a GPU: what is captured in a graph is what would have run without one, for every rule."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from apical.bench import provenance
from apical.core.activation import Noise
from apical.core.learner import Update
from apical.core.network import Params
from apical.engine.loop import MIN_STEPS_TO_COMPILE
from cases import EVERY, RULES
from reference import assert_all_same
from runs import RUN, data, interrupt, noisy, noisy_cnn, uncollected, weights, without_time
from runs import plain_cnn as cnn
from runs import plain_mlp as mlp
from sequences import RECURRENT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


Build = Callable[[], nn.Sequential]
every_rule = pytest.mark.parametrize("rule", EVERY)
every_network = pytest.mark.parametrize("build", [mlp, cnn])


def fit(build: Build, **settings: Any) -> apical.Fit:
    given = {"rule": "bp", "seeds": 3, "precision": "float32", **RUN, "device": "cuda", **settings}
    return apical.fit(build, data(), **given)


def eagerly(build: Build, **settings: Any) -> apical.Fit:
    """The same run, in which no step is ever captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apical.engine.cuda_graphs.EAGER_STEPS", 10**9)
        return fit(build, **settings)


def assert_same_run(one: apical.Fit, other: apical.Fit, tolerance: float = 1e-8) -> None:
    for row, wanted in zip(without_time(one.history), without_time(other.history), strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)
    for mine, theirs in zip(one.learners, other.learners, strict=True):
        assert_all_same(weights(mine.cpu()), weights(theirs.cpu()), tolerance)


@every_network
@every_rule
def test_a_captured_run_equals_the_eager_one(rule: str, build: Build) -> None:
    captured = fit(build, rule=rule)
    assert [reason for reason in captured.reasons if "CUDA graphs" in reason] == []
    assert_same_run(captured, eagerly(build, rule=rule))


@every_network
def test_a_captured_run_paces_what_it_decorrelates(build: Build) -> None:
    options = {"decorrelate": True, "decorrelation_rate": 0.01}
    captured = fit(build, rule="np", options=options)
    assert [reason for reason in captured.reasons if "CUDA graphs" in reason] == []
    assert_same_run(captured, eagerly(build, rule="np", options=options))


@pytest.mark.parametrize("rule", RECURRENT)
def test_a_recurrent_network_is_captured_too_and_trains_as_on_the_cpu(rule: str) -> None:
    def build() -> apical.Elman:
        return apical.Elman(nn.RNN(4, 5, batch_first=True), nn.Linear(5, 3)).double()

    x, y = torch.randint(0, 4, (29, 6)), torch.randint(0, 3, (29, 6))
    common = {"rule": rule, "seeds": 3, "precision": "float32", **RUN}
    captured = apical.fit(build, (x, y, x, y), **{**common, "device": "cuda"})
    assert [reason for reason in captured.reasons if "CUDA graphs" in reason] == []
    assert_same_run(captured, apical.fit(build, (x, y, x, y), **common), tolerance=1e-6)


@pytest.mark.parametrize("build", [noisy, noisy_cnn])
def test_every_replay_draws_noise_of_its_own(build: Build) -> None:
    captured = fit(build)
    assert [reason for reason in captured.reasons if "CUDA graphs" in reason] == []
    assert_same_run(captured, eagerly(build))


@every_network
@pytest.mark.parametrize("rule", RULES)
def test_the_gpu_and_the_cpu_train_the_same(rule: str, build: Build) -> None:
    assert_same_run(fit(build, rule=rule), fit(build, rule=rule, device="cpu"), tolerance=1e-6)


@every_network
def test_trials_of_a_sweep_are_their_own_runs(build: Build) -> None:
    trials: list[dict[str, Any]] = [{"lr": 2.0**-4}, {"lr": 2.0**-6}, {"options": {"theta_std": 0.3}}]
    common = {"rule": "dll", "seeds": 2, "precision": "float32", **RUN, "device": "cuda"}
    for trial, one in zip(trials, apical.sweep(build, data(), trials, **common), strict=True):
        assert_same_run(one, fit(build, rule="dll", seeds=2, **trial))


@every_network
def test_many_seeds_in_two_stacks_are_the_seeds_that_they_are(build: Build) -> None:
    many, two = fit(build, rule="dll", seeds=18), fit(build, rule="dll", seeds=[0, 17])
    for seed, learner in zip((0, 17), two.learners, strict=True):
        assert_all_same(weights(many.learners[seed]), weights(learner), 1e-8)


@every_network
def test_a_resumed_run_equals_one_that_was_never_interrupted(build: Build, tmp_path: Path) -> None:
    whole, path = fit(build, rule="dll"), tmp_path / "run.safetensors"
    interrupt(lambda: fit(build, rule="dll", checkpoint=path))
    assert_same_run(fit(build, rule="dll", checkpoint=path, resume=True), whole)


@every_network
def test_the_models_own_memory_layout_is_given_back(build: Build) -> None:
    model = build()
    before = [p.stride() for p in model.parameters()]
    fit(lambda: model, seeds=1)
    assert [p.stride() for p in model.parameters()] == before


@every_network
def test_a_run_leaves_nothing_on_the_device(build: Build) -> None:
    fit(build)  # libraries keep what the first one makes them set up
    with uncollected():
        before = torch.cuda.memory_allocated()
        fit(build)
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("precision", ["tf32", "float32", "bf16"])
@every_network
def test_precision_holds_in_the_run_alone(build: Build, precision: str) -> None:
    def single() -> nn.Sequential:
        return build().float()

    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    run = fit(single, precision=precision)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before
    exact = fit(build)
    for row, wanted in zip(run.history, exact.history, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=0.05)


@pytest.mark.parametrize(("build", "kind"), [(mlp, "other"), (cnn, "images")])
def test_a_long_run_is_compiled_by_itself_and_is_the_same(
    build: Build, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fit(build, rule="dll")
    assert any("torch.compile: 16 steps" in reason for reason in plain.reasons)
    monkeypatch.setitem(MIN_STEPS_TO_COMPILE, kind, 16)
    compiled = fit(build, rule="dll")
    assert compiled.reasons == []
    assert_same_run(compiled, plain)


@pytest.fixture
def looking() -> Iterator[str]:
    known = dict(apical.RULES)

    class Looking(apical.RULES["bp"]):  # type: ignore[misc]
        """Reads a number back from the device, which no capture allows."""

        NAME = "looking"

        def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
            update = super().update(params, state, x, y, noise)
            assert float(update.loss) == float(update.loss)
            return update

    yield Looking.NAME
    apical.RULES.clear()
    apical.RULES.update(known)


def test_a_rule_that_cannot_be_captured_trains_eagerly_and_it_is_said(looking: str) -> None:
    run = fit(mlp, rule=looking, stack=False)
    assert any(reason.startswith("CUDA graphs: ") for reason in run.reasons)
    assert_same_run(run, fit(mlp, stack=False))
    assert torch.isfinite(torch.randn(3, device="cuda")).all(), "the device's own generator works on"


def test_the_memory_of_a_run_is_what_it_takes_itself() -> None:
    others = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    device = torch.device("cuda")
    before = provenance.reset_peak(device)
    own = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    del own
    assert provenance.read_peak(device, before) == 1 << 20
    del others
