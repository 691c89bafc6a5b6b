"""The generated pages of this repository: `python -m tools.pages` writes them, `--check` says which ones differ."""
