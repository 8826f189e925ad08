// The live page: a snapshot when it opens, then what is new as server-sent events.
// Whatever a run says (names, errors, tasks) becomes text, never markup.

import { element, figure, redraw, showSections } from "./charts.js";

const RETRY_MS = 3000;
const STATES = { moving: "running", quiet: "quiet", overdue: "overdue", stalled: "stalled" };
let latest = null;
const $ = (id) => document.getElementById(id);

function text(id, value) {
  if ($(id).textContent !== value) $(id).textContent = value;
}

function chip(id, label, kind = label) {
  text(id, label);
  $(id).className = `chip ${kind}`;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

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

/** A bar beside a number: its share of the most. */
function load(count, most, tone) {
  const bar = element("progress", `load ${tone}`);
  bar.max = Math.max(1, most);
  bar.value = count;
  bar.setAttribute("aria-hidden", "true");
  return bar;
}

function showNow(now) {
  chip("state", STATES[now.state], now.state === "moving" ? "running" : now.state);
  text("phase", now.phase);
  $("progress").max = now.max_steps;
  $("progress").value = now.step;
  text("steps", `step ${whole.format(now.step)} of ${whole.format(now.max_steps)}`);
  const left = now.remaining_s === null || now.step >= now.max_steps ? "" : ` · ${duration(now.remaining_s)} left`;
  text("time", now.elapsed_s === null ? "" : `· ${duration(now.elapsed_s)}${left}`);
  latest = now;
  for (const part of document.querySelectorAll("[data-live]")) part.hidden = false;

  const stalled = now.state === "stalled";
  $("alarm").hidden = !stalled;
  if (stalled) text("alarm-text", now.report);
  chip("moving", now.state);
  text("report", now.report);
  const dispatched = now.stages.reduce((sum, stage) => sum + stage.count, 0);
  text("dispatched", dispatched ? `${whole.format(dispatched)} dispatched` : "nothing is dispatched yet");
  rows("stages", now.stages.map((stage) => [
    [stage.label, "text"], load(stage.count, dispatched, `t${stage.tone}`), [whole.format(stage.count), "n"], [stage.share, "n"],
  ]));

  $("failures-card").hidden = now.failures.length === 0;
  rows("failures", now.failures.map((one) => [
    [one.label, "text"], [whole.format(one.number), "n"], [one.share, "n"],
    element("ul", "examples", ...one.examples.map((example) =>
      element("li", "", element("code", "", example.trajectory_id), ` ${example.error}`))),
  ]));

  const most = Math.max(...now.engines.map((engine) => engine.calls), 0);
  text("engines-states", Object.entries(now.engines_by_state).map(([state, count]) => `${count} ${state}`).join(", "));
  rows("engines", now.engines.map((engine) => [
    element("code", "", engine.engine_id),
    element("span", `chip ${engine.state}`, engine.state),
    [engine.weight_version < 0 ? "none" : String(engine.weight_version), "n"],
    element("span", "load-cell", load(engine.calls, most, "t1"),
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
    const id = element("code", "", `${one.shown_id}…`);
    id.title = one.trajectory_id;
    return [
      id, [one.task_id, "cut"], [duration(one.age_s), "n"], [String(one.turn), "n"], [whole.format(one.tokens), "n"],
      [one.engine, "whole"], [`${one.waits_for} (${duration(one.waits_s)})`, "text"],
    ];
  }));
}

/** Shows that the run has ended: nothing on the page says any more that it is running. */
function showEnd() {
  const finished = latest.step >= latest.max_steps;
  chip("state", finished ? "finished" : "ended");
  text("phase", finished ? "" : "before its last step; async-rl report says why");
  text("time", latest.elapsed_s === null ? "" : `· ${duration(latest.elapsed_s)}`);
  $("alarm").hidden = true;
  for (const part of document.querySelectorAll("[data-live]")) part.hidden = true;
}

function showSteps(steps) {
  $("tiles").replaceChildren(...steps.tiles.map((tile) => {
    const value = element("p", "value", tile.value);
    value.id = `tile-${tile.name}`;
    const head = element("h2", "", tile.label);
    if (tile.verdict) head.append(" ", element("span", `chip ${tile.verdict}`, tile.verdict));
    return element("div", `tile ${tile.verdict ?? ""}`, head, value, element("p", "note", tile.note));
  }));
  showSections($("charts"), steps.sections);
  $("recent-columns").replaceChildren(...steps.columns.map((heading) => {
    const cell = element("th", "n", heading);
    cell.scope = "col";
    return cell;
  }));
  rows("recent", steps.recent.map(({ step, ...figures }) => [
    [String(step), "n"], ...Object.values(figures).map((value) => [figure(value), "n"]),
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
    showEnd();
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
  redraw();
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % names.length]);
});
const kept = localStorage.getItem("theme");
if (kept in THEMES) theme(kept);

open();
