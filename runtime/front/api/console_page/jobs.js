// The stored jobs of a function, the newest first.

import { ask, explained, say } from "./dialog.js";
import { element, setText, table } from "./dom.js";
import { clockOf, duration, NONE } from "./format.js";
import { get, post } from "./gateway.js";
import { Panel, textRow } from "./panel.js";

const LISTED = 50;
const COLUMNS = [
  { name: "Job" }, { name: "State" }, { name: "Submitted", mid: true }, { name: "Waited", number: true, mid: true }, { name: "Ran", number: true, mid: true },
  { name: "Attempts", number: true, mid: true }, { name: "Error", mid: true }, { name: "Actions" },
];
const OPEN = ["IN_QUEUE", "IN_PROGRESS"];
const BROKEN = ["FAILED", "TIMED_OUT"];

export function jobsPanel(name, may) {
  const base = `/v2/${encodeURIComponent(name)}`;
  const counts = element("p", { class: "note" });
  const cancel = (id) => ask({
    title: `Cancel the job ${id}?`, text: "If it runs, its worker is told to stop. It will not be run again.", verb: "Cancel the job",
    act: () => post(`${base}/cancel/${encodeURIComponent(id)}`).then(() => panel.load()), done: `The job ${id} was cancelled.`,
  });
  const retry = async (id) => {
    try {
      await post(`${base}/retry/${encodeURIComponent(id)}`);
      say(`The job ${id} is queued again.`);
    } catch (error) {
      say(explained(error));
    }
    panel.load();
  };
  const make = textRow(COLUMNS, (job) => ({
    State: job.status, Submitted: clockOf(job.createdAt), Waited: duration(job.delayTime), Ran: duration(job.executionTime),
    Attempts: job.attempts, Error: job.error ?? "",
  }), {
    nodes: (job) => ({
      Job: element("a", { href: `#/functions/${encodeURIComponent(name)}/jobs/${encodeURIComponent(job.id)}` }, element("code", {}, job.id)),
      Actions: element("span", {},
        element("button", { type: "button", "aria-label": `Cancel ${job.id}`, click: () => cancel(job.id) }, "Cancel…"),
        element("button", { type: "button", "aria-label": `Retry ${job.id}`, click: () => retry(job.id) }, "Retry")),
    }),
    update: ({ Actions }, job) => {
      const [stop, again] = Actions.children;
      stop.hidden = !OPEN.includes(job.status);
      again.hidden = !BROKEN.includes(job.status);
    },
  });
  const panel = new Panel({
    title: "Jobs",
    intro: counts,
    path: () => `${base}/requests?limit=${LISTED}`,
    table: table(`Jobs of ${name}, the newest first`, COLUMNS),
    keyOf: (job) => job.id,
    make,
    items: (found) => {
      count();
      return found.requests;
    },
    watch: (row) => JSON.stringify([row.queued, row.in_flight, row.codes]),
    empty: `No jobs. POST ${base}/run stores one: it survives crashes, and its result can be fetched later.`,
  });

  async function count() {
    try {
      const { jobs } = await get(`${base}/health`, panel?.aborter.signal);
      const parts = [["waiting", jobs.inQueue], ["running", jobs.inProgress], ["completed", jobs.completed], ["failed", jobs.failed], ["cancelled", jobs.cancelled]];
      setText(counts, `${parts.map(([text, many]) => `${many ?? NONE} ${text}`).join(" · ")}. The latest ${LISTED} are listed.`);
    } catch {
      setText(counts, "");
    }
  }

  return panel;
}
