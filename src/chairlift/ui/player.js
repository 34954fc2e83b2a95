// Which moment is shown: the newest of a live server, a moment of the past, or a recording as it plays.

import { wantsStillness } from "./dom.js";

const CATCH_UP = 0.15; // seconds over which columns that have arrived together are shown
const STILL_EVERY = 1000; // ms between two frames with "reduce motion" set

export class Player {
  constructor() {
    this.isPaused = false;
    this.isRecorded = false;
    this.speed = 1;
    this.time = 0; // microseconds, of a recording
    this.begin = 0; // of a recording: one saved late from a server has nothing before
    this.length = 0; // the moment of its end
    this.isOwn = () => false; // whether a lane belongs to this page's playground
    this.changed = () => {};
    this.last = performance.now();
  }

  toggle() {
    if (this.isRecorded && this.time >= this.length) {
      this.time = this.begin;
      this.isPaused = false;
    } else this.isPaused = !this.isPaused;
    this.changed();
  }

  pause() {
    if (this.isPaused) return;
    this.isPaused = true;
    this.changed();
  }

  /** Show so many steps more, or fewer. */
  step(histories, change) {
    this.pause();
    for (const history of histories) {
      const place = Math.max(history.base + 1, Math.min(history.end, history.cursor + change));
      if (place <= history.end) history.cursor = place;
      this.settle(history);
    }
    if (this.isRecorded) this.time = Math.max(this.begin, ...histories.map((each) => each.now));
    this.changed();
  }

  /** Show a share of all that is known, from 0 to 1. */
  seek(histories, share) {
    if (this.isRecorded) {
      this.time = this.begin + share * (this.length - this.begin);
      this.showTime(histories);
    } else {
      this.pause();
      for (const history of histories) {
        history.cursor = Math.max(history.base, Math.round(history.base + share * (history.end - history.base)));
        this.settle(history);
      }
    }
    this.changed();
  }

  share(histories) {
    if (this.isRecorded) return this.length > this.begin ? (this.time - this.begin) / (this.length - this.begin) : 0;
    const [history] = histories;
    return history && history.end > history.base ? (history.cursor - history.base) / (history.end - history.base) : 1;
  }

  settle(history) {
    const column = history.column(history.cursor - 1);
    if (column) history.now = column.start + column.took;
  }

  showTime(histories) {
    for (const history of histories) {
      history.cursor = history.placeAt(this.time);
      history.now = this.time;
    }
  }

  /** Move on to the moment of a new frame. */
  advance(histories, now) {
    if (wantsStillness() && now - this.last < STILL_EVERY) return;
    const seconds = Math.min(wantsStillness() ? 2 : 0.25, (now - this.last) / 1000);
    this.last = now;
    if (this.isPaused) return;
    if (this.isRecorded) {
      this.time = Math.min(this.length, this.time + seconds * 1e6 * this.speed);
      this.showTime(histories);
      if (this.time >= this.length && this.length) this.pause();
      return;
    }
    for (const history of histories) {
      const ahead = history.end - history.cursor;
      if (ahead > 600 || wantsStillness()) history.cursor = history.end;
      else history.cursor += Math.min(ahead, Math.ceil(ahead * (seconds / CATCH_UP)));
      // An idle engine sends no steps, but time goes on.
      history.now = history.latest + Math.max(0, (now - history.receivedAt) * 1000 - 500_000);
    }
  }
}
