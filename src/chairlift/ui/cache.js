// The KV cache of each engine: a map of its blocks, host memory and disk, hit rate, and the largest cached prefixes.

import { byId, fill, fit, h, onColours, palette, say } from "./dom.js";
import { brief, count, counted, lastPart, percent } from "./format.js";

const STATES = ["free", "cached", "held", "held", "shared", "shared"]; // by the digits of BlockPool.states
export const BLOCK_COLOURS = [
  ["held", "owned by a sequence"],
  ["shared", "shared by several"],
  ["cached", "cached, owned by none"],
  ["free", "free"],
  ["host", "in host memory"],
  ["disk", "on disk"],
];

const HEIGHT = 176; // most pixels of the map
const LARGEST = 22; // pixels of a square

class CacheCard {
  constructor(history) {
    this.history = history;
    this.name = h("h3", {}, "");
    this.note = h("p", { class: "dim" }, "");
    this.map = h("canvas", { class: "map", role: "img" });
    this.bar = h("div", { class: "shares", "aria-hidden": "true" });
    this.tiers = h("div", { class: "stack" });
    this.hits = h("dl", { class: "facts" });
    this.prefixes = h("tbody");
    this.none = h("p", { class: "dim" }, "No prefix is cached yet.");
    this.table = h("table", {},
      h("caption", {}, "Largest cached prefixes"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "tokens"), h("th", { scope: "col" }, "continuations"), h("th", { scope: "col" }, "in use by"), h("th", { scope: "col" }, "tenant"))),
      this.prefixes);
    this.element = h("article", { class: "panel cache" }, h("div", { class: "head" }, this.name, this.note), this.map, this.bar, this.tiers, this.hits, this.table, this.none);
    new ResizeObserver(() => (this.shown = null)).observe(this.map);
  }

  refresh(isAlone) {
    const { history } = this;
    const look = history.lookNow();
    say(this.name, isAlone ? "Blocks" : `${lastPart(history.model)}${history.replica === null ? "" : ` · replica ${history.replica}`}`);
    if (!look || !history.facts) return;
    const { blocks, block_size } = history.facts;
    const [free, cached, owned] = look.blocks;
    const shared = [...look.map].filter((each) => each >= "4").length * look.every;
    const words = `${count(owned)} owned${shared ? ` (about ${count(Math.min(shared, owned))} shared)` : ""}, ${count(cached)} cached, ${count(free)} free`;
    say(this.note, `${counted(blocks, "block")} of ${block_size} tokens${look.every > 1 ? `; a square is 1 of ${look.every}` : ""}`);
    this.map.setAttribute("aria-label", `Map of KV blocks: ${words}`);
    fill(this.bar, [["held", owned - shared], ["shared", shared], ["cached", cached], ["free", free]], ([name]) => name, ([name]) => h("i", { class: name }), (element, [, part]) => (element.style.flexGrow = String(Math.max(0, part))));
    this.facts(look, words);
    fill(this.tiers, look.tiers, ([name]) => name, ([name]) => tier(name), (element, each) => fillTier(element, each));
    this.table.hidden = !look.prefixes.length;
    this.none.hidden = Boolean(look.prefixes.length) || !look.has_cache;
    this.prefixes.replaceChildren(...look.prefixes.map(([tenant, tokens, branches, holders]) => h("tr", {},
      h("td", { class: "number" }, count(tokens)), h("td", { class: "number" }, count(branches)), h("td", { class: "number" }, counted(holders, "sequence")), h("td", {}, tenant || "–"))));
    this.draw(look);
  }

  facts(look, words) {
    const rate = look.prompt_tokens ? look.cached_tokens / look.prompt_tokens : 0;
    const recent = this.recent(look);
    const lines = [["Blocks", words]];
    if (look.has_cache) {
      lines.push(["Prefix hits", `${percent(rate)} of ${brief(look.prompt_tokens)} prompt tokens${recent === null ? "" : `; ${percent(recent)} in the last minute`}`]);
      lines.push(["Evictions", counted(look.evictions, "block")]);
    } else lines.push(["Prefix cache", "off"]);
    if (look.drafts) lines.push(["Drafts", `${percent(look.drafts[0] ? look.drafts[1] / look.drafts[0] : 0)} of ${brief(look.drafts[0])} accepted`]);
    lines.push(["Preemptions", count(look.counts[5])]);
    this.hits.replaceChildren(...lines.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  /** The hit rate of the last minute; null if no prompt was admitted in it. */
  recent(look) {
    const before = this.history.looks.find((each) => each.at > look.at - 60e6) ?? look;
    const prompt = look.prompt_tokens - before.prompt_tokens;
    return prompt > 0 ? (look.cached_tokens - before.cached_tokens) / prompt : null;
  }

  /** Make the map as high as its squares need. */
  shrink(many) {
    const width = this.map.clientWidth;
    this.size = largestSquare(width, HEIGHT, many);
    const height = `${Math.ceil(many / Math.max(1, Math.floor(width / this.size))) * this.size}px`;
    if (this.map.style.height !== height) this.map.style.height = height;
  }

  draw(look) {
    this.shrink(look.map.length);
    if (fit(this.map)) this.shown = null;
    if (this.shown === look || !this.map.width) return;
    this.shown = look;
    const pen = this.map.getContext("2d");
    const colours = palette();
    const { width, height } = this.map;
    const many = look.map.length;
    const size = Math.max(1, Math.floor(this.size * (window.devicePixelRatio || 1)));
    const across = Math.max(1, Math.floor(width / size));
    const gap = size > 5 ? Math.max(1, Math.round(size / 8)) : size > 3 ? 1 : 0;
    pen.clearRect(0, 0, width, height);
    for (let place = 0; place < many; place++) {
      pen.fillStyle = colours[STATES[look.map.charCodeAt(place) - 48]];
      pen.fillRect((place % across) * size, Math.floor(place / across) * size, size - gap, size - gap);
    }
  }
}

/** The largest square of which so many fit an area. */
function largestSquare(width, height, many) {
  let size = Math.min(LARGEST, Math.floor(Math.sqrt((width * height) / many)));
  while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < many) size--;
  return Math.max(1, size);
}

function tier(name) {
  const used = h("i", { class: name });
  return h("div", { class: "tier" }, h("span", {}, name === "host" ? "Host memory" : "Disk"), h("span", { class: "shares" }, used, h("i", { class: "free" })), h("span", { class: "dim" }, ""));
}

function fillTier(element, [, swapped, cached, total]) {
  const [, bar, words] = element.children;
  bar.children[0].style.flexGrow = String(swapped + cached);
  bar.children[1].style.flexGrow = String(Math.max(0, total - swapped - cached));
  say(words, `${count(cached)} cached, ${count(swapped)} swapped out, of ${counted(total, "block")}`);
}

export class Caches {
  constructor() {
    this.cards = new Map(); // by history
    onColours(() => {
      for (const card of this.cards.values()) card.shown = null;
    });
  }

  refresh(histories) {
    fill(byId("cache-body"), histories, (each) => each, (each) => {
      const card = new CacheCard(each);
      this.cards.set(each, card);
      return card.element;
    });
    for (const history of this.cards.keys()) if (!histories.includes(history)) this.cards.delete(history);
    for (const history of histories) this.cards.get(history).refresh(histories.length === 1);
  }
}
