// The console: asks for a key if one is needed, follows the gateway, and shows the view that the address names.

import { explained } from "./dialog.js";
import { element, setAttribute, setText } from "./dom.js";
import { FunctionView } from "./function.js";
import { keepFollowing, key, setKey } from "./gateway.js";
import { LogView } from "./logs.js";
import { Overview } from "./overview.js";
import { Fleet } from "./samples.js";
import { UsageView } from "./usage.js";

// The gateway sends a line each second. After so much silence it is taken for gone.
const SILENT_S = 8;

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const forget = document.getElementById("forget");
const fleet = new Fleet();
let view = null;
let following = null;

const PLACES = [
  ["#/", "Functions", () => true],
  ["#/usage", "Usage", () => fleet.may("read")],
  ["#/log", "Gateway log", () => fleet.may("admin")],
];

// A view has: node, title, update() for each line of the gateway, and end(). With accepts(hash), it also shows other addresses.
function viewOf(hash) {
  const [place, name, part, item] = hash.replace(/^#\/?/, "").split("/").map(decode);
  if (place === "functions" && name) return () => new FunctionView(fleet, name, part || "activity", item);
  if (place === "usage") return () => new UsageView();
  if (place === "log") return () => new LogView("/v1/logs/gateway", element("h1", {}, "Gateway log"), "No lines yet. What the gateway says of itself appears here.");
  return () => new Overview(fleet);
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// Show the view that the address names. `moved`: the user went there, so the focus goes there, too.
function show(moved) {
  const make = viewOf(location.hash);
  const next = view?.accepts?.(location.hash) ? view : make();
  if (next !== view) {
    view?.end();
    view = next;
    main.replaceChildren(view.node);
    if (moved) {
      main.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
  }
  update();
}

function update() {
  view.update();
  setText(document.getElementById("version"), fleet.gateway.version);
  document.title = `${view.title} · pilotflame`;
  forget.hidden = !fleet.gateway.keyed;
  for (const [index, link] of links.entries()) {
    link.hidden = !PLACES[index][2]();
    const here = (location.hash || "#/") === PLACES[index][0] || (index === 0 && location.hash.startsWith("#/functions/"));
    setAttribute(link, "aria-current", here ? "page" : null);
  }
}

const links = PLACES.map(([href, name]) => element("a", { href, hidden: true }, name));
document.getElementById("places").append(...links, element("a", { href: "/docs" }, "API"));

function onState(state, wait_s) {
  const texts = { live: "Live", hidden: "Paused", waiting: `The gateway does not answer. Trying again${wait_s > 2 ? ` in ${Math.round(wait_s)} s` : ""}…` };
  if (state instanceof Error) return refused(state);
  setAttribute(connection, "class", state);
  setText(connection, texts[state]);
  document.body.classList.toggle("stale", state === "waiting");
  if (state === "waiting" && !view) main.replaceChildren(element("p", { class: "note" }, "The gateway does not answer. This page goes on by itself when it does."));
}

function start() {
  let first = true;
  let begun = false;
  following = keepFollowing(
    () => {
      first = true;
      return "/v1/console?follow=1";
    },
    (line) => {
      fleet.take(line, first);
      first = false;
      if (begun) update();
      else show(false);
      begun = true;
    },
    onState,
    { silent_s: SILENT_S },
  );
}

function stop() {
  following?.end();
  view?.end();
  view = null;
}

// Ask for a key. `error` is why the gateway has refused the page.
function refused(error) {
  const had = key();
  stop();
  setText(connection, "");
  setAttribute(connection, "class", null);
  document.title = "API key · pilotflame";
  forget.hidden = true;
  for (const link of links) link.hidden = true;
  const input = element("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "pf_…", "aria-describedby": "why" });
  const why = element("p", { id: "why", class: had ? "problem" : "note", role: had ? "alert" : null }, had ? explained(error) : "This gateway requires an API key. It needs the scope read; more scopes show more.");
  const form = element(
    "form", { class: "key" },
    element("h1", {}, "API key"), why, element("p", {}, element("label", { for: "key" }, "Key"), input, element("button", { type: "submit" }, "Open")),
    element("p", { class: "note" }, "It stays in this tab until you close it. ", element("code", {}, "pilotflame keys create NAME --scope read"), " makes one."),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    main.replaceChildren(element("p", { class: "note" }, "Connecting…"));
    start();
  });
  main.replaceChildren(form);
  input.focus();
}

forget.addEventListener("click", () => {
  stop();
  fleet.clear();
  setKey("");
  main.replaceChildren(element("p", { class: "note" }, "Connecting…"));
  start();
});
// The address names the view, so the link may not change it.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => view && show(true));
start();
