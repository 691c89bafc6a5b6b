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
    ("local", "mlp"): "98.56±0.19 88.07±0.38 59.12±0.27 48.58±0.35",
    ("local", "cnn"): "99.39±0.06 91.90±0.26 95.08±0.25 72.18±0.10",
    ("pc", "mlp"): "98.42±0.13 88.72±0.65 59.05±0.45 47.34±0.24",
    ("pc", "cnn"): "99.41±0.40 92.03±0.70 94.53±1.54 72.94±0.32",
    ("wp", "mlp"): "91.44±0.40 68.90±0.47 48.15±1.06 31.07±0.31",
    ("wp", "cnn"): "92.61±0.43 75.79±0.83 57.69±1.32 39.72±0.38",
    ("dtp", "mlp"): "94.01±0.12 83.28±0.31 54.11±0.09 46.10±0.10",
    ("dtp", "cnn"): "96.40±0.05 90.51±0.18 69.72±0.32 50.88±0.07",
    ("hebb", "mlp"): "78.29±0.07 67.40±0.69 40.80±0.44 19.98±0.23",
    ("hebb", "cnn"): "83.05±0.12 72.03±0.48 44.77±0.33 29.86±0.13",
    ("rstdp", "mlp"): "77.18±0.17 70.03±0.28 41.76±0.46 22.68±0.30",
    ("rstdp", "cnn"): "91.67±0.04 74.29±0.30 50.02±0.32 33.19±0.38",
    ("ff", "mlp"): "96.99±0.14 80.51±0.74 47.52±0.63 39.48±0.10",
    ("ff", "cnn"): "15.66±0.08 10.00±0.00 6.70±0.00 10.32±0.00",
    ("ep", "mlp"): "93.81±0.18 75.65±0.35 22.62±0.39 16.93±0.10",
    ("ep", "cnn"): "26.73±0.22 30.26±0.29 6.70±0.00 10.32±0.00",
    ("dll", "mlp"): "97.57±0.40 87.50±0.43 56.60±0.12 45.87±0.10",
    ("dll", "cnn"): "98.87±0.30 90.88±0.40 85.81±0.17 70.89±0.58",
}

ACCURACY: dict[tuple[str, str, str], Figure] = {
    (rule, model, data): Figure(*(float(number) for number in cell.split("±")))
    for (rule, model), row in _TABLE_1.items()
    for data, cell in zip(_COLUMNS, row.split(), strict=True)
}
# Its "perturbation learning" is one row; ours are two rules.
ACCURACY |= {("np", model, data): f for (rule, model, data), f in ACCURACY.items() if rule == "wp"}
# Table 3 calls a Θ that stays random "DLL-FA".
ACCURACY["dll:frozen", "mlp", "mnist"] = Figure(97.37)
ACCURACY["dll:frozen", "cnn", "cifar10"] = Figure(69.85)
