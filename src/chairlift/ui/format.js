// Numbers in words, short enough for a tile.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(Math.round(number));

export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** A large number in three digits: 12.4k, 1.02M. */
export function brief(number) {
  if (number < 10 && number % 1) return number.toFixed(1);
  if (number < 10_000) return count(number);
  return number < 999_500 ? `${(number / 1e3).toPrecision(3)}k` : `${(number / 1e6).toPrecision(3)}M`;
}

/** Microseconds as the unit that suits them. */
export function duration(microseconds) {
  if (microseconds === null || microseconds === undefined || Number.isNaN(microseconds)) return "–";
  const ms = microseconds / 1000;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

/** A moment of a run: h:mm:ss.t */
export function clock(microseconds) {
  const seconds = Math.round(Math.max(0, microseconds / 1e5)) / 10;
  const minutes = Math.floor(seconds / 60);
  const rest = (seconds % 60).toFixed(1).padStart(4, "0");
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

/** The last part of a path, or a name as it is. */
export const lastPart = (name) => name.replace(/\/+$/, "").split("/").pop() || name;

/** The value below which a share of sorted numbers is; NaN for none. */
export function percentile(sorted, share) {
  if (!sorted.length) return Number.NaN;
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
