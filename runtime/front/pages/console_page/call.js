// The part that calls a function: a form made from its input schema, the answer, and the command that does the same.

import { ChatView, isLanguageModel } from "./chat.js";
import { PhaseBar, total } from "./charts.js";
import { explained } from "./dialog.js";
import { element, setText } from "./dom.js";
import { duration } from "./format.js";
import { call, get } from "./gateway.js";

const MOST_CHARS = 100_000;
const MOST_FIELDS = 20;
// Where each platform's callers send an input, and in what they wrap it.
const wrapped = (input) => ({ input });
const CONTRACTS = {
  runpod: { path: (name) => `/v2/${name}/runsync`, wrap: (body) => (body?.input === undefined ? wrapped(body) : body) },
  cog: { path: (name) => `/cog/predictions?function=${name}`, wrap: wrapped },
  lambda: { path: (name) => `/lambda/2015-03-31/functions/${name}/invocations`, wrap: (body) => body },
  pilotflame: { path: (name) => `/invoke/${name}`, wrap: (body) => body },
};

// Return how a function of this status is called: its path, an example of the body, and how an input becomes a body.
export function contract(status) {
  const { path, wrap } = CONTRACTS[status.dialect] ?? CONTRACTS.pilotflame;
  return { path: path(encodeURIComponent(status.name)), body: wrap(status.input_example), wrap };
}

// Return the command that calls it. In the shell, a single quote ends the text.
export function command({ path, body }) {
  const text = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -s '${location.origin}${path}' -H 'Content-Type: application/json' -d '${text}'`;
}

function resolved(schema, root) {
  const name = schema?.$ref?.replace(/^#\/\$defs\//, "");
  const found = name ? (root.$defs?.[name] ?? {}) : (schema ?? {});
  const one = (found.anyOf ?? found.oneOf)?.find((choice) => choice.type !== "null");
  return one ? { ...resolved(one, root), ...(found.default == null ? {} : { default: found.default }) } : found;
}

// A field of the form. `value()` returns undefined if the field is empty and need not be sent.
class Field {
  constructor(name, schema, required, given) {
    const id = `field-${name}`;
    const text = given === undefined || given === null ? "" : typeof given === "string" ? given : JSON.stringify(given);
    this.kind = schema.enum ? "choice" : ["string", "integer", "number", "boolean"].includes(schema.type) ? schema.type : "json";
    this.required = required;
    this.input = {
      choice: () => element("select", { id }, (required ? schema.enum : [null, ...schema.enum]).map((one) => element("option", { value: one === null ? "" : JSON.stringify(one), selected: one === given }, one ?? ""))),
      boolean: () => element("input", { id, type: "checkbox", checked: given === true }),
      integer: () => element("input", { id, type: "number", step: 1, value: text, required, min: schema.minimum, max: schema.maximum }),
      number: () => element("input", { id, type: "number", step: "any", value: text, required, min: schema.minimum, max: schema.maximum }),
      string: () => element("input", { id, type: "text", required, autocomplete: "off", value: text, maxlength: schema.maxLength }),
      json: () => element("textarea", { id, rows: 3, spellcheck: "false", required }, text),
    }[this.kind]();
    const hint = schema.description ? element("span", { class: "note", id: `${id}-hint` }, schema.description) : null;
    if (hint) this.input.setAttribute("aria-describedby", `${id}-hint`);
    this.node = element("div", { class: "field" }, element("label", { for: id }, name), this.input, hint);
  }

  value() {
    const { input } = this;
    if (this.kind === "boolean") return input.checked;
    if (input.value === "" && !(this.required && this.kind === "string")) return undefined;
    return this.kind === "string" ? input.value : JSON.parse(input.value);
  }
}

export class CallView {
  constructor(name) {
    Object.assign(this, { name, title: "Call", aborter: new AbortController() });
    this.state = element("p", { class: "note", role: "status" }, "Loading…");
    this.fields = element("div");
    this.go = element("button", { type: "submit", disabled: true }, "Send");
    this.form = element("form", { class: "call", submit: (event) => this.sent(event) }, this.fields, element("p", {}, this.go));
    this.outcome = element("p", { role: "status" });
    this.bar = new PhaseBar(14);
    this.answer = element("pre", { role: "group", tabindex: "0", "aria-label": "Answer" });
    this.shown = element("div", { hidden: true }, element("h3", {}, "Answer"), this.outcome, this.bar.node, this.answer);
    this.command = element("pre", { role: "group", tabindex: "0", "aria-label": "The same on the command line" });
    this.node = element("section", {}, element("h2", {}, "Call"), this.state, this.form, this.shown, element("h3", {}, "On the command line"), this.command);
    this.load();
  }

  async load() {
    try {
      const status = await get(`/v1/functions/${encodeURIComponent(this.name)}`, this.aborter.signal);
      this.contract = contract(status);
      if (isLanguageModel(status)) this.node.prepend((this.chat = new ChatView(status)).node);
      this.build(status.input_schema, status.input_example);
      setText(this.state, `POST ${this.contract.path}`);
      setText(this.command, command(this.contract));
      this.go.disabled = false;
    } catch (error) {
      if (!this.aborter.signal.aborted) setText(this.state, explained(error));
    }
  }

  // One field for each property of an object; one for the whole body of anything else.
  build(schema, given) {
    const found = resolved(schema, schema);
    const properties = Object.entries(found.properties ?? {});
    this.parts = null;
    if (found.type === "object" && properties.length && properties.length <= MOST_FIELDS)
      this.parts = new Map(properties.map(([name, one]) => [name, new Field(name, resolved(one, schema), Boolean(found.required?.includes(name)), given?.[name] ?? one.default)]));
    else this.whole = new Field("Body", { description: "JSON" }, true, given);
    this.fields.replaceChildren(...(this.parts ? [...this.parts.values()] : [this.whole]).map((one) => one.node));
  }

  input() {
    if (!this.parts) return this.whole.value();
    const values = [...this.parts].map(([name, field]) => [name, field.value()]);
    return Object.fromEntries(values.filter(([, value]) => value !== undefined));
  }

  async sent(event) {
    event.preventDefault();
    let body;
    try {
      body = this.contract.wrap(this.input());
    } catch (error) {
      return setText(this.state, `This is not JSON: ${error.message}.`);
    }
    setText(this.state, `POST ${this.contract.path}`);
    setText(this.command, command({ ...this.contract, body }));
    this.go.disabled = true;
    setText(this.go, "Waiting…");
    this.shown.hidden = true;
    try {
      await this.show(await call(this.contract.path, body, this.aborter.signal));
    } catch (error) {
      if (!this.aborter.signal.aborted) setText(this.state, explained(error));
    } finally {
      this.go.disabled = false;
      setText(this.go, "Send");
    }
  }

  async show({ response, elapsed_ms, text }) {
    const phases = timing(response.headers.get("Server-Timing") ?? "");
    const cold = response.headers.get("X-Cold-Start") === "true" ? "cold start" : "";
    setText(this.outcome, [response.status, duration(elapsed_ms), cold, response.headers.get("X-Request-Id")].filter(Boolean).join(" · "));
    this.bar.update(phases, total(phases), "Phases of this call");
    setText(this.answer, (indented(text) ?? text).slice(0, MOST_CHARS));
    this.shown.hidden = false;
  }

  update() {}

  end() {
    this.aborter.abort();
    this.chat?.end();
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

// Return the phases of a header Server-Timing, in milliseconds.
function timing(header) {
  const found = [...header.matchAll(/([\w-]+);dur=([\d.]+)/g)];
  return Object.fromEntries(found.map(([, name, ms]) => [name, Number(ms)]));
}
