// Writes numbers and times for people.

export const NONE = "–";

export function count(value) {
  if (value < 10_000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toPrecision(3)} k`;
  return `${(value / 1e6).toPrecision(3)} M`;
}

export function rate(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value === 0) return "0";
  if (value < 0.095) return value.toFixed(2);
  return value < 99.95 && !Number.isInteger(value) ? value.toFixed(1) : count(value);
}

// Milliseconds.
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return NONE;
  if (ms < 0.05) return "0 ms";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toPrecision(3)} s`;
  return span(ms / 1000);
}

// Seconds.
export function span(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ""}`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
  return `${(seconds / 86_400).toFixed(1)} days`;
}

export function share(value) {
  return value === null || value === undefined || Number.isNaN(value) ? NONE : `${Math.round(value * 100)} %`;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log2(value) / 10) - 1);
  return `${(value / 1024 ** (step + 1)).toPrecision(3)} ${units[step]}`;
}

// Three digits.
export function money(value) {
  if (value > 0 && value < 1e-6) return "<0.000001";
  return !value ? "0" : value >= 100 ? value.toFixed(0) : value.toFixed(Math.max(2, 2 - Math.floor(Math.log10(value))));
}

const two = (value) => String(value).padStart(2, "0");

// The time of day; with the date if it is not today. `at` is in Unix seconds.
export function clock(at) {
  const then = new Date(at * 1000);
  const time = `${two(then.getHours())}:${two(then.getMinutes())}:${two(then.getSeconds())}`;
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.getFullYear()}-${two(then.getMonth() + 1)}-${two(then.getDate())} ${time}`;
}

export function clockOf(text) {
  const at = Date.parse(text);
  return Number.isNaN(at) ? NONE : clock(at / 1000);
}

// The weights of a function or a revision: one without a name, or several with names; "" if there are none.
export function snapshotsOf(found) {
  return found.snapshot ?? Object.entries(found.snapshots ?? {}).map(([name, where]) => `${name}: ${where}`).join(", ");
}
