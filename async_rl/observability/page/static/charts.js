// Reads out charts under the pointer: the page and the report share it. Charts are right without it.

const NS = "http://www.w3.org/2000/svg";

/** The points of a line, as `drawing.py` writes them down. */
function points(path) {
  const ys = path.dataset.ys.split(" ");
  return path.dataset.xs.split(" ").map((x, i) => [Number(x), ys[i]]);
}

/** The point of a line that is nearest to x. */
function nearest(path, x) {
  let best = null;
  for (const point of points(path)) {
    if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  }
  return best;
}

function read(chart, svg, clientX) {
  const lines = [...svg.querySelectorAll("path.line")];
  const xs = lines.flatMap((line) => points(line).map(([x]) => x));
  const low = Math.min(...xs), high = Math.max(...xs);
  const box = svg.getBoundingClientRect();
  const wanted = low + ((clientX - box.left) / box.width) * (high - low);
  let step = null;
  for (const x of xs) if (step === null || Math.abs(x - wanted) < Math.abs(step - wanted)) step = x;
  if (step === null) return;

  let mark = svg.querySelector("line.cross");
  if (!mark) {
    mark = document.createElementNS(NS, "line");
    mark.setAttribute("class", "cross");
    mark.setAttribute("y1", "0");
    mark.setAttribute("y2", "1000");
    svg.append(mark);
  }
  const across = high > low ? ((step - low) / (high - low)) * 1000 : 500;
  mark.setAttribute("x1", across);
  mark.setAttribute("x2", across);

  let readout = chart.querySelector(".readout");
  if (!readout) {
    readout = document.createElement("p");
    readout.className = "readout";
    chart.append(readout);
  }
  readout.replaceChildren(`step ${step}`);
  for (const line of lines) {
    const point = nearest(line, step);
    if (point === null || point[0] !== step) continue;
    const item = document.createElement("span");
    item.className = line.getAttribute("class").replace("line ", "");
    item.textContent = `${line.dataset.label} ${point[1]}`;
    readout.append(item);
  }
}

function clear(chart) {
  chart.querySelector("line.cross")?.remove();
  chart.querySelector(".readout")?.remove();
}

/** Where the pointer is, if it is over a chart: [id of the chart, x in the window]. */
let pointed = null;

/** Reads out again what the pointer is over, after charts were drawn anew. */
export function readAgain() {
  const chart = pointed && document.getElementById(pointed[0]);
  if (chart) read(chart, chart.querySelector("svg.shapes"), pointed[1]);
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target instanceof Element ? event.target.closest("figure.chart svg.shapes") : null;
  for (const other of document.querySelectorAll("line.cross")) {
    if (other.ownerSVGElement !== svg) clear(other.closest("figure.chart"));
  }
  pointed = svg && svg.querySelector("path.line") ? [svg.closest("figure.chart").id, event.clientX] : null;
  readAgain();
});
