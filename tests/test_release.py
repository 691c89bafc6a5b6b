"""A release: an sdist and a wheel with every file, installed in a fresh environment, and the files beside them."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import apical
from pages import ROOT

PROJECT = ROOT / "pyproject.toml"
pytestmark = pytest.mark.skipif(not PROJECT.exists(), reason="not a checkout")

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, f'build_{sys.argv[1]}')(sys.argv[2]))"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build an sdist or a wheel as pip does without isolation, since that needs no network."""
    return folder / run(sys.executable, "-c", BUILD, kind, folder, cwd=source).splitlines()[-1]


def copy_checkout(folder: Path) -> Path:
    """Copy what a build may read, so that it leaves nothing in the checkout."""
    kept = [path for path in ROOT.iterdir() if path.is_file()]
    kept += [p for name in ("src", "tests") for p in (ROOT / name).rglob("*") if p.is_file()]
    for path in kept:
        if "__pycache__" not in path.parts and not path.parent.name.endswith(".egg-info"):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    setuptools = pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    assert setuptools
    folder = tmp_path_factory.mktemp("release")
    return build("sdist", copy_checkout(folder / "checkout"), folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked sdist alone, as PyPI's users build it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def test_the_sdist_and_the_wheel_have_every_file_of_the_package_and_nothing_else(sdist: Path, wheel: Path) -> None:
    package = Path(apical.__file__).parent
    ours = {p.relative_to(package.parent).as_posix() for p in package.rglob("*") if p.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == ours
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in ours} <= inside
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"} <= inside
    assert not any(name.startswith("tests/") for name in inside)


def test_the_metadata_are_what_pypi_accepts(wheel: Path) -> None:
    metadata = pytest.importorskip("packaging.metadata")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        found = metadata.Metadata.from_email(archive.read(name), validate=True)
    assert (found.name, str(found.version), found.license_expression) == ("apical", apical.__version__, "Apache-2.0")
    assert found.author == "The apical authors" or "The apical authors" in (found.author_email or "")
    assert found.description_content_type == "text/markdown"
    assert found.description.startswith("# apical")
    assert {str(r) for r in found.requires_dist if r.marker is None} >= {"torch>=2.11"}


def test_the_wheel_trains_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Which sees torch and the other packages of this one, but not this checkout."""
    pytest.importorskip("pip")
    pytest.importorskip("sklearn")
    pytest.importorskip("typer")
    run(sys.executable, "-m", "venv", "--without-pip", "fresh", cwd=tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    install = ["pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", *install, cwd=tmp_path)
    folder = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    others = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    Path(folder, "others.pth").write_text("\n".join(sorted(others)) + "\n")
    script = "import sys, apical; print(apical.__file__); sys.argv[0] = 'apical'; from apical.cli import main; main()"
    train = ["train", "--rule", "dll", "--model", "mlp", "--data", "digits", "--epochs", "1", "--lr", "0.01"]
    assert (tmp_path / "fresh" / "bin" / "apical").exists()
    first, *printed = run(python, "-c", script, *train, cwd=tmp_path).splitlines()
    assert Path(first).is_relative_to(tmp_path / "fresh")
    assert any("%" in line for line in printed)


def load_yaml(name: str) -> dict[str, object]:
    yaml = pytest.importorskip("yaml")
    loaded = yaml.safe_load((ROOT / name).read_text("utf-8"))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def test_the_citation_names_this_version() -> None:
    citation = load_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format requires
    assert citation["authors"] == [{"name": "The apical authors"}]
    assert (citation["version"], citation["license"]) == (apical.__version__, "Apache-2.0")


def test_the_workflow_tests_every_version_of_python_that_the_metadata_name() -> None:
    job = load_yaml(".github/workflows/ci.yml")["jobs"]["test"]  # type: ignore[index]
    named = [c for c in tomllib.loads(PROJECT.read_text())["project"]["classifiers"] if "Python :: 3." in c]
    assert job["strategy"]["matrix"]["python"] == [c.rpartition(" ")[2] for c in named] == ["3.11", "3.12", "3.13"]
    assert any(step.get("run", "").startswith("make test") for step in job["steps"])


def test_a_tag_publishes_without_a_password_and_only_what_was_tested() -> None:
    release = load_yaml(".github/workflows/release.yml")
    assert release["True"] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as true
    jobs = release["jobs"]
    assert isinstance(jobs, dict)
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("test", "build")
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    uses = [step.get("uses", "") for step in jobs["publish"]["steps"]]
    assert any(used.startswith("pypa/gh-action-pypi-publish@") for used in uses)
    [check] = [s["run"] for s in jobs["build"]["steps"] if s.get("name") == "Compare the tag with the version"]
    for tag, expected in ((f"v{apical.__version__}", 0), ("v0.0.0", 1)):
        done = subprocess.run(
            ["bash", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}, check=False
        )
        assert done.returncode == expected


@pytest.mark.parametrize("name", ["bug", "rule"])
def test_the_templates_for_issues_have_what_github_requires(name: str) -> None:
    template = load_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= template.keys()
    body = template["body"]
    assert isinstance(body, list)
    assert len({field["id"] for field in body}) == len(body)
    assert all(field["attributes"]["label"] for field in body)


def test_security_says_how_to_report() -> None:
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text("utf-8")


def test_the_readme_says_what_one_thread_is_worth_and_how_that_was_measured() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    said = re.search(r"`OMP_NUM_THREADS=1`.*?(\d+) times.*?`python (benchmarks/\w+\.py)`", text, re.DOTALL)
    assert said is not None
    assert (ROOT / said[2]).exists()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/rules/index.md"])
def test_the_entry_pages_lead_to_the_choice_of_a_rule(page: str) -> None:
    assert "which-rule.md)" in (ROOT / page).read_text("utf-8")
