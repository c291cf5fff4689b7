// The part that talks to a language model: the messages so far, the answer as it is made, and how long it took.

import { explained } from "./dialog.js";
import { element, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { streamed } from "./gateway.js";

// The input schema of functions that are language models.
const CONTRACT = "GenerationRequest";
const MOST_CHARS = 200_000;

export function isLanguageModel(status) {
  return status.input_schema?.title === CONTRACT && status.streaming;
}

export class ChatView {
  constructor(status) {
    Object.assign(this, { name: status.name, messages: [], aborter: null });
    this.list = element("ol", { class: "chat", "aria-live": "polite", "aria-label": "Messages" });
    this.system = element("textarea", { id: "chat-system", rows: 2 });
    this.adapter = this.adapters(Object.keys(status.settings.adapters ?? {}));
    this.temperature = element("input", { id: "chat-temperature", type: "number", min: 0, max: 2, step: "any" });
    this.most = element("input", { id: "chat-tokens", type: "number", min: 1, step: 1 });
    this.text = element("textarea", { id: "chat-text", rows: 3, required: true, keydown: (event) => this.typed(event) });
    this.go = element("button", { type: "submit" }, "Send");
    this.stop = element("button", { type: "button", disabled: true, click: () => this.aborter?.abort() }, "Stop");
    this.fresh = element("button", { type: "button", click: () => this.clear() }, "New chat");
    this.state = element("p", { class: "note", role: "status" });
    const more = element(
      "details", {}, element("summary", {}, "Settings"), field("System", this.system),
      this.adapter ? field("Adapter", this.adapter) : null, field("Temperature", this.temperature), field("Most tokens", this.most),
    );
    this.form = element(
      "form", { class: "call", submit: (event) => this.sent(event) }, more, field("Message", this.text),
      element("p", { class: "actions" }, this.go, this.stop, this.fresh), this.state,
    );
    this.node = element("section", {}, element("h2", {}, "Chat"), this.list, this.form);
  }

  adapters(names) {
    if (!names.length) return null;
    const options = ["", ...names].map((name) => element("option", { value: name }, name || "none"));
    return element("select", { id: "chat-adapter" }, options);
  }

  // Enter sends, and Shift and Enter makes a new line.
  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  clear() {
    this.aborter?.abort();
    this.messages = [];
    this.list.replaceChildren();
    setText(this.state, "");
    this.text.focus();
  }

  request() {
    const system = this.system.value.trim();
    const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages] };
    if (this.temperature.value !== "") body.temperature = Number(this.temperature.value);
    if (this.most.value !== "") body.max_tokens = Number(this.most.value);
    if (this.adapter?.value) body.adapter = this.adapter.value;
    return body;
  }

  async sent(event) {
    event.preventDefault();
    const text = this.text.value.trim();
    if (!text || this.aborter) return;
    this.add("user", text);
    this.messages.push({ role: "user", content: text });
    this.text.value = "";
    const messages = this.messages;
    const answer = new Answer(this.add("assistant", ""));
    await this.ask(answer);
    // A new chat may have begun meanwhile.
    if (messages === this.messages) messages.push({ role: "assistant", content: answer.text });
  }

  async ask(answer) {
    const aborter = (this.aborter = new AbortController());
    this.go.disabled = true;
    this.stop.disabled = false;
    setText(this.state, "Waiting…");
    try {
      const path = `/invoke/${encodeURIComponent(this.name)}`;
      const headers = await streamed(path, this.request(), (delta) => answer.take(delta), aborter.signal);
      setText(this.state, answer.times(headers.get("X-Cold-Start") === "true"));
    } catch (error) {
      setText(this.state, aborter.signal.aborted ? "Stopped." : explained(error));
    } finally {
      this.aborter = null;
      this.go.disabled = false;
      this.stop.disabled = true;
    }
  }

  add(role, text) {
    const body = element("p", { class: "text" }, text);
    this.list.append(element("li", { class: role }, element("b", {}, role === "user" ? "You" : this.name), body));
    return body;
  }

  end() {
    this.aborter?.abort();
  }
}

function field(name, input) {
  return element("div", { class: "field" }, element("label", { for: input.id }, name), input);
}

// An answer that grows with each piece. Its reasoning is shown before it.
class Answer {
  constructor(node) {
    Object.assign(this, { node, text: "", begun_ms: performance.now(), first_ms: null, usage: null, reason: "" });
    this.reasoning = null;
  }

  take(delta) {
    this.first_ms ??= performance.now();
    if (delta.reasoning) this.think(delta.reasoning);
    const room = MOST_CHARS - this.text.length;
    const calls = (delta.tool_calls ?? []).map((call) => `${call.name} ${call.arguments}`);
    this.text += [delta.arguments, delta.text, ...calls].join("").slice(0, Math.max(0, room));
    this.usage = delta.usage ?? this.usage;
    this.reason = delta.finish_reason ?? this.reason;
    setText(this.node, this.text);
  }

  think(text) {
    if (!this.reasoning) this.node.before((this.reasoning = element("p", { class: "text note" })));
    this.reasoning.append(text);
  }

  times(cold) {
    const tokens = this.usage?.completion_tokens ?? 0;
    const rest_s = (performance.now() - this.first_ms) / 1000;
    const parts = [`first token after ${duration(this.first_ms - this.begun_ms)}`, cold && "cold start", `${count(tokens)} tokens`];
    if (tokens > 1 && rest_s > 0) parts.push(`${count(Math.round((tokens - 1) / rest_s))}/s`);
    if (this.reason === "length") parts.push("cut off");
    return parts.filter(Boolean).join(" · ");
  }
}
