// The stored revisions of a function, and rollback to one of them.

import { ask } from "./dialog.js";
import { element, table } from "./dom.js";
import { bytes, clockOf, NONE, snapshotsOf } from "./format.js";
import { post } from "./gateway.js";
import { Panel, textRow } from "./panel.js";

const COLUMNS = [
  { name: "Revision" }, { name: "State" }, { name: "Deployed" }, { name: "Code", mid: true }, { name: "Snapshot", mid: true }, { name: "Own size", number: true, mid: true }, { name: "Actions" },
];

export function revisionsPanel(name) {
  const base = `/v1/functions/${encodeURIComponent(name)}`;
  const rollback = (revision) => ask({
    title: `Roll ${name} back to ${revision}?`,
    text: "A worker of that revision has to start first. Then it takes over, and the live revision finishes what it has begun.",
    verb: "Roll back",
    act: () => post(`${base}/rollback`, { revision }).then(() => panel.load()),
    done: `${name} runs ${revision}.`,
  });
  const panel = new Panel({
    title: "Revisions",
    path: () => `${base}/revisions`,
    table: table(`Revisions of ${name}, the newest first`, COLUMNS),
    keyOf: (one) => one.revision,
    make: textRow(COLUMNS, (one) => ({
      Revision: one.revision, State: one.state, Deployed: clockOf(one.created_at), Code: one.code_digest.slice(0, 12),
      Snapshot: snapshotsOf(one) || NONE, "Own size": bytes(one.size_bytes),
    }), {
      nodes: (one) => ({
        Actions: element("button", { type: "button", "aria-label": `Roll back to ${one.revision}`, click: () => rollback(one.revision) }, "Roll back…"),
      }),
      update: ({ Actions }, one) => (Actions.hidden = one.state === "live"),
    }),
    items: (found) => found.revisions,
    empty: "No revision is stored.",
    watch: (row) => row.revision,
    every_s: 10,
  });
  return panel;
}
