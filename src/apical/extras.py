"""Optional packages, imported where they are used: `import apical` needs torch, numpy and safetensors alone."""

import importlib
from typing import Any

from apical.errors import MissingExtraError


def extra(module: str, purpose: str, group: str = "data") -> Any:
    """Import an optional module, or say in one sentence what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"pip install 'apical[{group}]' installs it."
        ) from error
