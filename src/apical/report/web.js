"use strict";
// Sorting, filters, copying, and charts in the colours of the page. Everything else works without this.
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const figures = JSON.parse(document.getElementById("figures").textContent);
const form = document.querySelector("form.filters");
const dark = matchMedia("(prefers-color-scheme: dark)");

// Filters. An element is of what its data-* attributes say; one that does not say is of everything.

function wanted() {
  return [...new FormData(form)].filter(([, value]) => value !== "");
}

function of(tags) {
  return wanted().every(([name, value]) => {
    const own = tags[name];
    return own === undefined || (Array.isArray(own) ? own.includes(value) : own === value);
  });
}

function tagsOf(element) {
  const { suite, ...plain } = element.dataset;
  return suite === undefined ? plain : { ...plain, suite: JSON.parse(suite) };
}

function filter() {
  for (const one of all("tbody tr[data-rule], details[data-rule], .overview [data-data]")) {
    one.hidden = !of(tagsOf(one));
  }
  for (const table of all(".overview")) {
    for (const row of all("tbody tr", table)) { // a rule without a run on the data sets that are left says nothing
      const cells = all("td.score[data-data]", row).filter((cell) => !cell.hidden);
      row.hidden ||= cells.every((cell) => !cell.querySelector("a"));
    }
    for (const head of all("thead th[data-data]", table)) { // nor does a data set without one
      const cells = all("td.score[data-data]", table).filter((cell) => cell.dataset.data === head.dataset.data);
      const empty = cells.every((cell) => cell.hidden || cell.parentNode.hidden || !cell.querySelector("a"));
      for (const cell of [head, ...cells]) cell.hidden = empty;
    }
    table.closest("details").hidden = all("tbody tr", table).every((row) => row.hidden);
  }
  for (const panel of all("figure")) update(panel);
  for (const section of all("details:has(> .panels)")) {
    section.hidden = all("figure", section).every((panel) => panel.hidden);
  }
  const rows = all(".runs tbody tr");
  const left = rows.filter((row) => !row.hidden).length;
  form.querySelector("output").value = left ? `${left} of ${rows.length} shown` : "Nothing matches: choose fewer.";
}

// A figure shows the lines that the filters leave and that are pressed in its legend.

function update(panel) {
  const { data } = figures[panel.dataset.figure];
  for (const trace of data) trace.visible = of(trace.meta) && trace.meta.shown;
  for (const key of all("[data-line]", panel)) {
    const { meta } = data.find((trace) => trace.meta.line === Number(key.dataset.line));
    key.hidden = !of(meta);
    key.setAttribute("aria-pressed", meta.shown);
  }
  panel.hidden = data.every((trace) => !of(trace.meta));
  if (panel.drawn && !panel.hidden) draw(panel);
}

function toggle(key) {
  const panel = key.closest("figure");
  for (const { meta } of figures[panel.dataset.figure].data) {
    if (meta.line === Number(key.dataset.line)) meta.shown = !meta.shown;
  }
  update(panel);
}

// Sorting: numbers by their value, text by its letters, what is missing last.

function key(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.sort ?? cell.textContent.trim();
  return text === "" ? null : cell.dataset.sort === undefined ? text : Number(text);
}

function sort(head) {
  const rising = head.getAttribute("aria-sort") === "descending" || head.getAttribute("aria-sort") === "none" && !head.matches(":has(small)");
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const keyed = [...body.rows].map((row) => [key(row, head.cellIndex), row]);
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (rising ? 1 : -1) * compare(a, b)));
  body.append(...keyed.map(([, row]) => row));
}

// Charts are drawn when they come near, and again in other colours when the page changes its own.

function span(data, axis) { // an axis of lines begins and ends where they do
  const ends = data.filter((trace) => trace.visible && trace.mode !== "markers" && !trace.z).flatMap((trace) => trace.x);
  const range = [Math.min(...ends), Math.max(...ends)];
  return range[0] < range[1] ? { range: axis.type === "log" ? range.map(Math.log10) : range } : {};
}

function draw(panel) {
  const style = getComputedStyle(document.body);
  const [ink, soft, line, paper] = ["--ink", "--soft", "--line", "--paper"].map((name) => style.getPropertyValue(name).trim());
  const { data, layout } = figures[panel.dataset.figure];
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line };
  const coloured = {
    ...layout,
    xaxis: { ...layout.xaxis, ...axis, ...span(data, layout.xaxis) },
    yaxis: { ...layout.yaxis, ...axis },
    font: { family: style.fontFamily, size: 12, color: soft },
    hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
  };
  panel.drawn = true;
  Plotly.react(panel.querySelector(".chart"), data, coloured, { displayModeBar: false, responsive: true });
}

const watch = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) if (isIntersecting && !target.drawn) draw(target);
}, { rootMargin: "400px" });

// A table that goes on to the right says so.

function hint(box) {
  box.previousElementSibling.toggleAttribute("data-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
}
const sized = new ResizeObserver((boxes) => boxes.forEach(({ target }) => hint(target)));

// What happens when.

for (const box of all(".scroll")) {
  sized.observe(box);
  box.addEventListener("scroll", () => hint(box), { passive: true });
}
for (const key of all("[data-line]")) key.addEventListener("click", () => toggle(key));

for (const head of all(".sortable thead th")) head.querySelector("button").addEventListener("click", () => sort(head));
for (const panel of all("figure")) watch.observe(panel);
form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter));
dark.addEventListener("change", () => all("figure").filter((panel) => panel.drawn).forEach(draw));
addEventListener("beforeprint", () => {
  for (const folded of all("details.section, details.table")) folded.open = true;
  all("figure").filter((panel) => !panel.hidden && !panel.drawn).forEach(draw);
});

function open() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let one = named; one; one = one.parentElement) if (one instanceof HTMLDetailsElement) one.open = true;
  named?.scrollIntoView();
}
addEventListener("hashchange", open);
open();

document.addEventListener("click", async ({ target }) => {
  if (!target.matches(".command button")) return;
  const code = target.parentNode.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    target.textContent = "Copied";
  } catch { // no leave to write the clipboard: mark it, so that a key copies it
    getSelection().selectAllChildren(code);
    target.textContent = "Marked";
  }
});

filter();
