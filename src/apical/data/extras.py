"""Optional packages, imported where they are used: ``import apical.data`` needs torch and numpy alone."""

import importlib
from typing import Any

from apical.errors import MissingExtraError


def extra(module: str, purpose: str) -> Any:
    """Import an optional module, or say in one sentence what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}): "
            "pip install 'apical[data]' installs it."
        ) from error
