// A log that follows: of a function, or of the gateway itself.

import { explained } from "./dialog.js";
import { element, setText } from "./dom.js";
import { clock } from "./format.js";
import { keepFollowing } from "./gateway.js";

const FIRST_LINES = 200;
// The oldest lines are dropped, so that a page that stays open does not fill the memory.
const MOST_LINES = 2000;
const MOST_CHARS = 20_000;
// Programs colour their output for terminals.
const ESCAPES = /\x1b\[[0-9;?]*[A-Za-z]/g;
const LEVELS = { debug: "all", info: "info", warning: "warning", error: "error" };

export class LogView {
  // `request`: show the lines of this invocation or job alone. `place`: where the lines of an invocation are shown.
  constructor(path, heading, none, { request = "", place = "" } = {}) {
    Object.assign(this, { title: heading.textContent, path, request, place, last: 0, waiting: [], paused: false });
    this.lines = element("ol", { hidden: true, class: "lines", tabindex: "0", "aria-label": "Log lines, the newest last" });
    this.level = element("select", { id: "level", change: () => this.restart() }, Object.entries(LEVELS).map(([value, text]) => element("option", { value }, text)));
    this.words = element("input", { id: "words", type: "search", autocomplete: "off", spellcheck: "false", input: () => this.filter() });
    this.pause = element("button", { type: "button", "aria-pressed": "false", click: () => this.hold() }, "Pause");
    this.state = element("span", { class: "note" });
    const tools = element(
      "p", { class: "tools" },
      element("label", { for: "level" }, "Level"), this.level, element("label", { for: "words" }, "Filter"), this.words, this.pause,
      element("button", { type: "button", click: () => this.clear() }, "Clear"), this.state,
    );
    this.empty = element("p", { class: "note" }, none);
    this.node = element("section", { class: "log" }, heading, tools, this.empty, this.lines);
    this.begin();
  }

  begin() {
    const query = () => {
      const since = this.last ? `&since=${this.last + 1e-6}` : "";
      const request = this.request ? `&request=${encodeURIComponent(this.request)}` : "";
      return `${this.path}?follow=1&lines=${FIRST_LINES}&level=${this.level.value}${since}${request}`;
    };
    this.following = keepFollowing(query, (line) => this.take(line), (state) => this.told(state));
    this.told("live");
  }

  restart() {
    this.following.end();
    this.clear();
    this.last = 0;
    this.begin();
  }

  told(state) {
    const texts = { live: "Following", hidden: "Paused while hidden", waiting: "The connection was lost. Trying again…" };
    if (this.paused && state === "live") return;
    setText(this.state, state instanceof Error ? explained(state) : texts[state]);
  }

  take(line) {
    this.last = Math.max(this.last, line.at);
    this.waiting.push(line);
    if (this.waiting.length > MOST_LINES) this.waiting.shift();
    if (this.paused) this.tellWaiting();
    else this.schedule();
  }

  tellWaiting() {
    const many = this.waiting.length;
    setText(this.state, `Paused: ${many} new ${many === 1 ? "line" : "lines"}`);
  }

  // Lines are inserted once a frame: a function may print thousands in a second.
  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.insert();
    });
  }

  insert() {
    const { lines } = this;
    const atEnd = lines.hidden || lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
    if (!this.waiting.length) return;
    lines.append(...this.waiting.map((line) => this.made(line)));
    this.waiting = [];
    while (lines.childElementCount > MOST_LINES) lines.firstElementChild.remove();
    lines.hidden = false;
    this.empty.hidden = true;
    // Whoever reads older lines keeps their place.
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }

  made(line) {
    const text = line.text.replace(ESCAPES, "").slice(0, MOST_CHARS);
    const node = element(
      "li", { class: line.level },
      element("time", { datetime: new Date(line.at * 1000).toISOString() }, clock(line.at)), " ",
      element("span", { class: "level" }, line.level), " ", element("span", { class: "source" }, line.source), " ",
      this.requestOf(line), " ",
      element("span", { class: "text" }, text),
    );
    node.hidden = !this.fits(node);
    return node;
  }

  // The id of the invocation that logged the line, as a link to all of its lines.
  requestOf({ request_id: id }) {
    if (!id || id === this.request) return element("span", { class: "request" });
    return this.place ? element("a", { class: "request", title: id, href: `${this.place}/${encodeURIComponent(id)}` }, id) : element("span", { class: "request", title: id }, id);
  }

  fits(node) {
    const words = this.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = node.textContent.toLowerCase();
    return words.every((word) => text.includes(word));
  }

  filter() {
    for (const node of this.lines.children) node.hidden = !this.fits(node);
    this.lines.scrollTop = this.lines.scrollHeight;
  }

  hold() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    if (this.paused) this.tellWaiting();
    else {
      this.told("live");
      this.schedule();
    }
  }

  clear() {
    this.waiting = [];
    this.lines.replaceChildren();
    this.lines.hidden = true;
    this.empty.hidden = false;
  }

  update() {}

  end() {
    this.following.end();
    if (this.frame) cancelAnimationFrame(this.frame);
  }
}
