"""What the paper reports, in percent, with its error where it gives one (Lv et al. 2025, tables 1 and 3)."""

from typing import NamedTuple


class Figure(NamedTuple):
    """An accuracy that the paper prints; `error` is its ±."""

    accuracy: float
    error: float | None = None


_COLUMNS = ("mnist", "fashion_mnist", "svhn", "cifar10")
_TABLE_1 = {
    ("bp", "mlp"): "98.62±0.17 88.54±0.64 60.91±0.42 48.74±0.56",
    ("bp", "cnn"): "99.56±0.14 92.68±0.42 95.35±1.53 75.10±0.54",
    ("fa", "mlp"): "91.87±0.08 82.16±0.14 54.91±0.23 48.46±0.11",
    ("fa", "cnn"): "97.00±0.13 89.74±0.17 92.66±0.26 59.60±0.46",
    ("dll", "mlp"): "97.57±0.40 87.50±0.43 56.60±0.12 45.87±0.10",
    ("dll", "cnn"): "98.87±0.30 90.88±0.40 85.81±0.17 70.89±0.58",
}

ACCURACY: dict[tuple[str, str, str], Figure] = {
    (rule, model, data): Figure(*(float(number) for number in cell.split("±")))
    for (rule, model), row in _TABLE_1.items()
    for data, cell in zip(_COLUMNS, row.split(), strict=True)
}
# Table 3 calls a Θ that stays random "DLL-FA".
ACCURACY["dll:frozen", "mlp", "mnist"] = Figure(97.37)
ACCURACY["dll:frozen", "cnn", "cifar10"] = Figure(69.85)
