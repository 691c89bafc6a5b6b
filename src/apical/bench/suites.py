"""Suites: lists of runs, declared in TOML. The paper's are in `suites/`; users may write their own:

title = "Two rates"
seeds = 4                       # how many, or a list
control = "readout"             # a rule that is run whatever --rules says
layout = "matrix"               # rules × data sets, with an average; else "list", one line for each run
columns = ["best"]              # extra columns: best, alignment, local, memory
folds = "fold"                  # a varied setting (such as an option of the data) that figures are averaged over

[[runs]]
rules = ["bp", "dll"]           # or "all"
models = ["mlp"]
data = ["mnist"]
seeds = 2                       # in place of the suite's
tuned = false                   # do not start from the recorded settings of defaults.toml
like = "mlp"                    # the model whose recorded settings are used
settings = { epochs = 20 }      # keywords of `fit`
vary = { lr = [1e-3, 1e-4], options = { theta_std = [0.05, 1.0] } }   # every combination is a run
"""

import difflib
import itertools
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from apical import data as datasets
from apical import models
from apical.bench.declaration import Declaration
from apical.bench.defaults import find_settings, load_defaults_file
from apical.bench.refusals import add_context, check_model, check_names, check_settings, check_types
from apical.core.registry import options_of, resolve, rule_names
from apical.engine.settings import Settings, expand_seeds, merge_settings
from apical.errors import ApicalError

COLUMNS = ("best", "alignment", "local", "memory")
QUICK_EXAMPLES = 128
"""How many examples a quick run uses."""
SUITE_KEYS = ("title", "seeds", "control", "layout", "columns", "folds", "runs")
BLOCK_KEYS = ("rules", "models", "data", "seeds", "tuned", "like", "settings", "vary")


@dataclass(frozen=True)
class Suite:
    """A list of runs, and how their results are shown. The fields are the keys of the TOML file."""

    name: str
    title: str
    blocks: list[dict[str, Any]]
    seeds: Any = 1
    control: str | None = None
    layout: str = "list"
    columns: tuple[str, ...] = ()
    folds: str | None = None
    own: bool = False
    """Whether the user wrote it. Then a run that cannot be declared is an error; otherwise it is listed as a problem."""


@dataclass(frozen=True)
class Choice:
    """Which part of a suite to run, and with which seeds and epochs. None means what the suite says."""

    rules: Sequence[str] | None = None
    models: Sequence[str] | None = None
    data: Sequence[str] | None = None
    seeds: int | Sequence[int] | None = None
    epochs: int | None = None
    quick: bool = False
    defaults: str | Path | None = None
    """A file like defaults.toml that overrides the recorded settings."""


EVERYTHING = Choice()
"""The whole suite, with its own seeds and epochs."""


class Job(NamedTuple):
    """A declaration and its seeds. If it cannot be run here, `problem` says why."""

    rule: str
    model: str
    data: str
    epochs: int
    seeds: tuple[int, ...]
    varied: dict[str, Any]
    """The settings that distinguish it from the other runs of its block."""
    declaration: Declaration | None
    problem: str | None

    def __str__(self) -> str:
        more = "".join(f" {name}={value}" for name, value in self.varied.items())
        return f"{self.rule} {self.model} {self.data}{more}"


def list_names() -> list[str]:
    """Return the names of the suites that come with apical, `digits` first."""
    found = [p.name.removesuffix(".toml") for p in _get_folder().iterdir() if p.name.endswith(".toml")]
    return sorted(found, key=lambda name: (name != "digits", name))


def load(name: str) -> Suite:
    """Load a suite by its name, or from a TOML file of your own.

    >>> load("depth").title
    'Scalability: 1, 2, 3, 5 and 8 hidden layers'
    """
    if name in list_names():
        return _parse_suite(name, _get_folder().joinpath(f"{name}.toml").read_text("utf-8"), own=False)
    if not name.endswith(".toml"):
        near = difflib.get_close_matches(name, list_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ApicalError(
            f"there is no suite {name!r}{hint} The suites are {', '.join(list_names())}, and any file that ends in .toml."
        )
    try:
        return _parse_suite(name, Path(name).read_text("utf-8"), own=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ApicalError(f"the suite {name} cannot be read ({error}).") from error


def _get_folder() -> Any:
    """Return the folder of the suites that come with apical."""
    return resources.files("apical.bench").joinpath("suites")


def _parse_suite(name: str, text: str, *, own: bool) -> Suite:
    """Parse the TOML text of a suite and check it."""
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ApicalError(f"the suite {name} is not TOML: {error}.") from error
    where = f"the suite {name}"
    check_names(body, SUITE_KEYS, where)
    blocks = body.get("runs", [])
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise ApicalError(f"the suite {name} has no [[runs]]; each names rules, models and data.")
    check_types(body, {"title": str, "control": str, "columns": list, "folds": str}, where)
    for block in blocks:
        _check_block(block, f"[[runs]] of {where}")
    if body.get("layout", "list") not in ("list", "matrix"):
        raise ApicalError(f"the suite {name} has the layout {body['layout']!r}; list and matrix work.")
    check_names(body.get("columns", []), COLUMNS, f"columns of {where}")
    varied = [path[-1] for block in blocks for path, _ in _list_varied(block.get("vary", {}))]
    if "folds" in body and body["folds"] not in varied:
        under = ", ".join(dict.fromkeys(varied)) or "none"
        raise ApicalError(f"folds in {where} is {body['folds']!r}, but must be one of the names under vary: {under}.")
    with add_context(where):
        expand_seeds(body.get("seeds", 1))
    return Suite(
        name=name,
        title=body.get("title", name),
        blocks=blocks,
        seeds=body.get("seeds", 1),
        control=body.get("control"),
        layout=body.get("layout", "list"),
        columns=tuple(body.get("columns", [])),
        folds=body.get("folds"),
        own=own,
    )


def _check_block(block: dict[str, Any], where: str) -> None:
    """Check one `[[runs]]` of a suite."""
    check_names(block, BLOCK_KEYS, where)
    for name in ("rules", "models", "data"):
        value = block.get(name)
        listed = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
        if not listed and not (name == "rules" and value == "all"):
            raise ApicalError(f"{where} needs {name}, a list of names; it has {value!r}.")
    check_types(block, {"tuned": bool, "like": str, "settings": dict, "vary": dict}, where)
    for model in block["models"]:
        check_model(model, f"models in {where}")
    if "like" in block:
        check_model(block["like"], f"like in {where}")
    for path, values in _list_varied(block.get("vary", {})):
        if not isinstance(values, list) or not values:
            raise ApicalError(f"vary in {where} needs a list of values for {'.'.join(path)}, not {values!r}.")
    check_settings(block.get("settings", {}), f"settings of {where}")
    for varied in _list_combinations(block.get("vary", {})):
        check_settings(varied, f"vary of {where}")
    with add_context(where):
        expand_seeds(block.get("seeds", 1))


def list_jobs(suite: Suite, choice: Choice) -> list[Job]:
    """Return the chosen jobs of a suite, each once, the control of each network and data set first."""
    _check_choice(suite, choice)
    recorded = None if choice.defaults is None else load_defaults_file(Path(choice.defaults))
    found: dict[str, Job] = {}
    for block in suite.blocks:
        for job in _make_block_jobs(suite, block, choice, recorded):
            key = str(job) if job.declaration is None else job.declaration.key
            known = found.setdefault(key, job)
            found[key] = known._replace(seeds=tuple(dict.fromkeys((*known.seeds, *job.seeds))))
    if suite.layout == "matrix":
        _check_cells(suite, found.values())
    return list(found.values())


def _check_cells(suite: Suite, found: Iterable[Job]) -> None:
    """Check that each cell of a matrix has a single run, apart from its folds."""
    seen: dict[tuple[str, ...], Job] = {}
    for job in found:
        place = job.rule, job.model, job.data, str(job.varied.get(suite.folds or ""))
        if place in seen:
            raise ApicalError(
                f"the suite {suite.name} has the layout 'matrix', one cell for each rule, model and data set, but two runs"
                f" for one cell, {seen[place]} and {job}; layout = 'list' shows both."
            )
        seen[place] = job


def _check_choice(suite: Suite, choice: Choice) -> None:
    """Check that the suite has every name that was chosen, since any other name is a typo."""
    if choice.epochs is not None:
        Settings("bp", "mlp", "digits", epochs=choice.epochs)  # raises an error for an invalid number of epochs
    for kind in ("rules", "models", "data"):
        wanted = getattr(choice, kind)
        has = list(dict.fromkeys(name for block in suite.blocks for name in _list_block_names(suite, block, kind)))
        for name in wanted or ():
            if kind == "rules":
                resolve(name)
            if name not in has:
                raise ApicalError(
                    f"the suite {suite.name} has no {kind.removesuffix('s')} {name!r}; it has {', '.join(has)}."
                )


def _list_block_names(suite: Suite, block: dict[str, Any], kind: str) -> list[str]:
    """Return the rules, models or data of a block. Of rules, the control comes first."""
    listed: list[str] = rule_names() if block[kind] == "all" else block[kind]
    if kind != "rules" or suite.control is None:
        return listed
    return [suite.control, *(rule for rule in listed if rule != suite.control)]


def _make_block_jobs(
    suite: Suite, block: dict[str, Any], choice: Choice, recorded: dict[str, Any] | None
) -> Iterator[Job]:
    """Yield the chosen jobs of one block: every combination of data, model, rule and varied settings."""
    seeds = block.get("seeds", suite.seeds) if choice.seeds is None else choice.seeds
    if choice.quick and choice.seeds is None:
        seeds = 1
    listed = _list_block_names(suite, block, "rules")
    chosen = [rule for rule in listed if choice.rules is None or rule in choice.rules]
    rules = [rule for rule in listed if chosen and rule in (suite.control, *chosen)]
    for data, model, rule in itertools.product(block["data"], block["models"], rules):
        if (choice.models is None or model in choice.models) and (choice.data is None or data in choice.data):
            tuned = block.get("tuned", True)
            begin = find_settings(rule, block.get("like", model), data, recorded) if tuned else {}
            common = merge_settings(begin, block.get("settings", {}))
            for varied in _list_combinations(block.get("vary", {})):
                own = _drop_unknown_options(rule, varied) if rule == suite.control else varied
                yield _make_job(suite, choice, rule, model, data, common, expand_seeds(seeds), own)


def _drop_unknown_options(rule: str, varied: dict[str, Any]) -> dict[str, Any]:
    """Return the varied settings without the options that the control rule does not have."""
    known = options_of(resolve(rule)[0])
    options = {name: value for name, value in varied.get("options", {}).items() if name in known}
    rest = {name: value for name, value in varied.items() if name != "options"}
    return {**rest, "options": options} if options else rest


def _make_job(
    suite: Suite,
    choice: Choice,
    rule: str,
    model: str,
    data: str,
    common: dict[str, Any],
    seeds: tuple[int, ...],
    varied: dict[str, Any],
) -> Job:
    """Return one job. Whether its settings are valid and its data are here is checked."""
    settings = merge_settings(common, varied)
    if choice.epochs is not None or choice.quick:
        settings["epochs"] = 1 if choice.epochs is None else choice.epochs
        if "epochs" in varied:
            varied = {**varied, "epochs": settings["epochs"]}
    declaration = problem = None
    try:
        declaration = _declare(rule, model, data, settings, QUICK_EXAMPLES if choice.quick else None)
    except ApicalError as error:
        if suite.own or choice.defaults is not None:
            raise
        problem = str(error)
    if declaration is not None:
        problem = explain_missing_data(data)
    epochs = settings.get("epochs", Settings.epochs)
    return Job(rule, model, data, epochs, seeds, _flatten(varied), declaration, problem)


def _declare(rule: str, model: str, data: str, settings: dict[str, Any], examples: int | None) -> Declaration:
    """Check that everything that a declaration names exists, and return it. Results are cached."""
    kind, source = resolve(rule)[0], datasets.lookup(data)
    asked = kind, rule, model, data, json.dumps(settings, sort_keys=True, default=repr), examples
    if asked not in _DECLARATIONS:
        source.check_options(settings.get("data_options", {}))
        _check_model_builds(model, data)
        check_names(settings.get("options", {}), list(options_of(kind)), f"options of the rule {rule}")
        asked_for = Settings(rule, model, data, **{"loss": source.LOSS, **settings})
        _DECLARATIONS[asked] = Declaration.of(asked_for, examples)
    return _DECLARATIONS[asked]


_DECLARATIONS: dict[tuple[object, ...], Declaration] = {}
"""Cache of `_declare`, since a page of results lists the jobs of every suite many times."""


@cache
def _check_model_builds(model: str, data: str) -> None:
    """Check that a network can be built for a data set, without allocating its weights."""
    if model == "rnn":  # its sizes are known only once the data are loaded
        if not datasets.lookup(data).SEQUENCES:
            raise ApicalError(f"an rnn reads sequences, which {data} are not; characters and time series work.")
        return
    with torch.device("meta"):
        models.build(model, data)


def explain_missing_data(data: str) -> str | None:
    """Return why a data set cannot be used here and how to get it; None if it can be used."""
    source = datasets.lookup(data)
    state = source.state()
    return None if state == "present" else f"{data} is {state} in {datasets.data_folder()}: {source.remedy}."


def _list_varied(vary: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return each varied setting as a path of names, with its values. Tables such as options are one level deep."""
    return [
        (path, values)
        for name, value in vary.items()
        for path, values in (
            [((name, inner), v) for inner, v in value.items()] if isinstance(value, dict) else [((name,), value)]
        )
    ]


def _list_combinations(vary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the varied values as settings."""
    grid = _list_varied(vary)
    for values in itertools.product(*(each for _, each in grid)):
        chosen: dict[str, Any] = {}
        for (path, _), value in zip(grid, values, strict=True):
            if len(path) == 1:
                chosen[path[0]] = value
            else:
                chosen.setdefault(path[0], {})[path[1]] = value
        yield chosen


def _flatten(varied: dict[str, Any]) -> dict[str, Any]:
    """Return varied settings with the entries of tables at the top level."""
    return {path[-1]: value for path, value in _list_varied(varied)}
