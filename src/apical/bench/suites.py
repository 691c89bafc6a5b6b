"""Suites: lists of runs, declared in TOML. The paper's are in `suites/`; users may write their own:

title = "Two rates"
seeds = 4                       # how many, or a list
control = "readout"             # a rule that is run whatever --rules says
layout = "matrix"               # rules × data sets, with an average; else "list", one line for each run
columns = ["best"]              # extra columns: best, alignment, local, memory
folds = "fold"                  # a varied setting (such as an option of the data) that figures are averaged over

[[runs]]
rules = ["bp", "dll"]           # or "all"
without = ["dll"]               # rules that "all" leaves out
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
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from apical import data as datasets
from apical import models
from apical.bench.declaration import SUITES, Declaration, Request, format_seeds
from apical.bench.declaration import list_names as list_names
from apical.bench.defaults import (
    TOML_LIMIT,
    add_context,
    check_model,
    check_names,
    check_settings,
    check_types,
    find_settings,
    load_defaults_file,
)
from apical.core.registry import options_of, resolve, rule_names
from apical.data.bounded import read_file
from apical.engine.identity import hash_contents
from apical.engine.settings import Settings, expand_seeds, merge_settings
from apical.errors import ApicalError

COLUMNS = ("best", "alignment", "local", "memory")
QUICK_EXAMPLES = 128
"""How many examples a quick run uses."""


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

    def build_quick_command(self, request: Request) -> str:
        """Return the command that repeats a quick run, which `apical train` cannot; "" for all other runs."""
        if not request.quick:
            return ""
        imports = [f"--import {shlex.quote(name)}" for name in request.modules]
        settings = [] if request.defaults is None else [f"--defaults {shlex.quote(str(request.defaults))}"]
        part = f"--rules {self.rule} --models {self.model} --data {self.data}"
        more = f"--epochs {self.epochs} --seeds {format_seeds(self.seeds)}"
        return " ".join(["apical", *imports, "bench", shlex.quote(request.suite), "--quick", *settings, part, more])


def load(name: str) -> Suite:
    """Load a suite by its name, or from a TOML file of your own.

    >>> load("depth").title
    'Scalability: 1, 2, 3, 5 and 8 hidden layers'
    """
    if name in list_names():
        return _parse_suite(name, SUITES.joinpath(f"{name}.toml").read_text("utf-8"), own=False)
    if not name.endswith(".toml"):
        near = difflib.get_close_matches(name, list_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ApicalError(
            f"there is no suite {name!r}{hint} The suites are {', '.join(list_names())}, and any file that ends in .toml."
        )
    try:
        text = read_file(Path(name), TOML_LIMIT).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ApicalError(f"the suite {name} cannot be read ({error}).") from error
    return _parse_suite(name, text, own=True)


def _parse_suite(name: str, text: str, *, own: bool) -> Suite:
    """Parse the TOML text of a suite and check it."""
    try:
        body = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ApicalError(f"the suite {name} is not TOML: {error}.") from error
    where = f"the suite {name}"
    check_names(body, ("title", "seeds", "control", "layout", "columns", "folds", "runs"), where)
    blocks = body.pop("runs", [])
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
        **{"name": name, "title": name, **body, "columns": tuple(body.get("columns", []))}, blocks=blocks, own=own
    )


def _check_block(block: dict[str, Any], where: str) -> None:
    """Check one `[[runs]]` of a suite."""
    check_names(block, ("rules", "without", "models", "data", "seeds", "tuned", "like", "settings", "vary"), where)
    for name in ("rules", "models", "data"):
        value = block.get(name)
        listed = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
        if not listed and not (name == "rules" and value == "all"):
            raise ApicalError(f"{where} needs {name}, a list of names; it has {value!r}.")
    check_types(block, {"without": list, "tuned": bool, "like": str, "settings": dict, "vary": dict}, where)
    with add_context(f"without in {where}"):
        for rule in block.get("without", []):
            resolve(rule)
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


EVERYTHING = Request()


def list_jobs(suite: Suite, request: Request = EVERYTHING) -> list[Job]:
    """Return the chosen jobs of a suite, by default all, each once, the control of each network and data set first."""
    _check_choice(suite, request)
    recorded = None if request.defaults is None else load_defaults_file(Path(request.defaults))
    found: dict[str, Job] = {}
    for block in suite.blocks:
        for job in _make_block_jobs(suite, block, request, recorded):
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


def _check_choice(suite: Suite, request: Request) -> None:
    """Check that the suite has every name that was chosen, since any other name is a typo."""
    if request.epochs is not None:
        Settings("bp", "mlp", "digits", epochs=request.epochs)  # raises an error for an invalid number of epochs
    for kind in ("rules", "models", "data"):
        wanted = getattr(request, kind)
        has = list(dict.fromkeys(name for block in suite.blocks for name in _list_block_names(suite, block, kind)))
        for name in wanted or ():
            if kind == "rules":
                resolve(name)
            if name not in has:
                raise ApicalError(
                    f"the suite {suite.name} has no {kind.removesuffix('s')} {name!r}; it has {', '.join(has)}."
                )


def _list_block_names(suite: Suite, block: dict[str, Any], kind: str) -> list[str]:
    """Return the rules, models or data of a block. Of rules, the control comes first, unless another block lists it."""
    if kind != "rules":
        return list(block[kind])
    listed = _list_rules(block)
    elsewhere = any(suite.control in _list_rules(other) for other in suite.blocks)
    if suite.control is None or (elsewhere and suite.control not in listed):
        return listed
    return [suite.control, *(rule for rule in listed if rule != suite.control)]


def _list_rules(block: dict[str, Any]) -> list[str]:
    names = rule_names() if block["rules"] == "all" else block["rules"]
    return [name for name in names if name not in block.get("without", [])]


def _make_block_jobs(
    suite: Suite, block: dict[str, Any], request: Request, recorded: dict[str, Any] | None
) -> Iterator[Job]:
    """Yield the chosen jobs of one block: every combination of data, model, rule and varied settings."""
    seeds = block.get("seeds", suite.seeds) if request.seeds is None else request.seeds
    if request.quick and request.seeds is None:
        seeds = 1
    listed = _list_block_names(suite, block, "rules")
    chosen = [rule for rule in listed if request.rules is None or rule in request.rules]
    rules = [rule for rule in listed if chosen and rule in (suite.control, *chosen)]
    for data, model, rule in itertools.product(block["data"], block["models"], rules):
        if (request.models is None or model in request.models) and (request.data is None or data in request.data):
            tuned = block.get("tuned", True)
            begin = find_settings(rule, block.get("like", model), data, recorded) if tuned else {}
            common = merge_settings(begin, block.get("settings", {}))
            for varied in _list_combinations(block.get("vary", {})):
                if rule == suite.control:
                    varied = _drop_unknown_options(rule, varied)
                settings = merge_settings(common, varied)
                if request.epochs is not None or request.quick:
                    settings["epochs"] = request.epochs or 1
                declaration, problem = _try_to_declare(suite, request, rule, model, data, settings)
                epochs = settings.get("epochs", Settings.epochs)
                shown = {path[-1]: value for path, value in _list_varied(varied)}
                shown |= {"epochs": epochs} if "epochs" in varied else {}
                yield Job(rule, model, data, epochs, expand_seeds(seeds), shown, declaration, problem)


def _drop_unknown_options(rule: str, varied: dict[str, Any]) -> dict[str, Any]:
    """Return the varied settings without the options that the control rule does not have."""
    known = options_of(resolve(rule)[0])
    options = {name: value for name, value in varied.get("options", {}).items() if name in known}
    rest = {name: value for name, value in varied.items() if name != "options"}
    return {**rest, "options": options} if options else rest


def _try_to_declare(
    suite: Suite, request: Request, rule: str, model: str, data: str, settings: dict[str, Any]
) -> tuple[Declaration | None, str | None]:
    """Return a declaration, if its settings are valid, and why it cannot be run here, if so."""
    try:
        declaration = _declare(rule, model, data, settings, QUICK_EXAMPLES if request.quick else None)
    except ApicalError as error:
        if suite.own or request.defaults is not None:
            raise
        return None, str(error)
    return declaration, explain_missing_data(data)


def _declare(rule: str, model: str, data: str, settings: dict[str, Any], examples: int | None) -> Declaration:
    """Check that everything that a declaration names exists, and return it. Results are cached."""
    kind, source = resolve(rule)[0], datasets.lookup(data)
    content = json.dumps(hash_contents(rule, model, data))
    asked = kind, rule, model, data, content, json.dumps(settings, sort_keys=True, default=repr), examples
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
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in vary.items():
        inner = [((name, key), v) for key, v in value.items()] if isinstance(value, dict) else [((name,), value)]
        found += inner
    return found


def _list_combinations(vary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the varied values as settings."""
    grid = _list_varied(vary)
    for values in itertools.product(*(each for _, each in grid)):
        chosen: dict[str, Any] = {}
        for (path, _), value in zip(grid, values, strict=True):
            inner = chosen if len(path) == 1 else chosen.setdefault(path[0], {})
            inner[path[-1]] = value
        yield chosen
