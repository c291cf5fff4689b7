// The stored jobs of a function, the newest first.

import { ask, explained, say } from "./dialog.js";
import { element, setText, table } from "./dom.js";
import { clockOf, duration } from "./format.js";
import { post } from "./gateway.js";
import { Panel, textRow } from "./panel.js";

const LISTED = 50;
const COLUMNS = [
  { name: "Job" }, { name: "State" }, { name: "Submitted", mid: true }, { name: "Waited", number: true, mid: true }, { name: "Ran", number: true, mid: true },
  { name: "Attempts", number: true, mid: true }, { name: "Error", mid: true }, { name: "Actions" },
];
const OPEN = ["IN_QUEUE", "IN_PROGRESS"];
const BROKEN = ["FAILED", "TIMED_OUT"];

export function jobsPanel(name) {
  const base = `/v1/functions/${encodeURIComponent(name)}/jobs`;
  const counts = element("p", { class: "note" });
  const cancel = (id) => ask({
    title: `Cancel the job ${id}?`, text: "If it runs, its worker is told to stop. It will not be run again.", verb: "Cancel the job",
    act: () => post(`${base}/${encodeURIComponent(id)}/cancel`).then(() => panel.load()), done: `The job ${id} was cancelled.`,
  });
  const retry = async (id) => {
    try {
      await post(`${base}/${encodeURIComponent(id)}/retry`);
      say(`The job ${id} is queued again.`);
    } catch (error) {
      say(explained(error));
    }
    panel.load();
  };
  const make = textRow(COLUMNS, (job) => ({
    State: job.status, Submitted: clockOf(job.created_at), Waited: duration(job.delay_ms), Ran: duration(job.execution_ms),
    Attempts: job.attempts, Error: job.error?.message ?? "",
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
    path: () => `${base}?limit=${LISTED}`,
    table: table(`Jobs of ${name}, the newest first`, COLUMNS),
    keyOf: (job) => job.id,
    make,
    items: (found) => {
      count(found.counts);
      return found.jobs;
    },
    watch: (row) => JSON.stringify([row.queued, row.in_flight, row.codes]),
    empty: `No jobs. POST ${base} stores one: it survives crashes, and its result can be fetched later.`,
  });

  function count(jobs) {
    const parts = [["waiting", jobs.in_queue], ["running", jobs.in_progress], ["completed", jobs.completed], ["failed", jobs.failed], ["cancelled", jobs.cancelled]];
    setText(counts, `${parts.map(([text, many]) => `${many} ${text}`).join(" · ")}. The latest ${LISTED} are listed.`);
  }

  return panel;
}
