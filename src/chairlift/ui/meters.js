// The tiles at the top: rates, latencies of the last minutes, step times against their budget.

import { byId, fit, h, palette, say } from "./dom.js";
import { brief, count, counted, duration, percentile } from "./format.js";

const SPARK = 120; // seconds of the small charts
const RATE = 4; // seconds over which a rate is averaged
const LATENCY = 180; // seconds of the percentiles

const TILES = [
  { id: "output", name: "Output tokens/s", note: (found) => `${brief(found.finished)} requests/s finished`, colour: "decode" },
  { id: "prompt", name: "Prompt tokens/s", note: (found) => (found.hits === null ? "computed" : `computed, ${found.hits} cached`), colour: "prefill" },
  { id: "running", name: "Running", note: (found) => `${counted(found.waiting, "request")} waiting`, colour: "ink" },
  { id: "ttft", name: "Time to first token", note: rest("ttft"), colour: "prefill", isTime: true },
  { id: "tpot", name: "Time per output token", note: rest("tpot"), colour: "decode", isTime: true },
  { id: "e2e", name: "End to end", note: rest("e2e"), colour: "ink", isTime: true },
  { id: "step", name: "Step time", note: (found) => found.budget, colour: "dim", isTime: true },
];

const unbroken = (text) => text.replaceAll(" ", "\u00a0"); // in a narrow tile, the unit stays beside its number

function rest(name) {
  return (found) => (found.spread[name] ? `${unbroken(`p90 ${duration(found.spread[name][1])}`)} · ${unbroken(`p99 ${duration(found.spread[name][2])}`)}` : "no request has finished in 3 min");
}

export class Meters {
  constructor() {
    this.tiles = TILES.map((tile) => {
      const value = h("p", { class: "value", id: `meter-${tile.id}` }, "–");
      const note = h("p", { class: "note" }, "");
      const spark = h("canvas", { class: "spark", "aria-hidden": "true" });
      byId("meters").append(h("div", { class: "panel tile" }, h("h3", {}, tile.name), value, note, spark));
      return { ...tile, value, noteElement: note, spark };
    });
  }

  refresh(histories) {
    const found = measure(histories);
    for (const tile of this.tiles) {
      const value = found.values[tile.id];
      say(tile.value, tile.isTime ? duration(value) : value === null ? "–" : brief(value));
      say(tile.noteElement, tile.note(found));
      line(tile.spark, found.lines[tile.id], palette()[tile.colour]);
    }
  }
}

function measure(histories) {
  const lines = { output: [], prompt: [], running: [], ttft: [], tpot: [], e2e: [], step: [] };
  for (let back = SPARK; back >= 1; back -= 2) {
    const sums = { output: 0, prompt: 0, steps: 0, took: 0 };
    for (const history of histories) {
      const now = Math.floor(history.now / 1e6);
      for (const second of [now - back, now - back + 1]) {
        const own = history.seconds.get(second);
        if (own) for (const name in sums) sums[name] += own[name];
      }
    }
    lines.output.push(sums.output / 2);
    lines.prompt.push(sums.prompt / 2);
    lines.step.push(sums.steps ? sums.took / sums.steps : 0);
  }
  const rates = { output: 0, prompt: 0, finished: 0, steps: 0, took: 0 };
  let running = 0;
  let waiting = 0;
  let hits = null;
  for (const history of histories) {
    const now = Math.floor(history.now / 1e6);
    for (let second = now - RATE; second < now; second++) {
      const own = history.seconds.get(second);
      if (own) for (const name in rates) rates[name] += own[name];
    }
    const look = history.lookNow();
    running += look?.running ?? 0;
    waiting += look?.waiting ?? 0;
    if (look?.has_cache) hits = (hits ?? 0) + look.cached_tokens;
    lines.running = sumOfLines(lines.running, looksOf(history));
  }
  const spread = latencies(histories, lines);
  const [first] = histories;
  const facts = first?.facts;
  const target = facts?.target_us;
  return {
    values: {
      output: rates.output / RATE,
      prompt: rates.prompt / RATE,
      running,
      ttft: spread.ttft?.[0] ?? null,
      tpot: spread.tpot?.[0] ?? null,
      e2e: spread.e2e?.[0] ?? null,
      step: rates.steps ? rates.took / rates.steps : null,
    },
    lines,
    spread,
    waiting,
    hits: hits === null ? null : brief(hits),
    finished: rates.finished / RATE,
    budget: target ? `budget ${duration(target)}` : facts ? `budget ${count(facts.step_tokens)} tokens` : "",
  };
}

function looksOf(history) {
  const found = new Array(SPARK / 2).fill(0);
  for (const look of history.looksWithin(SPARK)) {
    const place = SPARK / 2 - 1 - Math.floor((history.now - look.at) / 2e6);
    if (place >= 0 && place < found.length) found.fill(look.running, place); // until the next look
  }
  return found;
}

const sumOfLines = (a, b) => b.map((value, place) => value + (a[place] ?? 0));

/** p50, p90 and p99 of the last minutes; the lines are medians of a few seconds each. */
function latencies(histories, lines) {
  const found = {};
  const ends = histories.flatMap((history) => history.endsWithin(LATENCY).map((each) => ({ ...each, age: history.now - each.time })));
  const values = {
    ttft: (end) => end.ttft,
    e2e: (end) => end.e2e,
    tpot: (end) => (end.ttft !== null && end.output > 1 ? (end.e2e - end.ttft) / (end.output - 1) : null),
  };
  for (const [name, value] of Object.entries(values)) {
    const all = ends.map(value).filter((each) => each !== null);
    if (all.length) {
      all.sort((a, b) => a - b);
      found[name] = [0.5, 0.9, 0.99].map((share) => percentile(all, share));
    }
    const parts = Array.from({ length: SPARK / 4 }, () => []);
    for (const end of ends) {
      const place = SPARK / 4 - 1 - Math.floor(end.age / 4e6);
      if (place >= 0 && value(end) !== null) parts[place].push(value(end));
    }
    let last = 0;
    lines[name] = parts.map((part) => (last = part.length ? percentile(part.sort((a, b) => a - b), 0.5) : last));
  }
  return found;
}

/** A small line chart from zero, with its area. */
export function line(canvas, values, colour) {
  fit(canvas);
  const pen = canvas.getContext("2d");
  const { width, height } = canvas;
  pen.clearRect(0, 0, width, height);
  const most = Math.max(...values, 0);
  if (!most || !width) return;
  const x = (place) => (place / Math.max(1, values.length - 1)) * width;
  const y = (value) => height - 1 - (value / most) * (height - 3);
  pen.beginPath();
  values.forEach((value, place) => pen.lineTo(x(place), y(value)));
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5 * (window.devicePixelRatio || 1);
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(0, height);
  pen.globalAlpha = 0.12;
  pen.fillStyle = colour;
  pen.fill();
  pen.globalAlpha = 1;
}
