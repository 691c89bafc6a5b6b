"""The audit's facts against what the algorithms are known to do, its verdicts, its JSON, and its page."""

import copy
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical import cli
from apical.core.learner import Claims
from apical.core.registry import resolve
from apical.errors import UnsupportedError
from apical.plausibility import verdicts
from apical.plausibility.criteria import find_claims, read_verdicts
from apical.plausibility.judge import build_audit_network, format_markdown
from cases import CASES, EVERY, learner_for, mostly_slow
from strategies import share_of_examples

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
Run = Callable[..., tuple[int, str, str]]


class Verdicts(dict[str, apical.Audit]):
    """The audit of each rule, once it is asked for."""

    def __missing__(self, rule: str) -> apical.Audit:
        self[rule] = verdicts([rule])[rule]
        return self[rule]

    def whole(self) -> dict[str, apical.Audit]:
        return {rule: self[rule] for rule in EVERY}


ALL = Verdicts()


def mlp(depth: int, width: int = 4) -> nn.Sequential:
    modules = [module for _ in range(depth - 1) for module in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(*modules, nn.Linear(width, width, bias=False))


def batch(count: int = 6, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.arange(count) % width


def facts(rule: str, depth: int = 3, **options: Any) -> dict[str, Any]:
    return apical.audit(apical.make(rule, mlp(depth), **options), *batch()).facts


def of_layers(facts: dict[str, Any], *path: str) -> list[Any]:
    found = facts["layers"]
    for key in path:
        found = [entry[key] for entry in found]
    return found


def three(audit: apical.Audit) -> tuple[bool, bool, bool]:
    return audit.c1, audit.c2, audit.c3


# The verdicts.

TRANSPORT = {"bp", "sign", "local", "pc", "pc:fixed", "ipc", "ep"}
"""Rules that use a weight in both directions: W, its sign, or a local classifier's weights."""


@pytest.mark.parametrize("rule", mostly_slow(EVERY, ["bp", "dll", "dtp", "local"]))
def test_c1_is_met_by_the_rules_that_have_no_use_for_a_transpose(rule: str) -> None:
    assert ALL[rule].c1 == (rule not in TRANSPORT)
    paper = ALL[rule].paper
    if paper is not None and rule != "ep":
        assert ALL[rule].c1 == paper.c1


def test_the_same_algorithm_has_the_same_verdicts_and_facts() -> None:
    fa, frozen = ALL["fa"], ALL["dll:frozen"]
    assert three(fa) == three(frozen)
    for ours, theirs in zip(fa.facts["layers"], frozen.facts["layers"], strict=True):
        assert ours == theirs
    assert fa.facts["costs"] == frozen.facts["costs"]
    # with one hidden layer, direct feedback alignment is feedback alignment
    one = [apical.audit(apical.make(rule, mlp(2)), *batch()) for rule in ("fa", "dfa")]
    assert three(one[0]) == three(one[1])
    assert one[0].facts["layers"] == one[1].facts["layers"]


@pytest.mark.parametrize("case", mostly_slow([name for name in CASES if name != "positions"], ["cnn", "parallel"]))
@pytest.mark.parametrize(
    "rule", mostly_slow(["bp", "fa", "dll", "local", "pc", "dtp", "np", "hebb"], ["bp", "fa", "np"])
)
def test_a_verdict_does_not_depend_on_the_network(rule: str, case: str) -> None:
    """Layers of any kind, pooling, dropout that draws noise of its own."""
    if case == "parallel" and not apical.RULES[rule].PARALLEL:
        pytest.skip(f"{rule} refuses a Parallel")
    made = CASES[case].case(batch=5)
    learner = learner_for(rule, made)
    assert three(apical.audit(learner, made.x, made.labels)) == three(ALL[rule])


def test_branches_are_side_by_side_and_none_is_above_another() -> None:
    made = CASES["parallel"].case(batch=5)
    layers = apical.audit(learner_for("fa", made), made.x, made.labels).facts["layers"]
    tiers = learner_for("fa", made).network.tiers
    assert any(len(tier.layers) > 1 for tier in tiers)
    for level, tier in enumerate(tiers):
        higher = [layer.name for t in tiers[level + 1 :] for layer in t.layers.values()]
        for i in tier.layers:
            assert set(layers[i]["waits_for"]) <= set(higher)
            assert layers[i]["error"]["hops"] == len(tiers) - 1 - level
            assert layers[i]["depends_on"]["presynaptic"]


@pytest.mark.parametrize("hidden", [6, 64])
def test_a_recurrent_network_is_judged_by_the_same_measure(hidden: int) -> None:
    """Also with too few neurons for the time steps: then on a network of the audit's own."""
    x, y = torch.randn(2, 3, 3), torch.randint(0, 2, (2, 3))
    for rule, expected in {
        "bp": (False, True, False),
        "dll": (True, True, False),
        "readout": (True, True, True),
    }.items():
        elman = apical.Elman(nn.RNN(3, hidden, batch_first=True), nn.Linear(hidden, 2))
        assert three(apical.audit(apical.make(rule, elman), x, y)) == expected


# The facts.


@share_of_examples(0.2)
@given(depth=st.integers(2, 5), rule=st.sampled_from(["bp", "fa", "dll", "sign", "pc", "pc:fixed", "ipc", "dtp", "ep"]))
def test_an_error_that_comes_down_layer_by_layer_crosses_a_synapse_for_each(depth: int, rule: str) -> None:
    found = facts(rule, depth)
    assert of_layers(found, "error", "hops") == list(range(depth - 1, -1, -1))
    assert of_layers(found, "error", "from") == ["above"] * (depth - 1) + ["itself"]
    names = [str(2 * i) for i in range(depth)]
    assert of_layers(found, "waits_for") == [names[i + 1 :] for i in range(depth)]


@pytest.mark.parametrize(("rule", "hops"), [("dfa", [1, 1, 1, 0]), ("np", [0] * 4), ("wp", [0] * 4)])
def test_an_error_that_jumps_comes_from_afar(rule: str, hops: list[int]) -> None:
    found = facts(rule, 4)
    assert of_layers(found, "error", "hops") == hops
    crossed = [3, 2, 1, 0]
    skips = ["afar" if h < c else "above" if c else "itself" for h, c in zip(hops, crossed, strict=True)]
    assert of_layers(found, "error", "from") == skips


def test_a_reward_for_all_layers_is_a_global_signal() -> None:
    last, both = (apical.audit(apical.make("rstdp", mlp(3), rewarded=n), *batch()) for n in (1, 2))
    assert (last.c2, both.c2) == (True, False)
    assert of_layers(last.facts, "error", "from") == ["nowhere", "nowhere", "itself"]
    assert of_layers(both.facts, "error", "from") == ["nowhere", "afar", "itself"]


def test_hidden_layers_that_no_target_reaches_are_said_to_be_so() -> None:
    for rule in ("hebb", "softhebb"):
        assert of_layers(ALL[rule].facts, "depends_on", "target") == [False, False, True]
        assert of_layers(ALL[rule].facts, "depends_on", "postsynaptic") == [True] * 3
        assert of_layers(ALL[rule].facts, "depends_on", "presynaptic") == [True] * 3
    assert of_layers(ALL["readout"].facts, "learns") == [False, False, True]


def test_an_update_that_uses_its_own_weight_is_told_from_one_that_uses_its_activity() -> None:
    """Of the last layer, whose error is made from its own activity; a random target needs no weights at all."""
    soft, hard = (facts("rstdp", soft=soft) for soft in (True, False))
    assert soft["layers"][0]["depends_on"]["own_weight"]
    assert hard["layers"][0]["depends_on"]["own_weight"]  # who wins is a matter of the weights
    assert not ALL["readout"].facts["layers"][0]["depends_on"]["own_weight"]
    assert ALL["bp"].facts["layers"][2]["depends_on"]["other_weights"] != []


@pytest.mark.parametrize(
    ("rule", "options", "mixes"),
    [
        ("hebb", {"center": True, "normalize": False}, True),
        ("hebb", {"center": False, "normalize": True}, True),
        ("hebb", {"center": False, "normalize": False}, False),
        ("local", {"similarity": 0.5}, True),
        ("local", {}, False),
        ("bp", {}, False),
        ("np", {}, False),
        ("ff", {}, False),
        ("dll:kolen-pollack", {}, False),
    ],
)
def test_examples_that_meet_before_the_mean_are_noticed(rule: str, options: Any, mixes: bool) -> None:
    found = of_layers(facts(rule, **options), "depends_on", "batch")
    assert found[0] == mixes


@pytest.mark.parametrize("samples", mostly_slow([1, 3], quick=[1]))
def test_passes_are_counted(samples: int) -> None:
    """2K for K antithetic samples, K + 1 with a baseline; a sweep of predictive coding predicts all but the first."""
    computed = ("activity", "computed")
    assert of_layers(facts("np", samples=samples), *computed) == [2 * samples] * 3
    assert of_layers(facts("wp", samples=samples), *computed) == [2 * samples] * 3
    assert facts("wp", samples=samples, antithetic=False)["passes"] == samples + 1
    sweeps = samples + 1
    full, fixed = facts("pc", sweeps=sweeps), facts("pc:fixed", sweeps=sweeps)
    assert of_layers(full, *computed) == [1, sweeps, sweeps + 1]  # the first sweep reaches the top alone
    assert of_layers(fixed, *computed) == [1, 1, 1]
    for rule in ("bp", "fa", "dll", "local", "hebb", "softhebb", "readout", "rstdp"):
        assert of_layers(ALL[rule].facts, *computed) == [1, 1, 1]


@pytest.mark.parametrize(("shown", "times"), [(True, 2), (False, 1)])
def test_a_second_pass_counts_where_the_target_joins_the_input(shown: bool, times: int) -> None:
    """The same input once more gives the activity that is there already."""

    class Teaching(apical.Learner):
        def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> apical.Update:
            loss, _ = self.loss.start(output := self.network.predict(params, x, noise), y)
            taught = self.network.forward(params, x + nn.functional.one_hot(y, 4) if shown else x, noise)
            grads: dict[str, Tensor] = {}
            for i, a in enumerate([*taught.inputs[1:], taught.output]):
                grads |= self.network.layers[i].gradients(taught.inputs[i], a, self.trainable)
            return apical.Update(grads, {}, loss, output)

    audit = apical.audit(Teaching(mlp(3)), *batch())
    assert of_layers(audit.facts, "activity", "computed") == [times] * 3
    assert audit.c3 == (not shown)


def test_all_steps_of_a_batch_count() -> None:
    """A first step from the target, without noise; then one from noise, without the target."""

    class Dreaming(apical.Backpropagation):
        @property
        def phases(self) -> Any:
            return self.update, self.dream

        def dream(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> apical.Update:
            dreamt = {name: torch.randn(params[name].shape) for name in self.trainable}
            return self.update(params, state, x, y, noise)._replace(grads=dreamt)

    found = apical.audit(Dreaming(mlp(3)), *batch()).facts
    assert of_layers(found, "depends_on", "target") == [True] * 3
    assert of_layers(found, "depends_on", "noise") == [True] * 3
    assert of_layers(found, "error", "hops") == [2, 1, 0]


def test_two_states_are_one_too_many() -> None:
    """Forward-forward with one hidden layer: nothing waits, but the layer fires for a right and for a wrong label."""
    audit = apical.audit(apical.make("ff", mlp(2)), *batch())
    assert of_layers(audit.facts, "waits_for") == [[], []]
    assert of_layers(audit.facts, "activity", "computed") == [2, 1]
    assert three(audit) == (True, True, False)


def test_states_that_are_compared_are_counted() -> None:
    held = ("activity", "held")
    for rule, count in {"bp": 1, "dll": 1, "pc": 1, "hebb": 1, "np": 2, "ep": 2, "ff": 2}.items():
        assert of_layers(ALL[rule].facts, *held)[:2] == [count] * 2, rule


def test_weights_are_locked_while_an_error_is_on_its_way_unless_they_step_with_it() -> None:
    """Incremental predictive coding waits, too, but its weights move at every sweep."""
    locked = ("activity", "locked")
    for rule in ("bp", "fa", "dll", "pc", "np", "dtp", "ep"):
        assert of_layers(ALL[rule].facts, *locked) == [True, True, False], rule
    for rule in ("ipc", "hebb", "local", "ff"):
        assert of_layers(ALL[rule].facts, *locked) == [False] * 3, rule
    sweeps = apical.make("ipc", mlp(3)).sweeps
    assert (ALL["ipc"].facts["optimiser_steps"], ALL["bp"].facts["optimiser_steps"]) == (sweeps, 1)


@share_of_examples(0.2)
@given(depth=st.integers(2, 5))
def test_costs_are_those_of_the_formula(depth: int) -> None:
    """In square layers a product is one unit of work: bp has L up, L − 1 down, L for the updates. wp goes up twice
    and multiplies each weight's noise by the slope, which is one example's work for a layer."""
    bp = 3 * depth - 1
    work = {"bp": bp, "readout": depth + 1, "fa": bp, "wp": (2 + 1 / 6) * depth, "dll": bp + depth - 1}
    for rule, units in work.items():
        found = facts(rule, depth)["costs"]
        assert found["multiply_adds"] == pytest.approx(units / bp, abs=0.006), rule
        own = 16 * (depth - 1) if rule in ("fa", "dll") else 0
        assert (found["extra_parameters"], found["extra_buffers"]) == (own, 0)
    assert facts("bp", depth)["costs"] == {
        **dict.fromkeys(("extra_parameters", "extra_buffers"), 0),
        **dict.fromkeys(("operations", "multiply_adds", "memory"), 1.0),
    }


def test_what_is_made_once_and_kept_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of a process makes the range of its classes; no later one does."""
    monkeypatch.setattr("apical.core.losses._CLASSES", {})
    first = facts("dll:frozen")["costs"]
    assert first == facts("dll:frozen")["costs"]
    assert first["operations"] == 1.0


class MakesTable(apical.Backpropagation):
    """Backpropagation with a table that the first update of a learner makes."""

    table: Tensor | None = None

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Any:
        self.table = torch.ones(100, 100) @ torch.ones(100, 100) if self.table is None else self.table
        return super().update(params, state, x, y, noise)


def test_a_table_that_the_first_update_of_a_learner_makes_is_no_cost_of_a_batch() -> None:
    costs = apical.audit(MakesTable(mlp(3)), *batch()).facts["costs"]
    assert costs == facts("bp")["costs"]


def test_extra_buffers_and_memory_are_counted() -> None:
    found = facts("np", decorrelate=True)["costs"]
    assert found["extra_buffers"] == 3 * 16
    assert facts("np", samples=20)["costs"]["memory"] > facts("np")["costs"]["memory"] > 0


# The learner stays as it is.


@pytest.mark.parametrize(
    "rule", mostly_slow(["dll:kolen-pollack", "ipc", "rstdp", "dtp", "np"], ["dll:kolen-pollack", "np"])
)
def test_an_audit_leaves_no_trace(rule: str) -> None:
    learner, (x, y) = apical.make(rule, mlp(3)), batch()
    learner.step(x, y, torch.optim.SGD(learner.param_groups(0.1)))
    before, drawn = copy.deepcopy(learner.state_dict()), torch.get_rng_state()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in learner.named_parameters()}
    given = x.clone(), y.clone()
    once = apical.audit(learner, x, y)
    assert all(torch.equal(v, before[n]) for n, v in learner.state_dict().items())
    for name, p in learner.named_parameters():
        assert (p.grad is None) == (grads[name] is None)
        assert p.grad is None or torch.equal(p.grad, grads[name])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1])
    assert once.to_dict() == apical.audit(learner, x, y).to_dict()


def test_what_leaves_torch_is_said_to_be_lost() -> None:
    class Reader(resolve("np")[0]):  # type: ignore[misc]
        def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> apical.Update:
            update = super().update(params, state, x, y, noise)
            scale = float(update.loss)
            return update._replace(grads={n: scale * g for n, g in update.grads.items()})

    (loss,) = apical.audit(Reader(mlp(2)), *batch()).facts["not_followed"]
    assert re.search(r"test_audit\.py:\d+ in update$", loss["line"])
    assert loss["operation"] == "__float__"
    assert ALL["np"].facts["not_followed"] == []


def test_a_bad_batch_or_learner_is_refused_in_a_sentence() -> None:
    learner, (x, y) = apical.make("bp", mlp(2)), batch()
    with pytest.raises(apical.ApicalError, match="targets have 3 examples"):
        apical.audit(learner, x, y[:3])
    with pytest.raises(UnsupportedError, match=r"a learner, not a Sequential; apical\.make"):
        apical.audit(mlp(2), x, y)
    learner.scale = (learner.forward_weights[0] * 2).sum()
    with pytest.raises(apical.ApicalError, match=r"cannot be copied for the audit.*as buffers or parameters"):
        apical.audit(learner, x, y)


# JSON, the command, the page.


@pytest.mark.parametrize("rule", EVERY)
def test_the_dictionary_is_plain_and_whole_and_has_the_recorded_verdict(rule: str) -> None:
    made = ALL[rule].to_dict()
    assert read_verdicts()[rule] == Claims(*(made[c] for c in ("c1", "c2", "c3"))), "run: python tools/verdicts.py"
    assert json.loads(json.dumps(made)) == made
    assert list(made) == ["c1", "c2", "c3", "paper", "facts"]
    assert {made[c] for c in ("c1", "c2", "c3")} <= {True, False, None}
    claims = find_claims(rule)
    assert made["paper"] == (None if claims is None else claims._asdict())
    assert set(made["facts"]["evidence"]) == {"c1", "c2", "c3"}
    assert [layer["layer"] for layer in made["facts"]["layers"]] == ["0", "2", "4"]
    for finding in made["facts"]["transport"]:
        assert re.fullmatch(r"\S+\.py:\d+ in \S+", finding["line"])
        assert "rules" in finding["called"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`apical audit WORDS` in an empty folder with a module of networks in it."""
    pytest.importorskip("typer")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "networks_to_audit.py").write_text(NETWORKS)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["apical", "audit", *words])
        with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


NETWORKS = """
from torch import nn
def conv():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Dropout(0.5), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
"""


def test_the_command_prints_json_for_the_rules_named(run: Run) -> None:
    code, out, err = run("dll:frozen", "bp", "--json")
    assert (code, err) == (0, "")
    expected = {"rules": {rule: ALL[rule].to_dict() for rule in ("dll:frozen", "bp")}}
    assert json.loads(out) == json.loads(json.dumps(expected))


def test_the_command_takes_all_rules_by_default_and_prints_the_pages_tables(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def known(names: list[str], *network: object) -> Iterable[tuple[str, apical.Audit]]:
        asked.append((names, *network))
        return ALL.whole().items()

    monkeypatch.setattr("apical.cli.audit.audit_rules", known)
    code, out, err = run("--markdown")
    assert (code, err) == (0, "")
    assert asked == [(list(EVERY), build_audit_network, None)]
    assert out.strip() == format_markdown(ALL.whole())


@pytest.mark.slow
def test_the_command_takes_a_network_of_ones_own_and_says_what_it_leaves_out(run: Run) -> None:
    mine = ("--model", "networks_to_audit:conv", "--shape", "2,3,3")
    code, out, err = run(*mine)
    assert code == 0
    assert re.fullmatch(r"apical: ep is left out: module 1 .*Dropout.*\n", err)
    assert re.search(r"fa +│ ✓ +│ ✓ +│ ✗ +│ ✓ ✗ ✗", out)
    assert run("ep", *mine)[0] == 1
    assert "pass input_shape" in run("fa", *mine[:2])[2]
    wrong = run("fa", *mine[:3], "two")
    assert wrong == (1, "", "apical: --shape 'two' is not a list of sizes such as 3,32,32.\n")
    assert "did you mean 'dll'?" in run("dl")[2]
    assert re.search(r"fa +│ ✓ +│ ✓ +│ ✗", run("fa", "--model", "cnn")[1])
    for model in ("rnn", "textcnn"):
        wrong = run("fa", "--model", model)
        assert wrong == (1, "", f"apical: the audit has no {model}; mlp, cnn or MODULE:FUNCTION works for --model.\n")


def test_the_page_has_the_tables_that_the_command_prints() -> None:
    assert format_markdown(ALL.whole()) in PAGE.read_text("utf-8"), "apical audit --markdown says something else by now"


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.startswith("True True False\n0 {'from': 'above', 'hops': 2} ['2', '4']")


def test_the_page_explains_every_verdict_that_differs_from_the_papers() -> None:
    text = PAGE.read_text("utf-8").partition("## Where the paper says otherwise")[2]
    for rule, audit in ALL.whole().items():
        for criterion in ("c1", "c2", "c3"):
            says = getattr(audit.paper, criterion, None)
            if says is not None and says != getattr(audit, criterion):
                lines = [line for line in text.splitlines() if line.startswith(f"**{criterion.upper()}")]
                assert any(f"`{rule}`" in line for line in lines), (rule, criterion)


def test_noise_that_acted_on_a_signal_makes_it_no_second_state() -> None:
    """Timing compares each step with each input: as many numbers as several states of a layer, but one state alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
    found = apical.audit(apical.make("rstdp", model), *batch()).facts
    assert of_layers(found, "activity", "computed") == [1, 1]


@pytest.mark.parametrize("rule", mostly_slow(EVERY, ["bp", "dll", "np", "hebb", "rstdp"]))
def test_a_batch_of_one_is_judged_as_any_other(rule: str) -> None:
    one = apical.audit(apical.make(rule, mlp(3)), *batch(1))
    assert three(one) == three(ALL[rule])
