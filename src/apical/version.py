"""The version, alone, so that building the package does not import torch."""

VERSION = "0.2.0"
