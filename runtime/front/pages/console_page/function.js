// The view of one function: what it does now, its log, jobs, revisions, and what may be done with it.

import { CallView, command, contract } from "./call.js";
import { LineChart, PHASES, PHASE_TEXTS, PhaseBar, swatch, total, Waterfall } from "./charts.js";
import { decisionsPanel, steps } from "./decisions.js";
import { ask, explained, say } from "./dialog.js";
import { element, reconcile, setAttribute, setText, table } from "./dom.js";
import { clock, clockOf, count, duration, NONE, rate, share, snapshotsOf } from "./format.js";
import { get, post } from "./gateway.js";
import { JobView } from "./job.js";
import { jobsPanel } from "./jobs.js";
import { LogView } from "./logs.js";
import { Figures, Rung, RUNGS, STOPPED, workersText } from "./overview.js";
import { revisionsPanel } from "./revisions.js";
import { WINDOW_S } from "./samples.js";
import { UsageView } from "./usage.js";

const FIRST_WINDOWS_S = [60, 120];
const NO_LINES = "No lines yet. What the function prints, and what happens to its workers, appears here.";
const PARTS = [
  { id: "activity", title: "Activity", make: (view) => new Activity(view.fleet, view.name) },
  { id: "call", title: "Call", scope: "invoke", make: (view) => new CallView(view.name) },
  { id: "logs", title: "Log", scope: "deploy", make: (view, request) => logView(view, request) },
  { id: "jobs", title: "Jobs", scope: "invoke", make: (view, id) => (id ? new JobView(view.name, id, view.fleet.may("deploy")) : jobsPanel(view.name)) },
  { id: "decisions", title: "Decisions", scope: "read", make: (view) => decisionsPanel(view.name) },
  { id: "usage", title: "Usage", scope: "read", make: (view) => new UsageView(view.name) },
  { id: "revisions", title: "Revisions", scope: "deploy", make: (view) => revisionsPanel(view.name) },
];

// The log of a function, or the lines of one request.
function logView(view, request) {
  const title = request ? `Log of ${request}` : "Log";
  return new LogView(`${view.base}/logs`, element("h2", {}, title), NO_LINES, { request, place: `${view.place}/logs` });
}

export class FunctionView {
  // `item` is what the part shows of several things, such as the id of a job.
  constructor(fleet, name, part, item = "") {
    Object.assign(this, { fleet, name, title: name, base: `/v1/functions/${encodeURIComponent(name)}`, place: `#/functions/${encodeURIComponent(name)}` });
    this.rung = new Rung();
    this.revision = element("span", { class: "note" });
    this.step = element("span", { class: "note" });
    this.trouble = element("p", { class: "problem" });
    this.figures = new Figures(["Workers", "Queued", "Running", "Requests/s", "Errors/s", "p95"]);
    this.links = PARTS.map(({ id, title }) => element("a", { href: `${this.place}/${id}` }, title));
    this.content = element("div");
    this.gone = element("p", { class: "problem", hidden: true }, `There is no function ${name}, or the key does not cover it.`);
    this.known = element(
      "div", {}, element("div", { class: "actions" }, this.buttons()), this.trouble, this.figures.node,
      element("nav", { class: "parts", "aria-label": `Parts of ${name}` }, this.links), this.content,
    );
    this.node = element("div", {}, element("h1", {}, name, " ", this.rung.node, " ", this.step, " ", this.revision), this.gone, this.known);
    this.open(part, item);
  }

  // Return true if this view shows the address, after opening the part that it names.
  accepts(hash) {
    const [place, name, part, item = ""] = hash.replace(/^#\/?/, "").split("/");
    if (place !== "functions" || name !== encodeURIComponent(this.name)) return false;
    this.open(part || "activity", decodeURIComponent(item));
    return true;
  }

  open(id, item) {
    const part = PARTS.find((one) => one.id === id) ?? PARTS[0];
    if (this.part === part && this.item === item) return;
    this.shown?.end();
    Object.assign(this, { part, item });
    const allowed = !part.scope || this.fleet.may(part.scope);
    this.shown = allowed ? part.make(this, item) : null;
    this.content.replaceChildren(this.shown?.node ?? element("p", { class: "note" }, `The API key lacks the scope ${part.scope}.`));
    PARTS.forEach((one, index) => setAttribute(this.links[index], "aria-current", one === part ? "page" : null));
  }

  buttons() {
    const { name, base } = this;
    const warm = async () => {
      try {
        await post(`/v2/${encodeURIComponent(name)}/warmup?workers=1`);
        say(`${name} was told to have a worker ready.`);
      } catch (error) {
        say(explained(error));
      }
    };
    const restart = () => ask({
      title: `Restart ${name}?`, text: "New workers start first; then the old ones finish what they have begun. No request is dropped.",
      verb: "Restart", act: () => post(`${base}/restart`), done: `${name} was restarted.`,
    });
    const reset = () => ask({
      title: `Reset ${name}?`, text: "It may start workers again at once, although the last starts have failed. Jobs that wait are run.",
      verb: "Reset", act: () => post(`${base}/reset`), done: `${name} was reset.`,
    });
    this.warmButton = element("button", { type: "button", click: warm }, "Warm up");
    this.restartButton = element("button", { type: "button", click: restart }, "Restart…");
    const pause = () => ask({
      title: `Pause ${name}?`, text: "It refuses new calls. Running calls end, and then all its processes. Jobs and messages of queues wait until it is resumed.",
      verb: "Pause", act: () => post(`${base}/pause`), done: `${name} is paused.`,
    });
    const resume = async () => {
      try {
        await post(`${base}/resume`);
        say(`${name} accepts calls again.`);
      } catch (error) {
        say(explained(error));
      }
    };
    this.resetButton = element("button", { type: "button", click: reset }, "Reset…");
    this.pauseButton = element("button", { type: "button", click: pause }, "Pause…");
    this.resumeButton = element("button", { type: "button", click: resume }, "Resume");
    return [this.warmButton, this.restartButton, this.resetButton, this.pauseButton, this.resumeButton];
  }

  update() {
    const row = this.fleet.functions.get(this.name)?.row;
    this.gone.hidden = Boolean(row);
    this.known.hidden = !row;
    if (!row) return;
    const recent = this.fleet.recent(this.name);
    this.rung.update(row.rung);
    // A plan may also climb. Only a step down needs no request.
    const down = RUNGS[row.next_rung] < RUNGS[row.rung];
    setText(this.step, down ? `${row.next_rung} at ${clock(row.next_rung_at)} if no request comes` : "");
    setText(this.revision, row.revision);
    const stopped = row.stopped ? `It refuses calls: ${STOPPED[row.stopped] ?? row.stopped}.` : "";
    setText(this.trouble, row.failed_starts ? `The last ${row.failed_starts} starts of a worker have failed. The log says why.` : stopped);
    this.trouble.hidden = !row.failed_starts && !row.stopped;
    this.warmButton.hidden = !this.fleet.may("invoke");
    this.restartButton.hidden = !this.fleet.may("deploy");
    this.resetButton.hidden = !this.fleet.may("deploy") || !row.failed_starts;
    this.pauseButton.hidden = !this.fleet.may("deploy") || row.stopped === "paused";
    this.resumeButton.hidden = !this.fleet.may("deploy") || row.stopped !== "paused";
    this.figures.update({
      Workers: workersText(row.workers), Queued: count(row.queued), Running: count(row.in_flight), "Requests/s": rate(recent?.rate),
      "Errors/s": rate(recent?.errors), p95: duration(recent?.p95),
    });
    this.shown?.update(row);
  }

  end() {
    this.shown?.end();
  }
}

// Charts of the last minutes, cold starts by phase, answers by status, and the latest errors.
class Activity {
  constructor(fleet, name) {
    Object.assign(this, { fleet, name });
    this.charts = [
      new LineChart("Requests per second", [["rate", "all"], ["errors", "errors"]], rate),
      new LineChart("Latency", [["p50", "p50"], ["p95", "p95"]], duration, { held: true }),
      new LineChart("Workers", [["ready", "ready"], ["starting", "starting"]], count, { whole: true }),
      new LineChart("Load", [["in_flight", "running"], ["queued", "queued"]], count, { whole: true }),
    ];
    this.cold = new ColdStarts();
    this.codes = table("Answers by status", [{ name: "Status" }, { name: "Answers", number: true }, { name: "Share", number: true }]);
    this.errors = element("ul", { class: "errors" });
    this.facts = element("dl", { class: "facts" });
    this.call = element("pre", { role: "group", tabindex: "0", "aria-label": "How to call it" });
    this.more = element("div", { class: "columns" },
      element("section", {}, element("h2", {}, "Answers"), this.codes.node),
      element("section", {}, element("h2", {}, "Latest errors"), this.errors),
      element("section", {}, element("h2", {}, "Function"), this.facts));
    this.node = element(
      "div", {}, element("h2", { class: "unseen" }, "Activity"), element("div", { class: "charts" }, this.charts.map((one) => one.node)),
      this.cold.node, this.more, element("h2", {}, "Call it"), this.call,
    );
    this.aborter = new AbortController();
    this.past = { loads: [], rates: [] };
  }

  // Read what the gateway remembers of the minutes before `until`, also if it has started anew since. Latency is not among it.
  async remember(until) {
    const base = `/v1/functions/${encodeURIComponent(this.name)}`;
    const since = until - WINDOW_S;
    try {
      const [load, calls] = await Promise.all([get(`${base}/load?since=${since}`, this.aborter.signal), get(`${base}/arrivals?since=${since}`, this.aborter.signal)]);
      const loads = steps(load.samples, until).filter((one) => one.at <= until);
      const known = loads[0]?.at ?? until;
      // Before the first sample there was no function.
      const none = loads.length && known > since ? [since, known].map((at) => ({ at, ready: 0, starting: 0, in_flight: 0, queued: 0 })) : [];
      this.past = { known, loads: [...none, ...loads], rates: rates(calls.arrivals, since, until) };
    } catch {
      // The stream says if the gateway or the function is gone.
    }
  }

  update(row) {
    const samples = this.fleet.functions.get(this.name);
    const points = samples.series(this.fleet.times);
    const { started_at } = this.fleet.gateway;
    if (this.started_at !== started_at) {
      this.started_at = started_at;
      this.remember(this.fleet.times[0]);
    }
    // At first the little that is known is shown large.
    const { known = this.fleet.times[0], loads, rates: past } = this.past;
    const known_s = this.fleet.at - known;
    const window_s = FIRST_WINDOWS_S.find((seconds) => seconds >= known_s) ?? WINDOW_S;
    const begin = this.fleet.at - window_s;
    [past, [], loads, loads].forEach((older, index) => {
      // The point before the window is drawn at its edge.
      const inside = older.findIndex((one) => one.at >= begin);
      const shown = older.slice(inside < 0 ? -1 : Math.max(0, inside - 1));
      // The first line of the gateway tells no rate. Where the past ends with one, it would break the line.
      const fresh = shown.length && points[0]?.rate === null && !index ? points.slice(1) : points;
      this.charts[index].update([...shown, ...fresh], this.fleet.at, window_s);
    });
    this.cold.update(row, this.latest);
    const codes = Object.entries(row.codes);
    const all = codes.reduce((found, [, many]) => found + many, 0);
    reconcile(this.codes.body, codes, ([code]) => code, codeRow, (child, [code, many]) => child.update(code, many, many / all));
    this.codes.node.hidden = !codes.length;
    // Errors are looked up when there are more of them, and the facts when there is a new revision.
    const errors = codes.filter(([code]) => Number(code) >= 400).reduce((found, [, many]) => found + many, 0);
    const state = `${row.revision} ${errors} ${row.failed_starts} ${row.cold_starts}`;
    if (state !== this.state && !this.loading) this.load(state);
  }

  async load(state) {
    this.loading = true;
    try {
      this.describe(await get(`/v1/functions/${encodeURIComponent(this.name)}`, this.aborter.signal));
      this.state = state;
    } catch {
      // The stream says if the gateway or the function is gone.
    } finally {
      // At most so often, however many errors there are.
      setTimeout(() => (this.loading = false), 2000);
    }
  }

  describe(status) {
    setText(this.call, command(contract(status)));
    this.latest = [...status.latest_cold_starts].reverse();
    const errors = [...status.last_errors].reverse();
    this.errors.replaceChildren(...errors.map((one) => element("li", {}, element("time", {}, clockOf(one.at)), " ", one.text)));
    if (!errors.length) this.errors.append(element("li", { class: "note" }, "None."));
    const { scale } = status.settings;
    const facts = {
      Kind: [status.kind, status.streaming ? "streams" : "", status.batch ? `batches of ${status.batch}` : ""].filter(Boolean).join(", "),
      Dialect: status.dialect, Deployed: clockOf(status.created_at), Snapshot: snapshotsOf(status) || NONE,
      Scale: `${scale.min} to ${scale.max} workers, ${scale.idle_timeout_s === null ? "kept as long as is learned to pay" : `idle after ${scale.idle_timeout_s} s`}`, Concurrency: status.settings.concurrency,
      Schedules: status.schedules.map((one) => `${one.cron} (${one.timezone}), next ${one.next_at ? clockOf(one.next_at) : "never"}`).join("; ") || NONE,
      "Memory at rest": status.rest_mb === null ? NONE : `${status.rest_mb} MiB`, Warnings: status.warnings.join(" ") || "None.",
    };
    this.facts.replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
  }

  end() {
    this.aborter.abort();
  }
}

function codeRow([code]) {
  const [head, many, part] = [element("th", { scope: "row" }, code), element("td", { class: "number" }), element("td", { class: "number" })];
  return {
    node: element("tr", {}, head, many, part),
    update(_code, answers, portion) {
      setText(many, count(answers));
      setText(part, share(portion));
    },
  };
}

const PART_S = 5;

// Return the rate of the calls that arrived in each PART_S seconds from `since` until `until`.
function rates(arrivals, since, until) {
  const counts = new Array(Math.floor((until - since) / PART_S)).fill(0);
  for (const at of arrivals) {
    const part = Math.floor((at - since) / PART_S);
    if (part < counts.length) counts[part] += 1;
  }
  return counts.map((many, part) => ({ at: since + (part + 1) * PART_S, rate: many / PART_S }));
}

// Where the time of cold starts went: one of the latest as a waterfall, and the mean of all.
class ColdStarts {
  constructor() {
    this.bars = [new PhaseBar(14), new PhaseBar(14)];
    this.heads = [element("h3"), element("h3")];
    this.fall = new Waterfall();
    this.choice = element("select", { id: "cold", change: () => this.draw() });
    this.chosen = element("p", { class: "tools" }, element("label", { for: "cold" }, "Show"), this.choice);
    this.totals = [element("td", { class: "number" }), element("td", { class: "number" })];
    this.whole = element("td", { class: "number" });
    this.cells = PHASES.map(() => [element("td", { class: "number" }), element("td", { class: "number" })]);
    const rows = PHASES.map((phase, index) => element("tr", {}, element("th", { scope: "row" }, swatch(`phase ${phase}`), ` ${phase}`), element("td", { class: "wide", title: PHASE_TEXTS[phase] }, this.fall.rows[index]), this.cells[index]));
    const heads = ["Phase", "When", "This one", "Mean"].map((text, index) => element("th", { scope: "col", class: ["", "wide", "number", "number"][index] || null }, text));
    this.table = element("table", {}, element("caption", { class: "unseen" }, "Cold starts by phase"), element("thead", {}, element("tr", {}, heads)),
      element("tbody", {}, rows, element("tr", { class: "sum" }, element("th", { scope: "row" }, "cold start"), element("td", { class: "wide" }, "until a worker has the request"), this.totals),
        element("tr", {}, element("th", { scope: "row" }, "whole call"), element("td", { class: "wide" }), this.whole, element("td", { class: "number" }, NONE))));
    this.title = element("h2", {}, "Cold starts");
    this.none = element("p", { class: "note" }, "None yet since the gateway has started.");
    this.why = element("p", { class: "note" });
    this.shown = element("div", { class: "cold" }, element("div", {}, this.chosen, this.heads[0], this.bars[0].node, this.heads[1], this.bars[1].node), this.table);
    this.node = element("section", {}, this.title, this.why, this.none, this.shown);
  }

  // `latest` are the last cold starts, the newest first; undefined until they are known.
  update(row, latest = []) {
    Object.assign(this, { row, latest: latest.length ? latest : [row.last_cold_start].filter(Boolean) });
    const any = row.cold_starts > 0;
    setText(this.title, any ? `Cold starts: ${count(row.cold_starts)}` : "Cold starts");
    this.none.hidden = any;
    setText(this.why, row.cold_because ? `It is cold: it ${row.cold_because}.` : "");
    this.why.hidden = !row.cold_because;
    this.shown.hidden = !any;
    const keys = this.latest.map((one) => one.request_id);
    if (keys.join() !== this.keys) {
      const options = this.latest.map((one, index) => element("option", { value: index }, `${index ? "" : "latest, "}${clock(one.at)}, ${duration(one.total_ms)}`));
      this.choice.replaceChildren(...options);
      this.keys = keys.join();
    }
    this.chosen.hidden = keys.length < 2;
    this.draw();
  }

  draw() {
    const { row } = this;
    const one = this.latest[Number(this.choice.value) || 0];
    if (!one) return;
    const shown = Object.fromEntries(one.phases.map(({ name, duration_ms }) => [name, duration_ms]));
    const mean = Object.fromEntries(Object.entries(row.cold_phases_s).map(([phase, seconds]) => [phase, (seconds * 1000) / row.cold_starts]));
    this.fall.update(one.phases, one.total_ms);
    setText(this.whole, duration(one.total_ms));
    const both = [shown, mean];
    const most = Math.max(...both.map(total));
    both.forEach((phases, column) => {
      this.bars[column].update(phases, most, column ? "Mean of all cold starts" : "This cold start");
      const cold_ms = column ? total(mean) : one.cold_start_ms;
      setText(this.totals[column], duration(cold_ms));
      setText(this.heads[column], `${column ? "Mean" : clock(one.at)}: ${duration(cold_ms)}`);
      PHASES.forEach((phase, index) => setText(this.cells[index][column], phases[phase] ? duration(phases[phase]) : NONE));
    });
  }
}
