// Keeps what the gateway has told of each function in the last minutes, and computes rates from the counts.

// As many seconds are shown.
export const WINDOW_S = 300;
// Percentiles and the rates in tables are of so many seconds.
const RECENT_S = 15;
// After a longer silence no line is drawn: the page was hidden, or the gateway was gone.
export const MAX_GAP_S = 5;

const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);
// 499: the caller has gone. That is not an error of the function.
const isError = (code) => Number(code) >= 400 && code !== "499";

function point(at, row) {
  const codes = Object.entries(row.codes);
  return {
    at,
    answered: sum(codes.map(([, many]) => many)),
    failed: sum(codes.filter(([code]) => isError(code)).map(([, many]) => many)),
    durations: row.durations,
    ready: row.workers.ready,
    starting: row.workers.starting,
    queued: row.queued,
    in_flight: row.in_flight,
  };
}

// Return the value below which this share of the values is, by interpolation in its bucket; null if there are none.
export function quantile(share, counts, bounds) {
  const wanted = share * sum(counts);
  if (!wanted) return null;
  let passed = 0;
  for (const [index, many] of counts.entries()) {
    if (many && passed + many >= wanted) {
      const low = index ? bounds[index - 1] : 0;
      // Nothing is known above the last bound.
      const high = index < bounds.length ? bounds[index] : low;
      return low + ((high - low) * (wanted - passed)) / many;
    }
    passed += many;
  }
  return bounds[bounds.length - 1];
}

// Return what happened between two points; null if there is no telling.
export function between(older, newer, bounds) {
  const seconds = newer.at - older.at;
  // Counts that fall are those of a gateway that has started anew.
  if (seconds <= 0 || newer.answered < older.answered) return null;
  const durations = newer.durations.map((many, index) => Math.max(0, many - older.durations[index]));
  return {
    at: newer.at,
    rate: (newer.answered - older.answered) / seconds,
    errors: (newer.failed - older.failed) / seconds,
    p50: toMs(quantile(0.5, durations, bounds)),
    p95: toMs(quantile(0.95, durations, bounds)),
  };
}

const toMs = (seconds) => (seconds === null ? null : seconds * 1000);

// A function with its latest row, and an entry for each line of the gateway in which it had changed.
export class Samples {
  constructor() {
    this.row = null;
    this.entries = [];
  }

  // `before` is the time of the line before; null if nothing is known of that time.
  add(at, row, before, bounds) {
    const last = this.entries.at(-1);
    const fresh = point(at, row);
    const happened = last && before !== null ? between({ ...last, at: before }, fresh, bounds) : null;
    this.row = row;
    this.entries.push({ ...UNKNOWN, ...fresh, ...happened, seconds: before === null ? 0 : at - before });
  }

  forget(before) {
    let old = 0;
    while (old < this.entries.length - 1 && this.entries[old + 1].at < before) old += 1;
    if (old) this.entries.splice(0, old);
  }

  // Return the rates and percentiles of the latest seconds before `now`; null if there is no telling.
  recent(now, bounds) {
    if (!this.entries.length) return null;
    const newest = this.entries.at(-1);
    const older = this.entries.findLast((one) => one.at <= now - RECENT_S);
    const since = older ? { ...older, at: now - RECENT_S } : this.entries[0];
    return between(since, { ...newest, at: now }, bounds);
  }

  // Return what was on at each of these times, and what had happened since the time before. There is no value where
  // nothing is known.
  series(times) {
    let index = 0;
    return times.map((at) => {
      while (index < this.entries.length && this.entries[index].at <= at) index += 1;
      const entry = this.entries[index - 1];
      if (!entry || at === null) return { ...UNKNOWN, at };
      return entry.at === at ? entry : { ...entry, ...NOTHING, at };
    });
  }

  // Return the rate of requests in each of `parts` equal parts of the last minutes; null before `known`.
  rates(now, known, parts) {
    const partOf = (at) => Math.floor(((at - now) / WINDOW_S + 1) * parts - 1e-9);
    const found = new Array(parts).fill(0).fill(null, 0, Math.max(0, partOf(known)));
    for (const entry of this.entries) {
      const part = partOf(entry.at);
      if (part >= 0 && entry.rate) found[part] += (entry.rate * entry.seconds * parts) / WINDOW_S;
    }
    return found;
  }
}

const UNKNOWN = { rate: null, errors: null, p50: null, p95: null };
const NOTHING = { rate: 0, errors: 0, p50: null, p95: null };

// All functions that the user may see.
export class Fleet {
  constructor() {
    this.functions = new Map();
    this.clear();
  }

  clear() {
    this.functions.clear();
    Object.assign(this, { gateway: null, at: 0, times: [] });
  }

  // Take a line of the gateway. `first` is true for the first line of an answer, which holds all functions.
  take(line, first) {
    if (this.gateway && this.gateway.started_at !== line.gateway.started_at) this.clear();
    const silent = this.at && line.at - this.at > MAX_GAP_S;
    const before = this.at && !silent ? this.at : null;
    const named = new Set(line.functions.map((row) => row.name));
    const gone = first ? this.names().filter((name) => !named.has(name)) : line.removed;
    for (const name of gone) this.functions.delete(name);
    for (const row of line.functions) {
      if (!this.functions.has(row.name)) this.functions.set(row.name, new Samples());
      this.functions.get(row.name).add(line.at, row, before, line.gateway.bounds_s);
    }
    // A null breaks the lines of the charts.
    this.times.push(...(silent ? [null] : []), line.at);
    Object.assign(this, { gateway: line.gateway, at: line.at });
    this.forget(line.at - WINDOW_S);
  }

  forget(before) {
    const kept = this.times.findIndex((at) => at !== null && at >= before);
    if (kept > 0) this.times.splice(0, kept);
    for (const samples of this.functions.values()) samples.forget(before);
  }

  names() {
    return [...this.functions.keys()].sort();
  }

  recent(name) {
    return this.functions.get(name)?.recent(this.at, this.gateway.bounds_s) ?? null;
  }

  may(scope) {
    return this.gateway?.scopes.includes(scope) ?? false;
  }
}
