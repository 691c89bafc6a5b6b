"""Suites: the paper's are what they claim to be, one's own are checked, and a part of one is a part of it."""

import itertools
from pathlib import Path

import pytest

import apical
from apical.bench import suites
from apical.bench.declaration import Request, list_names, parse_seeds
from apical.bench.defaults import find_settings, load_defaults_file
from apical.bench.suites import Job, list_jobs, load
from apical.data import registry
from apical.data.sentences import FOLDS
from apical.engine.loop import derive_seed
from apical.engine.settings import expand_seeds

TABLE_1 = [
    *("bp", "fa", "local", "pc", "np", "dtp", "softhebb", "rstdp", "ff", "ep"),
    *("dll", "dll:released", "dll:kolen-pollack", "readout"),
]


def of(suite: str, **choice: object) -> list[Job]:
    return list_jobs(load(suite), Request(**choice))


def settings(job: Job) -> dict[str, object]:
    assert job.declaration is not None
    return job.declaration.to_dict()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own.toml"


def test_every_suite_of_the_project_is_there_and_digits_is_the_first() -> None:
    assert list_names()[0] == "digits"
    assert set(list_names()) == {
        *("digits", "rules", "table1", "table2", "table3", "sensitivity", "convergence", "depth", "theta"),
        *(
            "paper-settings",
            "paper-length",
            "images-large",
            "text",
            "cost",
            "bias",
            "svhn-bias",
            "streaming",
            "staleness",
            "sensitivity-sgd",
            "ten-seeds",
        ),
    }


@pytest.mark.parametrize("name", list_names())
def test_every_suite_has_runs_each_once_and_what_cannot_be_run_says_why(name: str) -> None:
    found = of(name)
    assert found
    assert len({str(job) + str(job.declaration) for job in found}) == len(found)
    for job in found:
        assert (job.declaration is None) <= (job.problem is not None)
        assert job.seeds == tuple(range(len(job.seeds)))


@pytest.mark.parametrize(
    "name", ["digits", "table1", "theta", "depth", "bias", "convergence", "cost", "paper-settings"]
)
def test_all_of_these_can_be_run_once_their_data_are_there(name: str) -> None:
    assert all(job.declaration is not None for job in of(name))


def test_table_1_is_fourteen_rules_on_two_networks_and_four_data_sets_with_four_seeds() -> None:
    epochs = {"mnist": 20, "fashion_mnist": 20, "svhn": 30, "cifar10": 30}
    found = of("table1")
    wanted = itertools.product(TABLE_1, ("mlp", "cnn"), epochs)
    assert sorted((job.rule, job.model, job.data) for job in found) == sorted(wanted)
    for job in found:
        assert (job.epochs, len(job.seeds)) == (epochs[job.data], 4)
        recorded = find_settings(job.rule, job.model, job.data)
        assert settings(job) | recorded | {"epochs": job.epochs} == settings(job)  # but for the epochs


def test_theta_is_every_variant_at_every_rate_and_spread() -> None:
    found = {
        (job.rule, job.model, job.data, job.varied.get("theta_rate"), job.varied["theta_std"]) for job in of("theta")
    }
    rates = [("dll", r) for r in (1, 0.1, 0.01)] + [("dll:released", r) for r in (1, 0.1, 0.01)]
    rates += [("dll:kolen-pollack", r) for r in (1, 0.1, 0.01)] + [("dll:frozen", None)]
    networks = (("mlp", "mnist"), ("cnn", "cifar10"))
    assert found == {(rule, *n, rate, std) for (rule, rate), n, std in itertools.product(rates, networks, (0.05, 1))}
    for job in of("theta"):
        assert settings(job)["options"] == job.varied
        assert settings(job)["alignment"] is True


def test_depth_has_one_two_three_five_and_eight_hidden_layers() -> None:
    models = {job.model: apical.models.build(job.model, "mnist") for job in of("depth")}
    hidden = [sum(isinstance(m, apical.models.nn.Linear) for m in model) - 1 for model in models.values()]
    assert hidden == [1, 2, 3, 5, 8]
    recorded = find_settings("dll", "mlp", "mnist")
    for job in of("depth", rules=["dll"]):
        assert {name: settings(job)[name] for name in ("lr", "batch_size")} == {
            name: recorded[name] for name in ("lr", "batch_size")
        }


def test_bias_trains_every_network_with_and_without_and_changes_nothing_else() -> None:
    found = {(job.rule, job.data, job.model): settings(job) for job in of("bias")}
    plain = [place for place in found if not place[2].endswith("-bias")]
    assert len(found) == 2 * len(plain)
    for rule, data, model in plain:
        assert found[rule, data, f"{model}-bias"] == found[rule, data, model] | {"model": f"{model}-bias"}


def test_the_papers_settings_are_those_of_its_appendix_and_no_others() -> None:
    appendix = {
        ("mlp", "mnist"): (1e-3, 128),
        ("cnn", "mnist"): (5e-5, 64),
        ("mlp", "cifar10"): (8e-5, 64),
        ("cnn", "cifar10"): (5e-5, 64),
    }
    rules = {"bp", "fa", "dll", "dll:released", "dll:frozen", "dll:kolen-pollack"}
    found = of("paper-settings")
    assert {(job.rule, job.model, job.data) for job in found} == {(r, *n) for r in rules for n in appendix}
    for job in found:
        assert (settings(job)["lr"], settings(job)["batch_size"]) == appendix[job.model, job.data]
        assert settings(job)["options"] == {}


def test_text_is_every_rule_on_every_fold_once_with_the_recorded_settings() -> None:
    found = of("text")
    rules = ("readout", "bp", "fa", "dll", "dll:released", "dll:kolen-pollack")
    wanted = itertools.product(rules, ("subj", "mr"), range(FOLDS))
    assert sorted((job.rule, job.data, job.varied["fold"]) for job in found) == sorted(wanted)
    for job in found:
        recorded = find_settings(job.rule, job.model, job.data)
        expected = recorded | {"data_options": {"fold": job.varied["fold"]}}
        assert settings(job) | expected == settings(job)


def test_runs_that_several_suites_have_are_the_same_run() -> None:
    first = {job.declaration for job in of("table1")}
    assert {job.declaration for job in of("depth") if job.model == "mlp"} <= first
    assert {job.declaration for job in of("table3") if job.rule == "dll" and job.model != "rnn"} <= first


def test_a_choice_is_a_part_of_the_suite() -> None:
    found = of("table1", rules=["dll", "bp"], models=["cnn"], data=["svhn"], seeds=[3, 5], epochs=2)
    assert [(job.rule, job.model, job.data, job.epochs, job.seeds) for job in found] == [
        (rule, "cnn", "svhn", 2, (3, 5)) for rule in ("bp", "dll")
    ]


def test_the_control_of_digits_is_run_whatever_was_chosen_and_first() -> None:
    assert [(job.model, job.rule) for job in of("digits", rules=["fa"])] == [
        (model, rule) for model in ("mlp", "cnn") for rule in ("readout", "fa")
    ]
    assert {job.rule for job in of("digits")} == set(apical.rule_names())


def test_the_control_may_be_chosen_by_its_name_where_it_is_not_listed() -> None:
    assert {job.rule for job in of("table2", rules=["readout"])} == {"readout"}


def test_quick_is_one_seed_one_epoch_and_few_examples() -> None:
    for job in of("theta", quick=True):
        assert (job.epochs, job.seeds) == (1, (0,))
        assert job.declaration is not None
        assert job.declaration.examples == suites.QUICK_EXAMPLES
    assert of("theta", quick=True, seeds=2, epochs=3)[0][3:5] == (3, (0, 1))


def test_data_that_are_missing_are_told_with_the_way_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APICAL_DATA", str(tmp_path))
    problems = {job.problem for job in of("table1", data=["mnist"])}
    assert problems == {f"mnist is absent in {tmp_path}: `apical data fetch mnist` writes a good one."}


def test_what_belongs_to_another_version_is_a_problem_of_its_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: entry for name, entry in registry.DATASETS.items() if name != "cifar10"}
    monkeypatch.setattr(registry, "DATASETS", others)
    found = of("table3")
    assert all("no data set called 'cifar10'" in str(job.problem) for job in found if job.data == "cifar10")
    assert all(job.declaration is not None for job in found if job.data == "mnist")


# One's own.

GOOD = """
title = "Mine"
seeds = [4, 7]
columns = ["best"]
layout = "list"

[[runs]]
rules = ["dll", "bp"]
models = ["mlp"]
data = ["digits"]
settings = { epochs = 7, options = {} }
vary = { lr = [0.1, 0.2] }

[[runs]]
rules = ["dll"]
models = ["mlp"]
data = ["digits"]
seeds = 1
tuned = false
vary = { batch_size = [8, 16], options = { theta_std = [0.1, 0.2] } }
"""


def test_a_suite_of_ones_own_is_every_combination_of_what_varies(own: Path) -> None:
    own.write_text(GOOD)
    suite = load(str(own))
    assert (suite.name, suite.title, suite.layout, suite.columns) == (str(own), "Mine", "list", ("best",))
    found = list_jobs(suite, Request())
    first = [(job.rule, job.varied, job.seeds) for job in found[:4]]
    assert first == [(rule, {"lr": lr}, (4, 7)) for rule in ("dll", "bp") for lr in (0.1, 0.2)]
    assert [job.varied for job in found[4:]] == [
        {"batch_size": size, "theta_std": std} for size in (8, 16) for std in (0.1, 0.2)
    ]
    assert all(job.seeds == (0,) and job.epochs == 20 for job in found[4:])  # fit's own, untuned
    assert settings(found[5])["options"] == {"theta_std": 0.2}
    assert settings(found[0])["batch_size"] == find_settings("dll", "mlp", "digits")["batch_size"]


def test_options_join_the_recorded_ones_and_go_before_them(own: Path) -> None:
    own.write_text(
        """[[runs]]
        rules = ["pc"]
        models = ["mlp"]
        data = ["digits"]
        vary = { options = { sweeps = [3] } }"""
    )
    (job,) = list_jobs(load(str(own)), Request())
    recorded = find_settings("pc", "mlp", "digits")["options"]
    assert recorded["sweeps"] != 3
    assert settings(job)["options"] == {**recorded, "sweeps": 3}


@pytest.mark.parametrize(
    ("changes", "optimizer", "options"),
    [
        ('settings = { optimizer = "sgd" }', "sgd", {}),
        ('vary = { optimizer = ["sgd"] }', "sgd", {}),
        ('settings = { optimizer = "adamw" }', "adamw", {"betas": [0.5, 0.9], "weight_decay": 3.0}),
        ('settings = { optimizer = "sgd", optimizer_options = { momentum = 0.5 } }', "sgd", {"momentum": 0.5}),
        (
            "vary = { optimizer_options = { eps = [0.1] } }",
            "adamw",
            {"betas": [0.5, 0.9], "weight_decay": 3.0, "eps": 0.1},
        ),
    ],
)
def test_options_of_the_recorded_optimizer_are_not_those_of_another(
    changes: str, optimizer: str, options: dict[str, object], own: Path, tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded.toml"
    recorded.write_text(
        '[digits.mlp.rules.bp]\noptimizer = "adamw"\noptimizer_options = { betas = [0.5, 0.9], weight_decay = 3.0 }\n'
    )
    own.write_text(f'[[runs]]\nrules = ["bp"]\nmodels = ["mlp"]\ndata = ["digits"]\n{changes}\n')
    (job,) = of(str(own), defaults=recorded)
    assert (settings(job)["optimizer"], settings(job)["optimizer_options"]) == (optimizer, options)


BAD = {
    "no TOML": ("title = ", "is not TOML"),
    "no runs": ('title = "x"', r"has no \[\[runs\]\]"),
    "a key": (GOOD.replace("layout", "layuot"), "'layuot' is unknown; did you mean 'layout'"),
    "a key of runs": (GOOD.replace("models = ", "model = "), "'model' is unknown; did you mean 'models'"),
    "a layout": (GOOD.replace('"list"', '"cube"'), "layout 'cube'; list and matrix work"),
    "a column": (GOOD.replace('"best"', '"bset"'), "'bset' is unknown; did you mean 'best'"),
    "a rule": (GOOD.replace('"bp"', '"pb"'), "unknown rule 'pb'"),
    "a model": (GOOD.replace('"mlp"', '"mpl"'), "'mpl' is unknown; did you mean 'mlp'"),
    "data": (GOOD.replace('"digits"', '"digit"'), "no data set called 'digit'"),
    "a network": (GOOD.replace('"digits"', '"cifar100"'), "no mlp is defined for the data 'cifar100'"),
    "a setting": (GOOD.replace("epochs = 7", "epoch = 7"), "'epoch' is unknown; did you mean 'epochs'"),
    "a value": (GOOD.replace("epochs = 7", "epochs = 0"), "epochs is 0"),
    "an option": (GOOD.replace("theta_std =", "theta_sdt ="), "'theta_sdt' is unknown; did you mean 'theta_std'"),
    "names": (GOOD.replace('["dll", "bp"]', '"dll"'), "needs rules, a list of names"),
    "settings": (GOOD.replace("{ epochs = 7, options = {} }", "3"), "settings in .* is 3, but must be a table"),
    "what varies": (GOOD.replace("lr = [0.1, 0.2]", "lr = 0.1"), "needs a list of values for lr, not 0.1"),
    "nothing varies": (GOOD.replace("[0.1, 0.2] } }", "[] } }"), "needs a list of values for options.theta_std"),
    "seeds": (GOOD.replace("seeds = [4, 7]", 'seeds = "4"'), "seeds is '4'"),
    "no seeds": (GOOD.replace("[4, 7]", "[]"), r"own.toml: seeds are \[\], but must .* at least one"),
    "a seed twice": (GOOD.replace("[4, 7]", "[1, 1]"), r"own.toml: seeds are \[1, 1\], but must be different"),
    "seeds of runs": (GOOD.replace("seeds = 1", "seeds = 0"), r"runs\]\] of .*own.toml: seeds is 0"),
    "epochs": (GOOD.replace("epochs = 7", 'epochs = "one"'), "own.toml: epochs is 'one', but must be a whole"),
    "runs": ("runs = [1]", r"own.toml has no \[\[runs\]\]"),
    "columns": (GOOD.replace('["best"]', "3"), "columns in .*own.toml is 3, but must be a list"),
    "a column's type": (GOOD.replace('["best"]', "[3]"), "columns of .*own.toml: 3 is unknown; it takes best"),
    "title": (GOOD.replace('"Mine"', "3"), "title in .*own.toml is 3, but must be a text"),
    "control": ("control = 3" + GOOD, "control in .*own.toml is 3, but must be a text"),
    "folds": ('folds = "fld"' + GOOD, "folds in .*own.toml is 'fld', but must be one of .* lr, batch_size"),
    "folds' type": ("folds = 3" + GOOD, "folds in .*own.toml is 3, but must be a text"),
    "tuned": (GOOD.replace("tuned = false", 'tuned = "no"'), "tuned in .*own.toml is 'no', .* true or false"),
    "like": (GOOD.replace("seeds = 1", 'like = "mpl"'), "own.toml: 'mpl' is unknown; did you mean 'mlp'"),
    "like's type": (GOOD.replace("seeds = 1", "like = 3"), "like in .*own.toml is 3, but must be a text"),
    "alignment": (
        GOOD.replace("epochs = 7", 'alignment = "yes"'),
        "alignment in .*own.toml is 'yes', but must be true or false",
    ),
    **{
        name: (GOOD.replace("options = {}", f"{name} = 3"), f"^{name} in .*own.toml is 3, but must be a table")
        for name in ("options", "optimizer_options", "data_options")
    },
    "a rule to leave out": (
        GOOD.replace("seeds = 1", 'without = ["dl"]'),
        r"without in \[\[runs\]\] of .*own.toml: unknown rule 'dl'; did you mean 'dll'",
    ),
    "no rule to leave out": (
        GOOD.replace("seeds = 1", "without = [3]"),
        r"without in .*own.toml: a rule is given by its",
    ),
    "an option of a rule without": (
        GOOD.replace("options = {}", "options = { a = 1 }").replace('"dll", ', ""),
        "options of the rule bp: 'a' is unknown; it takes none",
    ),
    "options that vary": (GOOD.replace("lr = [0.1,", "options = [3,"), "options in vary .*own.toml is 3, but"),
    "a cell of a matrix": (
        GOOD.replace('"list"', '"matrix"'),
        "own.toml has the layout 'matrix', .* dll mlp digits lr=0.1 and dll mlp digits lr=0.2; layout = 'list'",
    ),
}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_a_typo_in_ones_own_suite_is_one_sentence(what: str, quick: bool, own: Path) -> None:
    text, words = BAD[what]
    assert text != GOOD
    own.write_text(text)
    with pytest.raises(apical.ApicalError, match=words) as caught:
        list_jobs(load(str(own)), Request(quick=quick))
    assert "\n" not in str(caught.value)


def test_the_folds_of_a_run_share_a_cell_of_a_matrix(own: Path) -> None:
    text = GOOD.split("[[runs]]")[1].replace("lr = [", "batch_size = [8, 16], lr = [")
    own.write_text(f'layout = "matrix"\nfolds = "lr"\n[[runs]]{text}')
    with pytest.raises(apical.ApicalError, match=r"batch_size=8 lr=0.1 and .* batch_size=16 lr=0.1"):
        of(str(own))
    own.write_text(own.read_text().replace("[8, 16]", "[8]"))
    assert len(of(str(own))) == 4


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ("0,0", "different whole numbers"),
        ("10001", "from 1 to 10,000"),
        ("1" + "0" * 21, "from 1 to 10,000"),
        ("9" * 20 + ",", "from 0 to 2"),
        ("2147483648,", r"from 0 to 2\*\*31 - 1"),
    ],
)
def test_seeds_that_cannot_be_are_one_sentence(seeds: str, words: str) -> None:
    for use in (expand_seeds, lambda given: of("digits", seeds=given)):
        with pytest.raises(apical.ApicalError, match=words):
            use(parse_seeds(seeds))


def test_the_largest_seed_is_one_that_generators_and_stores_take() -> None:
    (seed,) = expand_seeds([2**31 - 1])
    assert derive_seed(seed, 10**6, 1) < 2**63


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tabel1", "there is no suite 'tabel1'; did you mean 'table1'"),
        ("nonsense", "The suites are digits"),
        ("nowhere.toml", "nowhere.toml cannot be read"),
    ],
)
def test_a_suite_that_does_not_exist_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(apical.ApicalError, match=words):
        load(name)


def test_settings_of_ones_own_are_used_and_checked(own: Path) -> None:
    own.write_text("[digits.mlp]\nlr = 0.125\n[digits.mlp.rules.bp]\nlr = 0.25")
    found = of("digits", models=["mlp"], rules=["bp"], defaults=own)
    assert [(job.rule, settings(job)["lr"]) for job in found] == [("readout", 0.2), ("bp", 0.25)]
    own.write_text("[digits.mlp.rules.bp]\nlr = -1")
    with pytest.raises(apical.ApicalError, match="lr is -1"):
        of("digits", models=["mlp"], rules=["bp"], defaults=own)


def test_blocks_that_ask_for_the_same_run_have_the_seeds_of_both(own: Path) -> None:
    common = 'models = ["mlp"]\ndata = ["digits"]\n'
    own.write_text(
        f'[[runs]]\nrules = ["bp"]\nseeds = 1\n{common}[[runs]]\nrules = ["bp", "fa"]\nseeds = [3, 0, 1]\n{common}'
    )
    assert [(job.rule, job.seeds) for job in list_jobs(load(str(own)), Request())] == [
        ("bp", (0, 3, 1)),
        ("fa", (3, 0, 1)),
    ]


def test_epochs_that_were_asked_for_are_those_that_a_varying_run_says(own: Path) -> None:
    own.write_text('[[runs]]\nrules = ["bp"]\nmodels = ["mlp"]\ndata = ["digits"]\nvary = { epochs = [1, 2] }\n')
    (job,) = list_jobs(load(str(own)), Request(epochs=5))
    assert (job.epochs, job.varied, settings(job)["epochs"]) == (5, {"epochs": 5}, 5)


def test_a_control_is_run_once_where_options_vary_that_it_does_not_have(own: Path) -> None:
    own.write_text(
        'control = "readout"\n[[runs]]\nrules = ["dll"]\nmodels = ["mlp"]\ndata = ["digits"]\n'
        "vary = { lr = [0.1, 0.2], options = { theta_std = [0.1, 0.3] } }\n"
    )
    found = [(job.rule, job.varied) for job in list_jobs(load(str(own)), Request())]
    assert found[:2] == [("readout", {"lr": lr}) for lr in (0.1, 0.2)]
    assert [varied["theta_std"] for _, varied in found[2:]] == [0.1, 0.3, 0.1, 0.3]


def test_a_suite_of_endless_tables_or_an_endless_file_is_one_sentence(tmp_path: Path) -> None:
    deep, hole = tmp_path / "deep.toml", tmp_path / "hole.toml"
    deep.write_text("a = " + "[" * 20_000)
    with pytest.raises(apical.ApicalError, match=r"deep.toml is not TOML: .*recursion"):
        suites.load(str(deep))
    with hole.open("wb") as file:
        file.truncate(1 << 40)
    for read in (suites.load, lambda name: load_defaults_file(Path(name))):
        with pytest.raises(
            apical.ApicalError, match=r"hole.toml cannot be read .it has 1,099,511,627,776 bytes, more than"
        ):
            read(str(hole))


def test_all_rules_but_some_and_a_control_that_another_block_has(own: Path) -> None:
    own.write_text(
        'control = "readout"\n'
        '[[runs]]\nrules = "all"\nwithout = ["streaming"]\nmodels = ["mlp"]\ndata = ["digits"]\n'
        '[[runs]]\nrules = ["streaming"]\nmodels = ["mlp"]\ndata = ["digits"]\nsettings = { epochs = 3 }\n'
    )
    jobs = of(str(own))
    assert sorted(settings(job)["rule"] for job in jobs) == sorted(apical.rule_names())
    assert [settings(job)["epochs"] for job in jobs if settings(job)["rule"] == "streaming"] == [3]
