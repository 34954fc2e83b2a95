// The batch as a picture: a lane for each row, a column for each step, the newest at the right.
//
// Columns are drawn once, into a ring as wide as the picture; a frame copies the ring's two parts. So a new column costs
// its rows, whatever the history. All is drawn again only when the size, the zoom or the scale changes.

import { fit, palette } from "./dom.js";

const TOKENS = 44; // height of the bars of tokens, above the lanes
const TIMES = 36; // of step times, below
const GAP = 10;
const GUTTER = 46; // for labels, at the left
const LANES = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024];
const SCALES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 60000]; // ms
export const ZOOMS = [2, 3, 4, 6, 9, 14, 20];

export class Picture {
  constructor(canvas, history) {
    this.canvas = canvas;
    this.columns = null; // those in the ring: a history that begins anew has others
    this.history = history;
    this.context = canvas.getContext("2d", { alpha: false });
    this.ring = document.createElement("canvas");
    this.drawn = 0; // columns before this place are in the ring
    this.zoom = 4;
    this.lanes = 8;
    this.scale = 50; // ms, of the step times
    this.isOwn = () => false;
    this.isStale = true; // all must be drawn again
    this.shown = null; // what the last frame showed
    this.picked = null; // { place, row } under the pointer
  }

  /** The place and the row at a point of the element; null outside the lanes. */
  at(x, y) {
    const { canvas, history } = this;
    const place = history.cursor - 1 - Math.floor((canvas.clientWidth - x) / this.width);
    const row = Math.floor((y - TOKENS - GAP) / this.pitch);
    if (x < GUTTER || place < history.base || place >= history.end) return null;
    return { place, row: row >= 0 && row < this.lanes ? row : -1 };
  }

  get pitch() {
    return (this.canvas.clientHeight - TOKENS - TIMES - 2 * GAP) / this.lanes;
  }

  /** A column's width in the screen's pixels: a whole number, whatever the browser's zoom. */
  get step() {
    return Math.max(1, Math.round(this.zoom * (window.devicePixelRatio || 1)));
  }

  /** The same in the page's pixels, in which the pointer is measured. */
  get width() {
    return this.step / (window.devicePixelRatio || 1);
  }

  get visible() {
    return Math.max(1, Math.ceil((this.canvas.clientWidth - GUTTER) / this.width));
  }

  /** Draw a frame, if anything has changed. */
  draw() {
    const { canvas, history } = this;
    if (!canvas.clientWidth) return;
    if (fit(canvas) || this.columns !== history.columns) this.isStale = true;
    this.columns = history.columns;
    this.choose();
    const cursor = history.cursor;
    const state = `${cursor} ${this.picked?.place} ${this.picked?.row}`;
    if (!this.isStale && state === this.shown) return;
    this.shown = state;
    const first = Math.max(history.base, cursor - this.visible);
    const pixels = window.devicePixelRatio || 1;
    const slots = this.visible + 1;
    if (this.isStale || this.ring.width !== slots * this.step || this.ring.height !== canvas.height) {
      this.ring.width = slots * this.step;
      this.ring.height = canvas.height;
      this.pen = this.ring.getContext("2d", { alpha: false });
      this.drawn = first;
      this.oldest = first;
      this.isStale = false;
    }
    if (this.drawn > cursor || this.oldest > first || this.drawn < first) this.drawn = this.oldest = first;
    this.pixels = pixels;
    for (; this.drawn < cursor; this.drawn++) this.column(this.drawn, slots);
    this.oldest = Math.max(this.oldest, this.drawn - slots);
    this.compose(first, cursor, slots);
  }

  /** Choose how many lanes and how long a time fit the columns in view. */
  choose() {
    const { history } = this;
    let top = 3;
    let slowest = 1;
    const first = Math.max(history.base, history.cursor - this.visible);
    for (let place = first; place < history.cursor; place++) {
      const column = history.column(place);
      slowest = Math.max(slowest, column.took);
      top = Math.max(top, column.top);
    }
    const lanes = LANES.find((each) => each > top) ?? top + 1;
    const target = history.facts?.target_us ?? 0;
    const scale = SCALES.find((each) => each * 1000 >= Math.max(slowest, target)) ?? SCALES.at(-1);
    // It shrinks only when much less is needed, or it would jump to and fro.
    if (lanes > this.lanes || lanes * 2 <= this.lanes) this.set("lanes", lanes);
    if (scale > this.scale || scale * 2 <= this.scale) this.set("scale", scale);
  }

  set(name, value) {
    if (this[name] === value) return;
    this[name] = value;
    this.isStale = true;
  }

  /** Draw one column into the ring. */
  column(place, slots) {
    const { pen, pixels, history, step } = this;
    const column = history.column(place);
    const colours = palette();
    const x = (place % slots) * step;
    const gap = step >= 4 ? Math.max(1, Math.round(step / 8)) : 0;
    const width = step - gap;
    pen.fillStyle = colours.panel;
    pen.fillRect(x, 0, step, this.ring.height);
    if (!column) return;
    const top = Math.round((TOKENS + GAP) * pixels);
    const pitch = this.pitch * pixels;
    this.stack(column, x, width, colours);
    const chunks = column.chunks ? new Map(column.chunks.map((each) => [each[0], each])) : null;
    const drafts = column.drafts ? new Map(column.drafts.map((each) => [each[0], each])) : null;
    const { rows, cells } = column;
    const space = pitch >= 5 ? 1 : 0;
    const thin = pitch >= 3 ? 0.6 : 0.8;
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i];
      const lane = cells[i];
      const y = Math.round(top + row * pitch);
      const height = Math.max(1, Math.round(top + (row + 1) * pitch) - y - space);
      if (lane && this.isOwn(lane)) {
        pen.fillStyle = colours.own;
        pen.fillRect(x, y, step, height);
      }
      const chunk = chunks?.get(row);
      const draft = drafts?.get(row);
      if (chunk) this.chunk(chunk, lane, column, x, y, width, height, colours);
      else if (draft) this.draft(draft, x, y, width, height, colours);
      else {
        pen.fillStyle = lane ? colours.decode : colours.discarded;
        const own = Math.max(1, Math.round(height * thin));
        pen.fillRect(x, y + Math.round((height - own) / 2), width, own);
      }
    }
    for (const { row, kind, lane } of column.marks ?? []) this.mark(row, kind, lane, x, width, top, pitch, space, colours);
    this.time(column, x, width, colours);
  }

  chunk([, start], lane, column, x, y, width, height, colours) {
    const { pen } = this;
    pen.fillStyle = colours.prefill;
    pen.fillRect(x, y, width, height);
    if (start > 0 && (!lane || lane.firstChunk === column.number)) {
      // The part of the prompt that needed no computing, as its share of the lane.
      const share = Math.max(0.34, Math.min(0.8, start / Math.max(1, lane?.known ?? start)));
      pen.fillStyle = colours.cached;
      pen.fillRect(x, y, width, Math.max(1, Math.round(height * share)));
    }
  }

  draft([, drafted, accepted], x, y, width, height, colours) {
    const { pen } = this;
    const part = height / (drafted + 1);
    pen.fillStyle = colours.rejected;
    pen.fillRect(x, y, width, height);
    pen.fillStyle = colours.accepted;
    pen.fillRect(x, Math.round(y + part * (drafted - accepted)), width, Math.round(part * accepted));
    pen.fillStyle = colours.decode;
    pen.fillRect(x, Math.round(y + height - part), width, Math.max(1, Math.round(part)));
  }

  mark(row, kind, lane, x, width, top, pitch, space, colours) {
    const { pen } = this;
    const y = Math.round(top + row * pitch);
    const height = Math.max(1, Math.round(top + (row + 1) * pitch) - y - space);
    if (kind === "preempted") {
      pen.fillStyle = colours.preempted;
      pen.fillRect(x, y, width, height);
      return;
    }
    pen.fillStyle = lane.reason === "error" ? colours.preempted : colours.finished;
    const cap = Math.max(1, Math.min(width, Math.round(3 * this.pixels)));
    pen.fillRect(x + width - cap, y, cap, height);
  }

  /** The tokens of a step, as a share of its budget; the square root, or decodes alone would not be seen. */
  stack(column, x, width, colours) {
    const { pen, pixels, history } = this;
    const budget = history.facts?.step_tokens || 1;
    const full = TOKENS * pixels;
    const all = Math.round(full * Math.min(1, Math.sqrt(column.tokens / budget)));
    const prompt = Math.round(all * (column.prompt / Math.max(1, column.tokens)));
    pen.fillStyle = colours.decode;
    pen.fillRect(x, full - all, width, all - prompt);
    pen.fillStyle = colours.prefill;
    pen.fillRect(x, full - prompt, width, prompt);
  }

  time(column, x, width, colours) {
    const { pen, pixels, history } = this;
    const bottom = this.ring.height;
    const full = TIMES * pixels;
    const height = Math.max(1, Math.round(full * Math.min(1, column.took / 1000 / this.scale)));
    const target = history.facts?.target_us;
    pen.fillStyle = target && column.took > target ? colours.preempted : colours.dim;
    pen.fillRect(x, bottom - height, width, height);
    if (target) {
      pen.fillStyle = colours.budget;
      pen.fillRect(x, Math.round(bottom - full * Math.min(1, target / 1000 / this.scale)), width, Math.max(1, pixels));
    }
  }

  /** Copy the ring to the screen, the newest column at the right edge, with labels. */
  compose(first, cursor, slots) {
    const { context, canvas, pixels, step, ring } = this;
    const colours = palette();
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, canvas.width, canvas.height);
    this.lines(colours);
    let x = canvas.width - (cursor - first) * step;
    for (let place = first; place < cursor; ) {
      const slot = place % slots;
      const many = Math.min(cursor - place, slots - slot);
      context.drawImage(ring, slot * step, 0, many * step, ring.height, x, 0, many * step, ring.height);
      x += many * step;
      place += many;
    }
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, GUTTER * pixels, canvas.height);
    this.labels(colours);
    this.frame(cursor, colours);
  }

  lines(colours) {
    const { context, canvas, pixels } = this;
    context.fillStyle = colours.line;
    for (const y of [TOKENS + GAP / 2, canvas.clientHeight - TIMES - GAP / 2])
      context.fillRect(GUTTER * pixels, Math.round(y * pixels), canvas.width, 1);
  }

  labels(colours) {
    const { context, canvas, pixels, history } = this;
    context.font = `${11 * pixels}px ${getComputedStyle(canvas).fontFamily}`;
    context.fillStyle = colours.dim;
    context.textBaseline = "middle";
    const write = (text, y) => context.fillText(text, 0, y * pixels);
    write("tokens", 8);
    write(String(history.facts?.step_tokens ?? ""), 22);
    const pitch = this.pitch;
    const every = this.lanes <= 8 ? 1 : this.lanes / 4;
    for (let row = 0; row < this.lanes; row += every) write(`row ${row}`, TOKENS + GAP + (row + 0.5) * Math.max(pitch, 1) + (pitch < 8 ? 3 : 0));
    write("step", canvas.clientHeight - TIMES + 8);
    write(this.scale >= 1000 ? `${this.scale / 1000} s` : `${this.scale} ms`, canvas.clientHeight - TIMES + 22);
  }

  /** Outline what is under the pointer. */
  frame(cursor, colours) {
    const { context, canvas, pixels, picked, step } = this;
    if (!picked || picked.place >= cursor) return;
    const x = canvas.width - (cursor - picked.place) * step;
    context.strokeStyle = colours.ink;
    context.lineWidth = Math.max(1, pixels);
    context.globalAlpha = 0.35;
    context.strokeRect(x - 0.5, 0.5, step, canvas.height - 1);
    context.globalAlpha = 1;
    if (picked.row < 0) return;
    const y = (TOKENS + GAP + picked.row * this.pitch) * pixels;
    context.strokeRect(x - 1, y - 1, step + 1, Math.max(3, this.pitch * pixels + 1));
  }
}
