// The page: it follows a live server or plays a recording, and shows both alike.

import { BLOCK_COLOURS, Caches } from "./cache.js";
import { byId, h, onColours, say } from "./dom.js";
import { Cards } from "./engines.js";
import { clock, lastPart } from "./format.js";
import { Meters } from "./meters.js";
import { Player } from "./player.js";
import { Playground } from "./playground.js";
import { Queue } from "./queue.js";
import { SignIn } from "./signin.js";
import { Source } from "./source.js";

const REFRESH = 250; // ms between two updates of numbers and tables
const LEGEND = [
  ["prefill", "prompt chunk"],
  ["cached", "cached prefix"],
  ["decode", "decode"],
  ["accepted", "accepted draft"],
  ["rejected", "rejected draft"],
  ["preempted", "preempted"],
  ["finished", "finished"],
  ["discarded", "discarded"],
  ["own", "this page's own"],
];

const signIn = new SignIn();
const player = new Player();
const cards = new Cards(player);
const meters = new Meters();
const caches = new Caches();
const queue = new Queue();
let source = new Source();
const playground = new Playground(signIn, () => source);
player.isOwn = (lane) => playground.owns(lane.id);

for (const [id, entries] of [["legend", LEGEND], ["cache-legend", BLOCK_COLOURS]])
  byId(id).append(...entries.map(([name, words]) => h("li", { "data-name": name }, h("i", { class: name, "aria-hidden": "true" }), words)));

// ---- what is shown

let refreshed = 0;
let frames = 0;

function frame(now) {
  requestAnimationFrame(frame); // first: an error in this frame must not stop those that follow
  player.advance(source.all, now);
  cards.draw(source.all);
  frames++;
  if (now - refreshed > REFRESH) {
    refreshed = now;
    refresh();
  }
}

function refresh() {
  const { all } = source;
  meters.refresh(all);
  cards.refresh(all);
  caches.refresh(all);
  queue.refresh(all);
  playground.refresh();
  const models = [...new Set(all.map((history) => lastPart(history.model)))];
  showLegends(all);
  say(byId("batch-summary"), "one lane a row, one column a step, the newest at the right");
  say(byId("title"), source.title || (source.isRecorded ? "" : models.join(", ")));
  showPosition();
}

/** Legends name the colours that this engine can have: drafts with speculation, host and disk where there are any. */
function showLegends(all) {
  const looks = all.map((history) => history.lookNow()).filter(Boolean);
  const tiers = new Set(looks.flatMap((look) => look.tiers.map(([name]) => name)));
  const hasDrafts = looks.some((look) => look.drafts);
  const shown = { accepted: hasDrafts, rejected: hasDrafts, host: tiers.has("host"), disk: tiers.has("disk"), own: playground.ids.size > 0 };
  for (const entry of document.querySelectorAll(".legend li")) entry.hidden = shown[entry.dataset.name] === false;
}

function showPosition() {
  const isShown = source.isRecorded || player.isPaused;
  byId("position").closest("label").hidden = !isShown;
  if (!isShown) return;
  if (document.activeElement !== byId("position") || !player.isPaused)
    byId("position").value = String(Math.round(1000 * player.share(source.all)));
  const step = Math.max(0, ...source.all.map((history) => history.column(history.cursor - 1)?.number ?? 0));
  const words = source.isRecorded ? `${clock(player.time - player.begin)} of ${clock(player.length - player.begin)}` : `step ${step.toLocaleString("en")}`;
  say(byId("clock"), words);
  byId("position").setAttribute("aria-valuetext", words);
}

function status(kind, text) {
  byId("status").dataset.kind = kind;
  say(byId("status").querySelector("span"), text);
}

player.changed = () => {
  byId("pause").setAttribute("aria-pressed", String(player.isPaused));
  say(byId("pause"), player.isPaused ? (source.isRecorded ? "Play" : "Resume") : "Pause");
  if (source.isRecorded) status("recorded", player.isPaused ? "recording, paused" : "recording");
  else if (byId("status").dataset.kind !== "down") status(player.isPaused ? "paused" : "live", player.isPaused ? "paused" : "live");
  showPosition();
};

// ---- controls

byId("pause").addEventListener("click", () => player.toggle());
byId("back").addEventListener("click", () => player.step(source.all, -1));
byId("forward").addEventListener("click", () => player.step(source.all, 1));
byId("zoom-in").addEventListener("click", () => cards.zoomBy(1));
byId("zoom-out").addEventListener("click", () => cards.zoomBy(-1));
byId("speed").addEventListener("change", () => (player.speed = Number(byId("speed").value)));
byId("position").addEventListener("input", () => player.seek(source.all, Number(byId("position").value) / 1000));
byId("file").addEventListener("change", () => {
  open(byId("file").files[0]);
  byId("file").value = ""; // or the same file, mended, could not be chosen again
});
byId("save").addEventListener("click", () => {
  const link = h("a", { href: URL.createObjectURL(source.recording()), download: "chairlift.jsonl" });
  link.click();
  URL.revokeObjectURL(link.href);
});
byId("playground-toggle").addEventListener("click", () => playground.toggle());
onColours(() => cards.again());

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, button, summary, a");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    " ": () => player.toggle(),
    ArrowLeft: () => player.step(source.all, event.shiftKey ? -10 : -1),
    ArrowRight: () => player.step(source.all, event.shiftKey ? 10 : 1),
    "+": () => cards.zoomBy(1),
    "=": () => cards.zoomBy(1),
    "-": () => cards.zoomBy(-1),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});

// ---- sources

async function open(file) {
  if (file) await load(file.stream(), file.name);
}

async function load(stream, name) {
  const found = new Source(true);
  const before = [byId("status").dataset.kind, byId("status").textContent.trim()];
  notice("");
  status("recorded", "reading");
  try {
    player.length = await found.read(stream);
  } catch (error) {
    notice(`${name} cannot be shown: ${error.message}`);
    if (source.all.length) status(...before); // what was shown goes on
    else status("down", "no recording");
    return;
  }
  if (found.isCut) notice(`${name} ends in the middle of a line: all that comes before it is shown.`);
  source.ending.abort();
  source = found;
  player.isRecorded = true;
  player.begin = player.time = Math.min(...source.all.map((history) => history.earliest));
  player.isPaused = false;
  byId("speed").closest("label").hidden = false;
  byId("save").hidden = true;
  if (player.length - player.begin > 300e6) byId("speed").value = String((player.speed = 16));
  player.showTime(source.all);
  player.changed();
}

function notice(text) {
  byId("notice").hidden = !text;
  say(byId("notice"), text);
}

async function lost(code) {
  if (source.isRecorded) return false;
  if (code === 401) await signIn.ask(signIn.key ? "This key is not valid here." : "");
  else if (code === 403) await signIn.ask("This key may use the playground. The batch needs an admin's key.");
  else status("down", code === 429 ? "too many pages are open" : "not connected");
  return true;
}

async function begin() {
  // `chairlift view` names its recording in the page's root; a live server has none.
  const recorded = document.documentElement.dataset.recording;
  if (recorded) {
    byId("playground-toggle").hidden = true;
    const response = await fetch("/ui/recording");
    if (response.ok) await load(response.body, recorded);
    else notice(`${recorded} cannot be read: the server answered ${response.status}`);
    return;
  }
  await source.follow(signIn.fetch, lost, () => {
    status(player.isPaused ? "paused" : "live", player.isPaused ? "paused" : "live");
  });
}

requestAnimationFrame(frame);
begin();

// For tests and measurements: how many frames were drawn, and what is known.
window.chairlift = { player, get frames() { return frames; }, get histories() { return source.all; } };
