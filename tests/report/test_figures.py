"""Every chart as a file for a paper, the same for the same store."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from apical.bench.store import Store
from apical.errors import ApicalError
from apical.report import write_figures
from apical.report.charts import Chart, Line, make_chart_sections
from apical.report.figures import draw_panels
from apical.report.groups import collect
from apical.report.styles import Style
from cases import mostly_slow
from stores import declared, fill

pytest.importorskip("matplotlib")

BEGINNINGS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.parametrize("format", mostly_slow(BEGINNINGS, ["svg"]))
def test_figures_are_of_the_format_that_was_asked_for_and_never_change(
    format: str, store: Store, tmp_path: Path
) -> None:
    fill(store, declared("bp"), [90.0, 91.0])
    fill(store, declared("$mine$", data="digits"), [80.0, 81.0])
    written = []
    for folder in ("one", "two"):
        paths = write_figures(store.path, tmp_path / folder, format)
        assert {path.name for path in paths} == {p.name for p in (tmp_path / folder).iterdir()}
        written.append({path.name: path.read_bytes() for path in paths})
    names = {"curves-mnist-mlp", "curves-digits-mlp", "time-mnist-mlp-abacus", "time-digits-mlp-abacus"}
    assert set(written[0]) == {f"{name}.{format}" for name in names}
    if format == "svg":  # a dollar is a dollar, and not the beginning of mathematics
        assert ">$mine$<" in written[0]["curves-digits-mlp.svg"].decode()
    assert all(content.startswith(BEGINNINGS[format]) for content in written[0].values())
    assert written[0] == written[1]


def test_heat_maps_lines_and_local_losses_are_drawn(store: Store, tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for std in (0.5, 1.0):
            fill(store, declared("dll", lr=lr, options={"theta_std": std}), [90.0])
    for lr in (0.1, 1.0, 10.0):
        fill(store, declared("bp", lr=lr), [70.0, 80.0])
    names = {path.stem for path in write_figures(store.path, tmp_path, "svg")}
    assert {"heat-dll-mnist-mlp", "sweep-lr-mnist-mlp"} <= names
    sweep = (tmp_path / "sweep-lr-mnist-mlp.svg").read_text("utf-8")
    assert all(f">{word}<" in sweep for word in ("bp", "0.1", "1", "10"))  # a tick where a value is
    assert (tmp_path / "heat-dll-mnist-mlp.svg").read_text("utf-8").count(">90.00<") >= 4  # a number in every field


def test_several_drawings_in_one_file_share_a_legend(store: Store, tmp_path: Path) -> None:
    for data in ("mnist", "digits", "svhn"):
        fill(store, declared("bp", data=data), [90.0, 91.0])
        fill(store, declared("fa", data=data), [80.0, 81.0])
    (curves,) = [s.drawings for s in make_chart_sections(collect(store)) if s.heading == "Learning curves"]
    draw_panels(curves, tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text("utf-8")
    assert [drawn.count(f">{title}<") for title in ("mnist, mlp", "digits, mlp", "svhn, mlp")] == [1, 1, 1]
    assert [drawn.count(f">{rule}<") for rule in ("bp", "fa")] == [1, 1]


def test_panels_of_one_network_that_show_the_same_have_one_scale(store: Store, tmp_path: Path) -> None:
    runs = [("dll", "mnist", 50.0), ("bp", "mnist", 90.0), ("dll", "digits", 50.0)]
    for (rule, data, score), (k, lr), (j, decay) in product(runs, enumerate((0.1, 0.2)), enumerate((0.5, 1.0))):
        options = {"weight_decay": decay}
        fill(store, declared(rule, data=data, lr=lr, optimizer_options=options), [score + k + j])
    (heats,) = [s.drawings for s in make_chart_sections(collect(store)) if s.heading == "Sensitivity to settings"]
    with pytest.MonkeyPatch.context() as patch:
        drawn: list[Any] = []
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
        patch.setattr("apical.report.figures.replace_atomically", lambda path: nullcontext(path))
        draw_panels(heats, tmp_path / "all.svg")
    (figure,) = drawn
    scales = {axis.get_title(): image.get_clim() for axis in figure.axes for image in axis.images}
    assert scales == {"dll: mnist, mlp": (50.0, 92.0), "bp: mnist, mlp": (50.0, 92.0), "dll: digits, mlp": (50.0, 52.0)}


def test_a_logarithmic_axis_has_numbers_that_people_read(store: Store, tmp_path: Path) -> None:
    fill(store, declared("bp"), [90.0])
    (group,) = collect(store)
    line = Line("bp", group, [1.0, 2.0], [0.04, 0.3], [0.04, 0.3], [0.04, 0.3], Style(0))
    draw_panels([Chart("growth", "mnist, mlp", "batch size", "seconds", [line], log_y=True)], tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text("utf-8")
    assert all(f">{text}<" in drawn for text in ("0.05", "0.1", "0.2"))
    assert ">10<" not in drawn
    assert ">×<" not in drawn


def test_two_charts_of_one_name_are_two_files(store: Store, tmp_path: Path) -> None:
    fill(store, declared("bp", "a b"), [90.0])
    fill(store, declared("bp", "a-b"), [80.0])
    paths = write_figures(store.path, tmp_path, "svg")
    assert len({path.name for path in paths}) == len(paths) == 4


def test_another_format_is_refused_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    fill(store, declared("bp"), [90.0])
    with pytest.raises(ApicalError, match="'gif'; svg, png, pdf work"):
        write_figures(store.path, tmp_path / "figures", "gif")
    assert not (tmp_path / "figures").exists()
