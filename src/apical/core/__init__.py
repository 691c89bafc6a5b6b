"""Layers, networks, losses and learners: the parts that every rule is built from."""
