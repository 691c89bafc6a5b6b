"""A run that was stopped, however it was stopped, and taken up again is the run that was never stopped."""

import functools
import importlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import apical
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.replicas import ReplicaStack
from apical.errors import CheckpointError
from cases import mostly_slow
from disk import largest_file
from reference import assert_all_same
from runs import cnn, data, fit, mlp, noisy, noisy_cnn, plain_mlp, weights, without_time


class Counting(torch.optim.SGD):
    """Counts in plain numbers, of each parameter and of each group, and steps less and less."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        for group in self.param_groups:
            group.update(steps=0, share=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["share"] *= 0.9
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad * group["lr"] * group["share"] / (group["steps"] + self.state[p]["count"]))


OPTIMIZERS = {
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "optimizer_options": {"weight_decay": 0.1, "betas": (0.8, 0.9)}},
    "sgd": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
    "own": {"optimizer": functools.partial(torch.optim.RMSprop, momentum=0.5)},
    "counting": {"optimizer": Counting},
}
RESUMED: dict[str, Any] = {"rule": "dll", "seeds": [2, 0], "epochs": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.safetensors"


def stop_after(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as that epoch's checkpoint is on the disk."""
    save = checkpoints.save

    def and_stop(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        save(path, checkpoint)
        if checkpoint.epoch == epoch:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save", and_stop)


def stop_at_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of an epoch."""
    step, taken = ReplicaStack.step, iter(range(10**6))

    def and_stop(self: ReplicaStack, *args: Any) -> Any:
        if next(taken) == number:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(ReplicaStack, "step", and_stop)


def interrupted(*args: Any, stop: Callable[[pytest.MonkeyPatch], None], **settings: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop(patch)
        with pytest.raises(KeyboardInterrupt):
            fit(*args, **settings)


def assert_equal_runs(actual: apical.Fit, expected: apical.Fit) -> None:
    """Bit for bit."""
    assert without_time(actual.history) == without_time(expected.history)
    assert actual.failed == expected.failed
    for a, b in zip(actual.learners, expected.learners, strict=True):
        ours, theirs = a.state_dict(), b.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def assert_equal_files(actual: Path, expected: Path) -> None:
    """Every tensor: weights, buffers and the optimiser's memory."""
    ours, theirs = load_file(actual), load_file(expected)
    assert ours.keys() == theirs.keys()
    assert any("/optim/" in name for name in theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# Exact resume.


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("build", mostly_slow([noisy, noisy_cnn], [noisy]))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_at_any_epoch_equals_never_interrupted(
    optimizer: str, build: Callable, stack: bool, tmp_path: Path
) -> None:
    settings = {**RESUMED, **OPTIMIZERS[optimizer], "stack": stack, "alignment": True}
    whole = tmp_path / "whole.safetensors"
    expected = fit(build, **settings, checkpoint=whole)
    for epoch in (1, 2, 3):
        path = tmp_path / f"{epoch}.safetensors"
        interrupted(build, **settings, checkpoint=path, stop=functools.partial(stop_after, epoch))
        resumed = fit(build, **settings, checkpoint=path, resume=True)
        assert_equal_runs(resumed, expected)
        assert_equal_files(path, whole)
    assert names_in(tmp_path) == ["1.safetensors", "2.safetensors", "3.safetensors", "whole.safetensors"]


@pytest.mark.parametrize("stack", [True, False])
def test_interrupted_within_an_epoch_loses_that_epoch_alone(stack: bool, path: Path) -> None:
    settings = {**RESUMED, "stack": stack}
    expected = fit(noisy, **settings)
    steps = 4 if stack else 8
    interrupted(noisy, **settings, checkpoint=path, stop=functools.partial(stop_at_step, steps + 2))
    assert checkpoints.load(path).epoch == 1
    assert_equal_runs(fit(noisy, **settings, checkpoint=path, resume=True), expected)
    assert names_in(path.parent) == [path.name]


def test_interrupted_before_any_epoch_leaves_nothing_and_starts_anew(path: Path) -> None:
    interrupted(noisy, **RESUMED, checkpoint=path, stop=functools.partial(stop_at_step, 1))
    assert names_in(path.parent) == []
    assert_equal_runs(fit(noisy, **RESUMED, checkpoint=path, resume=True), fit(noisy, **RESUMED))


@pytest.mark.parametrize("first", [True, False])
def test_a_run_may_go_on_stacked_or_separate_as_it_likes(first: bool, path: Path) -> None:
    interrupted(noisy, **RESUMED, stack=first, checkpoint=path, stop=functools.partial(stop_after, 2))
    resumed = fit(noisy, **RESUMED, stack=not first, checkpoint=path, resume=True)
    expected = fit(noisy, **RESUMED)
    for a, b in zip(resumed.learners, expected.learners, strict=True):
        assert_all_same(weights(a), weights(b), 1e-9)


def test_a_finished_run_is_returned_as_it_was_without_a_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fit(noisy, **RESUMED, checkpoint=path)
    before = path.read_bytes()
    monkeypatch.setattr(ReplicaStack, "step", lambda *_: pytest.fail("a step was taken"))
    again = fit(noisy, **RESUMED, checkpoint=path, resume=True)
    assert_equal_runs(again, done)
    assert again.history == done.history
    assert path.read_bytes() == before


def test_a_model_of_the_users_own_resumes_in_place(path: Path) -> None:
    settings = {"rule": "dll", "epochs": 3, "checkpoint": path}
    torch.manual_seed(1)
    models = stopped, resumed, whole = mlp(), mlp(), mlp()
    for model in models[1:]:
        model.load_state_dict(stopped.state_dict())
    fit(whole, rule="dll", epochs=3)
    interrupted(stopped, **settings, stop=functools.partial(stop_after, 1))
    with torch.no_grad():
        resumed[1].weight.zero_()  # what it holds does not matter: the checkpoint does
    fit(resumed, **settings, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_a_learner_with_other_options_does_not_go_on(path: Path) -> None:
    fit(apical.make("pc", mlp(), sweeps=4), rule=None, stop_after=2, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r'other options, .*"sweeps": 4} and not .*"sweeps": 5}; go on'):
        fit(apical.make("pc", mlp(), sweeps=5), rule=None, checkpoint=path, resume=True)
    assert path.read_bytes() == before
    assert fit(apical.make("pc", mlp(), sweeps=4), rule=None, checkpoint=path, resume=True).history[-1]["epoch"] == 4


def test_losses_and_optimizers_that_are_objects_are_kept_by_the_names_of_their_kinds(path: Path) -> None:
    settings: dict[str, Any] = {"loss": nn.CrossEntropyLoss(reduction="none"), "checkpoint": path}
    fit(**settings)
    kept = checkpoints.load(path).settings
    assert (kept["loss"], kept["model"], kept["optimizer"]) == ("CrossEntropyLoss", "mlp", "adam")
    fit(**settings, resume=True)
    with pytest.raises(CheckpointError, match=r"its loss is 'CrossEntropyLoss', this one's is 'cross_entropy'"):
        fit(checkpoint=path, resume=True)


KILLED = """
import os, signal, sys
from apical.engine.replicas import ReplicaStack
import torch, runs
torch.set_num_threads(1)
step, taken = ReplicaStack.step, iter(range(10**6))
def and_die(self, *args):
    if next(taken) == 6:  # the second epoch's third step
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args)
ReplicaStack.step = and_die
runs.fit(runs.noisy, rule="dll", seeds=[2, 0], epochs=3, stack=True, checkpoint=sys.argv[1])
"""


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_an_epoch_resumes_and_ends_equal(path: Path) -> None:
    paths = [entry for entry in sys.path if entry]
    script = f"import sys; sys.path[:0] = {paths!r}\n{KILLED}"
    dead = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert names_in(path.parent) == [path.name]
    settings = {**RESUMED, "stack": True}
    assert checkpoints.load(path).epoch == 1
    assert_equal_runs(fit(noisy, **settings, checkpoint=path, resume=True), fit(noisy, **settings))


# What is not continued, and not overwritten either.


@pytest.fixture
def begun(path: Path) -> Path:
    interrupted(checkpoint=path, rule="dll", seeds=2, stop=functools.partial(stop_after, 1))
    return path


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def deeper() -> nn.Sequential:
    return nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3)).double()


def one_off(which: int, at: int = 0) -> tuple:
    """The data, but for one value of one tensor."""
    tensors = data()
    tensors[which].view(-1)[at] += 1 if tensors[which].view(-1)[at] < 1 else -1
    return tensors


def in_disguise(build: Callable[[], nn.Sequential]) -> Callable[[], nn.Sequential]:
    """Another network under the same name."""

    @functools.wraps(mlp)
    def renamed() -> nn.Sequential:
        return build()

    return renamed


def as_learner(path: Path, **changes: Any) -> apical.Fit:
    return fit(changes.pop("model", mlp), **{"rule": "dll", "seeds": 2, **changes}, checkpoint=path, resume=True)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rule": ({"rule": "fa"}, "its rule is 'dll', this one's is 'fa'"),
    "variant": ({"rule": "dll:released"}, "its rule is 'dll'"),
    "seeds": ({"seeds": 3}, r"its seeds is \[0, 1\]"),
    "order of seeds": ({"seeds": [1, 0]}, r"its seeds is \[0, 1\]"),
    "lr": ({"lr": 0.5}, "its lr is"),
    "epochs": ({"epochs": 9}, "its epochs is 4"),
    "batch": ({"batch_size": 9}, "its batch_size is 8"),
    "option": ({"options": {"theta_std": 0.5}}, "its options is {}"),
    "optimizer": ({"optimizer": "sgd"}, "its optimizer is 'adam'"),
    "optimizer's option": ({"optimizer_options": {"eps": 0.1}}, "its optimizer_options is {}"),
    "schedule": ({"schedule": "cosine"}, "its schedule is 'linear'"),
    "protocol": ({"protocol": "validation"}, "its protocol is 'clean'"),
    "smoothing": ({"label_smoothing": 0.1}, "its label_smoothing is 0.0"),
    "clip": ({"clip": 1.0}, "its clip is None"),
    "model": ({"model": cnn}, "its model is 'mlp', this one's is 'cnn'"),
    "width": ({"model": in_disguise(wide)}, "another network: param/model.1.weight has shape"),
    "depth": ({"model": in_disguise(deeper)}, r"another network: param/.* has shape None there"),
    "activation": ({"model": in_disguise(plain_mlp)}, "belongs to another network of the same name 'mlp'"),
    "values": ({"on": data(seed=8)}, "belongs to other data of the same name 'custom'"),
    "one target": ({"on": one_off(1)}, "belongs to other data"),
    "one test value": ({"on": one_off(2)}, "belongs to other data"),
    "the last target": ({"on": one_off(1, at=-1)}, "belongs to other data"),
    "the last test value": ({"on": one_off(2, at=-1)}, "belongs to other data"),
    "fewer examples": ({"on": data(train=28)}, "belongs to other data"),
    "type": ({"on": [t.double() if t.is_floating_point() else t for t in data()]}, "belongs to other data"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_stays(what: str, begun: Path) -> None:
    before = begun.read_bytes()
    changes, words = OTHERS[what]
    with pytest.raises(CheckpointError, match=words) as caught:
        as_learner(begun, **changes)
    assert "\n" not in str(caught.value)
    assert begun.read_bytes() == before
    assert names_in(begun.parent) == [begun.name]


def test_a_checkpoint_that_does_not_know_its_data_is_taken_as_before(begun: Path) -> None:
    checkpoints.save(begun, checkpoints.load(begun)._replace(fingerprint={}))
    assert as_learner(begun, on=data(seed=8)).history[-1]["epoch"] == 4


def test_a_fingerprint_knows_values_whatever_their_memory_and_whatever_the_addresses() -> None:
    class Odd(nn.Tanh):
        def extra_repr(self) -> str:
            return repr(object())

    x, y, x_test, y_test = (torch.randn(6, 3, 200, 200), torch.arange(6), torch.randn(2, 3, 4, 4), torch.arange(2))
    plain = Dataset(x, y, x_test, y_test, "a", 6)
    laid = replace(plain, x_train=x.contiguous(memory_format=torch.channels_last), name="b")
    assert not laid.x_train.is_contiguous()

    def fingerprint(last: nn.Module, data: Dataset) -> dict[str, str]:
        return checkpoints.fingerprint(apical.make("bp", nn.Sequential(nn.Linear(2, 2), last)), data)

    first = fingerprint(Odd(), plain)
    assert fingerprint(Odd(), laid) == first
    other = fingerprint(nn.Tanh(), replace(plain, y_train=y.flip(0)))
    assert other["model"] != first["model"]
    assert other["data"] != first["data"]


def test_one_changed_value_in_large_data_is_noticed(path: Path) -> None:
    x, y, *test = data(train=40_000)
    fit(on=(x, y, *test), checkpoint=path, epochs=2, batch_size=40_000, stop_after=1)
    x[12_346, 0, 1, 2] += 1
    with pytest.raises(CheckpointError, match="belongs to other data of the same name"):
        fit(on=(x, y, *test), checkpoint=path, epochs=2, batch_size=40_000, resume=True)


def test_a_module_of_the_users_own_is_compared_by_its_source(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "from torch import nn\nclass Odd(nn.Module):\n    def forward(self, x):\n        return x * 2\n"

    def own() -> nn.Sequential:
        sys.modules.pop("odd_modules", None)
        return nn.Sequential(*mlp(), importlib.import_module("odd_modules").Odd())

    (tmp_path / "odd_modules.py").write_text(source)
    fit(own, checkpoint=path, stop_after=1)
    assert fit(own, checkpoint=path, stop_after=2, resume=True).history[-1]["epoch"] == 2
    (tmp_path / "odd_modules.py").write_text(source.replace("x * 2", "x * 3.0"))
    importlib.invalidate_caches()
    with pytest.raises(CheckpointError, match="belongs to other source code of bp or own; go on with"):
        fit(own, checkpoint=path, resume=True)


def test_an_existing_checkpoint_is_refused_without_resume_and_stays(begun: Path) -> None:
    before = begun.read_bytes()
    with pytest.raises(CheckpointError, match=r"exists already.*resume=True"):
        fit(rule="dll", seeds=2, checkpoint=begun)
    assert begun.read_bytes() == before


def altered(path: Path) -> None:
    """A header that another program might have written: well formed, and wrong."""
    save_file({"x": torch.zeros(2)}, path, metadata={"apical": '{"format": 1, "epoch": 1}'})


def of_other_seeds(path: Path) -> None:
    saved = checkpoints.load(path)
    checkpoints.save(path, saved._replace(tensors={0: saved.tensors[0], 7: saved.tensors[1]}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a few bytes": lambda path: path.write_bytes(path.read_bytes()[:5]),
    "half the header": lambda path: path.write_bytes(path.read_bytes()[:400]),
    "half the file": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "all but a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one byte too many": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "text": lambda path: path.write_text("{}"),
    "foreign": lambda path: save_file({"weight": torch.zeros(2)}, path),
    "another format": lambda path: save_file({}, path, metadata={"apical": '{"format": 99}'}),
    "no json": lambda path: save_file({}, path, metadata={"apical": "{"}),
    "altered": altered,
    "of other seeds": of_other_seeds,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_no_checkpoint_is_refused_in_one_sentence_and_stays(what: str, begun: Path) -> None:
    DAMAGE[what](begun)
    before = begun.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        as_learner(begun)
    assert "\n" not in str(caught.value)
    assert str(begun) in str(caught.value)
    assert begun.read_bytes() == before


def damaged(good: bytes, rng: random.Random) -> bytes:
    """A file with a flipped bit, cut off, or with some bytes replaced by others, anywhere."""
    made, at = bytearray(good), rng.randrange(len(good))
    kind = rng.choice(["flip", "flip", "cut", "replace"])
    if kind == "flip":
        made[at] ^= 1 << rng.randrange(8)
    return (
        bytes(made[:at])
        if kind == "cut"
        else bytes(made[:at] + rng.randbytes(kind == "replace") + made[at + (kind == "replace") :])
    )


def test_a_damaged_checkpoint_never_resumes_to_other_weights(begun: Path) -> None:
    good, expected, rng = begun.read_bytes(), fit(rule="dll", seeds=2), random.Random(0)
    refused = 0
    for _ in range(40):
        begun.write_bytes(damaged(good, rng))
        try:
            resumed = as_learner(begun)
        except CheckpointError as error:
            refused += "\n" not in str(error)
        else:
            assert_equal_runs(resumed, expected)
            refused += 1
    assert refused == 40


def test_a_checkpoint_without_a_checksum_is_one_of_version_0_1_and_goes_on(begun: Path) -> None:
    with safe_open(begun, framework="pt") as file:
        header = file.metadata()
    del header["checksum"]
    save_file(load_file(begun), begun, metadata=header)
    assert_equal_runs(as_learner(begun), fit(rule="dll", seeds=2))


ALTERED: dict[str, Any] = {
    "the epoch as text": {"epoch": "1"},
    "more epochs than there are": {"epoch": 99},
    "history of numbers": {"history": [3]},
    "history without epochs": {"history": [{"seed": 0}]},
    "a failure without a reason": {"failed": {"0": None}},
    "a number as vocabulary": {"vocabulary": 3},
    "options that are no object": {"fingerprint": {"options": "["}},
    "endless brackets": {"history": "[" * 990 + "]" * 990},
    "more brackets than python reads": {"history": "[" * 100_000},
}


@pytest.mark.parametrize("what", ALTERED)
def test_a_checkpoint_of_version_0_1_with_values_of_a_wrong_type_is_refused_in_one_sentence(
    what: str, begun: Path
) -> None:
    described = json.dumps({"format": 1, **checkpoints.load(begun)._replace(tensors={})._asdict(), **ALTERED[what]})
    described = described.replace('"[', "[").replace(']"', "]") if "brackets" in what else described
    save_file(load_file(begun), begun, metadata={"apical": described})
    with pytest.raises(CheckpointError, match="not a checkpoint that can be read") as caught:
        as_learner(begun)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [functools.partial(apical.make, "ff"), apical.ForwardForward])
def test_an_option_with_the_name_of_a_method_is_part_of_the_learner(make: Callable[..., Any], path: Path) -> None:
    fit(make(mlp(), predict="readout"), rule=None, stop_after=1, checkpoint=path)
    with pytest.raises(CheckpointError, match='"predict": "readout"'):
        fit(make(mlp(), predict="goodness"), rule=None, checkpoint=path, resume=True)
    assert fit(make(mlp(), predict="readout"), rule=None, checkpoint=path, resume=True).history[-1]["epoch"] == 4


def test_a_folder_in_the_checkpoints_place_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint that can be read"):
        fit(checkpoint=path, resume=True)


# Disks.


@pytest.mark.parametrize("size", [10, 2000, 5000])
def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint_and_nothing_else(size: int, begun: Path) -> None:
    before = begun.read_bytes()
    assert len(before) > size
    with largest_file(size), pytest.raises(apical.ApicalError, match="could not be written") as caught:
        as_learner(begun)
    assert "\n" not in str(caught.value)
    assert begun.read_bytes() == before
    assert names_in(begun.parent) == [begun.name]
    assert_equal_runs(as_learner(begun), fit(rule="dll", seeds=2))


def test_a_folder_that_cannot_be_written_to_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(ReplicaStack, "step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(apical.ApicalError, match="cannot write"):
        fit(checkpoint=tmp_path / "file" / "run.safetensors")
    for length in (241, 300):
        with pytest.raises(apical.ApicalError, match="File name too long; choose a shorter name"):
            fit(checkpoint=tmp_path / f"{'n' * (length - 12)}.safetensors")


def test_a_checkpoint_is_made_in_a_new_folder_and_by_a_relative_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(checkpoint="run.safetensors", epochs=1)
    fit(checkpoint=Path("deep") / "er" / "run.safetensors", epochs=1)
    assert names_in(tmp_path) == ["deep", "run.safetensors"]
    assert names_in(tmp_path / "deep" / "er") == ["run.safetensors"]
    assert names_in(tmp_path / "deep") == ["er"]


def test_every_epoch_writes_a_checkpoint_that_says_where_it_stands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs, save = [], checkpoints.save

    def spy(where: Path, checkpoint: checkpoints.Checkpoint) -> None:
        save(where, checkpoint)
        epochs.append(checkpoints.load(where).epoch)

    monkeypatch.setattr(checkpoints, "save", spy)
    run = fit(checkpoint=path, seeds=2, on=data())
    assert epochs == [1, 2, 3, 4]
    kept = checkpoints.load(path)
    assert kept.history == run.history
    for seed, learner in enumerate(run.learners):
        for name, p in learner.named_parameters():
            assert torch.equal(kept.tensors[seed][f"param/{name}"], p)


@pytest.mark.parametrize("build", [mlp, cnn])
def test_a_run_that_stops_after_some_epochs_is_the_beginning_of_the_whole(
    build: Callable[[], nn.Sequential], path: Path
) -> None:
    """Its rates are those of the whole schedule, and it goes on as if it had never been stopped."""
    whole = fit(build, **RESUMED)
    part = fit(build, checkpoint=path, stop_after=2, **RESUMED)
    assert without_time(part.history) == [r for r in without_time(whole.history) if r["epoch"] <= 2]
    assert_equal_runs(fit(build, checkpoint=path, resume=True, **RESUMED), whole)


def test_stopping_later_than_the_end_or_where_it_stands_changes_nothing(path: Path) -> None:
    whole = fit(mlp, checkpoint=path, stop_after=99, **RESUMED)
    assert max(row["epoch"] for row in whole.history) == RESUMED["epochs"]
    again = fit(mlp, checkpoint=path, resume=True, stop_after=1, **RESUMED)
    assert_equal_runs(again, whole)


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_stopping_after_no_epoch_is_refused(wrong: Any) -> None:
    with pytest.raises(apical.ApicalError, match="stop_after"):
        fit(mlp, stop_after=wrong, **RESUMED)
