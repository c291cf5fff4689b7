// What functions have used, and what it costs: of all functions, by function, day or hour.

import { swatch } from "./charts.js";
import { explained } from "./dialog.js";
import { classes, element, reconcile, setAttribute, setText, svg } from "./dom.js";
import { clockOf, count, money, NONE, span } from "./format.js";
import { get } from "./gateway.js";

const DAY_S = 86_400;
const SPANS = { 1: "24 hours", 7: "7 days", 30: "30 days", 365: "a year" };
const KINDS = { function: "function", day: "day", hour: "hour", owner: "deployer" };
const EVERY_S = 15;
// Where the time went, from the dearest to the cheapest.
const TIMES = [["busy_s", "busy"], ["idle_s", "idle"], ["starting_s", "starting"], ["zygote_s", "zygote"], ["local_s", "files only"]];
const COLUMNS = [
  { name: "Time", bar: true, wide: true },
  { name: "Busy", of: (used) => span(used.busy_s) },
  { name: "Idle", of: (used) => span(used.idle_s), mid: true },
  { name: "Zygote", of: (used) => span(used.zygote_s), wide: true },
  { name: "Files only", of: (used) => span(used.local_s), widest: true },
  { name: "Invocations", of: (used) => count(used.invocations), wide: true },
  { name: "Cold starts", of: (used) => count(used.cold_starts), wide: true },
  { name: "They waited", of: (used) => span(used.waiting_s), widest: true },
  { name: "Cost", of: (used) => money(used.cost), money: true },
  { name: "Always on", of: (used) => money(used.always_on_cost), money: true, wide: true },
  { name: "Saved", of: (used) => (used.always_on_cost > 0 ? `${Math.round((1 - used.cost / used.always_on_cost) * 100)} %` : NONE) },
];


class UsageRow {
  constructor(kind) {
    this.head = element("th", { scope: "row" });
    this.parts = TIMES.map(([field]) => svg("rect", { class: `time ${field}`, height: 10, y: 0 }));
    this.bar = svg("svg", { class: "phases", height: 10, role: "img" }, this.parts);
    this.cells = COLUMNS.map((column) => element("td", { class: classes({ number: !column.bar, ...column }) }, column.bar ? this.bar : ""));
    this.node = element("tr", { class: kind === "total" ? "sum" : null }, this.head, this.cells);
  }

  update({ name, usage }) {
    setText(this.head, name);
    COLUMNS.forEach((column, index) => column.of && setText(this.cells[index], column.of(usage)));
    const all = TIMES.reduce((found, [field]) => found + usage[field], 0);
    let left = 0;
    TIMES.forEach(([field], index) => {
      const width = all > 0 ? (usage[field] / all) * 100 : 0;
      setAttribute(this.parts[index], "x", `${left.toFixed(2)}%`);
      setAttribute(this.parts[index], "width", `${width.toFixed(2)}%`);
      left += width;
    });
    const said = TIMES.filter(([field]) => usage[field] > 0).map(([field, word]) => `${word} ${span(usage[field])}`);
    setAttribute(this.bar, "aria-label", `Time of ${name}: ${said.join(", ") || "none"}`);
  }
}

export class UsageView {
  // `only` is the name of a function: then its usage alone is shown.
  constructor(only = null) {
    Object.assign(this, { only, title: "Usage" });
    this.aborter = new AbortController();
    this.by = this.choice("by", only ? { day: "day", hour: "hour" } : KINDS);
    this.since = this.choice("since", SPANS);
    this.since.value = "7";
    this.state = element("p", { class: "note", role: "status" }, "Loading…");
    this.prices = element("p", { class: "note" });
    this.body = element("tbody");
    this.first = element("th", { scope: "col" });
    this.heads = COLUMNS.map((column) => element("th", { scope: "col", class: classes({ number: !column.bar, ...column }) }, column.name));
    const legend = TIMES.map(([field, word]) => element("span", {}, swatch(`time ${field}`), ` ${word}`));
    this.shown = element(
      "div", { hidden: true }, element("p", { class: "legend wide", "aria-hidden": "true" }, legend),
      element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Usage" },
        element("table", {}, element("caption", { class: "unseen" }, "Usage"), element("thead", {}, element("tr", {}, this.first, this.heads)), this.body)),
      this.prices,
    );
    const tools = element("p", { class: "tools" }, element("label", { for: "by" }, "By"), this.by, element("label", { for: "since" }, "Of the last"), this.since);
    this.node = element("section", {}, element(only ? "h2" : "h1", {}, "Usage"), tools, this.state, this.shown);
    this.changed = () => document.visibilityState === "visible" && this.load();
    document.addEventListener("visibilitychange", this.changed);
    this.load();
  }

  choice(id, texts) {
    const options = Object.entries(texts).map(([value, text]) => element("option", { value }, text));
    return element("select", { id, change: () => this.load() }, options);
  }

  async load() {
    clearTimeout(this.timer);
    this.aborter.abort();
    this.aborter = new AbortController();
    const { signal } = this.aborter;
    const since = Date.now() / 1000 - Number(this.since.value) * DAY_S;
    const of = this.only ? `&function=${encodeURIComponent(this.only)}` : "";
    try {
      this.show(await get(`/v1/usage?by=${this.by.value}&since=${since.toFixed(0)}${of}`, signal));
    } catch (error) {
      if (signal.aborted) return;
      setText(this.state, explained(error));
      this.state.hidden = false;
      if ([401, 403, 404].includes(error.status)) return;
    }
    if (!signal.aborted && document.visibilityState === "visible") this.timer = setTimeout(() => this.load(), EVERY_S * 1000);
  }

  show({ by, rows, total, prices, currency = "" }) {
    const dated = by === "day" || by === "hour";
    const named = rows.map(({ key, usage }) => ({ key, usage, name: by === "day" ? key.slice(0, 10) : dated ? clockOf(key) : key || "no key" }));
    if (dated) named.reverse();
    setText(this.state, "Nothing was used in this time.");
    this.state.hidden = Boolean(rows.length);
    this.shown.hidden = !rows.length;
    setText(this.first, (this.only ? { day: "Day", hour: "Hour" } : { function: "Function", day: "Day", hour: "Hour", owner: "Deployer" })[by]);
    const all = named.length > 1 ? [...named, { key: "", name: "Total", usage: total, kind: "total" }] : named;
    reconcile(this.body, all, (one) => `${one.kind} ${one.key}`, (one) => new UsageRow(one.kind), (child, one) => child.update(one));
    COLUMNS.forEach((column, index) => column.money && setText(this.heads[index], currency ? `${column.name} (${currency})` : column.name));
    const set = Object.values(prices).some((price) => price > 0);
    setText(this.prices, set
      ? `Prices an hour${currency && ` in ${currency}`}: ${prices.memory_gb_hour} for a GB of memory, ${prices.disk_gb_hour} for a GB of disk, ${prices.device_hour} for a device. "Always on" is what one worker that never stops had cost.`
      : "No prices are set: price_memory_gb_hour and price_device_hour of the gateway.");
  }

  update() {}

  end() {
    this.aborter.abort();
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.changed);
  }
}
