// What one engine did: columns of steps, the lanes in them, its finished requests and looks at its cache and queue.
// The records are those of engine/recorder.py, from a live server or from a file.

const LIVE_COLUMNS = 8000;
const LIVE_SECONDS = 900;

const LANE = [
  "row", "id", "index", "tenant", "prompt", "cached", "arrival", "waited", "limit", "preemptions", "priority", "isFork",
  "known", "tail",
];

function laneOf(values, number) {
  const lane = { admitted: number, firstChunk: null, ended: null, reason: null, output: null, ttft: null, e2e: null };
  LANE.forEach((name, place) => (lane[name] = values[place]));
  return lane;
}

export class History {
  constructor(model, replica, isRecorded) {
    this.model = model;
    this.replica = replica;
    this.isRecorded = isRecorded;
    this.key = `${model}\n${replica}`;
    this.facts = null;
    this.state = null; // of the engine's process: device, dtype, trouble
    this.receivedAt = performance.now();
    this.reset();
  }

  reset() {
    this.columns = [];
    this.base = 0; // the first column's place since the beginning
    this.lanes = new Map(); // by row
    this.version = 0; // changes with the rows and the lanes
    this.rows = [];
    this.cells = null; // lanes of the last column's rows
    this.cellsVersion = -1;
    this.seconds = new Map(); // sums of each second
    this.ends = []; // finished requests, by time
    this.looks = [];
    this.marks = []; // events for the next column
    this.latest = 0; // microseconds
    this.lastNumber = 0;
    this.skipped = 0;
    this.cursor = 0; // columns shown: those before this place
    this.now = 0; // microseconds, of the moment that is shown
    this.topRow = 0; // of the last step
  }

  get end() {
    return this.base + this.columns.length;
  }

  /** The moment of the first thing that is known, in microseconds. */
  get earliest() {
    return Math.min(this.columns[0]?.start ?? this.latest, this.looks[0]?.at ?? this.latest);
  }

  column(place) {
    return this.columns[place - this.base];
  }

  take(record) {
    this.receivedAt = performance.now();
    if (record.start) this.start(record.start);
    if (!this.facts) return; // the rest of what another page was sent
    this.skipped += record.skipped ?? 0;
    const events = record.events ?? [];
    let next = 0;
    for (const step of record.steps ?? []) {
      const number = step[0];
      // A sequence that ends in this very step is still in its column.
      while (next < events.length && (events[next][1] < number || (events[next][1] === number && events[next][0] !== "end")))
        this.event(events[next++]);
      this.step(step);
      while (next < events.length && events[next][1] <= number) this.event(events[next++], true);
    }
    while (next < events.length) this.event(events[next++]);
    if (record.look) this.look(record.look);
    if (!this.isRecorded) this.forgetOld();
  }

  start(facts) {
    if (this.facts && (facts.epoch !== this.facts.epoch || facts.number < this.lastNumber)) this.reset(); // another recorder
    const known = new Map([...this.lanes.values()].map((lane) => [`${lane.row} ${lane.id} ${lane.index}`, lane]));
    this.facts = facts;
    this.lanes = new Map();
    for (const values of facts.lanes) {
      const lane = laneOf(values, facts.number);
      this.lanes.set(lane.row, known.get(`${lane.row} ${lane.id} ${lane.index}`) ?? lane);
    }
    this.version++;
    this.latest = Math.max(this.latest, facts.at);
    this.lastNumber = facts.number;
  }

  event([kind, number, ...rest], isAfter = false) {
    this.version++;
    if (kind === "admit") {
      const lane = laneOf(rest, number);
      this.lanes.set(lane.row, lane);
      this.onAdmit?.(lane);
      return;
    }
    const lane = this.lanes.get(rest[0]);
    if (!lane) return;
    this.lanes.delete(lane.row);
    lane.ended = number;
    if (kind === "end") {
      [, lane.reason, lane.output, lane.ttft, lane.e2e] = rest;
      const time = lane.arrival + lane.e2e;
      this.ends.push({ time, ttft: lane.ttft, e2e: lane.e2e, output: lane.output, reason: lane.reason });
      this.second(time).finished++;
    } else {
      lane.reason = rest[1] ? "preempted and swapped out" : "preempted";
      this.second(this.latest).preempted++;
    }
    const mark = { row: lane.row, kind: kind === "end" ? "finished" : "preempted", lane };
    const column = isAfter || kind === "end" ? this.columns.at(-1) : null;
    if (column) (column.marks ??= []).push(mark);
    else this.marks.push(mark);
  }

  step([number, start, took, tokens, sampled, rows, chunks, drafts]) {
    if (rows) {
      this.rows = rows;
      this.version++;
      this.topRow = rows.reduce((top, row) => (row > top ? row : top), 0);
    }
    if (this.cellsVersion !== this.version) {
      this.cells = this.rows.map((row) => this.lanes.get(row) ?? null); // null: it has ended, its token is discarded
      this.cellsVersion = this.version;
    }
    let prompt = 0;
    for (const [row, , length] of chunks || []) {
      prompt += length;
      const lane = this.lanes.get(row);
      if (lane && lane.firstChunk === null) lane.firstChunk = number;
    }
    const column = { number, start, took, tokens, sampled, prompt, rows: this.rows, cells: this.cells, top: this.topRow };
    column.chunks = chunks || null;
    column.drafts = drafts || null;
    column.marks = this.marks.length ? this.marks : null;
    this.marks = [];
    // Of steps that were skipped, all that is known is that they were like this one.
    const steps = this.columns.length ? Math.max(1, number - this.lastNumber) : 1;
    this.columns.push(column);
    this.lastNumber = number;
    this.latest = Math.max(this.latest, start + took);
    const sums = this.second(start);
    sums.output += sampled * steps;
    sums.prompt += prompt * steps;
    sums.steps += steps;
    sums.took += took * steps;
    sums.slowest = Math.max(sums.slowest, took);
  }

  look(look) {
    this.looks.push(look);
    this.latest = Math.max(this.latest, look.at);
  }

  second(time) {
    const key = Math.floor(time / 1e6);
    let sums = this.seconds.get(key);
    if (!sums) {
      sums = { output: 0, prompt: 0, steps: 0, took: 0, slowest: 0, finished: 0, preempted: 0 };
      this.seconds.set(key, sums);
    }
    return sums;
  }

  forgetOld() {
    const many = this.columns.length - LIVE_COLUMNS;
    if (many > 1000) {
      this.columns.splice(0, many);
      this.base += many;
      this.cursor = Math.max(this.cursor, this.base);
    }
    const oldest = this.latest / 1e6 - LIVE_SECONDS;
    for (const key of this.seconds.keys()) {
      if (key >= oldest) break;
      this.seconds.delete(key);
    }
    while (this.ends.length && this.ends[0].time / 1e6 < oldest) this.ends.shift();
    if (this.looks.length > 1800) this.looks.splice(0, 600);
  }

  /** The last look at or before the moment that is shown. */
  lookNow() {
    const found = last(this.looks, (look) => look.at <= this.now);
    return found < 0 ? (this.looks[0] ?? null) : this.looks[found];
  }

  /** The looks of the last `seconds` before the moment that is shown. */
  looksWithin(seconds) {
    const end = last(this.looks, (look) => look.at <= this.now) + 1;
    const begin = last(this.looks, (look) => look.at <= this.now - seconds * 1e6) + 1;
    return this.looks.slice(begin, end);
  }

  /** The place behind the last column that began at or before a moment. */
  placeAt(time) {
    return this.base + last(this.columns, (column) => column.start <= time) + 1;
  }

  /** Requests that finished in the last `seconds` before the moment that is shown. */
  endsWithin(seconds) {
    const end = last(this.ends, (each) => each.time <= this.now) + 1;
    const begin = last(this.ends, (each) => each.time <= this.now - seconds * 1e6) + 1;
    return this.ends.slice(begin, end);
  }
}

/** The last place of a sorted list where a condition holds that holds for all before it; -1 if it never does. */
function last(list, holds) {
  let low = -1;
  let high = list.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (holds(list[middle])) low = middle;
    else high = middle;
  }
  return low;
}
