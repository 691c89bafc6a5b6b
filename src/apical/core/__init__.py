"""Layers, networks, losses and learners: what every rule is written with."""
