// A panel of rows that are read again every few seconds while it is shown, and when the counts change that `watch` reads.

import { explained } from "./dialog.js";
import { classes, element, reconcile, setText } from "./dom.js";
import { get } from "./gateway.js";

const EVERY_S = 3;

export class Panel {
  // `path()` returns the address that is read, and `items` the rows of what it answers. `intro` is a node, `empty` the text without rows.
  // `keyOf` names a row. `make` returns the node and an update for it: {node, update(item)}. An `every_s` of 0 reads the rows again
  // only after a change of what `watch` returns for the value that `update` gets. The heading is an h2, below the view's own.
  constructor({ title, intro = null, path, table, keyOf, make, items, empty, every_s = EVERY_S, watch = () => null }) {
    Object.assign(this, { path, keyOf, make, items, every_s, watch, body: table.body });
    this.state = element("p", { class: "note", role: "status" }, "Loading…");
    this.rows = element("div", { hidden: true }, table.node);
    this.emptyText = empty;
    this.node = element("section", {}, element("h2", {}, title), intro, this.state, this.rows);
    this.aborter = new AbortController();
    this.loaded = false;
    this.changed = () => document.visibilityState === "visible" && this.load();
    document.addEventListener("visibilitychange", this.changed);
    this.load();
  }

  async load() {
    clearTimeout(this.timer);
    if (this.loading) return void (this.again = true);
    this.loading = true;
    try {
      const found = this.items(await get(this.path(), this.aborter.signal));
      this.show(found);
    } catch (error) {
      if (this.aborter.signal.aborted) return;
      setText(this.state, explained(error));
      this.state.hidden = false;
      if ([401, 403, 404].includes(error.status)) return;
    } finally {
      this.loading = false;
    }
    if (this.again) {
      this.again = false;
      return void this.load();
    }
    if (document.visibilityState === "visible" && this.every_s) this.timer = setTimeout(() => this.load(), this.every_s * 1000);
  }

  show(found) {
    this.loaded = true;
    setText(this.state, this.emptyText);
    this.state.hidden = Boolean(found.length);
    this.rows.hidden = !found.length;
    reconcile(this.body, found, this.keyOf, this.make, (child, item) => child.update(item));
  }

  // `row` is what the gateway has sent, such as the function's row: what it counts may have changed the panel, too.
  update(row) {
    const seen = row && this.watch(row);
    if (this.seen !== undefined && seen !== this.seen) this.load();
    this.seen = seen;
  }

  end() {
    this.aborter.abort();
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.changed);
  }
}

// Return a row of a table whose cells are texts, the first of them its head. `texts` maps an item to its texts; cells
// that are nodes are made once by `nodes`, and stay.
export function textRow(columns, texts, { nodes = () => ({}), update = () => {} } = {}) {
  return (item) => {
    const made = nodes(item);
    const cells = columns.map((column, index) =>
      element(index ? "td" : "th", { scope: index ? null : "row", class: classes(column) }, made[column.name] ?? ""));
    const row = {
      node: element("tr", {}, cells),
      update(now) {
        const said = texts(now);
        columns.forEach((column, index) => {
          if (!(column.name in made)) setText(cells[index], said[column.name] ?? "");
        });
        update(made, now);
      },
    };
    return row;
  };
}
