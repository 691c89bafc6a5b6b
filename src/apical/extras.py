"""Import optional packages when they are needed: `import apical` itself needs only torch, numpy and safetensors."""

import importlib
from typing import Any

from apical.errors import MissingExtraError


def import_extra(module: str, purpose: str, group: str = "data") -> Any:
    """Import an optional module, or raise an error that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"pip install 'apical[{group}]' installs it."
        ) from error
