// The first view: all functions, a row each.

import { PhaseBar, Sparkline, total } from "./charts.js";
import { classes, element, reconcile, setAttribute, setText, svg } from "./dom.js";
import { count, duration, NONE, rate } from "./format.js";

const SPARK_PARTS = 60;
// From the warmest down, with the number of steps in the picture.
export const RUNGS = { ready: 5, parked: 4, zygote: 3, resident: 2, local: 1 };
// Why a function refuses calls.
export const STOPPED = { paused: "paused", budget: "today's budget is used up", barred: "barred by damaged files or a policy" };
const RUNG_TEXTS = {
  ready: "a worker waits with its weights",
  parked: "a worker waits, without memory of its devices",
  zygote: "imports are done: workers are forked from it",
  resident: "no process, but the weights are in memory",
  local: "only files",
};

// How warm a function is, as a word and as a picture of a ladder.
export class Rung {
  constructor() {
    this.steps = [0, 1, 2, 3, 4].map((step) => svg("rect", { x: step * 4, y: 10 - step * 2.5, width: 3, height: 2 + step * 2.5 }));
    this.word = element("span");
    this.node = element("span", { class: "rung" }, svg("svg", { width: 19, height: 12, "aria-hidden": "true" }, this.steps), this.word);
  }

  update(rung) {
    this.steps.forEach((step, index) => setAttribute(step, "class", index < (RUNGS[rung] ?? 0) ? "on" : "off"));
    setText(this.word, rung);
    setAttribute(this.node, "title", RUNG_TEXTS[rung] ?? "");
  }
}

export function workersText(workers) {
  const more = [workers.starting ? `+${workers.starting}` : "", workers.draining ? `−${workers.draining}` : ""].join("");
  return `${workers.ready}${more} / ${workers.max}`;
}

const COLUMNS = [
  { name: "Function", by: (one) => one.row.name, text: true },
  { name: "Rung", by: (one) => RUNGS[one.row.rung] ?? 0 },
  { name: "Workers", by: (one) => one.row.workers.ready, number: true, mid: true },
  { name: "Queued", by: (one) => one.row.queued, number: true, wide: true },
  { name: "Running", by: (one) => one.row.in_flight, number: true, wide: true },
  { name: "Requests/s", by: (one) => one.recent?.rate ?? 0, number: true },
  { name: "Errors/s", by: (one) => one.recent?.errors ?? 0, number: true },
  { name: "p50", by: (one) => one.recent?.p50 ?? 0, number: true, wide: true },
  { name: "p95", by: (one) => one.recent?.p95 ?? 0, number: true },
  { name: "Cold starts", by: (one) => one.row.cold_starts, number: true, wide: true },
  { name: "Latest cold start", by: (one) => total(one.row.last_cold_phases_ms), wide: true },
];

class Row {
  constructor() {
    this.rung = new Rung();
    this.spark = new Sparkline();
    this.bar = new PhaseBar(8);
    this.link = element("a");
    this.trouble = element("span", { class: "trouble" });
    this.numbers = Object.fromEntries(COLUMNS.map((column) => [column.name, element("span")]));
    const special = {
      Function: [this.link, this.trouble], Rung: [this.rung.node],
      "Requests/s": [this.spark.node, this.numbers["Requests/s"]], "Latest cold start": [this.bar.node, this.numbers["Latest cold start"]],
    };
    this.node = element("tr", {}, COLUMNS.map((column) =>
      element(column.text ? "th" : "td", { scope: column.text ? "row" : null, class: classes(column) }, special[column.name] ?? this.numbers[column.name])));
  }

  update({ row, recent, rates, longest }) {
    setAttribute(this.link, "href", `#/functions/${encodeURIComponent(row.name)}`);
    setText(this.link, row.name);
    const failed = row.failed_starts ? `${row.failed_starts} failed ${row.failed_starts === 1 ? "start" : "starts"}` : "";
    setText(this.trouble, [STOPPED[row.stopped] ?? row.stopped, failed].filter(Boolean).join(", "));
    this.rung.update(row.rung);
    this.spark.update(rates);
    const cold = total(row.last_cold_phases_ms);
    const texts = {
      Workers: workersText(row.workers), Queued: count(row.queued), Running: count(row.in_flight),
      "Requests/s": rate(recent?.rate), "Errors/s": rate(recent?.errors), p50: duration(recent?.p50), p95: duration(recent?.p95),
      "Cold starts": count(row.cold_starts), "Latest cold start": cold ? duration(cold) : NONE,
    };
    for (const [name, text] of Object.entries(texts)) setText(this.numbers[name], text);
    setAttribute(this.numbers["Errors/s"], "class", recent?.errors > 0 ? "bad" : null);
    this.bar.update(row.last_cold_phases_ms, longest, `Phases of the latest cold start of ${row.name}`);
  }
}

export class Overview {
  constructor(fleet) {
    this.fleet = fleet;
    this.title = "Functions";
    this.sorted = { column: COLUMNS[0], down: false };
    this.figures = new Figures(["Functions", "Ready workers", "Running", "Queued", "Requests/s", "Errors/s"]);
    this.filter = element("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false", input: () => this.update() });
    this.heads = COLUMNS.map((column) => {
      const sort = element("button", { type: "button", click: () => this.sort(column) }, column.name);
      return element("th", { scope: "col", class: classes(column) }, sort);
    });
    this.body = element("tbody");
    this.shown = element("p", { class: "note" });
    this.list = element(
      "div", {},
      element("p", { class: "tools" }, element("label", { for: "filter" }, "Filter"), this.filter, this.shown),
      element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "All functions" },
        element("table", { class: "functions" }, element("caption", { class: "unseen" }, "All functions, with figures of the last 15 seconds"),
          element("thead", {}, element("tr", {}, this.heads)), this.body)),
    );
    this.empty = firstSteps();
    this.node = element("div", {}, element("h1", {}, "Functions"), this.figures.node, this.list, this.empty);
  }

  sort(column) {
    const same = this.sorted.column === column;
    // Numbers are of interest from the largest down.
    this.sorted = { column, down: same ? !this.sorted.down : !column.text };
    this.update();
  }

  update() {
    const { fleet } = this;
    const all = fleet.names().map((name) => {
      const samples = fleet.functions.get(name);
      return { row: samples.row, recent: fleet.recent(name), samples };
    });
    this.list.hidden = !all.length;
    this.empty.hidden = Boolean(all.length);
    this.figures.update(sums(all));
    this.heads.forEach((head, index) => {
      const { column, down } = this.sorted;
      setAttribute(head, "aria-sort", COLUMNS[index] === column ? (down ? "descending" : "ascending") : null);
    });
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = all.filter((one) => words.every((word) => one.row.name.toLowerCase().includes(word)));
    const { by } = this.sorted.column;
    const order = (one, other) => (by(one) < by(other) ? -1 : by(one) > by(other) ? 1 : one.row.name < other.row.name ? -1 : 1);
    shown.sort((one, other) => (this.sorted.down ? -order(one, other) : order(one, other)));
    const longest = Math.max(0, ...shown.map((one) => total(one.row.last_cold_phases_ms)));
    for (const one of shown) Object.assign(one, { longest, rates: one.samples.rates(fleet.at, fleet.times[0], SPARK_PARTS) });
    setText(this.shown, words.length ? `${shown.length} of ${all.length}` : "");
    reconcile(this.body, shown, (one) => one.row.name, () => new Row(), (child, one) => child.update(one));
  }

  end() {}
}

function sums(all) {
  const add = (value) => all.reduce((found, one) => found + (value(one) ?? 0), 0);
  return {
    Functions: count(all.length), "Ready workers": count(add((one) => one.row.workers.ready)), Running: count(add((one) => one.row.in_flight)),
    Queued: count(add((one) => one.row.queued)), "Requests/s": rate(add((one) => one.recent?.rate)), "Errors/s": rate(add((one) => one.recent?.errors)),
  };
}

// A row of figures with their names.
export class Figures {
  constructor(names) {
    this.values = Object.fromEntries(names.map((name) => [name, element("dd", {}, NONE)]));
    this.node = element("dl", { class: "figures" }, names.map((name) => element("div", {}, element("dt", {}, name), this.values[name])));
  }

  update(texts) {
    for (const [name, text] of Object.entries(texts)) setText(this.values[name], text);
  }
}

function firstSteps() {
  const commands = ["pilotflame init greeter --template hello", "pilotflame deploy greeter", "pilotflame invoke greeter '{\"name\": \"Ada\"}'"];
  return element(
    "section", { class: "first", hidden: true },
    element("h2", {}, "No function is deployed"),
    element("p", {}, "A function is a folder with a handler.py. Make one from a template, deploy it to this gateway and call it:"),
    element("pre", { role: "group", tabindex: "0", "aria-label": "Commands" }, commands.join("\n")),
    element("p", {}, "It appears here as soon as it is live. An API key that covers some functions shows these alone."),
  );
}
