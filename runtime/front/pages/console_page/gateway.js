// Sends requests to the gateway. The API key is kept in sessionStorage, that is until the tab is closed, and sent in
// the header Authorization. No cookies are used, so a page of another origin can send nothing in the user's name.

const STORED = "pilotflame.key";
const GET_TIMEOUT_MS = 20_000;
// A restart or a rollback waits for a worker that has to be set up.
const POST_TIMEOUT_MS = 1_000_000;

export class GatewayError extends Error {
  constructor(status, code, message, remedy = "") {
    super(message);
    Object.assign(this, { status, code, remedy });
  }

  get text() {
    return this.remedy ? `${this.message}${/[.!?…]$/.test(this.message) ? "" : "."} ${this.remedy}` : this.message;
  }
}

let held = null;

// A browser may refuse sessionStorage; then the key is kept in the page alone.
function stored(change) {
  try {
    return change ? change(sessionStorage) : sessionStorage.getItem(STORED);
  } catch {
    return null;
  }
}

export function key() {
  return held ?? stored() ?? "";
}

export function setKey(text) {
  held = text;
  stored((storage) => (text ? storage.setItem(STORED, text) : storage.removeItem(STORED)));
}

async function refusal(response) {
  try {
    const { error } = await response.json();
    return new GatewayError(response.status, error.type, error.message, error.remedy);
  } catch {
    return new GatewayError(response.status, "unreadable", `The gateway answered ${response.status} ${response.statusText}.`);
  }
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GatewayError(0, "gone", error.name === "TimeoutError" ? "The gateway has not answered in time." : "The gateway does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

// Call a function. The answer is returned whatever its status, with its text and the time that it took.
export async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json", ...(key() ? { Authorization: `Bearer ${key()}` } : {}) };
  const begun = performance.now();
  try {
    const response = await fetch(path, { method: "POST", body: JSON.stringify(body), headers, signal, credentials: "omit", redirect: "error" });
    const text = await response.text();
    return { response, text, elapsed_ms: performance.now() - begun };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GatewayError(0, "gone", "The gateway does not answer.");
  }
}

// Call a function that streams, with `onOutput` for each piece of its output. Return the headers of the answer.
export async function streamed(path, body, onOutput, signal) {
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  const response = await send(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  const take = (block) => {
    const fields = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
    if (fields.event === "output") onOutput(JSON.parse(fields.data));
    if (fields.event === "error") {
      const error = JSON.parse(fields.data);
      throw new GatewayError(200, error.type, error.message, error.remedy);
    }
  };
  await eachPart(response, "\n\n", take);
  return response.headers;
}

export async function get(path, signal) {
  const late = AbortSignal.timeout(GET_TIMEOUT_MS);
  return (await send(path, { signal: signal ? AbortSignal.any([signal, late]) : late })).json();
}

export async function post(path, body) {
  const options = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return (await send(path, { method: "POST", signal: AbortSignal.timeout(POST_TIMEOUT_MS), ...options })).json();
}

// Call `onLine` with each line of JSON of an answer, until that ends.
export async function follow(path, onLine, signal) {
  await eachPart(await send(path, { signal }), "\n", (line) => onLine(JSON.parse(line)));
}

// Call `onPart` with each part of an answer that ends with `end`, as it arrives.
async function eachPart(response, end, onPart) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(end);
      rest = parts.pop();
      for (const part of parts) if (part) onPart(part);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof GatewayError || error instanceof SyntaxError) throw error;
    throw new GatewayError(0, "gone", "The connection to the gateway has ended.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Follow `path` again and again while the page is visible. `onState` is told "live", "waiting", "hidden", or the error
// for which there is no sense in trying again. Return a function that ends it.
export function keepFollowing(path, onLine, onState, { silent_s = Infinity } = {}) {
  let ended = false;
  let current = null;
  let wake = () => {};
  let wait_s = 0.5;

  const awake = () => document.visibilityState === "visible";
  const changed = () => {
    if (awake()) wake();
    else current?.abort();
  };
  const pause = (seconds) =>
    new Promise((resolve) => {
      const timer = Number.isFinite(seconds) ? setTimeout(resolve, seconds * 1000) : null;
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });

  async function once() {
    current = new AbortController();
    const watch = { timer: null };
    const alive = () => {
      clearTimeout(watch.timer);
      if (Number.isFinite(silent_s)) watch.timer = setTimeout(() => current.abort(), silent_s * 1000);
    };
    alive();
    try {
      await follow(typeof path === "function" ? path() : path, (line) => {
        alive();
        wait_s = 0.5;
        onState("live");
        onLine(line);
      }, current.signal);
    } finally {
      clearTimeout(watch.timer);
    }
  }

  async function run() {
    while (!ended) {
      if (!awake()) {
        onState("hidden");
        await pause(Infinity);
        continue;
      }
      try {
        await once();
        // It ended as it should: the gateway limits how long an answer lasts.
        if (!ended) await pause(0.05);
        continue;
      } catch (error) {
        if (ended) return;
        if ([401, 403, 404].includes(error.status)) return onState(error);
      }
      if (ended || !awake()) continue;
      onState("waiting", wait_s);
      // Spread, so that the pages of a restarted gateway do not all come back in the same moment.
      await pause(wait_s * (0.75 + Math.random() / 2));
      wait_s = Math.min(15, wait_s * 2);
    }
  }

  document.addEventListener("visibilitychange", changed);
  run();
  return {
    end() {
      ended = true;
      document.removeEventListener("visibilitychange", changed);
      current?.abort();
      wake();
    },
    retry: () => wake(),
  };
}
