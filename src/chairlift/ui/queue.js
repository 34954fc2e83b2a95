// The queue: which requests wait, why, since when; by tenant.

import { byId, fill, h, say } from "./dom.js";
import { count, counted, duration, lastPart } from "./format.js";

export class Queue {
  constructor() {
    this.tenants = h("ul", { class: "tenants" });
    this.list = h("ol", { class: "waiting" });
    this.none = h("p", { class: "dim" }, "No request waits: every one that arrives is admitted at the next step.");
    byId("queue-body").append(h("div", { class: "panel stack" }, this.tenants, this.none, this.list));
  }

  refresh(histories) {
    const looks = histories.map((history) => ({ history, look: history.lookNow() })).filter((each) => each.look);
    const waiting = looks.reduce((sum, { look }) => sum + look.waiting, 0);
    const policies = [...new Set(histories.map((history) => history.facts?.policy).filter(Boolean))];
    say(byId("queue-summary"), `${counted(waiting, "request")} waiting${policies.length ? ` · policy ${policies.join(", ")}` : ""}`);
    this.none.hidden = waiting > 0;
    this.fillTenants(looks);
    const items = looks.flatMap(({ history, look }) => look.queue.map((values) => ({ history, values })));
    fill(this.list, items, ({ history, values }) => `${history.key} ${values[0]} ${values[1]}`, entry, (element, item) => fillEntry(element, item, histories.length > 1));
  }

  fillTenants(looks) {
    const sums = new Map();
    for (const { look } of looks)
      for (const [tenant, running, waiting] of look.tenants) {
        const sum = sums.get(tenant) ?? { running: 0, waiting: 0 };
        sum.running += running;
        sum.waiting += waiting;
        sums.set(tenant, sum);
      }
    const isNamed = [...sums.keys()].some(Boolean);
    const most = Math.max(1, ...[...sums.values()].map((each) => each.running + each.waiting));
    this.tenants.hidden = !isNamed;
    fill(this.tenants, isNamed ? [...sums] : [], ([tenant]) => tenant, ([tenant]) =>
      h("li", {}, h("span", { class: "name" }, tenant || "no tenant"), h("span", { class: "shares" }, h("i", { class: "running" }), h("i", { class: "queued" }), h("i", { class: "rest" })), h("span", { class: "dim" }, "")),
    (element, [, { running, waiting }]) => {
      const [first, second, rest] = element.children[1].children;
      first.style.flexGrow = String(running);
      second.style.flexGrow = String(waiting);
      rest.style.flexGrow = String(most - running - waiting);
      say(element.children[2], `${count(running)} running, ${count(waiting)} waiting`);
    });
  }
}

function entry() {
  return h("li", {}, h("p", { class: "line" }, h("strong", {}, ""), h("span", { class: "dim" }, "")), h("p", { class: "why" }, ""));
}

function fillEntry(element, { history, values: [id, index, tenant, prompt, , seconds, priority, preemptions, why] }, isOneOfSeveral) {
  const [line, sentence] = element.children;
  say(line.children[0], index ? `${id} #${index}` : id);
  const words = [`has waited ${duration(seconds * 1e6)}`, counted(prompt, "prompt token")];
  if (tenant) words.unshift(tenant);
  if (priority) words.push(`priority ${priority}`);
  if (preemptions) words.push(`preempted ${counted(preemptions, "time")}`);
  if (isOneOfSeveral) words.push(history.replica === null ? history.model : `${lastPart(history.model)} replica ${history.replica}`);
  say(line.children[1], words.join(" · "));
  say(sentence, why.join(" "));
}
