// Draws the charts that charts.py declares, with uPlot: the live page and the report share this file.
// Whatever a run says (names, reasons, errors) becomes text, never markup.

const HEIGHT = 156;
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const compact = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

/** An element with text or other elements in it. */
export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** A number in a few characters. */
export function figure(value) {
  if (value === null || value === undefined) return "n/a";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return (Math.abs(value) >= 1e4 ? compact : number).format(value);
}

// Colours are variables of page.css, light or dark; a canvas needs them resolved.
const probe = document.documentElement.appendChild(element("i"));
probe.hidden = true;
function colour(css) {
  probe.style.color = css;
  return getComputedStyle(probe).color;
}

/** Every chart on the page: [plot, chart], in the order of the sections. */
let drawn = [];
let shape = "";

/** Draws sections anew in their colours, for another theme. */
export function redraw() {
  for (const [plot] of drawn) plot.redraw(false);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

/** The series in the order in which they are drawn: of a stack the highest first, which the lower ones cover. */
function layers({ kind, series }) {
  return kind === "stacked" ? series.toReversed() : series;
}

/** The values of a stack, each with those of the series below it. */
function heights({ xs, series }) {
  const sums = xs.map(() => 0);
  return series.map(({ values }) => sums.map((_, at) => (sums[at] += values[at] ?? 0))).toReversed();
}

/** What uPlot plots of a chart: x, the series, then the edges of its band and its bound. */
function columns(chart) {
  const { xs, series, band, bound, kind } = chart;
  return [
    xs, ...(kind === "stacked" ? heights(chart) : series.map((one) => one.values)), ...(band ? [band.high, band.low] : []),
    ...(bound === null ? [] : [xs.map(() => bound)]),
  ];
}

/** The range of y: all values with a little room, from the floor and to the ceiling where those hold them. */
function range(chart, low, high) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [
    chart.floor !== null && low >= chart.floor ? chart.floor : low - room,
    chart.ceiling !== null && high <= chart.ceiling ? chart.ceiling : high + room,
  ];
}

function last(values) {
  return values.findLast((value) => value !== null) ?? null;
}

/** A sentence for those who do not see the chart. */
function spoken({ title, x, xs, series }) {
  const said = series.map(({ label, values }) => {
    const known = values.filter((value) => value !== null);
    return `${label} last ${figure(last(values))}, from ${figure(Math.min(...known))} to ${figure(Math.max(...known))}`;
  });
  return `${title}, ${x} ${xs[0]} to ${xs.at(-1)}: ${said.join("; ")}. Arrow keys read single values.`;
}

/** Names the series with their values: at the cursor, else the last ones; of bars there is no last one. */
function legend(chart, plot) {
  const at = plot?.cursor.idx ?? null;
  const item = (label, value, className) =>
    element("li", className, label, ...(value === null ? [] : [" ", element("b", "", figure(value))]));
  const value = (values) => (at !== null ? values[at] : chart.kind === "bars" ? null : last(values));
  const items = chart.series.map((one) => item(one.label, value(one.values), `t${one.tone}${one.faint ? " faint" : ""}`));
  if (chart.band) items.unshift(element("li", "t1 area", chart.band.label));
  if (chart.bound !== null) items.push(item("bound", chart.bound, "limit"));
  if (at !== null) items.push(element("li", "readout", `${chart.x} ${chart.xs[at]}`));
  return items;
}

/** The width of the labels of y: a fixed one would cut the sign of -1.0e-12. */
function labelsWidth(_, labels) {
  return Math.max(46, 12 + 6.5 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

function options(chart, width, onCursor) {
  const tone = (one) => `var(--t${one.tone})`;
  const filled = chart.kind === "bars" || chart.kind === "stacked";
  const bars = filled ? { paths: uPlot.paths.bars({ size: [0.8] }), points: { show: false } } : { points: { fill: () => colour("var(--card)") } };
  const series = layers(chart).map((one) => ({
    stroke: () => colour(tone(one)),
    fill: filled ? () => colour(tone(one)) : undefined,
    width: one.faint ? 1.1 : 1.9,
    alpha: one.faint ? 0.4 : 1,
    spanGaps: one.joined,
    ...bars,
  }));
  const bands = [];
  if (chart.band) {
    bands.push({ series: [series.length + 1, series.length + 2], fill: () => colour("color-mix(in srgb, var(--t1) 16%, transparent)") });
    series.push({ width: 0, points: { show: false } }, { width: 0, points: { show: false } });
  }
  if (chart.bound !== null) series.push({ stroke: () => colour("var(--soft)"), width: 1, dash: [5, 4], points: { show: false } });
  const axis = {
    stroke: () => colour("var(--soft)"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: () => colour("var(--grid)"), width: 1 },
    ticks: { show: false },
  };
  const half = filled ? 0.5 : 0;
  return {
    width, height: HEIGHT, bands, padding: [8, 14, 0, 0], legend: { show: false },
    series: [{}, ...series],
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low - half, high + half]) },
      y: { range: (_, low, high) => range(chart, low, high) } },
    axes: [
      { ...axis, size: 26, gap: 5, space: 46, grid: { show: false }, incrs: [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((p) => n * 10 ** p)).sort((a, b) => a - b), values: (_, marks) => marks.map((mark) => mark.toLocaleString("en")) },
      { ...axis, size: labelsWidth, gap: 4, space: 28, values: (_, marks) => marks.map(figure) },
    ],
    cursor: { y: false, drag: { x: false }, points: { size: 7 }, sync: { key: chart.x } },
    hooks: { setCursor: [onCursor] },
  };
}

/** Draws one chart into a figure that is on the page already. */
function draw(figureElement, chart) {
  const title = element("h3", "", chart.title);
  if (chart.unit) title.append(" ", element("small", "", chart.unit));
  const list = element("ul", "legend");
  const box = element("div", "plot");
  box.tabIndex = 0;
  box.setAttribute("role", "img");
  figureElement.append(element("figcaption", "", title, element("p", "", chart.note)), list, box);
  const entry = [null, chart];
  const show = (plot) => list.replaceChildren(...legend(entry[1], plot));
  const plot = new uPlot(options(chart, box.clientWidth, show), columns(chart), box);
  entry[0] = plot;
  entry[2] = () => {
    box.setAttribute("aria-label", spoken(entry[1]));
    show(plot);
  };
  entry[2]();
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: HEIGHT });
  }).observe(box);
  box.addEventListener("keydown", (event) => {
    const end = plot.data[0].length - 1, at = plot.cursor.idx ?? (event.key === "ArrowRight" ? -1 : end + 1);
    const next = { ArrowLeft: Math.max(at - 1, 0), ArrowRight: Math.min(at + 1, end), Home: 0, End: end }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 0 });
  });
  box.addEventListener("blur", () => plot.setCursor({ left: -10, top: -10 }));
  return entry;
}

/** Shows sections; where only their figures are new, charts stay, and with them the cursor. */
export function showSections(parent, sections) {
  const charts = sections.flatMap((section) => section.charts);
  const names = ({ xs, series, band, ...rest }) => [rest, band?.label, series.map(({ values, ...one }) => one)];
  const wanted = JSON.stringify(sections.map((section) => [section.title, section.charts.map(names)]));
  if (wanted === shape) {
    drawn.forEach((entry, i) => {
      entry[1] = charts[i];
      entry[0].setData(columns(charts[i]));
      entry[2]();
    });
    return;
  }
  shape = wanted;
  for (const [plot] of drawn) plot.destroy();
  const figures = [];
  parent.replaceChildren(...sections.map((section) => {
    const title = element("h2", "", section.title);
    title.id = `title-${section.name}`;
    const card = element("section", "card", title, element("div", "charts", ...section.charts.map((chart) => {
      const one = element("figure", "chart");
      one.id = `chart-${chart.name}`;
      figures.push(one);
      return one;
    })));
    card.id = `section-${section.name}`;
    card.setAttribute("aria-labelledby", title.id);
    return card;
  }));
  drawn = figures.map((one, i) => draw(one, charts[i]));
}

const data = document.getElementById("chart-data"); // a report has it inside
if (data) showSections(document.getElementById("charts"), JSON.parse(data.textContent));
