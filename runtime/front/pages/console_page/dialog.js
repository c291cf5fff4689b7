// Asks before something is done, and says what came of it.

import { element } from "./dom.js";
import { GatewayError } from "./gateway.js";

// Say something to all users: it is read out once, and is gone after a while.
let clearing;
export function say(text) {
  const said = document.getElementById("said");
  said.textContent = text;
  clearTimeout(clearing);
  clearing = setTimeout(() => (said.textContent = ""), 8000);
}

export function explained(error) {
  return error instanceof GatewayError ? error.text : String(error.message ?? error);
}

// Ask, and do it if the user agrees. Escape and Cancel leave everything as it is. While it is being done the dialog
// stays, and if it fails, the reason is shown in it. Closed then, it leaves the outcome to `say`.
export function ask({ title, text, verb, act, done }) {
  const problem = element("p", { class: "problem", role: "alert" });
  const cancel = element("button", { type: "button", autofocus: true }, "Cancel");
  const go = element("button", { type: "button", class: "danger" }, verb);
  const dialog = element(
    "dialog", { "aria-labelledby": "asked" },
    element("h2", { id: "asked" }, title), element("p", {}, text), problem, element("p", { class: "choices" }, cancel, go),
  );
  cancel.addEventListener("click", () => dialog.close());
  go.addEventListener("click", async () => {
    go.disabled = true;
    go.textContent = "Working…";
    problem.textContent = "";
    try {
      await act();
      dialog.close();
      say(done);
    } catch (error) {
      // Whoever has closed the dialog meanwhile did not end what was begun.
      if (!dialog.open) return say(explained(error));
      problem.textContent = explained(error);
      go.disabled = false;
      go.textContent = verb;
    }
  });
  // The browser returns the focus to the button that opened it.
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
