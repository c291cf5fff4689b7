// One job: its state, its output, and the lines that it logged.

import { explained } from "./dialog.js";
import { element, setText } from "./dom.js";
import { clockOf, duration, NONE } from "./format.js";
import { get } from "./gateway.js";
import { LogView } from "./logs.js";

const EVERY_MS = 2000;
const OPEN = ["IN_QUEUE", "IN_PROGRESS"];
const MOST_CHARS = 100_000;

export class JobView {
  // `logs`: the caller may read the function's log.
  constructor(name, id, logs) {
    Object.assign(this, { name, id, title: `Job ${id}`, aborter: new AbortController() });
    this.state = element("p", { class: "note", role: "status" }, "Loading…");
    this.facts = element("dl", { class: "facts" });
    this.output = element("pre", { role: "group", tabindex: "0", "aria-label": "Output", hidden: true });
    const base = `/v1/functions/${encodeURIComponent(name)}/logs`;
    this.log = logs ? new LogView(base, element("h3", {}, "Log"), "This job has logged nothing.", { request: id }) : null;
    this.node = element("section", {}, element("h2", {}, "Job ", element("code", {}, id)), this.state, this.facts, this.output, this.log?.node);
    this.load();
  }

  async load() {
    try {
      const job = await get(`/v1/functions/${encodeURIComponent(this.name)}/jobs/${encodeURIComponent(this.id)}`, this.aborter.signal);
      this.show(job);
      if (OPEN.includes(job.status)) this.timer = setTimeout(() => this.load(), EVERY_MS);
    } catch (error) {
      if (!this.aborter.signal.aborted) setText(this.state, explained(error));
    }
  }

  show(job) {
    setText(this.state, job.status);
    const facts = {
      Submitted: clockOf(job.created_at), Waited: duration(job.delay_ms), Ran: duration(job.execution_ms),
      Worker: job.worker || NONE, Error: job.error ? job.error.message : "None.",
    };
    this.facts.replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
    this.output.hidden = job.output === undefined;
    setText(this.output, JSON.stringify(job.output, null, 2)?.slice(0, MOST_CHARS) ?? "");
  }

  update() {
    this.log?.update();
  }

  end() {
    this.aborter.abort();
    clearTimeout(this.timer);
    this.log?.end();
  }
}
