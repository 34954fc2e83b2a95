// The playground: a chat with this server, with its settings, its tokens and its way through the batch.

import { Answer, Timeline, alternatives } from "./answer.js";
import { byId, copyText, h, say } from "./dom.js";
import { asCurl, asPython } from "./request_code.js";

const SCHEMA = `{
  "type": "object",
  "properties": { "city": { "type": "string" }, "country": { "type": "string" } },
  "required": ["city", "country"]
}`;
const TOOLS = `[{
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": { "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] }
  }
}]`;
const MOST_ANSWERS = 128;
const SETTINGS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, 0.7],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, 128],
  ["n", "Answers", { min: 1, max: 8, step: 1 }, 1],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }, null],
  ["top_k", "Top k", { min: 0, step: 1 }, null],
  ["seed", "Seed", { step: 1 }, null],
];

export class Playground {
  constructor(signIn, source) {
    this.signIn = signIn;
    this.source = source;
    this.messages = []; // the conversation so far
    this.running = null; // the request in flight
    this.turns = []; // timelines with their request's id
    this.ids = new Set();
    this.inputs = {};
    this.build(byId("playground"));
  }

  owns(id) {
    return this.ids.has(id);
  }

  toggle() {
    const panel = byId("playground");
    panel.hidden = !panel.hidden;
    byId("playground-toggle").setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) {
      this.listModels();
      this.text.focus();
    } else byId("playground-toggle").focus();
  }

  build(panel) {
    this.model = h("select", { id: "play-model" });
    this.system = h("textarea", { id: "play-system", rows: 2, placeholder: "You are a helpful assistant." });
    const settings = SETTINGS.map(([name, label, limits, value]) => {
      const input = h("input", { id: `play-${name}`, type: "number", ...limits, value: value ?? "" });
      this.inputs[name] = input;
      return h("label", {}, h("span", {}, label), input);
    });
    this.scores = h("input", { id: "play-logprobs", type: "checkbox", checked: true });
    this.form = h("select", { id: "play-form" }, h("option", { value: "" }, "free text"), h("option", { value: "schema" }, "JSON schema"), h("option", { value: "tools" }, "tools, if it wants"), h("option", { value: "call" }, "a call of a tool"));
    this.formText = h("textarea", { id: "play-form-text", rows: 6, spellcheck: "false", class: "code", hidden: true, "aria-label": "Schema or tools, in JSON" });
    this.form.addEventListener("change", () => {
      this.formText.hidden = !this.form.value;
      const example = this.form.value === "schema" ? SCHEMA : TOOLS;
      if (this.form.value && example !== this.example) this.formText.value = this.example = example;
    });
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.text = h("textarea", { id: "play-text", rows: 3, placeholder: "Why is the sky blue?", "aria-label": "Message" });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.problem = h("p", { class: "error", role: "alert" });
    this.copied = h("span", { class: "dim", role: "status" }, "");
    this.tip = h("div", { class: "tip alternatives", role: "tooltip", hidden: true });
    const form = h("form", { class: "ask" }, this.text, h("div", { class: "row" }, this.send,
      h("button", { type: "button", onclick: () => this.clear() }, "Clear"),
      h("button", { type: "button", onclick: () => this.copy(asCurl) }, "Copy as curl"),
      h("button", { type: "button", onclick: () => this.copy(asPython) }, "Copy as Python"), this.copied), this.problem);
    panel.append(
      h("div", { class: "head" }, h("h2", {}, "Playground"), h("button", { type: "button", "aria-label": "Close the playground", onclick: () => this.toggle() }, "×")),
      h("details", { class: "settings" }, h("summary", {}, "Settings"),
        h("label", { class: "wide" }, h("span", {}, "Model"), this.model),
        h("label", { class: "wide" }, h("span", {}, "System prompt"), this.system),
        h("div", { class: "grid" }, ...settings),
        h("label", { class: "check" }, this.scores, h("span", {}, "Log-probabilities of tokens")),
        h("label", { class: "wide" }, h("span", {}, "Answer"), this.form), this.formText),
      this.log, form, this.tip);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.ask();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.ask();
      }
    });
    this.log.addEventListener("keydown", (event) => this.move(event));
    this.log.addEventListener("blur", () => (this.tip.hidden = true));
    panel.addEventListener("keydown", (event) => event.key === "Escape" && this.toggle());
    this.log.addEventListener("pointerover", (event) => this.point(event.target));
    this.log.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  /** Show the alternatives to the token under the pointer. */
  point(target) {
    const { scored } = target;
    this.tip.hidden = !scored;
    if (!scored) return;
    this.tip.replaceChildren(alternatives(scored));
    const place = target.getBoundingClientRect();
    const panel = byId("playground").getBoundingClientRect();
    this.tip.style.left = `${Math.max(8, Math.min(place.left - panel.left, panel.width - 220))}px`;
    this.tip.style.top = `${place.bottom - panel.top + 6}px`;
  }

  /** Arrow keys, in the conversation: from one token to the next; its alternatives are shown and read aloud. */
  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const tokens = [...this.log.querySelectorAll(".token")];
    if (!step || !tokens.length) return;
    event.preventDefault();
    const old = tokens.findIndex((each) => each.classList.contains("chosen"));
    const next = tokens[old < 0 ? (step > 0 ? 0 : tokens.length - 1) : Math.max(0, Math.min(tokens.length - 1, old + step))];
    tokens[old]?.classList.remove("chosen");
    next.classList.add("chosen");
    next.scrollIntoView({ block: "nearest" });
    this.point(next);
    say(byId("spoken"), this.tip.innerText);
  }

  async listModels() {
    if (this.model.options.length) return;
    try {
      const response = await this.signIn.fetch("/v1/models");
      const { data = [] } = await response.json();
      this.model.append(...data.map(({ id }) => h("option", { value: id }, id)));
    } catch {
      // A request without a model's name goes to the first one.
    }
  }

  /** The body of the request for the conversation with one more message; an error says which setting is wrong. */
  body(text) {
    const body = { messages: [] };
    if (this.model.value) body.model = this.model.value;
    if (this.system.value.trim()) body.messages.push({ role: "system", content: this.system.value });
    body.messages.push(...this.messages, { role: "user", content: text });
    for (const [name] of SETTINGS) if (this.inputs[name].value !== "") body[name] = Number(this.inputs[name].value);
    if (this.scores.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    if (this.form.value) {
      let given;
      try {
        given = JSON.parse(this.formText.value);
      } catch (error) {
        throw new Error(`the ${this.form.value === "schema" ? "schema is" : "tools are"} not JSON: ${error.message}`);
      }
      if (this.form.value !== "schema") body.tools = given;
      if (this.form.value === "call") Object.assign(body, { tool_choice: "required", parallel_tool_calls: false });
      if (this.form.value === "schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: given } };
    }
    return { ...body, stream: true };
  }

  async ask() {
    say(this.problem, "");
    const text = this.text.value.trim() || this.text.placeholder;
    let body;
    try {
      body = this.body(text);
    } catch (error) {
      say(this.problem, error.message);
      return;
    }
    const id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.ids.add(id);
    this.source().wanted.set(id, []);
    const many = Math.min(body.n ?? 1, MOST_ANSWERS); // further ones are not shown
    const answers = Array.from({ length: many }, (_, place) => new Answer(place, many));
    const timeline = new Timeline();
    this.turns.push({ id, timeline });
    this.log.append(h("p", { class: "asked" }, text), h("div", { class: "answers" }, ...answers.map((each) => each.element)), timeline.element);
    this.text.value = "";
    this.running = new AbortController();
    say(this.send, "Stop");
    try {
      await this.stream({ ...body, request_id: id, stream_options: { include_usage: true } }, answers, timeline);
      this.messages = [...body.messages.filter((each) => each.role !== "system"), answers[0].message];
    } catch (error) {
      if (error.name !== "AbortError") say(this.problem, error.message);
    }
    timeline.done = performance.now();
    this.running = null;
    say(this.send, "Send");
    this.refresh();
  }

  async stream(body, answers, timeline) {
    const response = await this.signIn.fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    if (!response.ok) {
      const found = await response.json().catch(() => ({}));
      throw new Error(found.error?.message ?? `the server answered ${response.status}`);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: {")) this.take(JSON.parse(line.slice(6)), answers, timeline);
      this.log.scrollTop = this.log.scrollHeight;
    }
  }

  take(chunk, answers, timeline) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) timeline.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      if (choice.delta?.content || choice.delta?.tool_calls) timeline.first ??= performance.now();
      answers[choice.index]?.take(choice);
    }
  }

  refresh() {
    if (byId("playground").hidden) return;
    for (const { id, timeline } of this.turns.slice(-4)) timeline.refresh(this.source().wanted.get(id));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.turns = [];
    this.log.replaceChildren();
    say(this.problem, "");
  }

  async copy(write) {
    try {
      const text = this.text.value.trim() || this.text.placeholder;
      await copyText(write(this.body(text), Boolean(this.signIn.key)));
      say(this.copied, "copied");
    } catch (error) {
      say(this.copied, `not copied: ${error.message}`);
    }
    setTimeout(() => say(this.copied, ""), 2000);
  }
}
