// One answer of the playground while it streams: text, tokens with their log-probabilities, tool calls, timeline.

import { h, say } from "./dom.js";
import { count, counted, duration } from "./format.js";

export class Answer {
  constructor(place, many) {
    this.text = "";
    this.reasoning = h("p", { class: "reasoning", hidden: true });
    this.body = h("div", { class: "text" });
    this.calls = h("pre", { class: "calls", hidden: true });
    this.end = h("p", { class: "dim end" }, "");
    this.element = h("div", { class: "answer" }, many > 1 ? h("p", { class: "dim" }, `answer ${place + 1}`) : null, this.reasoning, this.body, this.calls, this.end);
    this.toolCalls = [];
    this.pending = []; // tokens that have no text yet
  }

  take(choice) {
    const { delta = {}, logprobs, finish_reason: reason } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) {
      this.reasoning.hidden = false;
      this.reasoning.append(thought);
    }
    const content = delta.content ?? "";
    this.text += content;
    this.pending.push(...(logprobs?.content ?? []));
    if (content) this.body.append(...this.spell(content));
    else if (thought || delta.tool_calls) this.pending = [];
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (reason) say(this.end, reason === "stop" || reason === "tool_calls" ? "" : `ended: ${reason}`);
  }

  /** A part of the text as tokens. Tokens that are no text, such as the one that ends an answer, are left out. */
  spell(content) {
    const scored = this.pending;
    this.pending = [];
    const first = scored.findIndex((_, place) => scored.slice(place).map((each) => each.token).join("") === content);
    if (first >= 0) return scored.slice(first).map((each) => token(each, each.token));
    return [scored.length ? token(scored.at(-1), content) : content]; // a character of several tokens
  }

  /** The answer as a message of the conversation that goes on. */
  get message() {
    const whole = this.toolCalls.filter((each) => isJson(each.arguments)); // the last may have been cut off
    const calls = whole.map(({ id, ...called }) => ({ id, type: "function", function: called }));
    if (!calls.length) return { role: "assistant", content: this.text };
    return { role: "assistant", content: this.text || null, tool_calls: calls };
  }

  call({ index = 0, id, function: part = {} }) {
    const known = (this.toolCalls[index] ??= { id, name: "", arguments: "" });
    known.name += part.name ?? "";
    known.arguments += part.arguments ?? "";
    this.calls.hidden = false;
    say(this.calls, this.toolCalls.map((each) => `${each.name}(${each.arguments})`).join("\n"));
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** A token, the darker behind it the less likely it was; its alternatives appear on hover. */
function token(scored, text) {
  const chance = Math.exp(scored.logprob);
  const element = h("span", { class: "token" }, text);
  element.style.setProperty("--doubt", String(Math.round(100 * (1 - chance))));
  element.scored = scored;
  return element;
}

/** The alternatives to a token, as lines with bars. */
export function alternatives(scored) {
  const lines = scored.top_logprobs?.length ? scored.top_logprobs : [scored];
  return h("div", {}, ...lines.map((each) => {
    const chance = Math.exp(each.logprob);
    const bar = h("i", { "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, 60 * chance)}px`;
    return h("p", { class: each.token === scored.token ? "chosen" : "" }, h("code", {}, JSON.stringify(each.token).slice(1, -1) || "∅"), bar, h("span", {}, `${(100 * chance).toFixed(1)}%`));
  }));
}

/** A request's times: in the queue, in prefill, decoding; from the engine's events where this key may see them. */
export class Timeline {
  constructor() {
    this.bar = h("div", { class: "shares timeline", "aria-hidden": "true" }, h("i", { class: "queued" }), h("i", { class: "prefill" }), h("i", { class: "decode" }));
    this.words = h("p", { class: "dim" }, "");
    this.element = h("div", { class: "times" }, this.bar, this.words);
    this.sent = performance.now();
    this.first = this.done = null;
    this.usage = null;
  }

  refresh(lanes) {
    const now = this.done ?? performance.now();
    const seen = ((this.first ?? now) - this.sent) * 1000;
    const total = (now - this.sent) * 1000;
    const lane = lanes?.[0];
    const waited = lane?.waited ?? 0;
    const parts = [waited, Math.max(0, seen - waited), Math.max(0, total - seen)];
    parts.forEach((part, place) => (this.bar.children[place].style.flexGrow = String(Math.max(0.001, part))));
    const words = [];
    if (lane) words.push(`queue ${duration(waited)}`);
    if (this.first) words.push(`first token after ${duration(seen)}`);
    if (lane?.cached) words.push(`${count(lane.cached)} of ${count(lane.prompt)} prompt tokens cached`);
    const tokens = this.usage?.completion_tokens;
    if (tokens) words.push(`${counted(tokens, "token")} in ${duration(total)}`);
    if (tokens > 1 && this.done && total > seen) words.push(`${count((tokens - 1) / ((total - seen) / 1e6))} tokens/s`);
    const preempted = lanes?.some((each) => each.preemptions);
    if (preempted) words.push("preempted");
    say(this.words, words.join(" · "));
  }
}
