// The live page: a snapshot when it opens, then what is new as server-sent events.
// Whatever a run says (names, errors, tasks) becomes text, never markup; only charts come as markup, from drawing.py.

import { readAgain } from "./charts.js";

const RETRY_MS = 3000;
const STATES = { moving: "running", quiet: "quiet", overdue: "overdue", stalled: "stalled" };
const $ = (id) => document.getElementById(id);

function text(id, value) {
  if ($(id).textContent !== value) $(id).textContent = value;
}

/** An element with text or other elements in it. */
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function chip(id, label, kind = label) {
  text(id, label);
  $(id).className = `chip ${kind}`;
}

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function figure(value) {
  if (value === null || value === undefined) return "n/a";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return Math.abs(value) >= 1000 ? whole.format(value) : number.format(value);
}

function duration(seconds) {
  if (seconds === null) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** Replaces rows; cells are text, or [text, class], or elements. */
function rows(id, all) {
  $(id).replaceChildren(
    ...all.map((cells, i) => {
      const row = element("tr", "", ...cells.map((cell) => {
        if (cell instanceof Node) return element("td", "", cell);
        const [value, className] = Array.isArray(cell) ? cell : [cell, ""];
        const made = element("td", className, value);
        if (className === "cut") made.title = value;
        return made;
      }));
      row.dataset.row = i;
      return row;
    }),
  );
}

/** A bar beside a number: how much of the busiest engine's load this one has. */
function load(calls, most) {
  const NS = "http://www.w3.org/2000/svg";
  const bar = document.createElementNS(NS, "svg");
  bar.setAttribute("class", "load");
  bar.setAttribute("aria-hidden", "true");
  for (const [name, width] of [["all", 100], ["some", (100 * calls) / Math.max(1, most)]]) {
    const rect = document.createElementNS(NS, "rect");
    rect.setAttribute("class", name);
    rect.setAttribute("width", `${width}%`);
    rect.setAttribute("height", "100%");
    rect.setAttribute("rx", "3");
    bar.append(rect);
  }
  return bar;
}

function showNow(now) {
  chip("state", STATES[now.state], now.state === "moving" ? "running" : now.state);
  text("phase", now.phase);
  $("progress").max = now.max_steps;
  $("progress").value = now.step;
  text("steps", `step ${whole.format(now.step)} of ${whole.format(now.max_steps)}`);
  const left = now.remaining_s === null ? "" : ` · ${duration(now.remaining_s)} left`;
  text("time", now.elapsed_s === null ? "" : `· ${duration(now.elapsed_s)}${left}`);

  const stalled = now.state === "stalled";
  $("alarm").hidden = !stalled;
  if (stalled) text("alarm-text", now.report);
  chip("moving", now.state);
  text("report", now.report);
  if (now.flow) $("flow").innerHTML = now.flow;

  const most = Math.max(...now.engines.map((engine) => engine.calls), 0);
  text("engines-states", Object.entries(now.engines_by_state).map(([state, count]) => `${count} ${state}`).join(", "));
  rows("engines", now.engines.map((engine) => [
    element("code", "", engine.engine_id),
    element("span", `chip ${engine.state}`, engine.state),
    [engine.weight_version < 0 ? "none" : String(engine.weight_version), "n"],
    element("span", "load-cell", load(engine.calls, most),
      `${engine.calls} ${engine.calls === 1 ? "call" : "calls"}`,
      engine.prefill_tokens ? `, ${whole.format(engine.prefill_tokens)} to prefill` : ""),
  ]));
  now.engines.forEach((engine, i) => {
    if (!engine.error) return;
    const cell = element("td", "error-text", engine.error);
    cell.colSpan = 4;
    $("engines").querySelector(`tr[data-row="${i}"]`).after(element("tr", "error-row", cell));
  });
  text("engines-more", now.engines_more ? `and ${now.engines_more} more that serve` : "");

  rows("slowest", now.slowest.map((one) => {
    const id = element("code", "", `…${one.trajectory_id.slice(-8)}`);
    id.title = one.trajectory_id;
    return [
      id, [one.task_id, "cut"], [duration(one.age_s), "n"], [String(one.turn), "n"], [whole.format(one.tokens), "n"],
      [one.engine, "whole"], [`${one.waits_for} (${duration(one.waits_s)})`, "text"],
    ];
  }));
}

function showSteps(steps) {
  $("tiles").replaceChildren(...steps.tiles.map((tile) => {
    const value = element("p", "value", tile.value);
    value.id = `tile-${tile.name}`;
    return element("div", "tile", element("h2", "", tile.label), value, element("p", "note", tile.note));
  }));
  $("charts").replaceChildren(...steps.sections.map((section) => {
    const charts = element("div", "charts");
    charts.innerHTML = section.charts.join("");
    const title = element("h2", "", section.title);
    title.id = `title-${section.name}`;
    const card = element("section", "card", title, charts);
    card.id = `section-${section.name}`;
    card.setAttribute("aria-labelledby", title.id);
    return card;
  }));
  readAgain();
  rows("recent", steps.recent.map((row) => [
    [String(row.step), "n"], ...[row.reward, row.ppo_kl, row.staleness_p95, row.tokens_per_s, row.wait_s, row.step_s, row.sync_s]
      .map((value) => [figure(value), "n"]),
  ]));
  $("extremes-card").hidden = steps.extremes.length === 0;
  rows("extremes", steps.extremes.map((token) => [
    element("code", "", token.trajectory_id),
    ...[token.position, token.token_id, token.lag].map((value) => [String(value), "n"]),
    ...[token.rollout_log_prob, token.log_prob].map((value) => [figure(value), "n"]),
  ]));
}

function follow(known) {
  const source = new EventSource(`/api/events?have=${encodeURIComponent(known)}`);
  source.addEventListener("open", () => chip("connection", "live"));
  source.addEventListener("now", (event) => showNow(JSON.parse(event.data)));
  source.addEventListener("steps", (event) => showSteps(JSON.parse(event.data)));
  source.addEventListener("end", () => {
    source.close();
    chip("connection", "ended");
  });
  source.addEventListener("error", () => {
    chip("connection", "reconnecting");
    if (source.readyState === EventSource.CLOSED) setTimeout(open, RETRY_MS);
  });
}

async function open() {
  try {
    const answer = await fetch("/api/snapshot");
    if (!answer.ok) throw new Error(`${answer.status}`);
    const all = await answer.json();
    text("run", all.run);
    text("version", all.version);
    document.title = `${all.run} · async-rl`;
    showNow(all.now);
    showSteps(all.steps);
    follow(all.steps.id);
  } catch {
    chip("connection", "reconnecting");
    setTimeout(open, RETRY_MS);
  }
}

// Colours follow the system unless somebody chooses; the choice is kept in this browser.
const THEMES = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  text("theme", THEMES[name]);
  $("theme").setAttribute("aria-label", `Colours: ${name}`);
  localStorage.setItem("theme", name);
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % names.length]);
});
const kept = localStorage.getItem("theme");
if (kept in THEMES) theme(kept);

open();
