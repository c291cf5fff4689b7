// Draws charts as SVG. Each has its figures as text, too: in its caption and its label.

import { element, setAttribute, setText, svg } from "./dom.js";
import { clock, duration, NONE, span } from "./format.js";

const HEIGHT = 120;
// Room for the longest label of the axis, as "1 min 30 s".
const LEFT = 64;
const BOTTOM = 18;
const TOP = 10;

// Return a round number that is at least `value`, for the top of an axis. Half of it is round, too.
function roundUp(value, whole) {
  if (!(value > 0)) return whole ? 2 : 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const tops = [1, 2, 4, 6, 8, 10].map((step) => step * power).filter((top) => !whole || top > 1);
  return tops.find((top) => top >= value * 0.999);
}

// Return the path of a line that is broken where values are missing, and that of the values without neighbours.
function paths(values, x, y) {
  let [line, dots] = ["", ""];
  let length = 0;
  let last = "";
  const end = () => (dots += length === 1 ? `M${last}h0` : "");
  values.forEach((value, index) => {
    const at = value === null || value === undefined ? null : x(index);
    if (at === null) {
      end();
      length = 0;
      return;
    }
    last = `${at.toFixed(1)} ${y(value).toFixed(1)}`;
    line += (length ? "L" : "M") + last;
    length += 1;
  });
  end();
  return [line, dots];
}

// A chart of the last minutes with a line for each of `lines`: [name of a field, label].
export class LineChart {
  // `whole`: the values are whole numbers. `held`: where values are missing, a faint line shows the last one.
  constructor(title, lines, format, { whole = false, held = false } = {}) {
    Object.assign(this, { title, lines, format, whole, points: [], hovered: null });
    this.held = held ? lines.map((_, index) => svg("path", { class: `line held s${index + 1}` })) : [];
    this.paths = lines.map((_, index) => ["line", "dots"].map((kind) => svg("path", { class: `${kind} s${index + 1}` })));
    this.grid = [0, 0.5, 1].map(() => [svg("line", { class: "grid" }), svg("text", { class: "tick", "text-anchor": "end", x: LEFT - 6 })]);
    this.times = [0, 0.5, 1].map((at) => svg("text", { class: "tick", y: HEIGHT - 3, "text-anchor": ["start", "middle", "end"][at * 2] }));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    // Until there are points.
    const label = { "aria-label": `${title}: none yet` };
    this.svg = svg("svg", { role: "img", height: HEIGHT, ...label }, ...this.grid.flat(), ...this.times, this.cursor, ...this.held, ...this.paths.flat());
    this.values = lines.map(() => element("b"));
    this.when = element("span", { class: "when" });
    const legend = lines.map(([, label], index) => element("span", {}, swatch(`s${index + 1}`), ` ${label} `, this.values[index]));
    this.node = element("figure", { class: "chart" }, element("figcaption", {}, element("h3", {}, title), ...legend, this.when), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    this.width = 400;
    new ResizeObserver(([entry]) => {
      this.width = Math.max(160, Math.round(entry.contentRect.width));
      this.draw();
    }).observe(this.node);
  }

  // Show the last `window_s` until `end`.
  update(points, end, window_s) {
    Object.assign(this, { points, end, window_s });
    this.draw();
  }

  hover(event) {
    if (event) {
      const box = this.svg.getBoundingClientRect();
      const at = this.end - (1 - (event.clientX - box.left - LEFT) / (this.width - LEFT)) * this.window_s;
      const index = this.points.findIndex((one) => one.at !== null && one.at >= at);
      this.hovered = index < 0 ? this.points.length - 1 : index;
    } else this.hovered = null;
    this.draw();
  }

  draw() {
    if (!this.points.length) return;
    this.hovered = this.hovered !== null && this.hovered < this.points.length ? this.hovered : null;
    const columns = this.lines.map(([field]) => this.points.map((one) => one[field] ?? null));
    const highest = Math.max(0, ...columns.flat());
    const top = roundUp(highest, this.whole);
    const x = (index) => {
      const { at } = this.points[index];
      return at === null ? null : LEFT + Math.max(0, 1 - (this.end - at) / this.window_s) * (this.width - LEFT - 1);
    };
    const y = (value) => TOP + (1 - Math.min(1, value / top)) * (HEIGHT - TOP - BOTTOM);
    setAttribute(this.svg, "width", this.width);
    setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.paths.forEach((pair, index) => {
      const drawn = paths(columns[index], x, y);
      pair.forEach((one, part) => setAttribute(one, "d", drawn[part]));
    });
    this.held.forEach((path, index) => {
      let last = null;
      setAttribute(path, "d", paths(columns[index].map((value) => (last = value ?? last)), x, y)[0]);
    });
    this.axes(top, y);
    this.caption(columns, x);
  }

  axes(top, y) {
    [0, 0.5, 1].forEach((part, index) => {
      const [line, text] = this.grid[index];
      const at = y(top * part);
      for (const [name, value] of [["x1", LEFT], ["x2", this.width], ["y1", at], ["y2", at]]) setAttribute(line, name, value);
      setAttribute(text, "y", at + 3.5);
      setText(text, this.format(top * part));
      setAttribute(this.times[index], "x", LEFT + part * (this.width - LEFT));
      setText(this.times[index], part === 1 ? "now" : `−${span((1 - part) * this.window_s)}`);
    });
  }

  caption(columns, x) {
    const index = this.hovered ?? this.points.length - 1;
    const shown = columns.map((column) => column[index] ?? null);
    shown.forEach((value, line) => setText(this.values[line], value === null ? NONE : this.format(value)));
    setAttribute(this.cursor, "visibility", this.hovered === null ? "hidden" : "visible");
    for (const name of ["x1", "x2"]) setAttribute(this.cursor, name, x(index) ?? LEFT);
    setText(this.when, this.hovered === null ? "" : clock(this.points[index].at));
    const said = this.lines.map(([, label], line) => {
      const values = columns[line].filter((value) => value !== null);
      const now = columns[line].at(-1);
      return `${label} ${now === null ? "unknown" : this.format(now)}, highest ${values.length ? this.format(Math.max(...values)) : "unknown"}`;
    });
    setAttribute(this.svg, "aria-label", `${this.title}, last ${span(this.window_s)}: ${said.join("; ")}`);
  }
}

// A band that shows how warm a function was: a segment for the time on each rung.
export class RungBand {
  constructor() {
    this.svg = svg("svg", { class: "band", height: 14, role: "img", "aria-label": "Rungs: none yet" });
    this.legend = element("span");
    this.node = element("figure", { class: "chart" }, element("figcaption", {}, element("h3", {}, "Rung"), this.legend), this.svg);
  }

  // Each of `points` holds a rung until the time of the next one.
  update(points, end, window_s) {
    const begin = end - window_s;
    const spans = points.slice(0, -1).map((one, index) => ({ rung: one.rung, from: Math.max(one.at, begin), to: Math.max(points[index + 1].at, begin) }));
    const shown = spans.filter(({ from, to }) => to > from).reduce((found, one) => {
      const last = found.at(-1);
      if (last?.rung === one.rung) last.to = one.to;
      else found.push(one);
      return found;
    }, []);
    const percent = (at) => `${(((at - begin) / window_s) * 100).toFixed(3)}%`;
    this.svg.replaceChildren(...shown.map(({ rung, from, to }) =>
      svg("rect", { class: `at ${rung}`, height: 14, x: percent(from), width: `${(((to - from) / window_s) * 100).toFixed(3)}%` })));
    const times = new Map();
    for (const { rung, from, to } of shown) times.set(rung, (times.get(rung) ?? 0) + to - from);
    this.legend.replaceChildren(...[...times].flatMap(([rung, seconds]) => [swatch(`at ${rung}`), ` ${rung} `, element("b", {}, span(seconds)), "  "]));
    setAttribute(this.svg, "aria-label", `Rungs in the last ${span(window_s)}: ${[...times].map(([rung, seconds]) => `${rung} ${span(seconds)}`).join(", ") || "unknown"}`);
  }
}

export function swatch(kind) {
  return svg("svg", { class: "swatch", width: 10, height: 10, "aria-hidden": "true" }, svg("rect", { class: kind, width: 10, height: 10, rx: 2 }));
}

// A small line without axes, for a row of a table. The number stands beside it, so it is hidden from screen readers.
export class Sparkline {
  constructor() {
    this.path = svg("path", { class: "line s1" });
    this.node = svg("svg", { class: "spark", width: 90, height: 20, viewBox: "0 0 90 20", "aria-hidden": "true" }, this.path);
  }

  update(values) {
    const top = Math.max(...values.map((value) => value ?? 0)) || 1;
    const x = (index) => (index / (values.length - 1)) * 89;
    setAttribute(this.path, "d", paths(values, x, (value) => 18.5 - (value / top) * 17)[0]);
  }
}

// The phases of a call that waited for a worker, in their order: the first four are its cold start. `queue` ends when a worker is asked for.
export const PHASES = ["queue", "fork", "restore", "dispatch", "link", "wait", "exec", "respond"];
export const PHASE_TEXTS = {
  queue: "until a worker is asked for",
  fork: "until the worker's process is there",
  restore: "weights mapped, setup run",
  dispatch: "until the request is sent",
  link: "to the worker and back",
  wait: "until its batch starts",
  exec: "in the handler",
  respond: "until the response",
};

// The phases of one cold start below each other, each where it began: one row of a table for each.
export class Waterfall {
  constructor() {
    this.parts = PHASES.map((phase) => svg("rect", { class: `phase ${phase}`, height: 10, y: 0 }));
    this.rows = this.parts.map((part, index) => svg("svg", { class: "phases", height: 10, role: "img", "aria-label": `${PHASES[index]}: none` }, part));
  }

  // `phases` are {name, start_ms, duration_ms}.
  update(phases, total_ms) {
    PHASES.forEach((phase, index) => {
      const found = phases.find(({ name }) => name === phase) ?? { start_ms: 0, duration_ms: 0 };
      const percent = (ms) => `${(total_ms > 0 ? (ms / total_ms) * 100 : 0).toFixed(2)}%`;
      setAttribute(this.parts[index], "x", percent(found.start_ms));
      setAttribute(this.parts[index], "width", percent(found.duration_ms));
      const { start_ms, duration_ms } = found;
      setAttribute(this.rows[index], "aria-label", duration_ms > 0 ? `${phase}: from ${duration(start_ms)}, for ${duration(duration_ms)}` : `${phase}: none`);
    });
  }
}

// A bar of phases, as long as its share of `most` milliseconds.
export class PhaseBar {
  constructor(height = 10) {
    this.parts = PHASES.map((phase) => svg("rect", { class: `phase ${phase}`, height, y: 0 }));
    this.node = svg("svg", { class: "phases", height, role: "img", "aria-label": "Phases: none yet" }, this.parts);
  }

  update(phases_ms, most, label) {
    let left = 0;
    PHASES.forEach((phase, index) => {
      const width = most > 0 ? ((phases_ms[phase] ?? 0) / most) * 100 : 0;
      setAttribute(this.parts[index], "x", `${left.toFixed(2)}%`);
      setAttribute(this.parts[index], "width", `${width.toFixed(2)}%`);
      left += width;
    });
    const said = PHASES.filter((phase) => phases_ms[phase] > 0).map((phase) => `${phase} ${duration(phases_ms[phase])}`);
    setAttribute(this.node, "aria-label", `${label}: ${said.join(", ") || "none"}`);
  }
}

export const total = (phases) => Object.values(phases).reduce((one, other) => one + other, 0);
