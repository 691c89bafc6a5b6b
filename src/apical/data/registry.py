"""The registry of data sets by name, and the functions that take such a name.

The registry is read from ``datasets.toml``. To add a data set, add a table there.
"""

import difflib
import hashlib
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from apical.data import images, sequences
from apical.data.dataset import Dataset
from apical.data.sentences import Sentences
from apical.data.source import (
    PathLike,
    Record,
    Remote,
    Report,
    Source,
    compute_sums,
    data_folder,
    explain_errors,
    find_reason,
)
from apical.errors import DataError
from apical.extras import import_extra

KINDS: dict[str, Callable[..., Source]] = {
    "digits": images.Digits,
    "images": images.Images,
    "characters": sequences.Characters,
    "series": sequences.Series,
    "sentences": Sentences,
}
PARSERS = (
    images.parse_idx,
    images.parse_cifar10,
    images.parse_cifar100,
    images.parse_svhn,
    images.parse_tiny_imagenet,
    sequences.parse_gzipped,
    sequences.parse_ett,
    sequences.parse_pandas_frame,
)
TIMEOUT = 30  # seconds without a byte from the server


def _read_registry() -> dict[str, Source]:
    """Make an entry from each table of ``datasets.toml``."""
    parsers = {parser.__name__: parser for parser in PARSERS}
    tables = tomllib.loads(resources.files("apical.data").joinpath("datasets.toml").read_text("utf-8"))
    entries: dict[str, Source] = {}
    for name, table in tables.items():
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        make_entry = KINDS[fields.pop("kind")]
        fields["files"] = tuple(Remote(**file) for file in fields.get("files", ()))
        if "parser" in fields:
            fields["parser"] = parsers[fields["parser"]]
        entries[name] = make_entry(name=name, **fields)
    return entries


DATASETS: dict[str, Source] = _read_registry()


@dataclass(frozen=True)
class Listing:
    """One row of ``apical data list``; ``state`` is the value of :meth:`Source.state`."""

    name: str
    title: str
    size: str
    state: str
    note: str


def lookup(name: str | Source) -> Source:
    """Return the registry entry of a name.

    ``text:PATH`` and ``series:PATH`` give an entry for a file of your own. A ``Source`` is returned unchanged.
    """
    if isinstance(name, Source):
        return name
    if name in DATASETS:
        return DATASETS[name]
    kind, _, path = str(name).partition(":")
    if kind == "text" and path:
        return sequences.OwnText(name=name, title="a text of yours", path=Path(path).expanduser())
    if kind == "series" and path:
        return sequences.OwnSeries(name=name, title="series of yours", path=Path(path).expanduser())
    closest = difflib.get_close_matches(str(name).lower().replace("-", "_"), DATASETS, n=1)
    hint = f" (did you mean {closest[0]}?)" if closest else ""
    raise DataError(
        f"There is no data set called {name!r}{hint}: the names are {', '.join(DATASETS)}, and text:PATH or series:PATH "
        "for a file of yours."
    )


def load(name: str | Source, *, root: PathLike | None = None, **options: Any) -> Dataset:
    """Load a data set as normalised tensors on the CPU.

    Its types, shapes, labels and SHA-256 are checked first. ``root`` is the folder of the canonical files, by
    default ``$APICAL_DATA`` or else the user's cache folder. ``options`` depend on the kind of data, for example
    ``window`` for characters and time series.

    >>> load("digits")
    Dataset('digits': 1,437 + 360 of 1×8×8, 10 classes)
    """
    entry = lookup(name)
    entry.check_options(options)
    arrays, _ = entry.read(root)
    make_dataset: Callable[..., Dataset] = entry.dataset
    try:
        return make_dataset(arrays, **options)
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        shown = ", ".join(f"{key}={value}" for key, value in options.items()) or "its default options"
        raise DataError(
            f"{entry.name} with {shown} does not fit into memory: choose options that take less."
        ) from error


def verify(name: str | Source, root: PathLike | None = None) -> Report:
    """Check every byte of a stored data set and report what it was compared with.

    Raises ``DataError`` if the data set is absent or damaged.
    """
    return lookup(name).read(root)[1]


def listing(root: PathLike | None = None) -> list[Listing]:
    """List all data sets and whether they are on this machine.

    Values are not read: ``present`` means that the file has the right structure, not that its content is right.
    """
    return [Listing(entry.name, entry.title, entry.size, entry.state(root), entry.note) for entry in DATASETS.values()]


def fetch(
    name: str | Source, root: PathLike | None = None, source: PathLike | None = None, progress: bool = True
) -> Path:
    """Write the canonical file of a data set and return its path. A good file is left as it is.

    The official files are downloaded into ``downloads/NAME`` beside the canonical file (they may be deleted
    afterwards), or read from ``source``, a folder that has them already. In both cases their md5 is checked
    before they are parsed. ``progress`` prints messages and progress bars on stderr.
    """
    entry = lookup(name)
    try:
        _, report = entry.read(root)
    except DataError:
        if not entry.files:  # there is nothing to download
            raise
    else:
        _print_progress(f"Nothing to fetch. {report}", progress)
        return report.path
    if source is None:
        paths = _download_files(entry, data_folder(root) / "downloads" / entry.name, progress)
    else:
        paths = _find_files(entry, Path(source).expanduser())
    path = entry.place(root)
    arrays = entry.parse(paths)
    md5 = {file.name: _compute_md5(found) for file, found in zip(entry.files, paths, strict=True)}
    record = Record(md5, compute_sums(arrays))
    entry.certify(arrays, record, path)
    entry.write(path, arrays, record)
    _print_progress(f"Wrote {path}", progress)
    return path


def _print_progress(sentence: str, progress: bool) -> None:
    if progress:
        print(sentence, file=sys.stderr)


def _find_files(entry: Source, folder: Path) -> list[Path]:
    """Return the paths of the official files in a folder, after a check of their md5."""
    missing = [file.name for file in entry.files if not (folder / file.name).is_file()]
    if missing:
        raise DataError(f"{folder} has no {', '.join(missing)}: put the official files of {entry.name} there.")
    for file in entry.files:
        md5 = _compute_md5(folder / file.name)
        if file.md5 not in (None, md5):
            raise DataError(f"{folder / file.name} {_describe_wrong_md5(file, md5)}")
    return [folder / file.name for file in entry.files]


def _compute_md5(path: Path) -> str:
    with explain_errors(path), path.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download_files(entry: Source, folder: Path, progress: bool) -> list[Path]:
    """Download the official files and return their paths. pooch checks each md5 and reuses earlier downloads."""
    for file in entry.files:
        if file.page:
            raise DataError(
                f"{file.name} has no address to download it from: get it from {file.page} and run "
                f"`apical data fetch {entry.name} --from FOLDER`."
            )
    pooch = import_extra("pooch", f"fetching {entry.name}")
    if progress:
        import_extra("tqdm", "the progress bar")
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 18, timeout=TIMEOUT)
    paths = []
    for file in entry.files:
        try:
            known = None if file.md5 is None else f"md5:{file.md5}"
            path = pooch.retrieve(file.url, known, file.name, folder, downloader=downloader)
        except OSError as error:  # from the network or the disk
            raise DataError(
                f"{file.name} could not be downloaded from {file.url} ({find_reason(error)}): try "
                f"again, or get the file elsewhere and run `apical data fetch {entry.name} --from FOLDER`."
            ) from error
        except ValueError as error:  # pooch raises it for a wrong md5
            raise DataError(f"{file.url} {_describe_wrong_md5(file)}") from error
        paths.append(Path(path))
    return paths


def _describe_wrong_md5(file: Remote, md5: str = "another") -> str:
    return f"is not the official {file.name}: its md5 is {md5}, not {file.md5}; nothing of it was used."
