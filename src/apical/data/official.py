"""Make a canonical file from the official files: download or find them, check their md5, parse, write."""

import hashlib
import sys
from pathlib import Path

from apical.data import canonical
from apical.data.registry import lookup
from apical.data.source import PathLike, Remote, Source, data_folder
from apical.errors import DataError
from apical.extras import import_extra

TIMEOUT = 30  # seconds without a byte from the server


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
    record = canonical.Record(md5, canonical.compute_sums(arrays))
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
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({canonical.describe_error(error)}).") from error


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
                f"{file.name} could not be downloaded from {file.url} ({canonical.describe_error(error)}): try "
                f"again, or get the file elsewhere and run `apical data fetch {entry.name} --from FOLDER`."
            ) from error
        except ValueError as error:  # pooch raises it for a wrong md5
            raise DataError(f"{file.url} {_describe_wrong_md5(file)}") from error
        paths.append(Path(path))
    return paths


def _describe_wrong_md5(file: Remote, md5: str = "another") -> str:
    return f"is not the official {file.name}: its md5 is {md5}, not {file.md5}; nothing of it was used."
