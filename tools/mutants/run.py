"""Check that the tests notice faults: apply each mutation of a fixed list and run the nearest tests against it.

    python tools/mutants/run.py                   every mutation; exits with 1 if a fault goes unnoticed
    python tools/mutants/run.py --only dll.py     those whose file or text contains "dll.py"
    python tools/mutants/run.py --record          also write which test noticed which fault to kills.json

The mutations are in the TOML files beside this script, by path below src/apical, or tools/…. A mutation names a source
line, or a part that only one line has, by its text, so that a renamed line shows at once which mutations must be
rewritten. One that cannot change any result has `equivalent`, the reason: it must survive. `kills.json` remembers the
test that noticed each fault: that test runs first the next time, the nearest tests follow if it passes. At the end
every test that noticed a fault must pass on the unchanged sources.

Each worker has a copy of the repository. Every mutation runs in a fork of this process, which has imported torch and
pytest already.
"""

import argparse
import ast
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  (imported before the forks)
import pytest
import torch  # noqa: F401

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KILLS = HERE / "kills.json"
NOT_STARTED = "(the tests do not start)"
LIMIT = 900
"""Seconds after which a mutated run counts as failed: a fault may make the code wait forever."""


@dataclass(frozen=True)
class Mutation:
    """One fault: a source line, what it becomes, and the tests that are nearest to it."""

    path: str
    line: str
    becomes: str
    tests: tuple[str, ...]
    below: str = ""
    equivalent: str = ""

    @property
    def name(self) -> str:
        where = f" (below {self.below})" if self.below else ""
        return f"{self.path}{where}: {self.line}  →  {self.becomes}"

    def apply(self, source: str) -> str:
        """Return the mutated source. Raises ValueError if the line is not there, or not unique."""
        lines = source.split("\n")
        start = 0
        if self.below:
            start = next((i for i, line in enumerate(lines) if self.below in line), len(lines)) + 1
        found = [i for i in range(start, len(lines)) if lines[i].strip() == self.line]
        found = found or [i for i in range(start, len(lines)) if self.line in lines[i]]
        if not found or (len(found) > 1 and not self.below):
            raise ValueError(f"{len(found)} lines match")
        line = lines[found[0]]
        indent = line[: len(line) - len(line.lstrip())]
        lines[found[0]] = line.replace(self.line, self.becomes.replace("\n", f"\n{indent}"))
        mutated = "\n".join(lines)
        ast.parse(mutated)
        return mutated


def load_mutations() -> list[Mutation]:
    """Read the mutations of every TOML file beside this script."""
    found = []
    for file in sorted(HERE.glob("*.toml")):
        for group in tomllib.loads(file.read_text("utf-8"))["file"]:
            for entry in group["mutations"]:
                tests = tuple(f"tests/{test}" for test in entry.pop("tests", group["tests"]))
                folder = "" if group["path"].startswith("tools/") else "src/apical/"
                found.append(Mutation(folder + group["path"], tests=tests, **entry))
    return found


def check_mutations(mutations: Iterable[Mutation]) -> list[str]:
    """Return one sentence for each mutation that cannot be applied or whose tests do not exist."""
    problems = []
    names = set()
    for mutation in mutations:
        if mutation.name in names:
            problems.append(f"listed twice: {mutation.name}")
        names.add(mutation.name)
        try:
            mutation.apply((ROOT / mutation.path).read_text("utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"cannot be applied ({error}): {mutation.name}")
        missing = [test for test in mutation.tests if not (ROOT / test).exists()]
        problems += [f"there is no {test}: {mutation.name}" for test in missing]
    return problems


def copy_repository(folder: Path) -> None:
    """Copy the files that git does not ignore, as they are now, to a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


class Tree:
    """A copy of the repository in which one mutation at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_killer(self, mutation: Mutation, known: str | None, stamp: int) -> str | None:
        """Apply a mutation and return the first test that fails, or None if all pass.

        `stamp` becomes the mutated file's modification time. It must differ between mutations: Python decides by
        time and size whether its compiled copy of a file is still valid.
        """
        path = self.folder / mutation.path
        original, times = path.read_text("utf-8"), path.stat()
        path.write_text(mutation.apply(original), "utf-8")
        os.utime(path, (stamp, stamp))
        try:
            killer = self.run([known]) if known else None
            if killer in (None, NOT_STARTED):  # no known test, or it passes, or it has another name now
                killer = self.run(mutation.tests)
            return killer
        finally:
            path.write_text(original, "utf-8")
            os.utime(path, (times.st_atime, times.st_mtime))

    def run(self, tests: Iterable[str]) -> str | None:
        """Run tests in a fork of this process and return the first that failed, or None."""
        report = self.folder / "failed.txt"
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._run_in_child(list(tests), report)
        deadline = time.monotonic() + LIMIT
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(child, 9)
                os.waitpid(child, 0)
                return "(time limit)"
            time.sleep(0.02)
        if not report.exists():
            return "(the tests end in the middle)"
        return report.read_text("utf-8") or None

    def _run_in_child(self, tests: list[str], report: Path) -> None:
        os.setpgid(0, 0)
        log = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(self.folder)
        source = str(self.folder / "src")
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = source
        os.environ["CI"] = "true"  # hypothesis then draws the same examples every time
        watcher = FirstFailure()
        options = ["--exitfirst", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main([*options, *tests], plugins=[watcher])
        failed = "" if code == pytest.ExitCode.OK else NOT_STARTED
        report.write_text(watcher.test or failed, "utf-8")
        os._exit(0)


class FirstFailure:
    """A pytest plugin that remembers the first test that failed."""

    test: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.test is None:
            self.test = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.test is None:
            self.test = report.nodeid


def find_killers(mutations: list[Mutation], original: Path, workers: int) -> Iterator[tuple[Mutation, str | None]]:
    """Yield each mutation with the test that noticed it, or None; several workers run side by side."""
    known = json.loads(KILLS.read_text("utf-8")) if KILLS.exists() else {}
    now = int(time.time())
    jobs = [(mutation, known.get(mutation.name), now + i) for i, mutation in enumerate(mutations, 1)]
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, initializer=_prepare_worker, initargs=(original,)) as pool:
        yield from pool.imap(_find_killer, jobs)


def _prepare_worker(original: Path) -> None:
    global tree
    folder = original.with_name(f"worker-{os.getpid()}")
    shutil.copytree(original, folder)
    tree = Tree(folder)


def _find_killer(job: tuple[Mutation, str | None, int]) -> tuple[Mutation, str | None]:
    return job[0], tree.find_killer(*job)


tree: Tree
"""The copy of the repository that belongs to this worker process."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="run mutations whose file or text contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="mutations that run side by side")
    parser.add_argument("--record", action="store_true", help="write the killing tests to kills.json")
    parser.add_argument("--check", action="store_true", help="only check that every mutation can be applied")
    arguments = parser.parse_args()

    everything = load_mutations()
    problems = check_mutations(everything)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    mutations = [m for m in everything if arguments.only in m.name]
    if arguments.check or not mutations:
        print(f"{len(mutations)} of {len(everything)} mutations can be applied")
        return 0 if mutations else 2

    start, killers, wrong, equivalent = time.monotonic(), {}, [], 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = Path(folder) / "original"
        copy_repository(original)
        for i, (mutation, killer) in enumerate(find_killers(mutations, original, arguments.workers), 1):
            verdict = f"killed by {killer}"
            if killer is not None:
                killers[mutation.name] = killer
            elif mutation.equivalent:
                equivalent += 1
                verdict = f"survived, as it must: {mutation.equivalent}"
            else:
                verdict = "SURVIVED"
                wrong.append(f"survived: {mutation.name}")
            if killer is not None and mutation.equivalent:
                wrong.append(f"listed as equivalent, but killed by {killer}: {mutation.name}")
            seconds = time.monotonic() - start
            print(f"[{i}/{len(mutations)}, {seconds:.0f} s] {mutation.name}\n    {verdict}", flush=True)
        tests = sorted({killer for killer in killers.values() if not killer.startswith("(")})
        broken = Tree(original).run(tests) if tests else None
    if broken is not None:
        wrong.append(f"fails without any mutation, so that its kills prove nothing: {broken}")
    if arguments.record:
        old = json.loads(KILLS.read_text("utf-8")) if KILLS.exists() and arguments.only else {}
        merged = {m.name: (old | killers)[m.name] for m in everything if m.name in old | killers}
        KILLS.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(
        f"{len(mutations)} mutations: {len(killers)} killed, {equivalent} equivalent, "
        f"{len(mutations) - len(killers) - equivalent} survived, {time.monotonic() - start:.0f} s"
    )
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
