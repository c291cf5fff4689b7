// What the gateway has decided about a function and why, and how many workers it had in the last hour.

import { LineChart, RungBand } from "./charts.js";
import { element, table } from "./dom.js";
import { clockOf, count } from "./format.js";
import { get } from "./gateway.js";
import { Panel, textRow } from "./panel.js";

const HOUR_S = 3600;
const FIRST_WINDOW_S = 600;
const LISTED = 200;
const COLUMNS = [{ name: "Time" }, { name: "Decision" }, { name: "Cause", mid: true }];

export function decisionsPanel(name) {
  const base = `/v1/functions/${encodeURIComponent(name)}`;
  const chart = new LineChart("Workers and queue", [["ready", "ready workers"], ["queued", "queued"]], count, { whole: true });
  const band = new RungBand();
  const panel = new Panel({
    title: "Decisions",
    intro: element("div", { class: "charts one" }, chart.node, band.node),
    path: () => `${base}/decisions?lines=${LISTED}`,
    table: table(`Decisions about ${name}, the newest first`, COLUMNS),
    keyOf: (one) => one.key,
    make: textRow(COLUMNS, (one) => ({ Time: clockOf(one.at), Decision: one.text, Cause: one.cause })),
    items: (found) => {
      load();
      return numbered(found.decisions).reverse();
    },
    empty: "None is remembered. Starts and stops of workers, steps on the ladder and refusals appear here, each with its figures.",
    // Not the queue, which changes all the time: an hour of load is read again each time.
    watch: (row) => JSON.stringify([row.workers, row.rung]),
  });

  async function load() {
    const since = Date.now() / 1000 - HOUR_S;
    try {
      const { now, samples } = await get(`${base}/load?since=${since}`, panel?.aborter.signal);
      const end = Date.parse(now) / 1000;
      const points = steps(samples, end);
      const window_s = points.length && end - points[0].at < FIRST_WINDOW_S ? FIRST_WINDOW_S : HOUR_S;
      chart.update(points, end, window_s);
      band.update(points, end, window_s);
    } catch {
      // The panel says why nothing can be read.
    }
  }

  return panel;
}

// Two decisions may say the same at the same time.
function numbered(decisions) {
  const seen = new Map();
  return decisions.map((one) => {
    const said = `${one.at} ${one.text}`;
    const number = seen.get(said) ?? 0;
    seen.set(said, number + 1);
    return { ...one, key: `${said} ${number}` };
  });
}

// A sample holds until the next one: without the points in between, lines would be slanted.
export function steps(samples, end) {
  const points = samples.map((one) => ({ ...one, at: Date.parse(one.at) / 1000 }));
  const found = points.flatMap((one, index) => (index ? [{ ...points[index - 1], at: one.at }, one] : [one]));
  if (points.length) found.push({ ...points.at(-1), at: end });
  return found;
}
