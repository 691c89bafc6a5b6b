"""The app with all of its commands, in the order in which `apical --help` lists them."""

# isort: off
from apical.cli import train, tune, sample, audit, bench, report, results, data  # noqa: F401
from apical.cli.root import app
# isort: on

app.add_typer(data.app, name="data")

__all__ = ["app"]
