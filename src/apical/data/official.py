"""From official files to a canonical file: download or find them, check their md5, parse, write."""

import hashlib
import sys
from pathlib import Path

from apical.data import canonical
from apical.data.registry import lookup
from apical.data.source import PathLike, Remote, Source, data_folder
from apical.errors import DataError
from apical.extras import extra

TIMEOUT = 30  # seconds without a byte from the server


def fetch(
    name: str | Source,
    root: PathLike | None = None,
    source: PathLike | None = None,
    progress: bool = True,
) -> Path:
    """Write the canonical file of a data set and return its path; where a good one is, say so and stop.

    The official files are downloaded into ``downloads/NAME`` beside the canonical file (they may be deleted
    afterwards), or read from ``source``, a folder that has them already. Their md5 is checked either way,
    before anything is parsed. ``progress`` tells on stderr what happens.
    """
    entry = lookup(name)
    try:
        _, report = entry.read(root)
    except DataError:
        if not entry.files:  # it comes with a package: nothing that could be fetched would help
            raise
    else:
        _say(f"Nothing to fetch. {report}", progress)
        return report.path
    if source is None:
        paths = _download(entry, data_folder(root) / "downloads" / entry.name, progress)
    else:
        paths = _found(entry, Path(source).expanduser())
    path = entry.place(root)
    arrays = entry.parse(paths)
    md5 = {file.name: _md5(found) for file, found in zip(entry.files, paths, strict=True)}
    record = canonical.Record(md5, canonical.digests(arrays))
    entry.certify(arrays, record, path)
    entry.write(path, arrays, record)
    _say(f"Wrote {path}", progress)
    return path


def _say(sentence: str, progress: bool) -> None:
    if progress:
        print(sentence, file=sys.stderr)


def _found(entry: Source, folder: Path) -> list[Path]:
    """The official files in a folder of the user's, each with its official md5."""
    missing = [file.name for file in entry.files if not (folder / file.name).is_file()]
    if missing:
        raise DataError(
            f"{folder} has no {', '.join(missing)}: put the official files of {entry.name} there."
        )
    for file in entry.files:
        md5 = _md5(folder / file.name)
        if file.md5 not in (None, md5):
            raise DataError(f"{folder / file.name} {_not_official(file, md5)}")
    return [folder / file.name for file in entry.files]


def _md5(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({canonical.reason(error)}).") from error


def _download(entry: Source, folder: Path, progress: bool) -> list[Path]:
    """The official files from the network; pooch keeps what has the right md5 and reuses what is there."""
    for file in entry.files:
        if file.page:
            raise DataError(
                f"{file.name} has no address to download it from: get it from {file.page} and run "
                f"`apical data fetch {entry.name} --from FOLDER`."
            )
    pooch = extra("pooch", f"fetching {entry.name}")
    if progress:
        extra("tqdm", "the progress bar")
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 18, timeout=TIMEOUT)
    paths = []
    for file in entry.files:
        try:
            known = None if file.md5 is None else f"md5:{file.md5}"
            path = pooch.retrieve(file.url, known, file.name, folder, downloader=downloader)
        except OSError as error:  # the network's errors and the disk's
            raise DataError(
                f"{file.name} could not be downloaded from {file.url} ({canonical.reason(error)}): try "
                f"again, or get the file elsewhere and run `apical data fetch {entry.name} --from FOLDER`."
            ) from error
        except ValueError as error:  # how pooch says that the md5 differs
            raise DataError(f"{file.url} {_not_official(file)}") from error
        paths.append(Path(path))
    return paths


def _not_official(file: Remote, md5: str = "another") -> str:
    return f"is not the official {file.name}: its md5 is {md5}, not {file.md5}; nothing of it was used."
