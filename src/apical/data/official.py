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
    record = canonical.Record({file.name: file.md5 for file in entry.files}, canonical.digests(arrays))
    entry.certify(arrays, record, path)
    canonical.write(path, arrays, record)
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
        path = folder / file.name
        try:
            with path.open("rb") as opened:
                md5 = hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({canonical.reason(error)}).") from error
        if md5 != file.md5:
            raise DataError(f"{path} {_not_official(file, md5)}")
    return [folder / file.name for file in entry.files]


def _download(entry: Source, folder: Path, progress: bool) -> list[Path]:
    """The official files from the network; pooch keeps what has the right md5 and reuses what is there."""
    pooch = extra("pooch", f"fetching {entry.name}")
    if progress:
        extra("tqdm", "the progress bar")
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 18, timeout=TIMEOUT)
    paths = []
    for file in entry.files:
        try:
            path = pooch.retrieve(file.url, f"md5:{file.md5}", file.name, folder, downloader=downloader)
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
