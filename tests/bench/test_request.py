"""A flag is declared once: both command lines and `apical.bench.run` have the fields of a request."""

from dataclasses import fields
from pathlib import Path

import pytest

import apical
from apical.bench import Request, run
from apical.bench.__main__ import _make_parser
from apical.bench.declaration import list_flags


def test_every_flag_is_on_both_command_lines() -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from apical.cli import load_app

    names = {flag.name for flag in list_flags()}
    of_typer = {parameter.name for parameter in get_command(load_app()).commands["bench"].params}  # type: ignore[attr-defined]
    of_argparse = {action.dest for action in _make_parser()._actions}
    assert of_typer - {"help"} == of_argparse - {"help"} == names
    assert {field.name for field in fields(Request)} - names == {"modules", "progress", "started", "pool"}


def test_what_is_not_given_is_the_default() -> None:
    assert Request.from_command_line(**vars(_make_parser().parse_args([]))) == Request()


def test_text_becomes_names_seeds_paths_and_an_address() -> None:
    words = "table1 --rules bp,fa --rule dll --seeds 4, --store s.sqlite --limit-seconds 9 --quick --dry-run --ray"
    asked = Request.from_command_line(**vars(_make_parser().parse_args(words.split())))
    assert asked == Request(
        suite="table1",
        rules=["bp", "fa", "dll"],
        seeds=[4],
        store=Path("s.sqlite"),
        limit=9.0,
        quick=True,
        dry_run=True,
        ray=True,
    )
    there = Request.from_command_line(**vars(_make_parser().parse_args(["--ray", "ray://there:1"])))
    assert there.ray == "ray://there:1"


def test_an_unknown_option_of_run_is_one_sentence() -> None:
    with pytest.raises(
        apical.ApicalError, match=r"^apical.bench.run: 'sedes' is unknown; did you mean 'seeds'\? It takes"
    ):
        run(sedes=3)
    for hidden in ("started", "pool"):
        with pytest.raises(apical.ApicalError, match=f"'{hidden}' is unknown"):
            run(**{hidden: 1})
