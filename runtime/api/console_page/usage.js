// What the functions have used, and what it costs.

import { explained } from "./dialog.js";
import { element, setText } from "./dom.js";
import { get } from "./gateway.js";

export class UsageView {
  constructor() {
    this.title = "Usage";
    this.state = element("p", { class: "note", role: "status" }, "Loading…");
    this.node = element("div", {}, element("h1", {}, "Usage"), this.state);
    get("/v1/usage").then(() => {}, (error) => setText(this.state, explained(error)));
  }

  update() {}

  end() {}
}
