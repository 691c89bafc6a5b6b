"""What is installed: the public names, the version, and life without any optional package."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import apical
from apical.bench import suites
from apical.core.registry import options_of
from cases import EVERY

ROOT = Path(__file__).parents[1]
OPTIONAL = [
    *["typer", "rich", "sklearn", "scipy", "pooch", "tqdm", "PIL", "h5py", "matplotlib", "pyarrow", "ray"],
    *["jinja2", "plotly"],
    *["tensorboard", "wandb"],
]
GROUPS = ("cli", "data", "plot", "parquet", "ray", "report", "tensorboard", "wandb")
PROJECT = ROOT / "pyproject.toml"


def python(script: str) -> subprocess.CompletedProcess[str]:
    paths = [entry for entry in sys.path if entry]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )


ALONE = f"""
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import apical, runs
run = runs.fit(seeds=2, rule="dll", progress=True)
assert len(run.accuracies) == 2
for data in ("digits",):
    try:
        apical.fit("mlp", data, rule="bp", epochs=1)
    except apical.ApicalError as error:
        assert isinstance(error, ImportError)
        print(error)
sys.argv = ["apical", "train"]
from apical.cli import main
main()
"""


def test_apical_trains_with_torch_numpy_and_safetensors_alone_and_says_what_else_to_install() -> None:
    done = python(ALONE)
    assert done.returncode == 1
    assert re.fullmatch(r"the digits data set needs sklearn.*pip install 'apical\[data\]'.*\n", done.stdout)
    *epochs, error = done.stderr.splitlines()
    assert all(": epoch " in line for line in epochs)
    assert re.fullmatch(r"apical: the command line needs \w+: pip install 'apical\[cli\]' installs it\.", error)


def test_importing_apical_imports_no_optional_package() -> None:
    ours = f"sorted((set(sys.modules) - before) & set({OPTIONAL!r}))"
    done = python(f"import torch; before = set(sys.modules)\nimport apical\nprint({ours})")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_public_name_exists() -> None:
    assert len(set(apical.__all__)) == len(apical.__all__)
    assert [name for name in apical.__all__ if not hasattr(apical, name)] == []


def test_every_built_in_rule_is_public() -> None:
    built_in = {rule for rule in apical.RULES.values() if rule.__module__.startswith("apical.")}
    assert {getattr(apical, rule.__name__, None) for rule in built_in} == built_in
    assert {rule.__name__ for rule in built_in} <= set(apical.__all__)


def test_the_version_is_the_one_that_the_package_is_built_with() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", apical.__version__)
    try:
        installed = importlib.metadata.version("apical")
    except importlib.metadata.PackageNotFoundError:
        if not PROJECT.exists():
            pytest.skip("neither installed nor a checkout")
        project = tomllib.loads(PROJECT.read_text())
        assert project["project"]["dynamic"] == ["version"]
        assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "apical.version.VERSION"}
        from apical.version import VERSION

        installed = VERSION
    assert apical.__version__ == installed


@pytest.mark.skipif(not PROJECT.exists(), reason="not a checkout")
def test_torch_numpy_and_safetensors_are_the_only_requirements_and_every_optional_package_is_an_extra() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=\[;]", requirement)[0] for requirement in requirements}

    assert names(project["dependencies"]) == {"torch", "numpy", "safetensors"}
    extras = names([r for group in GROUPS for r in project["optional-dependencies"][group]])
    on_pypi = {"sklearn": "scikit-learn", "PIL": "pillow"}
    assert extras == {on_pypi.get(name, name) for name in OPTIONAL}


def test_the_settings_and_the_types_travel_with_the_package() -> None:
    package = Path(apical.__file__).parent
    assert (package / "py.typed").exists()
    assert (package / "bench" / "defaults.toml").exists()
    assert (package / "data" / "datasets.toml").exists()
    assert (package / "bench" / "times.json").exists()
    assert {p.suffix for p in (package / "report").glob("web.*")} == {".html", ".css", ".js", ".py"}
    assert {path.stem for path in (package / "bench" / "suites").glob("*.toml")} == set(suites.list_names())


@pytest.mark.parametrize("name", sorted({name.partition(":")[0] for name in EVERY}))
def test_every_rule_has_its_page(name: str) -> None:
    """With its name, its options, its law and a command."""
    page = (Path(__file__).parents[1] / "docs" / "rules" / f"{name}.md").read_text("utf-8")
    assert page.startswith(f"# `{name}`")
    assert f"--rule {name}" in page
    assert "law" in page.lower() or "tests/rules/test_" in page  # how it is proved
    for option in options_of(apical.RULES[name]):
        assert f"`{option}" in page, option
