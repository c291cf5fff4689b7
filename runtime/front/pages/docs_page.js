// Shows /openapi.json and sends requests. All texts are inserted as text, never as HTML.
"use strict";

const METHODS = ["get", "put", "post", "delete", "options", "head", "patch"];
const BODILESS = ["get", "head"];
const MAX_SHOWN = 200000;

function element(name, content = [], attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[content].flat());
  return made;
}

function authorization() {
  const key = document.getElementById("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Return the schema with references to components resolved, as far as they are not recursive.
function resolved(schema, components, seen = []) {
  if (Array.isArray(schema)) return schema.map((one) => resolved(one, components, seen));
  if (schema === null || typeof schema !== "object") return schema;
  const name = typeof schema.$ref === "string" ? schema.$ref.replace("#/components/schemas/", "") : "";
  if (name && !seen.includes(name) && name in components) return resolved(components[name], components, [...seen, name]);
  return Object.fromEntries(Object.entries(schema).map(([key, value]) => [key, resolved(value, components, seen)]));
}

function bodies(content, components) {
  return Object.entries(content || {}).flatMap(([media, body]) => [
    element("div", [element("code", media)]),
    element("pre", JSON.stringify(resolved(body.schema ?? {}, components), null, 1)),
  ]);
}

function parameterRow(parameter, inputs) {
  const schema = parameter.schema || {};
  const input = element("input", [], { placeholder: String(schema.default ?? schema.type ?? ""), "aria-label": parameter.name });
  inputs.push([parameter, input]);
  const name = element("code", parameter.name + (parameter.required ? " *" : ""));
  return element("tr", [element("td", name), element("td", parameter.in), element("td", input), element("td", parameter.description || "")]);
}

// Return [URL, headers] of the request that the inputs describe.
function target(path, inputs) {
  const query = new URLSearchParams();
  const headers = authorization();
  for (const [parameter, input] of inputs) {
    if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    else if (input.value && parameter.in === "query") query.append(parameter.name, input.value);
    else if (input.value && parameter.in === "header") headers[parameter.name] = input.value;
  }
  const text = query.toString();
  return [text ? `${path}?${text}` : path, headers];
}

async function send(method, path, inputs, media, body, shown) {
  const [url, headers] = target(path, inputs);
  shown.textContent = "…";
  try {
    const options = { method: method.toUpperCase(), headers };
    if (body && body.value) {
      options.body = body.value;
      headers["Content-Type"] = media;
    }
    const response = await fetch(url, options);
    const text = await response.text();
    const lines = [...response.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
    shown.textContent = `${response.status} ${response.statusText}\n${lines}\n\n${text.slice(0, MAX_SHOWN)}`;
  } catch (error) {
    shown.textContent = `No response: ${error.message}`;
  }
}

function form(method, path, operation, inputs) {
  const content = Object.keys(operation.requestBody?.content || {});
  const media = content.includes("application/json") ? "application/json" : content[0];
  const takesBody = media && !BODILESS.includes(method);
  const body = takesBody ? element("textarea", [], { "aria-label": "Body", placeholder: media, spellcheck: "false" }) : null;
  const shown = element("pre", "", { "aria-live": "polite" });
  const button = element("button", "Send", { type: "button" });
  button.addEventListener("click", () => send(method, path, inputs, media, body, shown));
  return [...(body ? [element("h3", "Body"), body] : []), element("p", button), shown];
}

function fill(details, method, path, operation, components) {
  const inputs = [];
  const rows = (operation.parameters || []).map((parameter) => parameterRow(parameter, inputs));
  if (rows.length) details.append(element("h3", "Parameters"), element("table", rows));
  details.append(...form(method, path, operation, inputs));
  const request = bodies(operation.requestBody?.content, components);
  if (request.length) details.append(element("h3", "Request"), ...request);
  for (const [status, response] of Object.entries(operation.responses || {})) {
    details.append(element("h3", `${status} ${response.description || ""}`), ...bodies(response.content, components));
  }
}

function entry(method, path, operation, components) {
  const title = [element("span", method.toUpperCase(), { class: "method" }), element("code", path), " ", element("span", operation.summary || "")];
  const details = element("details", element("summary", title));
  details.dataset.words = `${method} ${path} ${operation.summary || ""}`.toLowerCase();
  // Filled when it is first opened: a gateway may have thousands of functions.
  details.addEventListener("toggle", () => fill(details, method, path, operation, components), { once: true });
  return details;
}

function show(found) {
  document.getElementById("version").textContent = found.info.version;
  const components = found.components?.schemas || {};
  const sections = new Map();
  for (const [path, operations] of Object.entries(found.paths)) {
    const group = `/${path.split("/")[1]}`;
    const entries = METHODS.filter((method) => method in operations).map((method) => entry(method, path, operations[method], components));
    sections.set(group, [...(sections.get(group) || []), ...entries]);
  }
  const made = [...sections].map(([group, entries]) => element("section", [element("h2", group), ...entries]));
  document.getElementById("operations").replaceChildren(...made);
  filter();
}

function filter() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of document.querySelectorAll("section")) {
    const entries = [...section.querySelectorAll("details")];
    for (const details of entries) details.hidden = !words.every((word) => details.dataset.words.includes(word));
    section.hidden = entries.every((details) => details.hidden);
  }
}

async function load() {
  const status = document.getElementById("status");
  try {
    const response = await fetch("/openapi.json", { headers: authorization() });
    const found = await response.json();
    status.className = response.ok ? "" : "failed";
    status.textContent = response.ok ? "" : `${found.error.message} ${found.error.remedy || ""}`;
    if (response.ok) show(found);
  } catch (error) {
    status.className = "failed";
    status.textContent = `The gateway does not answer: ${error.message}`;
  }
}

document.getElementById("key").addEventListener("change", load);
document.getElementById("filter").addEventListener("input", filter);
load();
