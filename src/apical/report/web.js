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
  for (const row of all(".overview tbody tr")) { // a rule without a run on the data sets that are left says nothing
    const cells = all("td.score[data-data]", row).filter((cell) => !cell.hidden);
    row.hidden ||= cells.every((cell) => !cell.querySelector("a"));
  }
  for (const head of all(".overview thead th[data-data]")) { // nor does a data set without one
    const cells = all(".overview td.score[data-data]").filter((cell) => cell.dataset.data === head.dataset.data);
    const empty = cells.every((cell) => cell.hidden || cell.parentNode.hidden || !cell.querySelector("a"));
    for (const cell of [head, ...cells]) cell.hidden = empty;
  }
  for (const table of all(".overview")) {
    table.parentNode.hidden = all("tbody tr", table).every((row) => row.hidden);
  }
  for (const panel of all("figure")) {
    const figure = figures[panel.dataset.figure];
    for (const trace of figure.data) {
      trace.visible = of(trace.meta) && (trace.meta.shown || "legendonly");
    }
    panel.hidden = figure.data.every((trace) => trace.visible === false);
    if (panel.drawn && !panel.hidden) draw(panel);
  }
  for (const section of all("section:has(> .panels)")) {
    section.hidden = all("figure", section).every((panel) => panel.hidden);
  }
  const rows = all(".runs tbody tr");
  const left = rows.filter((row) => !row.hidden).length;
  form.querySelector("output").value = left ? `${left} of ${rows.length} shown` : "Nothing matches: choose fewer.";
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

function draw(panel) {
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line, paper] = ["--ink", "--soft", "--line", "--paper"].map((name) => style.getPropertyValue(name).trim());
  const { data, layout } = figures[panel.dataset.figure];
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line };
  const coloured = {
    ...layout,
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
    font: { family: style.fontFamily, size: 12, color: soft },
    hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
  };
  panel.drawn = true;
  Plotly.react(panel.querySelector(".chart"), data, coloured, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
}

const watch = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) if (isIntersecting && !target.drawn) draw(target);
}, { rootMargin: "400px" });

// What happens when.

for (const head of all(".sortable thead th")) head.querySelector("button").addEventListener("click", () => sort(head));
for (const panel of all("figure")) watch.observe(panel);
form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter));
dark.addEventListener("change", () => all("figure").filter((panel) => panel.drawn).forEach(draw));
addEventListener("beforeprint", () => all("figure").filter((panel) => !panel.hidden && !panel.drawn).forEach(draw));

function open() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named instanceof HTMLDetailsElement) named.open = true;
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
