// Where records come from: a live server's stream of events, or a file, line by line.

import { History } from "./history.js";

const RETRY = 2000; // ms
const WANTED = "chairlift record";

export class Source {
  constructor(isRecorded = false) {
    this.isRecorded = isRecorded;
    this.histories = new Map();
    this.title = "";
    this.isCut = false; // whether a recording ends in the middle of a line: its writer was killed, or its disk full
    this.lines = []; // of the live stream, to save them
    this.size = 0;
    this.wanted = new Map(); // lanes of the playground's requests, by id
    this.ending = new AbortController();
  }

  get all() {
    return [...this.histories.values()];
  }

  /** Take a record of an engine, or the state of all. */
  take(record) {
    if (record.engines) {
      for (const state of record.engines) this.of(state).state = state;
      return;
    }
    if (record.model !== undefined) this.of(record).take(record);
  }

  of({ model, replica = null }) {
    const key = `${model}\n${replica}`;
    let history = this.histories.get(key);
    if (!history) {
      history = new History(String(model), replica, this.isRecorded);
      history.onAdmit = (lane) => this.wanted.get(lane.id)?.push(lane);
      this.histories.set(key, history);
    }
    return history;
  }

  // ---- a live server

  /** Read the stream until it ends, and again after a pause; `failed` is told of every end. */
  async follow(fetchWithKey, failed, connected) {
    for (;;) {
      let status = 0;
      try {
        const response = await fetchWithKey("/ui/events", { signal: this.ending.signal });
        status = response.status;
        if (response.ok) {
          connected();
          await readLines(response.body, (line) => {
            if (!line.startsWith("data: ")) return;
            this.keep(line.slice(6));
            this.take(JSON.parse(line.slice(6)));
          });
        }
      } catch {
        // The server has stopped, or the network is down: `failed` says so.
      }
      if (this.ending.signal.aborted || !(await failed(status))) return;
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }

  keep(line) {
    this.lines.push(line);
    this.size += line.length;
    if (this.size > 48e6) {
      // A file must begin with lanes and rows that are known, as a stream does.
      const next = this.lines.findIndex((each, place) => place > this.lines.length / 2 && each.includes('"start":'));
      const gone = this.lines.splice(0, next < 0 ? this.lines.length : next);
      this.size -= gone.reduce((sum, each) => sum + each.length, 0);
    }
  }

  /** The stream so far as a recording. */
  recording() {
    const head = JSON.stringify({ kind: WANTED, version: 1, title: "saved from a live server" });
    return new Blob([[head, ...this.lines].join("\n"), "\n"], { type: "application/jsonl" });
  }

  // ---- a file

  /** Read a recording; an error says what is wrong with it. */
  async read(stream) {
    let number = 0;
    await readLines(stream, (line, isLast) => {
      number++;
      if (!line.trim()) return;
      let record;
      try {
        record = JSON.parse(line);
      } catch {
        this.isCut = isLast && number > 1;
        if (this.isCut) return;
        throw new Error(`line ${number} is not JSON: a recording is made with --record-view FILE`);
      }
      if (number === 1) {
        if (record?.kind !== WANTED) throw new Error("this is not a recording: make one with --record-view FILE");
        if (record.version !== 1) throw new Error(`this recording has version ${record.version}, and this page reads version 1`);
        this.title = String(record.title ?? "");
      } else {
        try {
          this.take(record);
        } catch (error) {
          throw new Error(`line ${number} is no record of this page's version: ${error.message}`);
        }
      }
    });
    if (!this.histories.size) throw new Error("the recording is empty: no step was recorded");
    return Math.max(...this.all.map((history) => history.latest));
  }
}

/** Take a stream line by line; `isLast` is for what follows the last line break. */
async function readLines(stream, take) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) take(line, false);
  }
  if (rest) take(rest, true);
}
