// One card for each engine: its name, its picture, what is under the pointer, and the same as a table.

import { byId, fill, h, say } from "./dom.js";
import { count, counted, duration, lastPart } from "./format.js";
import { Picture, ZOOMS } from "./picture.js";

const REASONS = {
  stop: "finished: the model ended it",
  complete: "finished: its grammar allows nothing more",
  length: "finished: max_tokens or the context is used up",
  abort: "aborted: its client disconnected",
  error: "failed",
  ended: "ended by its client: a stop string or a disconnect",
};

/** What a lane is doing in a column, in words. */
export function doing(column, row, lane) {
  const mark = column.marks?.find((each) => each.row === row && each.kind === "preempted");
  if (mark) return mark.lane.reason;
  const chunk = column.chunks?.find((each) => each[0] === row);
  if (chunk) {
    const [, start, length] = chunk;
    const cached = start && lane?.firstChunk === column.number ? `, behind ${count(start)} that were cached` : "";
    return `prefill: ${counted(length, "prompt token")}${cached}`;
  }
  const draft = column.drafts?.find((each) => each[0] === row);
  if (draft) return `decode with ${counted(draft[1], "draft")}: ${count(draft[2])} accepted`;
  return lane ? "decode: 1 token" : "discarded: its sequence had just ended";
}

export function linesOf(lane) {
  const lines = [
    ["request", lane.index ? `${lane.id} #${lane.index}` : lane.id],
    ["tenant", lane.tenant || "none"],
    ["prompt", `${count(lane.prompt)} tokens${lane.cached ? `, ${count(lane.cached)} cached` : ""}`],
    ["answer", lane.output === null ? `up to ${count(lane.limit - lane.prompt)} tokens` : counted(lane.output, "token")],
    ["waited", duration(lane.waited)],
  ];
  if (lane.ttft !== null) lines.push(["first token", `after ${duration(lane.ttft)}`]);
  if (lane.e2e !== null) lines.push(["end to end", duration(lane.e2e)]);
  if (lane.preemptions) lines.push(["preempted", counted(lane.preemptions, "time")]);
  if (lane.priority) lines.push(["priority", String(lane.priority)]);
  if (lane.reason) lines.push(["end", REASONS[lane.reason] ?? lane.reason]);
  if (typeof lane.tail === "string" && lane.tail) lines.push(["prompt ends", lane.tail.slice(-240)]);
  return lines;
}

class Card {
  constructor(history, player) {
    this.history = history;
    this.player = player;
    this.name = h("h3", {}, "");
    this.note = h("p", { class: "dim" }, "");
    this.trouble = h("p", { class: "error", role: "alert", hidden: true });
    this.canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img" });
    this.tip = h("div", { class: "tip", role: "tooltip", hidden: true });
    this.body = h("tbody");
    this.caption = h("caption");
    this.table = h("details", { class: "as-table" }, h("summary", {}, "This step as a table"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The step's rows" },
        h("table", {}, this.caption,
          h("thead", {}, h("tr", {}, ...["row", "request", "tenant", "prompt", "cached", "waited", "in this step"].map((each) => h("th", { scope: "col" }, each)))),
          this.body)));
    this.element = h("article", { class: "panel engine" }, h("div", { class: "head" }, this.name, this.note), this.trouble,
      h("div", { class: "picture" }, this.canvas, this.tip), this.table);
    this.picture = new Picture(this.canvas, history);
    this.picture.isOwn = player.isOwn;
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.point(-1, -1));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("blur", () => this.point(-1, -1));
    new ResizeObserver(() => (this.picture.isStale = true)).observe(this.canvas);
  }

  point(x, y) {
    this.picture.picked = this.pointer = null;
    if (x >= 0) {
      this.picture.picked = this.picture.at(x, y);
      this.pointer = { x, y };
    }
    this.tell();
  }

  /** Arrow keys: up and down choose a row of the newest column; the player steps left and right. */
  move(event) {
    if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
    event.preventDefault();
    this.player.pause();
    const place = this.history.cursor - 1;
    const column = this.history.column(place);
    if (!column) return;
    const rows = [...column.rows].sort((a, b) => a - b);
    const old = rows.indexOf(this.picture.picked?.row ?? -1);
    const next = old + (event.key === "ArrowDown" ? 1 : -1);
    const row = rows[Math.max(0, Math.min(rows.length - 1, next))];
    this.picture.picked = { place, row };
    this.pointer = { x: this.canvas.clientWidth - 20, y: 54 + row * this.picture.pitch };
    this.tell();
    say(byId("spoken"), this.tip.innerText);
  }

  /** Show what is known of the cell under the pointer. */
  tell() {
    const picked = this.picture.picked;
    const column = picked && this.history.column(picked.place);
    this.tip.hidden = !column;
    if (!column) return;
    const place = column.rows.indexOf(picked.row);
    const marked = column.marks?.find((each) => each.row === picked.row)?.lane;
    const lane = (place >= 0 ? column.cells[place] : null) ?? marked ?? null;
    const lines = [h("strong", {}, `step ${count(column.number)}`), h("span", {}, `${counted(column.rows.length, "sequence")}, ${counted(column.tokens, "token")}, ${duration(column.took)}`)];
    if (place >= 0 || marked) {
      lines.push(h("em", {}, doing(column, picked.row, lane)));
      const list = h("dl");
      for (const [name, value] of lane ? linesOf(lane) : []) list.append(h("dt", {}, name), h("dd", {}, value));
      lines.push(list);
    }
    this.tip.replaceChildren(...lines);
    const width = Math.min(320, this.canvas.clientWidth - 16);
    const x = Math.max(8, Math.min(this.pointer.x + 16, this.canvas.clientWidth - width - 8));
    const isBelow = this.pointer.y < this.canvas.clientHeight / 2;
    this.tip.style.width = `${width}px`;
    this.tip.style.left = `${this.pointer.x + 16 + width > this.canvas.clientWidth ? Math.max(8, this.pointer.x - width - 16) : x}px`;
    this.tip.style.top = isBelow ? `${this.pointer.y + 14}px` : "auto";
    this.tip.style.bottom = isBelow ? "auto" : `${this.canvas.clientHeight - this.pointer.y + 14}px`;
  }

  refresh(isAlone) {
    const { facts, state, model, replica } = this.history;
    say(this.name, isAlone || replica === null ? lastPart(model) : `${lastPart(model)} · replica ${replica}`);
    const words = [];
    if (state?.device) words.push(`${state.dtype} on ${state.device}`);
    if (facts) {
      words.push(`${counted(facts.max_sequences, "row")}, ${count(facts.step_tokens)} tokens a step`);
      words.push([facts.policy, facts.batching, facts.prefill].join(" · "));
    }
    say(this.note, words.join("  ·  "));
    this.trouble.hidden = !state?.trouble;
    say(this.trouble, state?.trouble ?? "");
    const column = this.history.column(this.history.cursor - 1);
    this.canvas.setAttribute("aria-label", column
      ? `Batch at step ${column.number}: ${column.rows.length} sequences, ${column.prompt} prompt tokens, ${column.sampled} output tokens. A table follows.`
      : "Batch: no step has run yet");
    if (this.table.open) this.fillTable(column);
  }

  fillTable(column) {
    say(this.caption, column ? `Step ${count(column.number)}: ${counted(column.tokens, "token")} in ${duration(column.took)}` : "No step has run yet");
    const rows = (column?.rows ?? []).map((row, place) => ({ row, lane: column.cells[place] }));
    rows.sort((a, b) => a.row - b.row);
    this.body.replaceChildren(...rows.map(({ row, lane }) => h("tr", {},
      h("th", { scope: "row" }, String(row)),
      ...[lane?.id ?? "–", lane?.tenant || "–", lane ? count(lane.prompt) : "–", lane ? count(lane.cached) : "–", duration(lane?.waited), doing(column, row, lane)]
        .map((each) => h("td", {}, each)))));
  }
}

export class Cards {
  constructor(player) {
    this.player = player;
    this.zoom = 2;
    this.cards = new Map(); // by history: another recording may have an engine of the same name
  }

  /** Make the cards of new engines, and draw all. */
  draw(histories) {
    fill(byId("engines"), histories, (each) => each, (each) => {
      const card = new Card(each, this.player);
      card.picture.zoom = ZOOMS[this.zoom];
      this.cards.set(each, card);
      return card.element;
    });
    for (const history of this.cards.keys()) if (!histories.includes(history)) this.cards.delete(history);
    for (const history of histories) {
      const card = this.cards.get(history);
      card.picture.draw();
      if (card.pointer && !this.player.isPaused) card.point(card.pointer.x, card.pointer.y);
    }
  }

  refresh(histories) {
    for (const history of histories) this.cards.get(history)?.refresh(histories.length === 1);
  }

  zoomBy(change) {
    this.zoom = Math.max(0, Math.min(ZOOMS.length - 1, this.zoom + change));
    for (const card of this.cards.values()) card.picture.set("zoom", ZOOMS[this.zoom]);
  }

  again() {
    for (const card of this.cards.values()) card.picture.isStale = true;
  }
}
